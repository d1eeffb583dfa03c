// What cutting moves: a graph's nodes as units that stay whole, in an order in which little crosses the boundaries.
#pragma once
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "graph/ir.h"
#include "partitioner/cost.h"
#include "partitioner/cut.h"
#include "partitioner/target.h"

namespace fretsaw {

// A graph as arrays: nodes by their position, and for each what it uses.
struct GraphIndex {
  explicit GraphIndex(const Graph& graph);
  int producer(const Value* value) const;  // position of the node; -1: an input or constant
  bool is_fixed(const Value* value) const { return value->constant && !inputs.count(value); }  // no input can override it

  const Graph& graph;
  std::vector<Node*> nodes;
  std::vector<std::vector<Value*>> uses;    // inputs and what bodies use from outside, each once
  std::vector<std::vector<int>> producers;  // of each of them: producer(value)
  std::unordered_map<const Node*, int> position;
  std::unordered_set<const Value*> inputs;
};

// The same graph with the sizes that costs are computed for; nodes stand at the same positions.
struct SizedGraph {
  SizedGraph(const GraphIndex& index, const Target& target);
  const GraphIndex& index;
  Target target;
  std::vector<Cost> costs;  // of each node by itself
};

struct UnitOptions {
  bool open_groups = false;   // fusion groups may be cut: their parts give the same bits, though in more time
  bool count_copied = false;  // nodes that could be copied into every stage are units too
};
// Units are fusion groups, single nodes, and sets of nodes that values which can't be sent (sequences, strings) tie together.
// Nodes that depend only on constants and shapes belong to no unit: each stage that needs them gets a copy.
struct Units {
  std::vector<int> order;                 // positions of all nodes, a unit's nodes together; legal to run
  std::vector<int> unit_of;               // of each node, by position; -1: copied
  std::vector<std::vector<int>> members;  // of each unit: positions, in running order. Units are in running order
  std::string tied_by;                    // a value that ties nodes together and why: "'s', it is a sequence"
};
Units make_units(const GraphIndex& index, const SizedGraph& sized, const UnitOptions& options = {});

// Positions of nodes of which every stage that needs them may have a copy of its own.
std::vector<char> copied_nodes(const GraphIndex& index);

CutProblem make_cut_problem(const Units& units, const SizedGraph& sized);

}  // namespace fretsaw
