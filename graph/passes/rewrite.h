// What the passes edit graphs with. Private to graph/passes.
#pragma once
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

// Edits the node list of one graph in one walk, in linear time however many nodes come and go.
//
//   Rewriter r(graph);
//   r.walk([&](Node& node) {
//     Value* flat = r.add("Flatten", {node.inputs[0]}, {{"axis", int64_t{1}}});  // stands before `node`
//     node.inputs[0] = flat;
//     return true;                                                             // false: `node` goes
//   });
class Rewriter {
 public:
  explicit Rewriter(Graph& graph) : graph_(graph) {}

  // Calls `visit` for each node, in order. Nodes added meanwhile are not visited.
  void walk(const std::function<bool(Node&)>& visit);

  // A node before the one at hand, with one output; `name` is a wish for the output's name.
  Value* add(const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes = {}, const std::string& name = "");
  // A node that makes `outputs`, which nothing may make any more (see detach). Before or after the one at hand.
  Node* add_making(const std::string& op, std::vector<Value*> inputs, std::vector<Value*> outputs, std::vector<Attribute> attributes = {},
                   bool after = false);
  // A node of the graph's storage that is not in its list, before the one at hand.
  void place(Node& node) { kept_.push_back(&node); }
  // Gives `node` a fresh value at this output and returns the one it had, for a node after it to make.
  Value* detach(Node& node, size_t output);
  Value* constant(TensorPtr tensor, const std::string& name = "constant");
  Graph& graph() { return graph_; }

 private:
  Graph& graph_;
  Node* current_ = nullptr;
  std::vector<Node*> kept_, after_;
};

void for_each_graph(Graph& graph, const std::function<void(Graph&)>& visit);  // this one, then the bodies at every depth

using ValueMap = std::unordered_map<const Value*, Value*>;
// Replaces uses in nodes, bodies and graph outputs, all in one walk. Chains (a -> b, b -> c) are followed.
void replace_uses(Graph& graph, const ValueMap& replacements);

// remove_dead_nodes, but what communicates with other ranks stays: they wait for it.
void remove_unused_nodes(Graph& graph);

// Makes `node` own `value` as output `index`.
void set_output(Node& node, size_t index, Value* value);
// Copies the nodes of `body`, except the values in `mapping` (its inputs, outputs that are to be existing values, captures), to `target`.
// Returns the copies in order; they are in target's storage and not yet in its node list. Names get the prefix and are made unique.
std::vector<Node*> copy_nodes(const Graph& body, Graph& target, ValueMap& mapping, const std::string& prefix);

// Who uses each value in this graph, bodies of its nodes included. An output of the graph counts as a use.
class Uses {
 public:
  explicit Uses(const Graph& graph);
  void add(const Value* value, Node* user);
  bool is_output(const Value* value) const;
  // The node of the only use; null when there is another use, or none.
  Node* only_user(const Value* value) const;
  // Whether `test` holds for every node that uses the value; outputs of the graph are not looked at.
  template <typename F>
  bool all_users(const Value* value, const F& test) const {
    auto it = users_.find(value);
    if (it == users_.end() || !it->second.first) return true;
    if (!test(it->second.first)) return false;
    for (const Node* node : it->second.more)
      if (!test(node)) return false;
    return true;
  }
  bool unused(const Value* value) const;

 private:
  struct Users {
    Node* first = nullptr;
    std::vector<Node*> more;  // an entry for each further input slot or body
    bool output = false;
  };
  std::unordered_map<const Value*, Users> users_;
};

// Whether a value is constant for good: an initializer that is no input, which a caller may override.
bool is_fixed(const Value* value);
// The number in a fixed floating-point or integer constant of one element.
bool scalar_value(const Value* value, double& number);
// All elements of a fixed float16, bfloat16, float32 or float64 constant; false for other types and missing bytes.
bool float_values(const Value* value, std::vector<double>& numbers);

// Element types as far as the operators' schemas tell them from inputs and constants; types in the file of other values are not trusted.
class ElementTypes {
 public:
  DType of(const Value* value) const;  // undefined when not known
  void add(const Node& node);          // call in order of execution, before asking for the node's outputs

 private:
  std::unordered_map<const Value*, DType> known_;
};

}  // namespace fretsaw
