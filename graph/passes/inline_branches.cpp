// An If whose condition is known becomes its branch. Exporters write such an If for a squeeze, say: it asks for a size that is in the
// model.
#include <algorithm>

#include "graph/passes.h"
#include "graph/passes/functions.h"

namespace fretsaw {
namespace {

class BranchInliner {
 public:
  BranchInliner(const Graph& top, const ShapeFacts& facts) : top_(top), facts_(facts) {}

  bool run(Graph& graph) {
    std::vector<Node*> kept;
    kept.reserve(graph.nodes.size());
    bool found = false;
    for (Node* node : std::vector<Node*>(graph.nodes)) {
      if (const GraphPtr branch = known_branch(*node)) {
        for (Node* copy : splice(*branch, *node)) kept.push_back(copy);
        found = true;
        continue;
      }
      for (const GraphPtr& body : bodies(*node)) found |= run(*body);
      kept.push_back(node);
    }
    graph.nodes = std::move(kept);
    return found;
  }

 private:
  GraphPtr known_branch(const Node& node) const {
    const std::optional<bool> condition = node.is("If") ? known_condition(node.input(0)) : std::nullopt;
    const GraphPtr branch = condition ? node.get_graph(*condition ? "then_branch" : "else_branch") : nullptr;
    return branch && branch->outputs.size() >= node.outputs.size() ? branch : nullptr;
  }

  // What inference knows of values in the body of a loop may hold for one pass alone.
  std::optional<bool> known_condition(const Value* value) const {
    if (!value) return std::nullopt;
    const auto known = facts_.known.find(value);
    TensorPtr tensor = is_fixed(value) ? value->constant : nullptr;
    if (known != facts_.known.end() && value->graph == &top_) tensor = known->second;
    const auto numbers = tensor && tensor->count() == 1 ? int_values(*tensor) : std::nullopt;
    return numbers ? std::optional((*numbers)[0] != 0) : std::nullopt;
  }

  const Graph& top_;
  const ShapeFacts& facts_;
};

}  // namespace

bool inline_branches(Model& model, const ShapeFacts& facts) {
  return BranchInliner(*model.graph, facts).run(*model.graph);
}

void inline_branches(Model& model) {
  const auto has_branches = [&] {
    bool found = false;
    for_each_graph(*model.graph, [&](Graph& graph) {
      found |= std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const Node* node) { return node->is("If"); });
    });
    return found;
  };
  bool changed = false;
  // Where a branch has gone in, more is known.
  while (has_branches() && inline_branches(model, infer_shapes(model))) changed = true;
  if (changed) remove_dead_nodes(*model.graph);
}

}  // namespace fretsaw
