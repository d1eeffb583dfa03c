// The walk back through one graph that reverse-mode differentiation is. Private to graph/gradient*.cpp.
#pragma once
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "graph/gradient_nodes.h"
#include "graph/gradients.h"
#include "graph/ir.h"

namespace fretsaw {

// Whether a gradient can flow through a value of this type. Of what is not known, and of sequences, it is found out at their nodes.
bool carries_gradient(const Type& type);
// Whether one flows through this value: integers of QuantizeLinear have that of the numbers they stand for, a float.
bool carries_gradient(const Value& value);
// mask_learns: of Attention, whether its mask has a gradient.
bool has_gradient_rule(const Node& node, bool mask_learns = false);
bool stops_gradient(const Node& node);

// The walk back through the model's main graph, or through a copy of a body, which takes values of the graphs around it.
class GradientWalk {
 public:
  explicit GradientWalk(Graph& graph) : graph_(graph), nodes_{graph} {}

  struct Found {
    const Node* by;
    Value *value, *gradient;
  };
  // A Gather from a value of another graph, and the gradient of what it took.
  struct TakenRow {
    Node* gather;
    Value* gradient;
  };

  // What the wanted values flow into.
  void find_dependent(const std::vector<Value*>& wanted);
  bool depends(const Value* value) const { return value && dependent_.count(value) > 0; }
  bool takes_dependent(const Node& node) const;

  // `by`: the node whose rule found it; null for what was found elsewhere.
  void contribute(Node* by, Value* value, Value* gradient);
  // From what has been contributed, through these nodes.
  void go_back(const std::vector<Node*>& forward);
  // The sum of what has come for a value; null when nothing has.
  Value* total(Value* value);

  // From now on Gathers from outer values are left to the caller, where what they take has one size whenever the graph runs.
  void keep_taken_rows() { keeps_rows_ = true; }
  const std::vector<TakenRow>& taken_rows() const { return taken_rows_; }

  GradientNodes& nodes() { return nodes_; }
  const std::vector<Found>& found() const { return found_; }

 private:
  void differentiate(Node& node);
  bool is_row_of_outer_value(const Node& node) const;
  // graph/gradient_bodies.cpp
  std::vector<Value*> learning_captures(const Node& node) const;
  void differentiate_branches(Node& node, const std::vector<Value*>& of_outputs);
  GraphPtr gradient_branch(Node& node, const char* name, const std::vector<Value*>& of_outputs, const std::vector<Value*>& learning);
  void differentiate_loop(Node& node, const std::vector<Value*>& of_outputs);
  void take_over(const GradientWalk& inner);

  Graph& graph_;
  GradientNodes nodes_;
  std::unordered_set<const Value*> dependent_;
  std::unordered_map<const Value*, std::vector<Value*>> contributions_;
  std::unordered_map<const Value*, Node*> first_user_;
  std::vector<Found> found_;
  bool keeps_rows_ = false;
  std::vector<TakenRow> taken_rows_;
};

}  // namespace fretsaw
