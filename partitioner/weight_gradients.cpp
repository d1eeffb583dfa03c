// A walk from the results back: what leads to the gradient of an activation is waited for.
#include "partitioner/weight_gradients.h"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <vector>

#include "graph/gradients.h"
#include "graph/plan.h"

namespace fretsaw {
namespace {

// Forward nodes that activations come from; what is made of parameters alone is none.
std::unordered_set<std::string> activation_nodes(const Graph& graph, const std::function<int(const Node&)>& stage_of) {
  std::unordered_set<const Value*> activations;
  for (const Value* v : graph.inputs)
    if (!v->name.starts_with(kStateInput)) activations.insert(v);
  std::unordered_set<std::string> nodes;
  for (const Node* node : graph.nodes) {
    if (stage_of(*node) >= 0) continue;
    const std::vector<Value*> taken = operands(*node);
    const bool takes = std::any_of(taken.begin(), taken.end(), [&](const Value* v) { return activations.contains(v); });
    if (!takes) continue;
    nodes.insert(node->name);
    activations.insert(node->outputs.begin(), node->outputs.end());
  }
  return nodes;
}

std::string forward_node(const Node& node) {
  const auto at = node.metadata.find(kBackwardOf);
  return at == node.metadata.end() ? "" : at->second;
}

}  // namespace

std::unordered_set<const Node*> weight_gradient_nodes(const Graph& graph, const std::function<int(const Node&)>& stage_of) {
  const std::unordered_set<std::string> activations = activation_nodes(graph, stage_of);
  std::unordered_map<const Value*, std::vector<const Node*>> users;
  for (const Node* node : graph.nodes)
    for (const Value* v : operands(*node)) users[v].push_back(node);
  std::unordered_set<const Node*> waited_for, apart;
  for (auto it = graph.nodes.rbegin(); it != graph.nodes.rend(); ++it) {
    const Node& node = **it;
    const int stage = stage_of(node);
    if (stage < 0) continue;
    const std::string own = forward_node(node);
    const auto waits = [&](const Node* user) {
      const int of_user = stage_of(*user);
      if (of_user < 0) return false;
      const std::string other = forward_node(*user);
      return waited_for.contains(user) || of_user != stage || (other != own && activations.contains(other));
    };
    bool needed = false;
    for (const Value* v : node.outputs)
      if (const auto at = users.find(v); v && at != users.end()) needed |= std::any_of(at->second.begin(), at->second.end(), waits);
    (needed ? waited_for : apart).insert(&node);
  }
  return apart;
}

}  // namespace fretsaw
