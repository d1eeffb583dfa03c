#include "partitioner/rounded_uses.h"

#include <algorithm>

#include "graph/communication_schemas.h"

namespace fretsaw {
namespace {

bool hands_on(const Node& node) {
  return node.is("Identity") || (node.op == "AllGather" && node.domain == kCommunicationDomain);
}

// The type of 16 bits that the node rounds to; undefined: it does something else.
DType rounds_to(const Node& node) {
  if (!node.is("Cast")) return DType::undefined;
  const auto type = static_cast<DType>(node.get_int("to", 0));
  return type == DType::float16 || type == DType::bfloat16 ? type : DType::undefined;
}

}  // namespace

std::optional<RoundedUse> rounded_use(const Value* value, const Graph& graph, const Consumers& users) {
  RoundedUse use;
  std::vector<const Value*> open{value};
  while (!open.empty()) {
    const Value* v = open.back();
    open.pop_back();
    if (std::find(graph.outputs.begin(), graph.outputs.end(), v) != graph.outputs.end()) return std::nullopt;
    const auto found = users.find(v);
    if (found == users.end()) continue;
    for (Node* node : found->second) {
      if (hands_on(*node)) {
        use.handing_on.push_back(node);
        open.push_back(node->outputs[0]);
        continue;
      }
      const DType type = rounds_to(*node);
      if (type == DType::undefined || (use.type != DType::undefined && use.type != type)) return std::nullopt;
      use.type = type;
      use.casts.push_back(node);
    }
  }
  if (use.casts.empty()) return std::nullopt;
  return use;
}

}  // namespace fretsaw
