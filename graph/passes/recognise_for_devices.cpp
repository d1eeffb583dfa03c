// The passes that devices want, in their order, and transposes that move nothing.
#include "graph/passes.h"
#include "graph/passes/rewrite.h"
#include "graph/passes/strided_view.h"

namespace fretsaw {
namespace {

// Whether the elements keep their order: only dimensions of 1 change places.
bool moves_nothing(const Node& transpose) {
  auto x = static_dims(transpose.input(0));
  if (!x) return false;
  const std::vector<int64_t> perm = transpose.get_ints("perm");
  int64_t last = -1;
  for (int64_t at : perm) {
    if ((*x)[static_cast<size_t>(at)] == 1) continue;
    if (at < last) return false;
    last = at;
  }
  return !perm.empty();
}

}  // namespace

void transposes_to_reshapes(Model& model) {
  for_each_graph(*model.graph, [](Graph& graph) {
    for (Node* node : graph.nodes) {
      auto y = static_dims(node->out(0));
      if (!node->is("Transpose") || !y || !moves_nothing(*node)) continue;
      Value* dims = graph.add_constant(graph.fresh_name(node->name + "_dims"), make_int64s(*y));
      dims->type = Type::tensor(DType::int64, Shape{static_cast<int64_t>(y->size())});
      node->op = "Reshape";
      node->attributes.clear();
      node->inputs.push_back(dims);
    }
  });
}

void recognise_for_devices(Model& model, MergedWeights* kept) {
  fuse_rotary(model);
  fuse_attention(model);
  transposes_to_reshapes(model);
  merge_products(model, {}, kept);
  turn_rows(model);
  sink_reshapes(model);
  stride_attention(model);
}

}  // namespace fretsaw
