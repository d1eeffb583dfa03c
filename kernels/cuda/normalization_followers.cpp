// Reads the nodes that are fused behind a BatchNormalization.
#include <algorithm>

#include "kernels/cuda/normalization_batch.h"

namespace fretsaw::cuda {

namespace {

// Its last place: the value may stand among the norm's own inputs too.
int last_place(const std::vector<const Value*>& values, const Value* value) {
  const auto found = std::find(values.rbegin(), values.rend(), value);
  return value && found != values.rend() ? static_cast<int>(values.rend() - found) - 1 : -1;
}

std::string read_residual(const CompileContext& c, const Node& node, const Value* previous, NormFollowers& f) {
  const Value* other = node.input(0) == previous ? node.input(1) : node.input(0);
  if (f.residual >= 0) return "a second addition";
  if (other == previous || (node.input(0) != previous && node.input(1) != previous)) return "an addition of something else";
  const int at = last_place(c.inputs, other);
  if (at < 0 || c.input_dims(static_cast<size_t>(at)) != c.input_dims(0) || c.input_dtype(static_cast<size_t>(at)) != c.input_dtype(0))
    return "an addition of another shape or type";
  f.residual = at;
  return "";
}

std::string read_outputs(const CompileContext& c, NormFollowers& f) {
  const Node& norm = c.node();
  const auto place = [&](const Value* value) { return last_place(c.outputs, value); };
  f.outputs[0] = place(c.nodes.back()->out(0));
  for (size_t i = 1; i < 3; ++i) f.outputs[i] = i < norm.outputs.size() ? place(norm.out(i)) : -1;
  if (f.outputs[0] < 0) return "a result that nobody takes";
  const auto known = std::count_if(f.outputs.begin(), f.outputs.end(), [](int at) { return at >= 0; });
  return static_cast<size_t>(known) == c.outputs.size() ? "" : "a value inside the step that is used outside it";
}

}  // namespace

std::string read_norm_followers(const CompileContext& c, NormFollowers& f) {
  if (c.nodes.size() == 1) return "";
  if (!c.input_dims(0)) return "a tensor of unknown shape";
  for (size_t i = 1; i < c.nodes.size(); ++i) {
    const Node& node = *c.nodes[i];
    const Value* previous = c.nodes[i - 1]->out(0);
    if (!node.domain.empty() || f.relu) return "a node after Relu";
    std::string reason;
    if (node.op == "Relu" && node.input(0) == previous)
      f.relu = true;
    else
      reason = node.op == "Add" ? read_residual(c, node, previous, f) : node.op + " after BatchNormalization";
    if (!reason.empty()) return reason;
  }
  return read_outputs(c, f);
}

void take_norm_layouts(const CompileContext& c, const NormFollowers& f, CompiledKernel& kernel) {
  follow_layout(c, kernel);
  if (kernel.input_layouts.empty()) return;
  if (f.residual >= 0) kernel.input_layouts[static_cast<size_t>(f.residual)] = Layout::nhwc;
  std::swap(kernel.output_layouts[0], kernel.output_layouts[static_cast<size_t>(f.outputs[0])]);
}

}  // namespace fretsaw::cuda
