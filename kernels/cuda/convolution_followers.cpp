// Reads the elementwise nodes that are fused behind a convolution.
#include <algorithm>
#include <limits>

#include "kernels/cpu/convert.h"
#include "kernels/cuda/convolution_step.h"

namespace fretsaw::cuda {

namespace {

using Kind = FusedActivation::Kind;

// Its last place: the value may stand among the convolution's own inputs too, in a form of their own.
int input_index(const CompileContext& c, const Value* value) {
  const auto found = std::find(c.inputs.rbegin(), c.inputs.rend(), value);
  return value && found != c.inputs.rend() ? static_cast<int>(c.inputs.rend() - found) - 1 : -1;
}

// [O] broadcast over batch and cells: [O, 1, 1], [1, O, 1, 1], or one element for one channel.
bool is_per_channel(const Dims& dims, const Dims& y) {
  const size_t tail = y.size() - 2;
  if (dims.size() > y.size() || count_of(dims) != y[1]) return false;
  return dims.size() > tail ? dims[dims.size() - tail - 1] == y[1] : y[1] == 1;
}

// The constant scalar among the node's inputs; `absent` where it is left out.
std::string read_scalar(const CompileContext& c, const Node& node, size_t i, float absent, ConvolutionStep& step, float& value) {
  value = absent;
  if (!node.input(i)) return "";
  const int at = input_index(c, node.input(i));
  const TensorPtr constant = at < 0 ? nullptr : c.constants[static_cast<size_t>(at)];
  if (!constant || !constant->data || constant->count() != 1) return "bounds that are not constant";
  load_as<float>(constant->dtype, constant->data, 0, 1, &value);
  step.settings.push_back(static_cast<size_t>(at));
  return "";
}

std::string read_clip(const CompileContext& c, const Node& node, ConvolutionStep& step, FusedActivation& f) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  if (step.convolution.dtype == DType::float64) return "Clip of float64";  // the bounds are kept as float32
  if (std::string reason = read_scalar(c, node, 1, -kInfinity, step, f.a); !reason.empty()) return reason;
  if (std::string reason = read_scalar(c, node, 2, kInfinity, step, f.b); !reason.empty()) return reason;
  f.kind = f.b == kInfinity ? Kind::relu : Kind::clip;
  return f.a == 0 && f.b > 0 ? "" : "Clip to other bounds than 0 and a positive number";
}

// An activation, or a reason.
std::string read_activation(const CompileContext& c, const Node& node, ConvolutionStep& step, FusedActivation& f) {
  if (node.op == "Clip") return read_clip(c, node, step, f);
  if (node.op == "Relu")
    f.kind = Kind::relu;
  else if (node.op == "LeakyRelu")
    f.kind = Kind::leaky_relu, f.a = node.get_float("alpha", 0.01f);
  else if (node.op == "Sigmoid")
    f.kind = Kind::sigmoid;
  else if (node.op == "Swish")
    f.kind = Kind::swish, f.a = node.get_float("alpha", 1);
  else if (node.op == "HardSwish")
    f.kind = Kind::hard_swish;
  else if (node.op == "Gelu")
    f.kind = node.get_string("approximate", "none") == "tanh" ? Kind::gelu_tanh : Kind::gelu;
  else if (node.op == "Tanh")
    f.kind = Kind::tanh;
  else
    return node.op + " after a convolution";
  return "";
}

std::string read_addition(const CompileContext& c, const Node& node, const Value* previous, ConvolutionStep& step) {
  const Value* other = node.input(0) == previous ? node.input(1) : node.input(0);
  const int at = other == previous ? -1 : input_index(c, other);
  if (at < 0) return "an addition of the convolution to itself";
  if (c.input_dtype(static_cast<size_t>(at)) != step.convolution.dtype) return "an addition of another type";
  const std::optional<Dims> dims = c.input_dims(static_cast<size_t>(at));
  if (!dims) return "an addition of unknown shape";
  if (!step.convolution.bias && is_per_channel(*dims, step.y_dims)) {
    step.convolution.bias = true, step.bias_input = at;
    return "";
  }
  if (step.convolution.residual || *dims != step.y_dims) return "an addition of another shape";
  // It lies as Y does; the copies that other ranks need are made for X and Y only.
  if (step.copies_y || at == 1 || at == step.bias_input || (at == 0 && step.prepares_x)) return "an addition of an input in another layout";
  step.convolution.residual = true, step.residual_input = at;
  return "";
}

}  // namespace

std::string read_followers(const CompileContext& c, ConvolutionStep& step) {
  FusedActivation& activation = step.convolution.activation;
  for (size_t i = 1; i < c.nodes.size(); ++i) {
    const Node& node = *c.nodes[i];
    const Value* previous = c.nodes[i - 1]->out(0);
    if (!node.domain.empty() || activation.kind != Kind::none) return "a node after the activation";
    if (node.op != "Add" && node.input(0) != previous) return "a node that takes something else";
    if (node.op == "Add" && node.input(0) != previous && node.input(1) != previous) return "a node that takes something else";
    const std::string reason = node.op == "Add" ? read_addition(c, node, previous, step) : read_activation(c, node, step, activation);
    if (!reason.empty()) return reason;
  }
  const Value* last = c.nodes.back()->out(0);
  for (const Value* output : c.outputs) {
    if (output && output != last) return "a value inside the step that is used outside it";
  }
  return "";
}

}  // namespace fretsaw::cuda
