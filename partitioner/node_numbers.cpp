#include "partitioner/node_numbers.h"

#include <algorithm>
#include <unordered_set>

#include "graph/gradients.h"
#include "partitioner/weight_gradients.h"

namespace fretsaw {
namespace {

// Follows the nodes in their order.
class ForwardStages {
 public:
  ForwardStages(const TrainingJob& job, const NodeNumbers& placed, const NodeNumbers& sums) : job_(job), placed_(placed), sums_(sums) {
    for (const auto& [node, number] : placed) by_name_.emplace(node->name, number);
  }

  void add(const Node& node) { stages_[&node] = stage_of(node); }
  // The forward stage that the node belongs to.
  int of(const Node& node) const { return stages_.at(&node); }

 private:
  // A backward node runs with its forward node, or in an earlier stage where it needs what that one's backward graph makes.
  int stage_of(const Node& node) const {
    if (const auto known = placed_.find(&node); known != placed_.end()) return known->second < 0 ? -1 : job_.forward_of(known->second);
    int stage = job_.stages() - 1;
    if (const auto sum = sums_.find(&node); sum != sums_.end()) {
      stage = sum->second;
    } else if (const auto origin = node.metadata.find(kBackwardOf); origin != node.metadata.end()) {
      const auto forward = by_name_.find(origin->second);
      if (forward != by_name_.end() && forward->second >= 0) stage = forward->second;
    }
    for (const Value* v : operands(node))
      if (v->producer && !placed_.contains(v->producer)) stage = std::min(stage, of(*v->producer));
    return stage;
  }

  const TrainingJob& job_;
  const NodeNumbers &placed_, &sums_;
  std::unordered_map<std::string, int> by_name_;
  NodeNumbers stages_;
};

}  // namespace

NodeNumbers number_nodes(const Graph& graph, const TrainingJob& job, const NodeNumbers& placed, const NodeNumbers& sums) {
  ForwardStages stages(job, placed, sums);
  for (const Node* node : graph.nodes) stages.add(*node);
  const auto is_forward = [&](const Node& node) {
    const auto known = placed.find(&node);
    return known != placed.end() && known->second < job.stages();
  };
  std::unordered_set<const Node*> apart;
  if (job.has_weight_graphs())
    apart = weight_gradient_nodes(graph, [&](const Node& node) { return is_forward(node) ? -1 : stages.of(node); });
  NodeNumbers numbers;
  for (const Node* node : graph.nodes) {
    const int stage = stages.of(*node);
    if (const auto known = placed.find(node); known != placed.end())
      numbers[node] = known->second;
    else
      numbers[node] = apart.contains(node) ? job.weights_of(stage) : job.backward_of(stage);
  }
  return numbers;
}

}  // namespace fretsaw
