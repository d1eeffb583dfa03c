// Transposes of rows move across products towards attention, which reads and writes rows in any order (stride_attention.cpp).
//
//   x [B, S, E] -> Transpose [S, B, E] -> MatMul -> Add -> views -> Attention
//   Attention -> views -> Gemm [S * B, E] -> Reshape [S, B, E] -> Transpose [B, S, E]
//
// become
//
//   x [B, S, E] -> MatMul -> Add -> Transpose -> views -> Attention
//   Attention -> views -> Transpose -> Gemm [B * S, E] -> Reshape [B, S, E]
#include <algorithm>
#include <deque>
#include <optional>

#include "graph/device_operators.h"
#include "graph/passes.h"
#include "graph/passes/patterns.h"
#include "graph/passes/strided_view.h"

namespace fretsaw {
namespace {

// The operand whose rows the node treats one by one, and all alike, each becoming one row of its output. Null for other nodes.
Value* row_operand_of(const Node& node) {
  const auto is_matrix = [](const Value* v) { return is_fixed(v) && v->constant->dims.size() == 2; };
  const auto is_row = [](const Value* v) { return is_fixed(v) && v->constant->dims.size() == 1; };
  if (node.is("MatMul")) return is_matrix(node.input(1)) ? node.inputs[0] : nullptr;
  if (node.is("Gemm")) {
    const bool plain = node.get_int("transA", 0) == 0 && is_matrix(node.input(1)) && (!node.input(2) || is_row(node.input(2)));
    return plain ? node.inputs[0] : nullptr;
  }
  if (node.is("Reshape")) return node.inputs[0];
  if (!node.is("Add") || is_row(node.inputs[0]) == is_row(node.inputs[1])) return nullptr;
  return node.inputs[is_row(node.inputs[0]) ? 1 : 0];
}

Value* row_operand(const Node& node) {
  Value* v = row_operand_of(node);
  return v && v->graph == node.graph ? v : nullptr;  // what uses a value of a graph around this one is not seen
}

bool is_product(const Node* node) {
  return node->is("MatMul") || node->is("Gemm");
}

// Whether the node shows, orders or picks elements of its first input and does nothing else.
bool only_moves(const Node& node) {
  for (const char* op : {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Split", "Slice", "Gather", "Identity"})
    if (node.is(op)) return true;
  return false;
}

// A Transpose of [lead..., N] that keeps the last dimension.
struct RowOrder {
  std::vector<int64_t> perm;
  Dims before, after;  // the leading dimensions
};

std::optional<RowOrder> row_order(const Node& node) {
  const auto x = static_dims(node.input(0)), y = static_dims(node.out(0));
  const std::vector<int64_t> perm = node.get_ints("perm");
  if (!node.is("Transpose") || !x || !y || count_of(*x) == 0 || perm.size() < 3 || perm.back() != std::ssize(perm) - 1) return std::nullopt;
  return RowOrder{perm, Dims(x->begin(), x->end() - 1), Dims(y->begin(), y->end() - 1)};
}

Dims with_width(Dims lead, int64_t width) {
  lead.push_back(width);
  return lead;
}

class RowTurner {
 public:
  explicit RowTurner(Graph& graph) : graph_(graph), uses_(graph), edit_(graph) {}

  void run() {
    edit_.walk([&](Node& node) {
      if (!row_operand(node)) return true;
      if (feeds_attention(node.out(0)))
        turn_later(node);
      else if (comes_from_attention(row_operand(node)))
        turn_earlier(node);
      return true;
    });
  }

 private:
  using Chain = std::deque<Node*>;

  // The Transpose before the rows that end with `last` moves behind it.
  void turn_later(Node& last) {
    Chain chain = {&last};
    Node* before = row_operand(last)->producer;
    while (before && uses_.only_user(before->out(0)) == chain.front() && !row_order(*before) && row_operand(*before)) {
      chain.push_front(before);
      before = row_operand(*before)->producer;
    }
    if (!before || uses_.only_user(before->out(0)) != chain.front()) return;
    const auto order = row_order(*before);
    if (!order || !all_have(chain, order->after)) return;
    replace_operand(*chain.front(), before->inputs[0]);
    Value* result = edit_.detach(last, 0);
    last.out(0)->type = result->type;
    relabel(chain, order->after, order->before);
    const int64_t width = static_dims(result)->back();
    Value* turned = result;
    if (lead_of(result) != order->after) turned = fresh(result, with_width(order->after, width));
    Value* shown = last.out(0);
    if (lead_of(shown) != order->before) shown = show_after(shown, fresh(result, with_width(order->before, width)));
    edit_.add_making("Transpose", {shown}, {turned}, {{"perm", order->perm}}, true);
    if (turned != result) show_after(turned, result);
  }

  // The Transpose behind the rows that begin with `first` moves before it.
  void turn_earlier(Node& first) {
    Chain chain = {&first};
    Node* behind = uses_.only_user(first.out(0));
    while (behind && !row_order(*behind) && row_operand(*behind) == chain.back()->out(0)) {
      chain.push_back(behind);
      behind = uses_.only_user(behind->out(0));
    }
    const auto order = behind ? row_order(*behind) : std::nullopt;
    Value* rows = row_operand(first);
    if (!order || !all_have(chain, order->before)) return;
    const Dims dims = *static_dims(rows);
    const bool flat = lead_of(rows) != order->before;
    Value* shown = flat ? show_before(rows, with_width(order->before, dims.back())) : rows;
    Value* turned = edit_.add("Transpose", {shown}, {{"perm", order->perm}}, rows->name + "_turned");
    turned->type = Type::tensor(rows->type.dtype, shape_of(with_width(order->after, dims.back())));
    replace_operand(first, flat ? show_before(turned, dims) : turned);
    relabel(chain, order->before, order->after);
    behind->op = "Reshape";  // of a value that has its dimensions already
    behind->attributes.clear();
    behind->inputs = {behind->inputs[0], dims_constant(graph_, *static_dims(behind->out(0)))};
  }

  // Whether a product is among the nodes and all values have these leading dimensions, or all rows in one.
  bool all_have(const Chain& chain, const Dims& lead) const {
    const auto fits = [&](const Value* v) {
      const auto dims = static_dims(v);
      return dims && !dims->empty() && (lead_of(v) == lead || lead_of(v) == Dims{count_of(lead)});
    };
    return std::any_of(chain.begin(), chain.end(), is_product) && fits(row_operand(*chain.front())) &&
           std::all_of(chain.begin(), chain.end(), [&](const Node* n) { return fits(n->out(0)); });
  }

  static Dims lead_of(const Value* value) {
    Dims dims = *static_dims(value);
    dims.pop_back();
    return dims;
  }

  // What has the leading dimensions `from` has `to` instead.
  void relabel(const Chain& chain, const Dims& from, const Dims& to) {
    for (Node* node : chain) {
      Value* v = node->out(0);
      const Dims dims = *static_dims(v);
      if (lead_of(v) == from) v->type = Type::tensor(v->type.dtype, shape_of(with_width(to, dims.back())));
      if (node->is("Reshape")) node->inputs[1] = dims_constant(graph_, *static_dims(v));
    }
  }

  static void replace_operand(Node& node, Value* by) {
    Value* old = row_operand(node);
    *std::find(node.inputs.begin(), node.inputs.end(), old) = by;
  }

  // Whether nothing but attention uses the value, through whatever shows, orders and picks its elements.
  bool feeds_attention(const Value* value) const {
    if (uses_.is_output(value) || uses_.unused(value)) return false;
    return uses_.all_users(value, [&](const Node* user) {
      if (has_strided_form(*user)) return user->input(3) != value;
      return user->input(0) == value && only_moves(*user) &&
             std::all_of(user->outputs.begin(), user->outputs.end(), [&](const Value* v) { return !v || feeds_attention(v); });
    });
  }

  // Whether the value is attention's result in another order or shape, which nothing else uses.
  bool comes_from_attention(const Value* value) const {
    for (const Node* node = value->producer; node && value->output == 0 && uses_.only_user(value); node = value->producer) {
      if (has_strided_form(*node)) return true;
      if (!only_moves(*node) || node->is("Split") || node->is("Slice") || node->is("Gather")) return false;
      value = node->inputs[0];
    }
    return false;
  }

  Value* fresh(const Value* like, const Dims& dims) {
    return graph_.add_value(graph_.fresh_name(like->name + "_rows"), Type::tensor(like->type.dtype, shape_of(dims)));
  }
  Value* show_after(Value* from, Value* to) {
    edit_.add_making("Reshape", {from, dims_constant(graph_, *static_dims(to))}, {to}, {}, true);
    return to;
  }
  Value* show_before(Value* from, const Dims& dims) {
    Value* made = edit_.add("Reshape", {from, dims_constant(graph_, dims)}, {}, from->name + "_rows");
    made->type = Type::tensor(from->type.dtype, shape_of(dims));
    return made;
  }

  Graph& graph_;
  Uses uses_;
  Rewriter edit_;
};

}  // namespace

void turn_rows(Model& model) {
  for_each_graph(*model.graph, [](Graph& graph) {
    if (has_any(graph, {"Attention"}) && has_any(graph, {"Transpose"})) RowTurner(graph).run();
  });
  remove_unused_nodes(*model.graph);
}

}  // namespace fretsaw
