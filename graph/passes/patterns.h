// A small matcher for what exporters write in pieces. Private to graph/passes.
//
//   Matcher matcher(graph);
//   matcher.run([&](Node& root) {                                   // the last node first, so that the longest form is found
//     Match match(matcher, root);
//     if (!root.is("Mul") || !match.either(root, [&](Value* x, Value* s) {
//           Node* sigmoid = match.made_by(s, "Sigmoid");
//           return sigmoid && sigmoid->inputs[0] == x;
//         }) || !match.closed()) return;
//     match.replace("Swish", {x});
//   });
#pragma once
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "graph/passes/rewrite.h"

namespace fretsaw {

class Matcher {
 public:
  explicit Matcher(Graph& graph) : graph_(graph), uses_(graph) {}
  // Calls `visit` for each node of these operators that is still there, the last first; at the end removes what matches replaced.
  void run(const std::function<void(Node&)>& visit);

 private:
  friend class Match;
  Graph& graph_;
  Uses uses_;
  std::unordered_map<const Node*, bool> gone_;
};

// One attempt: the nodes between the inputs and the root. It changes nothing until replace().
class Match {
 public:
  Match(Matcher& matcher, Node& root) : matcher_(matcher), root_(root) {}

  // The node of this graph that makes `value`, when it has this operator; it becomes part of the match. Null otherwise.
  Node* made_by(const Value* value, std::string_view op);
  // The operands of a commutative node: calls test(a, b) and, if that fails, test(b, a), giving back what the first attempt took.
  bool either(const Node& node, const std::function<bool(Value*, Value*)>& test);
  // Forgets nodes taken since `mark()`.
  size_t mark() const { return taken_.size(); }
  void back_to(size_t mark) { taken_.resize(mark); }

  // Whether everything between is used only inside the match.
  bool closed() const;
  // A node with this operator makes the root's output in its place. The matched nodes go.
  Node* replace(const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes = {});

 private:
  Matcher& matcher_;
  Node& root_;
  std::vector<Node*> taken_;
};

// Whether the graph has a node of one of these operators: a cheap look before a Matcher is made.
bool has_any(const Graph& graph, std::initializer_list<std::string_view> ops);
// Whether two numbers are the same as far as the element type tells.
bool near(double found, double number, DType type);
// Whether `value` is a fixed scalar, or a vector of one element, near `number`.
bool is_number(const Value* value, double number);
// The size of the last dimension, -1 when it is not known; and the rank, -1 likewise.
int64_t last_dim(const Value* value);
int64_t rank_of(const Value* value);
// Whether the node reduces the last axis alone and keeps it as 1.
bool reduces_last_axis(const Node& node);

void fuse_layer_normalization(Graph& graph);  // fuse_normalization.cpp
void fuse_rms_normalization(Graph& graph);
void fuse_gelu(Graph& graph);  // fuse_activations.cpp
void fuse_swish(Graph& graph);
void fold_batch_norm(Graph& graph);  // fold_batch_norm.cpp

}  // namespace fretsaw
