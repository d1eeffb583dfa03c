// Every way in which each node may run on the ranks of the tensor axis: what it takes of its operands and what it leaves.
//
//   MatMul x [m, k], w [k, n]   whole      x whole    w whole    -> whole
//                               factor n   x whole    w [_, t]   -> [_, t]      columns
//                               factor k   x [_, t]   w [t, _]   -> pending     rows
//
// How a factor is cut is not the node's alone: 3 heads over 2 ranks are cut between heads, so the product that makes them must be, too.
// Cuts are therefore candidates that travel along dimensions through the factor rules, from the nodes that seed them.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "graph/factors.h"
#include "graph/ir.h"
#include "graph/sharding.h"

namespace fretsaw {

// How a value lies on the ranks, as a number: kWhole, kPending, or a cut in the table.
using Form = int;
constexpr Form kWhole = 0, kPending = 1;

// Cuts and forms by number; equal ones have one.
class FormTable {
 public:
  FormTable(int ranks, std::string axis) : ranks_(ranks), axis_(std::move(axis)) {}
  int ranks() const { return ranks_; }
  const std::string& axis() const { return axis_; }  // of the mesh: "tensor"
  int add(const Cut& cut);                           // the cut's number
  const Cut& cut(int number) const { return cuts_[static_cast<size_t>(number)]; }
  Form form(int dim, int cut);
  bool is_cut(Form f) const { return f > kPending; }
  int dim_of(Form f) const { return forms_[static_cast<size_t>(f - 2)].first; }
  int cut_number(Form f) const { return forms_[static_cast<size_t>(f - 2)].second; }
  const Cut& cut_of(Form f) const { return cut(cut_number(f)); }
  Sharding sharding(Form f) const;

 private:
  int ranks_;
  std::string axis_;
  std::vector<Cut> cuts_;
  std::vector<std::pair<int, int>> forms_;  // dimension, cut
  std::map<std::vector<int64_t>, int> cut_numbers_;
  std::map<std::pair<int, int>, Form> form_numbers_;
};

struct Strategy {
  enum class Kind : uint8_t {
    whole,     // every rank does all of it
    factor,    // a factor of the rule is cut
    segments,  // the factor that segments share is
    divided,   // a whole factor is cut, as its `when_cut` says
    linear,    // pending sums pass
    measure,   // Shape and Size: the operand's form does not matter
  };
  Kind kind = Kind::whole;
  int factor = -1, cut = -1;          // which factor, cut how
  std::vector<Form> inputs, outputs;  // of each operand and result; kWhole where left out
  double share = 1;                   // of the node's work on the busiest rank
  double exchanges = 0;               // all-reduces inside of it, of tensors without the dimension that is cut
};

struct NodeStrategies {
  FactorRule rule;
  std::vector<Strategy> all;  // the first is `whole`, unless the node must be divided or pins say otherwise
  bool weighty = false;       // a contraction, or the rows of a weight
  bool heavy = false;         // weighty, and to be divided where that is possible
  bool divisible = false;     // some rule divides it, whether pins let it or not
  bool pinned = false;        // pins chose among the strategies: it runs so even where its operands are whole
};

// What may be done; nodes by their position in the graph.
struct Strategies {
  Strategies(int ranks, const std::string& axis) : forms(ranks, axis) {}
  FormTable forms;
  std::vector<NodeStrategies> nodes;
  // Values all of whose origins are constants: any part of them is had without communication.
  std::unordered_map<const Value*, bool> derived_constants;
  std::unordered_map<const Value*, Form> pins;  // forms that values take once they are made
  std::vector<std::string> notes;               // pins that no rule allows
};

// How operands of one node are to lie, by position; nullopt: as it comes.
struct NodePins {
  std::vector<std::optional<Sharding>> inputs, outputs;
};

struct StrategyOptions {
  int ranks = 1;
  std::string axis = "tensor";
  bool even = false;  // only cuts in parts of one size
  bool all = false;   // every factor of every node is cut evenly to begin with, and nothing must be divided (for tests)
  std::unordered_map<const Node*, std::string> kept_whole;  // nodes that must not be divided, with the reason
  // Of a value: its form once it is made; of a constant: the form in which the nodes that can take it so do.
  std::unordered_map<const Value*, Sharding> pins;
  // Of a node's operands. What it takes decides between its strategies; what it makes is brought into the form where it comes in another.
  std::unordered_map<const Node*, NodePins> operands;
  // When given: only these nodes must be divided where that is possible.
  std::optional<std::unordered_set<const Node*>> to_divide;
};
// The types of all values must be inferred. Dimensions of unknown size are never cut.
Strategies find_strategies(const Graph& graph, const StrategyOptions& options);

}  // namespace fretsaw
