// Nodes that hand their input through: Identity, Dropout in inference, Cast to the type the value has. Names of graph outputs stay.
// CastLike of what has a known type becomes Cast: nothing else of its second operand counts.
#include <algorithm>
#include <optional>
#include <unordered_set>

#include "graph/passes.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

bool is_false_or_missing(const Value* value) {
  double number = 0;
  return !value || (scalar_value(value, number) && number == 0);
}

bool hands_through(const Node& node, const ElementTypes& types, const std::optional<Uses>& uses) {
  if (!node.input(0) || !node.out(0)) return false;
  if (node.is("Identity")) return true;
  if (node.is("Dropout")) {
    return is_false_or_missing(node.input(2)) && (!node.out(1) || uses->unused(node.out(1)));
  }
  if (node.is("Cast")) {
    DType from = types.of(node.inputs[0]);
    return from != DType::undefined && static_cast<int64_t>(from) == node.get_int("to", 0);
  }
  return false;
}

// True where it did.
bool name_type(Node& node, const ElementTypes& types) {
  if (!node.is("CastLike") || !node.input(0) || !node.input(1)) return false;
  const DType to = types.of(node.inputs[1]);
  if (to == DType::undefined) return false;
  node.op = "Cast";
  node.inputs.resize(1);
  node.set("to", static_cast<int64_t>(to));
  return true;
}

class IdentityRemover {
 public:
  void run_all(Graph& graph) {
    run(graph);
    replace_uses(graph, replaced_);  // where a value was renamed after its first users were visited
    if (drops_operands_) remove_dead_nodes(graph);
  }

 private:
  void run(Graph& graph) {
    std::optional<Uses> uses;  // only a Dropout asks
    if (std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const Node* node) { return node->is("Dropout"); })) uses.emplace(graph);
    std::unordered_set<const Value*> outputs(graph.outputs.begin(), graph.outputs.end());
    Rewriter(graph).walk([&](Node& node) {
      for (Value*& v : node.inputs)
        if (v) v = resolve(v);
      for (const GraphPtr& body : bodies(node)) run(*body);
      drops_operands_ |= name_type(node, types_);
      types_.add(node);
      return !hands_through(node, types_, uses) || !remove(node, graph, outputs);
    });
    for (Value*& v : graph.outputs) v = resolve(v);
  }

  Value* resolve(Value* v) const {
    for (auto it = replaced_.find(v); it != replaced_.end(); it = replaced_.find(v)) v = it->second;
    return v;
  }

  // True when the node may go.
  bool remove(Node& node, const Graph& graph, std::unordered_set<const Value*>& outputs) {
    Value *x = node.inputs[0], *y = node.outputs[0];
    if (!outputs.count(y)) {
      if (x->type.kind == Type::Kind::unknown) x->type = y->type;
      replaced_[y] = x;
      return true;
    }
    // The output's name must stay: what made x makes y instead, where x is a value of this graph that is no output itself.
    if (!x->producer || x->graph != &graph || outputs.count(x)) return false;
    if (y->type.kind == Type::Kind::unknown) y->type = x->type;
    set_output(*x->producer, static_cast<size_t>(x->output), y);
    x->producer = nullptr;
    replaced_[x] = y;
    return true;
  }

  ElementTypes types_;
  ValueMap replaced_;
  bool drops_operands_ = false;
};

}  // namespace

void remove_identities(Model& model) {
  IdentityRemover().run_all(*model.graph);
}

}  // namespace fretsaw
