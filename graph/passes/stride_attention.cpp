// Attention that reads its operands where they lie and writes its result where it is wanted.
//
//   x [S, B, 3 * H * D] -> Reshape -> Transpose -> Gather -> Reshape -> Transpose -> q [B, H, S, D], k and v likewise
//   Attention(q, k, v) -> Transpose -> Reshape -> y [S * B, H * D]
//
// becomes y = StridedAttention(x, x, x): no element moves. Views and permutations of any kind are seen through (strided_view.h).
#include <algorithm>
#include <numeric>
#include <set>

#include "graph/device_operators.h"
#include "graph/passes.h"
#include "graph/passes/patterns.h"
#include "graph/passes/strided_view.h"

namespace fretsaw {
namespace {

using Axes = std::vector<StridedView::Axis>;

// Devices read rows in pieces of so many elements.
constexpr int64_t kPiece = 8;

// An operand of attention, or its result, in a value before or after it.
struct Placed {
  Value* in = nullptr;
  HeadsView view;
  int copies = 0;  // nodes that move elements in between
};

// [B, H, S, D], or [B, S, H * D].
std::optional<HeadsView> view_in_itself(const Value* value, int64_t heads) {
  const auto dims = static_dims(value);
  if (!dims || count_of(*dims) == 0) return std::nullopt;
  if (dims->size() == 4) return dense_view((*dims)[0], (*dims)[1], (*dims)[2], (*dims)[3]);
  if (dims->size() != 3 || heads < 1 || (*dims)[2] % heads != 0) return std::nullopt;
  const int64_t S = (*dims)[1], width = (*dims)[2], D = width / heads;
  return HeadsView{(*dims)[0], heads, S, D, 0, S * width, D, width};
}

// One dimension of heads: its size, and elements from one index to the next where they come from and where they go.
struct HeadsDim {
  int64_t size, from, to;
};

std::vector<HeadsDim> dims_of_heads(const HeadsView& v) {
  return {{v.batches, v.batch, 0}, {v.heads, v.head, 0}, {v.rows, v.row, 0}, {v.width, 1, 0}};
}

// Cuts axes that run over several dimensions. False where one doesn't end with a dimension.
bool cut_at_dims(Axes& axes, const std::vector<HeadsDim>& dims) {
  for (const HeadsDim& dim : dims) {
    if (dim.size == 1) continue;
    for (size_t i = 0; i < axes.size(); ++i) {
      StridedView::Axis& a = axes[i];
      if (a.at >= dim.from || a.at * a.size <= dim.from) continue;
      const int64_t inner = dim.from / a.at;
      if (dim.from % a.at != 0 || a.size % inner != 0) return false;
      const StridedView::Axis outer{a.size / inner, dim.from, a.stride * inner};
      a.size = inner;
      axes.push_back(outer);
    }
  }
  return true;
}

// The dimension that an axis is (a part of): of those that are no larger steps, the one with the largest.
HeadsDim* dim_of(const StridedView::Axis& axis, std::vector<HeadsDim>& dims) {
  HeadsDim* found = nullptr;
  for (HeadsDim& dim : dims)
    if (dim.size > 1 && dim.from <= axis.at && (!found || dim.from > found->from)) found = &dim;
  return found;
}

// Dimensions of 1 get a stride as if they were the outermost.
void stride_ones(std::vector<HeadsDim>& dims) {
  int64_t whole = dims.back().size;
  for (const HeadsDim& dim : dims) whole = std::max(whole, dim.size * dim.to);
  for (HeadsDim& dim : dims)
    if (dim.size == 1) dim.to = whole;
}

// The view with these axes, whose `at` counts where `heads` does. Nullopt where they don't lie at one stride for each dimension, or not
// with rows of neighbours, or where elements are repeated.
std::optional<HeadsView> moved(const HeadsView& heads, Axes axes, int64_t offset) {
  std::vector<HeadsDim> dims = dims_of_heads(heads);
  if (!cut_at_dims(axes, dims)) return std::nullopt;
  for (const StridedView::Axis& a : axes) {
    if (a.size == 1) continue;
    HeadsDim* dim = dim_of(a, dims);
    if (!dim || a.at % dim->from != 0) return std::nullopt;
    const int64_t steps = a.at / dim->from, stride = a.stride / steps;
    if (stride == 0 || a.stride % steps != 0 || (dim->to != 0 && dim->to != stride)) return std::nullopt;
    dim->to = stride;
  }
  if (dims[3].size > 1 && dims[3].to != 1) return std::nullopt;
  stride_ones(dims);
  return HeadsView{heads.batches, heads.heads, heads.rows, heads.width, offset, dims[0].to, dims[1].to, dims[2].to};
}

// Whether rows begin at places as even as their width.
bool is_aligned(const HeadsView& v) {
  const int64_t piece = std::gcd(v.width, kPiece);
  return v.offset % piece == 0 && v.batch % piece == 0 && v.head % piece == 0 && v.row % piece == 0;
}

// Which of two places is better: fewer nodes stand between the attention and it.
void take_better(Placed& best, const Placed& other) {
  if (other.copies > 0 && other.copies >= best.copies && is_aligned(other.view)) best = other;
}

Axes inverse(const Axes& axes) {
  Axes turned;
  for (const StridedView::Axis& a : axes) turned.push_back({a.size, a.stride, a.at});
  return turned;
}

class AttentionStrider {
 public:
  explicit AttentionStrider(Graph& graph) : graph_(graph), uses_(graph), edit_(graph) {}

