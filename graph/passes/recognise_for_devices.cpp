// The passes that devices want, in their order, and the small ones among them.
#include <algorithm>

#include "graph/passes.h"
#include "graph/passes/patterns.h"
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

// Whether the node takes the mean over all cells of each channel of an image [N, C, H, W] or more; a mean over lines is one of rows.
bool is_mean_over_cells(const Node& node) {
  const auto x = static_dims(node.input(0));
  if (!node.is("ReduceMean") || !x || x->size() < 4 || !is_float(node.input(0)->type.dtype) || !is_fixed(node.input(1))) return false;
  std::vector<int64_t> axes = int_values(*node.input(1)->constant).value_or(std::vector<int64_t>{});
  const auto rank = static_cast<int64_t>(x->size());
  for (int64_t& axis : axes) axis += axis < 0 ? rank : 0;
  std::sort(axes.begin(), axes.end());
  std::vector<int64_t> cells;
  for (int64_t axis = 2; axis < rank; ++axis) cells.push_back(axis);
  return axes == cells;
}

// Means over an image become poolings, which take and leave images channels last.
void means_to_poolings(Model& model) {
  for_each_graph(*model.graph, [](Graph& graph) {
    if (!has_any(graph, {"ReduceMean"})) return;
    Rewriter edit(graph);
    edit.walk([&](Node& node) {
      if (!is_mean_over_cells(node)) return true;
      const auto x = *static_dims(node.input(0));
      if (node.get_int("keepdims", 1) == 0) {
        Value* given = edit.detach(node, 0);
        Dims kept(x.size(), 1);
        kept[0] = x[0], kept[1] = x[1];
        node.out(0)->type = Type::tensor(given->type.dtype, shape_of(kept));
        edit.add_making("Reshape", {node.out(0), dims_constant(graph, {x[0], x[1]})}, {given}, {}, /*after=*/true);
      }
      node.op = "GlobalAveragePool";
      node.attributes.clear();
      node.inputs.resize(1);
      node.group = -1;
      return true;
    });
  });
}

}  // namespace

void transposes_to_reshapes(Model& model) {
  for_each_graph(*model.graph, [](Graph& graph) {
    for (Node* node : graph.nodes) {
      auto y = static_dims(node->out(0));
      if (!node->is("Transpose") || !y || count_of(*y) == 0 || !moves_nothing(*node)) continue;
      node->op = "Reshape";
      node->attributes.clear();
      node->inputs.push_back(dims_constant(graph, *y));
    }
  });
}

void recognise_for_devices(Model& model, MergedWeights* kept) {
  fuse_rotary(model);
  fuse_attention(model);
  means_to_poolings(model);
  transposes_to_reshapes(model);
  merge_products(model, {}, kept);
  join_rotations(model);
  turn_rows(model);
  turn_products(model);
  sink_reshapes(model);
  stride_attention(model);
}

}  // namespace fretsaw
