// Which elementwise nodes may join the kernel of a contraction.
#include "graph/fusion_rules.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace fretsaw {

namespace {

constexpr size_t kLongestChain = 6;
constexpr std::array<std::string_view, 4> kContractions = {"Conv", "ConvTranspose", "MatMul", "Gemm"};
constexpr std::array<std::string_view, 11> kActivations = {"Relu",  "LeakyRelu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish",
                                                           "Swish", "Gelu",      "Tanh", "Elu",     "Mish"};
constexpr std::array<std::string_view, 4> kBinaries = {"Add", "Mul", "Sub", "Div"};

template <size_t N>
bool one_of(const std::array<std::string_view, N>& names, const Node& node) {
  return node.domain.empty() && std::find(names.begin(), names.end(), node.op) != names.end();
}

bool is_float32(const Value* value) {
  return value && value->type.is_tensor() && value->type.dtype == DType::float32;
}

// Same number, or the same symbol.
bool same_dim(const Dim& a, const Dim& b) {
  if (a.known() || b.known()) return a.value == b.value;
  return !a.symbol.empty() && a.symbol == b.symbol;
}

// Whether a tensor of shape `from` broadcasts to `to` without making it larger.
bool broadcasts_into(const Shape& from, const Shape& to) {
  if (from.size() > to.size()) return false;
  for (size_t i = 0; i < from.size(); ++i) {
    const Dim& dim = from[from.size() - 1 - i];
    if (!(dim.known() && dim.value == 1) && !same_dim(dim, to[to.size() - 1 - i])) return false;
  }
  return true;
}

bool can_fuse_binary(const Node& node, const Value* previous, const Shape& shape) {
  if (node.inputs.size() != 2) return false;
  const bool first = node.inputs[0] == previous;
  if (first == (node.inputs[1] == previous)) return false;  // neither, or both
  if (!first && (node.op == "Sub" || node.op == "Div")) return false;
  const Value* other = node.inputs[first ? 1 : 0];
  if (!is_float32(other)) return false;
  if (other->is_constant()) return broadcasts_into(shape_of(other->constant->dims), shape);
  return other->type.shape && broadcasts_into(*other->type.shape, shape);
}

bool can_fuse_activation(const Node& node, const Value* previous) {
  if (node.inputs.empty() || node.inputs[0] != previous) return false;
  for (size_t i = 1; i < node.inputs.size(); ++i) {
    const Value* bound = node.inputs[i];
    if (!bound) continue;
    if (!bound->is_constant() || bound->constant->is_missing() || bound->constant->count() != 1) return false;
  }
  return true;
}

}  // namespace

bool is_fusable_contraction(const Node& node) {
  return one_of(kContractions, node) && node.outputs.size() == 1 && is_float32(node.input(0)) && is_float32(node.input(1)) &&
         is_float32(node.out(0));
}

bool can_fuse(const Node& contraction, const std::vector<const Node*>& chain) {
  if (!is_fusable_contraction(contraction) || chain.size() > kLongestChain) return false;
  const Value* previous = contraction.out(0);
  if (!previous->type.shape) return false;
  const Shape& shape = *previous->type.shape;
  for (const Node* node : chain) {
    if (!node || node->outputs.size() != 1 || !is_float32(node->out(0))) return false;
    if (one_of(kBinaries, *node)) {
      if (!can_fuse_binary(*node, previous, shape)) return false;
    } else if (!one_of(kActivations, *node) || !can_fuse_activation(*node, previous)) {
      return false;
    }
    previous = node->out(0);
  }
  return true;
}

}  // namespace fretsaw
