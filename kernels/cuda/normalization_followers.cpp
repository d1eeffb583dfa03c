// Reads the nodes that are fused behind a BatchNormalization, and before its gradient.
#include <algorithm>

#include "graph/communication_schemas.h"
#include "kernels/cpu/convert.h"
#include "kernels/cuda/gradients.h"
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

// The places of the node's outputs among the step's; a reason where the step gives others too.
std::string read_outputs(const CompileContext& c, const std::array<const Value*, 3>& values, std::array<int, 3>& places) {
  for (size_t i = 0; i < 3; ++i) places[i] = last_place(c.outputs, values[i]);
  const auto known = std::count_if(places.begin(), places.end(), [](int at) { return at >= 0; });
  return static_cast<size_t>(known) == c.outputs.size() ? "" : "a value inside the step that is used outside it";
}

bool is_zero(const CompileContext& c, size_t i) {
  const TensorPtr& constant = c.constants[i];
  if (!constant || !constant->data || constant->count() != 1 || !is_float(constant->dtype)) return false;
  double value = 1;
  load_as<double>(constant->dtype, constant->data, 0, 1, &value);
  return value == 0;
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
  if (last_place(c.outputs, c.nodes.back()->out(0)) < 0) return "a result that nobody takes";
  return read_outputs(c, {c.nodes.back()->out(0), c.node().out(1), c.node().out(2)}, f.outputs);
}

void take_norm_layouts(const CompileContext& c, const NormFollowers& f, CompiledKernel& kernel) {
  follow_layout(c, kernel);
  if (kernel.input_layouts.empty()) return;
  if (f.residual >= 0) kernel.input_layouts[static_cast<size_t>(f.residual)] = Layout::nhwc;
  std::swap(kernel.output_layouts[0], kernel.output_layouts[static_cast<size_t>(f.outputs[0])]);
}

bool ends_in_norm_gradient(const CompileContext& c) {
  const Node& last = *c.nodes.back();
  return c.nodes.size() > 1 && last.op == "BatchNormalizationGrad" && last.domain == kCommunicationDomain;
}

std::string read_norm_gradient(const CompileContext& c, NormGradientOperands& at) {
  if (c.nodes.size() == 1) return "";
  const std::string other = "other nodes than those of Relu's gradient before BatchNormalizationGrad";
  if (c.nodes.size() != 3 || !c.nodes[0]->is("Greater") || !c.nodes[1]->is("Where") || c.inputs.size() != 6) return other;
  const Node &mask = *c.nodes[0], &part = *c.nodes[1], &norm = *c.nodes[2];
  // The step's inputs are y, 0, dy, 0, x and scale.
  const bool chained = part.input(0) == mask.out(0) && norm.input(0) == part.out(0) && c.inputs[2] == part.input(1) &&
                       c.inputs[3] == part.input(2) && c.inputs[4] == norm.input(1) && c.inputs[5] == norm.input(2);
  if (!chained || !is_zero(c, 1) || !is_zero(c, 3)) return other;
  if (!c.input_dims(0) || c.input_dims(0) != c.input_dims(2) || c.input_dims(0) != c.input_dims(4)) return "operands of several shapes";
  at = {.dy = 2, .x = 4, .scale = 5, .y = 0};
  return read_outputs(c, {norm.out(0), norm.out(1), norm.out(2)}, at.outputs);
}

void take_gradient_layouts(const CompileContext& c, const NormGradientOperands& at, CompiledKernel& kernel) {
  if (at.y < 0) return take_images(c, {at.dy, at.x}, kernel);
  kernel.packed_inputs = {1, 3};  // the zeros
  take_images(c, {at.dy, at.x, static_cast<size_t>(at.y)}, kernel);
  if (kernel.output_layouts.empty()) return;
  kernel.output_layouts[0] = Layout::plain;
  if (at.outputs[0] >= 0) kernel.output_layouts[static_cast<size_t>(at.outputs[0])] = Layout::nhwc;
}

}  // namespace fretsaw::cuda
