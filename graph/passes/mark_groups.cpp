// Marks the nodes that run as one kernel: a contraction and the elementwise nodes after it.
//
//   a = Conv(x, w)   b = Conv(y, v)   c = Add(a, b)   d = Relu(c)      groups: {b, c, d}; a runs alone
//
// A group runs where its last node stands, so all that its other nodes take must be made before the contraction: of two contractions
// that meet in an Add, the later one takes it.
#include "graph/fusion_rules.h"
#include "graph/passes.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

constexpr char kMarked[] = "fretsaw.groups";  // a key of the model's metadata: its groups are decided

class GroupMarker {
 public:
  GroupMarker(Graph& graph, int& next) : graph_(graph), next_(next), uses_(graph) {
    positions_.reserve(graph.nodes.size());
    for (size_t i = 0; i < graph.nodes.size(); ++i) positions_[graph.nodes[i]] = i;
  }

  void run() {
    for (Node* node : graph_.nodes)
      if (node->group < 0 && is_fusable_contraction(*node)) grow(*node);
  }

 private:
  void grow(Node& contraction) {
    std::vector<const Node*> chain;
    std::vector<Node*> members = {&contraction};
    while (Node* next = only_user(*members.back())) {
      chain.push_back(next);
      if (next->group >= 0 || !operands_ready(*next, members.back()->out(0), contraction) || !can_fuse(contraction, chain)) break;
      members.push_back(next);
    }
    if (members.size() == 1) return;
    for (Node* node : members) node->group = next_;
    ++next_;
  }

  // The one node that uses the one output of `node`, directly and once; null when there is none.
  Node* only_user(const Node& node) const {
    Node* user = node.outputs.size() == 1 && node.out(0) ? uses_.only_user(node.out(0)) : nullptr;
    return user && bodies(*user).empty() ? user : nullptr;
  }

  bool operands_ready(const Node& node, const Value* from_group, const Node& contraction) const {
    size_t limit = positions_.at(&contraction);
    for (const Value* v : node.inputs) {
      if (!v || v == from_group || !v->producer) continue;
      auto it = positions_.find(v->producer);
      if (it != positions_.end() && it->second >= limit) return false;
    }
    return true;
  }

  Graph& graph_;
  int& next_;
  Uses uses_;
  std::unordered_map<const Node*, size_t> positions_;
};

}  // namespace

void mark_groups(Model& model) {
  bool marked = model.metadata.count(kMarked) > 0;
  for_each_graph(*model.graph, [&](Graph& g) {
    for (const Node* node : g.nodes) marked |= node->group >= 0;
  });
  if (marked) return;
  int next = 0;
  for_each_graph(*model.graph, [&](Graph& g) { GroupMarker(g, next).run(); });
  model.metadata[kMarked] = "marked";
}

}  // namespace fretsaw