  bool run() {
    edit_.walk([&](Node& node) {
      if (has_strided_form(node)) rewrite(node);
      return true;
    });
    for (Node* node : graph_.nodes)
      if (groups_.count(node->group)) node->group = -1;
    return changed_;
  }

 private:
  void rewrite(Node& node) {
    const int64_t query_heads = node.get_int("q_num_heads", 0), key_heads = node.get_int("kv_num_heads", 0);
    const auto q = find_operand(node.input(0), query_heads), k = find_operand(node.input(1), key_heads),
               v = find_operand(node.input(2), key_heads), y = find_result(node, query_heads);
    if (!q || !k || !v || !y || q->copies + k->copies + v->copies + y->copies == 0) return;
    write_attention_views(node, {q->view, k->view, v->view, y->view, *static_dims(y->in)});
    node.op = "StridedAttention";
    node.domain = kDeviceDomain;
    for (const char* name : {"q_num_heads", "kv_num_heads", "qk_matmul_output_mode"}) node.remove(name);
    node.inputs[0] = q->in, node.inputs[1] = k->in, node.inputs[2] = v->in;
    make(node, y->in);
    if (node.group >= 0) groups_.insert(node.group);
    changed_ = true;
  }

  static std::optional<Placed> find_operand(Value* value, int64_t heads) {
    const auto own = view_in_itself(value, heads);
    if (!own) return std::nullopt;
    Placed best{value, *own};
    auto view = whole_view(value, *static_dims(value));
    while (view && step_back(*view, false))
      if (const auto there = moved(*own, view->axes, view->offset)) take_better(best, {view->base, *there, view->copies});
    return best;
  }

  std::optional<Placed> find_result(const Node& node, int64_t heads) const {
    Value* made = node.out(0);
    const auto own = view_in_itself(made, heads);
    if (!own) return std::nullopt;
    Placed best{made, *own};
    for (Value* after = next_order(made); after; after = next_order(after)) {
      const auto dims = static_dims(after);
      auto view = dims ? whole_view(after, *dims) : std::nullopt;
      while (view && view->base != made)
        if (!step_back(*view, false)) view.reset();
      if (!view) break;
      if (const auto there = moved(*own, inverse(view->axes), 0)) take_better(best, {after, *there, view->copies});
    }
    return best;
  }

  // What the only user makes of the value, when that is all its elements in some order.
  Value* next_order(const Value* value) const {
    const Node* user = uses_.only_user(value);
    if (!user || user->input(0) != value) return nullptr;
    for (const char* op : {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
      if (user->is(op)) return user->out(0);
    return nullptr;
  }

  // The node makes `value`; what made it dies.
  void make(Node& node, Value* value) {
    if (node.out(0) == value) return;
    edit_.detach(*value->producer, 0);
    node.outputs[0]->producer = nullptr;
    set_output(node, 0, value);
  }

  Graph& graph_;
  Uses uses_;
  Rewriter edit_;
  std::set<int> groups_;  // fusion groups that lost a node
  bool changed_ = false;
};

}  // namespace

void stride_attention(Model& model) {
  register_device_schemas();
  for_each_graph(*model.graph, [&](Graph& graph) {
    if (has_any(graph, {"Attention"}) && AttentionStrider(graph).run()) model.opsets[kDeviceDomain] = 1;
  });
  remove_unused_nodes(*model.graph);
}

}  // namespace fretsaw
