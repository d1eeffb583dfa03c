// Activations that the backward pass computes once more instead of keeping them.
#pragma once
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "graph/ir.h"

namespace fretsaw {

struct RecomputeProblem {
  std::function<int(const Node&)> forward_stage;   // the stage of a forward node; -1: another node, or one that is copied anyway
  std::function<int(const Node&)> backward_stage;  // the stage whose backward node this is; -1: no backward node
};

// Values that are kept, by the names of their nodes and their places among the outputs.
using KeptValues = std::set<std::pair<std::string, int>>;

// Divides each stage's forward nodes into blocks, at places where little passes from node to node, and keeps only what passes there; what
// backward nodes take of the rest is computed once more from it, just before. The number of blocks is the one that makes what is kept and
// the largest block together smallest. What came from other stages, random numbers, results of collectives and values that no parameter
// has a part in (masks, positions) are kept as they are. The graph is sorted before and after. Returns the new nodes with their stages.
// Ranks that hold parts of one model, uneven ones maybe, keep the same: `kept` is what the first of them chose, which fills it.
std::unordered_map<Node*, int> recompute_blocks(Graph& graph, const RecomputeProblem& problem, std::optional<KeptValues>& kept);

}  // namespace fretsaw
