// Reshapes between a product and what follows it move behind what follows, so that both can run as one.
//
//   Gemm [M, N] -> Reshape [B, S, N] -> Gelu            becomes  Gemm -> Gelu -> Reshape
//   Gemm [M, N] -> Reshape [B, S, N] -> Add(r [B, S, N])   becomes  Gemm -> Add(Reshape(r) [M, N]) -> Reshape
//
// The last dimension stays, so that a bias [N] is one before and after.
#include <algorithm>
#include <optional>
#include <set>

#include "graph/catalogue.h"
#include "graph/passes.h"
#include "graph/passes/patterns.h"
#include "graph/passes/strided_view.h"

namespace fretsaw {
namespace {

bool is_product(const Node& node) {
  return node.is("Gemm") || node.is("MatMul");
}

// The value that a Reshape shows in other dimensions, the last one being the same. Null for other values.
Value* rows_of(const Value* value) {
  const Node* node = value ? value->producer : nullptr;
  if (!node || !node->is("Reshape") || value->graph != node->graph || node->inputs[0]->graph != value->graph) return nullptr;
  const auto x = static_dims(node->inputs[0]), y = static_dims(value);
  if (!x || !y || x->empty() || y->empty() || x->back() != y->back() || count_of(*y) == 0) return nullptr;
  return node->inputs[0];
}

// Whether an operand means the same beside values of any dimensions that end with `width`: a number, or one for each column.
bool fits_any_rows(const Value* value, int64_t width) {
  const auto dims = static_dims(value);
  return dims && (count_of(*dims) == 1 || *dims == Dims{width}) && dims->size() < 2;
}

class ReshapeSinker {
 public:
  explicit ReshapeSinker(Graph& graph) : graph_(graph), uses_(graph), edit_(graph) {}

  void run() {
    edit_.walk([&](Node& node) {
      if (is_product(node)) steps_.insert(node.out(0));
      if (follows(node) && !node.is("Cast")) sink(node);  // a Cast is of what computes with its result
      return true;
    });
  }

 private:
  // Elementwise, whatever the dimensions.
  static bool follows(const Node& node) {
    return role_of(node) == Role::elementwise && node.outputs.size() == 1 && !node.is("QuantizeLinear") && !node.is("DequantizeLinear");
  }

  // Puts the Reshape before `node` behind it.
  void sink(Node& node) {
    const auto ends = [&](const Value* v) { return ends_step(v, node); };
    const auto at =
        std::find_if(node.inputs.begin(), node.inputs.end(), [&](const Value* v) { return ends(v) || ends_shown_step(v, node); });
    if (at == node.inputs.end()) return;
    if (!ends(*at) && !move(node, *at)) return;
    steps_.insert(node.out(0));
  }

  // Whether the value is the result of a product and what followed it so far, for this node alone.
  bool ends_step(const Value* v, const Node& node) const { return steps_.count(v) && (uses_.only_user(v) == &node || uses_.unused(v)); }
  bool ends_shown_step(const Value* v, const Node& node) const {
    const Value* rows = rows_of(v);
    return rows && uses_.only_user(v) == &node && ends_step(rows, *v->producer);
  }

  bool move(Node& node, const Value* shown) {
    Value* rows = rows_of(shown);
    const Dims dims = *static_dims(rows), shown_dims = *static_dims(shown);
    if (static_dims(node.out(0)) != shown_dims || !fit(node, shown, shown_dims) || has_step_of_its_own(node, shown)) return false;
    for (Value*& v : node.inputs) v = v == shown ? rows : as_rows(v, shown_dims, dims);
    Value* result = edit_.detach(node, 0);
    node.out(0)->type = Type::tensor(result->type.dtype, shape_of(dims));
    edit_.add_making("Reshape", {node.out(0), dims_constant(graph_, shown_dims)}, {result}, {}, true);
    return true;
  }

  static bool fit(const Node& node, const Value* shown, const Dims& shown_dims) {
    return std::all_of(node.inputs.begin(), node.inputs.end(), [&](const Value* v) {
      return v == nullptr || v == shown || static_dims(v) == shown_dims || fits_any_rows(v, shown_dims.back());
    });
  }

  // Whether another operand is elementwise too, and for this node alone: those two run as one, if no Reshape is put between them.
  bool has_step_of_its_own(const Node& node, const Value* shown) const {
    return std::any_of(node.inputs.begin(), node.inputs.end(), [&](const Value* v) {
      return v && v != shown && v->producer && v->producer->graph == node.graph && follows(*v->producer) && uses_.only_user(v) == &node;
    });
  }

  // An operand beside rows of these dimensions.
  Value* as_rows(Value* value, const Dims& shown_dims, const Dims& dims) {
    if (!value || static_dims(value) != shown_dims) return value;
    if (Value* rows = rows_of(value); rows && static_dims(rows) == dims) return rows;
    Value* made = edit_.add("Reshape", {value, dims_constant(graph_, dims)}, {}, value->name + "_rows");
    made->type = Type::tensor(value->type.dtype, shape_of(dims));
    return made;
  }

  Graph& graph_;
  Uses uses_;
  Rewriter edit_;
  std::set<const Value*> steps_;  // results of products and of what follows them
};

// A Reshape of a Reshape takes what the first one takes, and one that changes nothing goes.
void join_reshapes(Graph& graph) {
  ValueMap same;
  for (Node* node : graph.nodes) {
    const auto dims = static_dims(node->out(0));
    if (!node->is("Reshape") || !dims) continue;
    while (Value* earlier = rows_of(node->inputs[0])) {
      node->inputs[0] = earlier;
      node->inputs[1] = dims_constant(graph, *dims);  // the old one may copy dimensions of the old input
    }
    const bool inside = std::find(graph.outputs.begin(), graph.outputs.end(), node->out(0)) == graph.outputs.end();
    if (inside && static_dims(node->inputs[0]) == dims) same[node->out(0)] = node->inputs[0];
  }
  replace_uses(graph, same);
}

}  // namespace

void sink_reshapes(Model& model) {
  const auto join = [&] {
    for_each_graph(*model.graph, join_reshapes);
    remove_unused_nodes(*model.graph);  // what nobody uses is no follower of a product
  };
  join();
  for_each_graph(*model.graph, [](Graph& graph) { ReshapeSinker(graph).run(); });
  join();
}

}  // namespace fretsaw
