// The roofline: a kernel takes as long as its arithmetic or its memory traffic, whichever is longer.
#include "partitioner/cost.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_set>

#include "graph/catalogue.h"

namespace fretsaw {
namespace {

template <size_t N>
bool one_of(const Node& node, const std::array<std::string_view, N>& ops) {
  return node.domain.empty() && std::find(ops.begin(), ops.end(), node.op) != ops.end();
}

// Reads only the elements it takes, not the whole of its first input.
bool takes_a_part(const Node& node) {
  static constexpr std::array<std::string_view, 6> kOps = {"Gather", "GatherElements", "GatherND", "Slice", "Shape", "Size"};
  return one_of(node, kOps);
}

bool half_precision(const Node& node) {
  for (const Value* v : node.outputs)
    if (v) return v->type.dtype == DType::float16 || v->type.dtype == DType::bfloat16;
  return false;
}

}  // namespace

int64_t type_bytes(const Type& type) {
  if (!type.is_tensor() || !type.shape) return 0;
  double bits = bits_of(type.dtype);
  for (const Dim& d : *type.shape) bits *= d.known() ? static_cast<double>(d.value) : 1.0;
  return static_cast<int64_t>(std::min(bits / 8 + 0.875, 0x1p46));  // 64 TiB at most, so that sums over all values of a graph stay in range
}

std::string why_not_sent(const Type& type) {
  switch (type.kind) {
    case Type::Kind::tensor:
      if (type.dtype == DType::string) return "it holds strings";
      return type.dtype == DType::undefined ? "its element type is not known" : "";
    case Type::Kind::sparse_tensor:
      return "it is a sparse tensor";
    case Type::Kind::sequence:
      return "it is a sequence";
    case Type::Kind::optional:
      return "it is optional";
    case Type::Kind::map:
      return "it is a map";
    case Type::Kind::unknown:
      return "its type is not known";
  }
  return "";
}

bool is_random(const Node& node) {
  static constexpr std::array<std::string_view, 6> kOps = {"RandomNormal",      "RandomNormalLike", "RandomUniform",
                                                           "RandomUniformLike", "Bernoulli",        "Multinomial"};
  if (one_of(node, kOps) || (node.is("Dropout") && node.input(2))) return true;
  if (const OperatorRecord* record = find_operator(node.op, node.domain); record && record->random) return true;
  for (const GraphPtr& body : bodies(node))
    if (std::any_of(body->nodes.begin(), body->nodes.end(), [](const Node* n) { return is_random(*n); })) return true;
  return false;
}

bool is_view(const Node& node) {
  static constexpr std::array<std::string_view, 5> kOps = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"};
  return one_of(node, kOps);
}

Cost cost_of(const std::vector<const Node*>& nodes, const Target& target) {
  Cost cost;
  double compute_us = 0;
  bool launches = false;
  std::unordered_set<const Value*> inside, read;
  if (nodes.size() > 1)
    for (const Node* n : nodes) inside.insert(n->outputs.begin(), n->outputs.end());
  for (size_t i = 0; i < nodes.size(); ++i) {
    const Node& node = *nodes[i];
    double flops = flops_of(node);
    cost.flops += flops;
    compute_us += flops / (half_precision(node) ? target.half_flops_per_us : target.flops_per_us);
    if (is_view(node)) continue;
    launches = true;
    double written = 0;
    // Of a group only what its last node makes is written.
    if (i + 1 == nodes.size())
      for (const Value* v : node.outputs)
        if (v) written += static_cast<double>(type_bytes(v->type));
    cost.bytes += written;
    bool part = takes_a_part(node);
    for (size_t k = 0; k < node.inputs.size(); ++k) {
      const Value* v = node.inputs[k];
      if (!v || inside.count(v) || (nodes.size() > 1 && !read.insert(v).second)) continue;
      auto bytes = static_cast<double>(type_bytes(v->type));
      cost.bytes += part && k == 0 ? std::min(bytes, written) : bytes;
    }
  }
  const double memory_us = cost.bytes / target.memory_bytes_per_us;
  if (launches) cost.time_us = std::max(compute_us, memory_us) + (1 - target.overlap) * std::min(compute_us, memory_us) + target.launch_us;
  return cost;
}

double transfer_us(double bytes, const Target& target) {
  return bytes > 0 ? target.link_latency_us + bytes / target.link_bytes_per_us : 0;
}

}  // namespace fretsaw
