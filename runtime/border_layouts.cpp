// How values lie where a stage's graph begins and ends.
#include "graph/communication_schemas.h"
#include "runtime/program.h"

namespace fretsaw {
namespace {

bool is_border(const Node* node, const char* op) {
  return node && node->domain == kCommunicationDomain && node->op == op;
}
Layout layout_at(const Node& border) {
  return border.get_int("channels_last", 0) != 0 ? Layout::nhwc : Layout::plain;
}

}  // namespace

Layout layout_of_input(const Value& graph_input, const Graph& graph) {
  for (const Node* node : graph.nodes)
    if (is_border(node, "Recv") && node->input(0) == &graph_input) return layout_at(*node);
  return Layout::plain;
}

Layout layout_of_output(const Value& graph_output) {
  return is_border(graph_output.producer, "Send") ? layout_at(*graph_output.producer) : Layout::plain;
}

}  // namespace fretsaw
