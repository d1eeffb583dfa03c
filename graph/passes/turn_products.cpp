// Products read a transposed matrix where it lies, and leave their result transposed:
//
//   MatMul(x [B, S, K], Transpose(w [N, K]))        becomes  Reshape -> Gemm<transB = 1>(x [B * S, K], w) -> Reshape
//   Gemm(a, Transpose(b))                           becomes  Gemm(a, b) with the other transB; a likewise
//   Transpose(Gemm(a, b))                           becomes  Gemm(b, a) with both flags the other way round
//
// Transposed constants are folded, and none of these: weights that learn are no constants.
#include "graph/passes.h"
#include "graph/passes/patterns.h"
#include "graph/passes/strided_view.h"

namespace fretsaw {
namespace {

bool swaps_two(const Node& node) {
  const auto dims = static_dims(node.input(0));
  const std::vector<int64_t> perm = node.get_ints("perm");
  return node.is("Transpose") && dims && dims->size() == 2 && (perm.empty() || perm == std::vector<int64_t>{1, 0});
}

// The matrix that the value is the transpose of; null for other values.
Value* transposed(const Value* value, const Graph& graph) {
  const Node* node = value ? value->producer : nullptr;
  return node && node->graph == &graph && swaps_two(*node) ? node->inputs[0] : nullptr;
}

class ProductTurner {
 public:
  explicit ProductTurner(Graph& graph) : graph_(graph), uses_(graph), edit_(graph) {}

  void run() {
    edit_.walk([&](Node& node) {
      if (node.is("MatMul")) rows_to_gemm(node);
      if (node.is("Gemm")) read_transposed(node);
      if (swaps_two(node)) leave_transposed(node);
      return true;
    });
  }

 private:
  void rows_to_gemm(Node& node) {
    const auto x = static_dims(node.input(0)), y = static_dims(node.out(0));
    if (!x || !y || x->size() < 2 || count_of(*x) == 0 || !is_float(node.input(0)->type.dtype) || !transposed(node.input(1), graph_))
      return;
    if (x->size() > 2) {
      const int64_t width = x->back(), rows = count_of(*x) / width, columns = y->back();
      Value* flat = edit_.add("Reshape", {node.inputs[0], dims_constant(graph_, {rows, width})}, {}, node.inputs[0]->name + "_rows");
      flat->type = Type::tensor(node.inputs[0]->type.dtype, shape_of({rows, width}));
      node.inputs[0] = flat;
      Value* result = edit_.detach(node, 0);
      node.out(0)->type = Type::tensor(result->type.dtype, shape_of({rows, columns}));
      edit_.add_making("Reshape", {node.out(0), dims_constant(graph_, *y)}, {result}, {}, /*after=*/true);
    }
    node.op = "Gemm", node.group = -1;
  }

  void read_transposed(Node& node) {
    for (const size_t i : {0, 1}) {
      Value* matrix = transposed(node.input(i), graph_);
      if (!matrix) continue;
      node.inputs[i] = matrix;
      turn(node, i == 0 ? "transA" : "transB");
    }
  }

  void leave_transposed(Node& node) {
    const Value* product = node.input(0);
    const Node* gemm = product->producer;
    if (!gemm || !gemm->is("Gemm") || gemm->graph != &graph_ || gemm->input(2) || uses_.only_user(product) != &node) return;
    node.op = "Gemm", node.group = -1;
    node.attributes = gemm->attributes;
    node.inputs = {gemm->inputs[1], gemm->inputs[0]};
    const int64_t first = gemm->get_int("transA", 0), second = gemm->get_int("transB", 0);
    node.set("transA", int64_t{second == 0}), node.set("transB", int64_t{first == 0});
  }

  static void turn(Node& node, const char* flag) { node.set(flag, int64_t{node.get_int(flag, 0) == 0}); }

  Graph& graph_;
  Uses uses_;
  Rewriter edit_;
};

}  // namespace

void turn_products(Model& model) {
  for_each_graph(*model.graph, [](Graph& graph) {
    if (has_any(graph, {"Transpose"})) ProductTurner(graph).run();
  });
  remove_unused_nodes(*model.graph);
}

}  // namespace fretsaw
