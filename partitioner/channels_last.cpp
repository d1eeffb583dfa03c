// Follows channels-last values from the operators that make them.
#include "partitioner/channels_last.h"

#include <algorithm>
#include <string_view>
#include <unordered_set>

#include "graph/catalogue.h"
#include "graph/communication_schemas.h"

namespace fretsaw {
namespace {

bool is_image(const Value* v) {
  return v && v->type.is_tensor() && v->type.dtype == DType::float32 && v->type.shape && v->type.shape->size() == 4;
}

bool makes_images(const Node& node) {
  static constexpr std::string_view kOps[] = {"Conv", "ConvTranspose", "MaxPool", "AveragePool"};
  return node.domain.empty() && std::find(std::begin(kOps), std::end(kOps), node.op) != std::end(kOps);
}

bool exchanges_parts(const Node& node) {
  return node.domain == kCommunicationDomain && (node.op == "AllReduce" || node.op == "AllGather" || node.op == "ReduceScatter");
}

}  // namespace

std::unordered_set<const Value*> channels_last_values(const Graph& graph) {
  std::unordered_set<const Value*> images;
  for (const Node* node : graph.nodes) {
    const bool from_image = std::any_of(node->inputs.begin(), node->inputs.end(), [&](const Value* v) { return images.count(v) > 0; });
    const bool passes = exchanges_parts(*node) || role_of(*node) == Role::elementwise;
    if (is_image(node->out(0)) && (makes_images(*node) || (from_image && passes))) images.insert(node->out(0));
  }
  return images;
}

void mark_channels_last(Graph& graph) {
  const std::unordered_set<const Value*> images = channels_last_values(graph);
  for (Node* node : graph.nodes)
    if (exchanges_parts(*node) && images.count(node->out(0))) node->set("channels_last", int64_t{1});
}

}  // namespace fretsaw
