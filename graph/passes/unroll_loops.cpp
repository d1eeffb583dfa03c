// Loops whose number of passes is known become their passes, one after another.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <optional>
#include <unordered_map>

#include "graph/passes.h"
#include "graph/passes/loops.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

int64_t nodes_in(Graph& graph) {
  int64_t count = 0;
  for_each_graph(graph, [&](const Graph& g) { count += std::ssize(g.nodes); });
  return count;
}

bool is_true(const Value* value) {
  const auto numbers = is_fixed(value) ? int_values(*value->constant) : std::nullopt;
  return numbers && numbers->size() == 1 && (*numbers)[0] != 0;
}

// Whether a body's condition holds after a pass before which `given` held.
bool stays_true(const Value* condition, const Value* given) {
  if (condition == given || is_true(condition)) return true;
  const Node* by = condition ? condition->producer : nullptr;
  if (!by) return false;
  const auto operand = [&](size_t i) { return stays_true(by->input(i), given); };
  if (by->is("And")) return operand(0) && operand(1);
  return (by->is("Identity") || by->is("Cast")) && operand(0);
}

// The numbers of one pass of a loop that counts by itself, as `while` is written: what its body makes of them.
class PassNumbers {
 public:
  // `outer`: what is known of a value that is not the body's, or of a constant.
  using Outer = std::function<std::optional<int64_t>(const Value*)>;
  explicit PassNumbers(Outer outer) : outer_(std::move(outer)) {}

  void set(const Value* value, std::optional<int64_t> number) { numbers_[value] = number; }
  std::optional<int64_t> of(const Value* value) {
    if (!value) return std::nullopt;
    if (const auto found = numbers_.find(value); found != numbers_.end()) return found->second;
    std::optional<int64_t> number = outer_(value);
    if (!number && value->producer && value->output == 0) number = made_by(*value->producer);
    numbers_[value] = number;
    return number;
  }

 private:
  std::optional<int64_t> made_by(const Node& node) {
    const auto any_of = [&](std::initializer_list<const char*> ops) {
      return node.domain.empty() && std::any_of(ops.begin(), ops.end(), [&](const char* op) { return node.op == op; });
    };
    const DType type = node.outputs[0]->type.dtype;
    if (type != DType::int64 && type != DType::int32 && type != DType::boolean) return std::nullopt;  // smaller ones run over
    if (any_of({"Identity", "Reshape", "Squeeze", "Unsqueeze"})) return of(node.input(0));
    if (any_of({"Cast", "CastLike"})) {
      const std::optional<int64_t> x = of(node.input(0));
      return x && type == DType::boolean ? std::optional<int64_t>(*x != 0) : x;
    }
    if (any_of({"Not"})) {
      const std::optional<int64_t> x = of(node.input(0));
      return x ? std::optional<int64_t>(*x == 0) : std::nullopt;
    }
    if (!any_of({"Add", "Sub", "Mul", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "And", "Or"})) return std::nullopt;
    const std::optional<int64_t> a = of(node.input(0)), b = of(node.input(1));
    if (!a || !b) return std::nullopt;
    const auto x = static_cast<uint64_t>(*a), y = static_cast<uint64_t>(*b);  // sums of counters that run over are no undefined behaviour
    if (node.is("Add")) return static_cast<int64_t>(x + y);
    if (node.is("Sub")) return static_cast<int64_t>(x - y);
    if (node.is("Mul")) return static_cast<int64_t>(x * y);
    if (node.is("Less")) return *a < *b;
    if (node.is("LessOrEqual")) return *a <= *b;
    if (node.is("Greater")) return *a > *b;
    if (node.is("GreaterOrEqual")) return *a >= *b;
    if (node.is("Equal")) return *a == *b;
    return node.is("And") ? *a != 0 && *b != 0 : *a != 0 || *b != 0;
  }

  Outer outer_;
  std::unordered_map<const Value*, std::optional<int64_t>> numbers_;
};

class LoopUnroller {
 public:
  LoopUnroller(Graph& graph, const ShapeFacts& facts, int64_t& nodes_left)
      : graph_(graph), facts_(facts), uses_(graph), rewriter_(graph), nodes_left_(nodes_left) {}

  // True when a loop was unrolled.
  bool run() {
    bool found = false;
    rewriter_.walk([&](Node& node) {
      const bool unrolled = (node.is("Loop") && unroll_loop(node)) || (node.is("Scan") && unroll_scan(node));
      found |= unrolled;
      return !unrolled;
    });
    replace_uses(graph_, replaced_);
    return found;
  }

 private:
  std::optional<int64_t> known_number(const Value* value) const {
    if (!value) return std::nullopt;
    const auto known = facts_.known.find(value);
    const TensorPtr tensor = is_fixed(value) ? value->constant : known != facts_.known.end() ? known->second : nullptr;
    const auto numbers = tensor && tensor->count() == 1 ? int_values(*tensor) : std::nullopt;
    return numbers ? std::optional((*numbers)[0]) : std::nullopt;
  }

  // Outputs of no row would need a shape. Takes the nodes from the budget.
  bool may_unroll(const Node& node, Graph& body, int64_t passes, size_t carried) {
    const bool rows_wanted = std::any_of(node.outputs.begin() + static_cast<std::ptrdiff_t>(std::min(carried, node.outputs.size())),
                                         node.outputs.end(), [](const Value* v) { return v != nullptr; });
    if (passes < 0 || (passes == 0 && rows_wanted)) return false;
    const int64_t each = std::max<int64_t>(nodes_in(body), 1);
    if (passes > nodes_left_ / each) return false;
    nodes_left_ -= passes * each;
    return true;
  }

  // Passes of a loop whose condition follows from numbers that it carries; nullopt where one is not known, or there are too many.
  std::optional<int64_t> counted_passes(const Node& node, Graph& body, size_t carried, std::optional<int64_t> at_most) const {
    const int64_t affordable = nodes_left_ / std::max<int64_t>(nodes_in(body), 1);
    // What inference knows of the body's own values may hold for one pass alone.
    const auto known = [&](const Value* value) { return value->graph != &body || is_fixed(value) ? known_number(value) : std::nullopt; };
    std::vector<std::optional<int64_t>> now;
    for (size_t i = 0; i < carried; ++i) now.push_back(known_number(node.input(2 + i)));
    for (int64_t pass = 0; pass <= affordable; ++pass) {
      if (at_most && pass >= *at_most) return std::max<int64_t>(*at_most, 0);
      PassNumbers numbers(known);
      numbers.set(body.inputs[0], pass);
      numbers.set(body.inputs[1], 1);
      for (size_t i = 0; i < carried; ++i) numbers.set(body.inputs[2 + i], now[i]);
      const std::optional<int64_t> goes_on = numbers.of(body.outputs[0]);
      if (!goes_on) return std::nullopt;
      if (*goes_on == 0) return pass + 1;
      for (size_t i = 0; i < carried; ++i) now[i] = numbers.of(body.outputs[1 + i]);
    }
    return std::nullopt;
  }

  bool unroll_loop(Node& node) {
    const GraphPtr body = fitting_body(node);
    std::optional<int64_t> passes = known_number(node.input(0));
    const std::optional<int64_t> begins = node.input(1) ? known_number(node.input(1)) : 1;
    if (!body || !begins) return false;
    if (*begins == 0) passes = 0;
    const size_t carried = node.inputs.size() - 2;
    const bool limited = passes.has_value() || !node.input(0);
    if (limited && (!passes || (*passes > 0 && !stays_true(body->outputs[0], body->inputs[1]))))
      passes = counted_passes(node, *body, carried, passes);
    if (!passes) return false;
    passes = std::max<int64_t>(*passes, 0);
    if (!may_unroll(node, *body, *passes, carried)) return false;
    Value* holds = *passes > 0 ? rewriter_.constant(make_true(), node.name + "_condition") : nullptr;
    Passes made(*this, node, *body, {node.inputs.begin() + 2, node.inputs.end()}, {.carried_in = 2, .carried_out = 1});
    for (int64_t pass = 0; pass < *passes; ++pass)
      made.add({{body->inputs[0], rewriter_.constant(make_int64(pass), node.name + "_pass")}, {body->inputs[1], holds}});
    made.finish([](size_t) { return Rows{}; });
    return true;
  }

  bool unroll_scan(Node& node) {
    const GraphPtr body = node.get_graph("body");
    const int64_t taken = node.get_int("num_scan_inputs", 0);
    if (!body || taken < 1 || std::ssize(node.inputs) < taken || body->inputs.size() != node.inputs.size()) return false;
    const size_t carried = node.inputs.size() - static_cast<size_t>(taken);
    if (body->outputs.size() < carried) return false;
    const std::vector<int64_t> axes = node.get_ints("scan_input_axes"), directions = node.get_ints("scan_input_directions");
    std::optional<int64_t> passes;
    std::vector<size_t> axis_of;
    for (size_t i = 0; i < static_cast<size_t>(taken); ++i) {
      const Value* x = node.input(carried + i);
      if (!x || !x->type.is_tensor() || !x->type.shape) return false;
      const auto rank = std::ssize(*x->type.shape);
      int64_t axis = i < axes.size() ? axes[i] : 0;
      if (axis < 0) axis += rank;
      if (axis < 0 || axis >= rank) return false;
      const Dim& dim = (*x->type.shape)[static_cast<size_t>(axis)];
      if (!dim.known() || (passes && *passes != dim.value)) return false;
      passes = dim.value;
      axis_of.push_back(static_cast<size_t>(axis));
    }
    if (!may_unroll(node, *body, *passes, carried)) return false;
    std::vector<std::vector<Value*>> slices;
    for (size_t i = 0; i < axis_of.size(); ++i) {
      slices.push_back(slices_of(node.inputs[carried + i], axis_of[i], *passes, node.name));
      if (i < directions.size() && directions[i] != 0) std::reverse(slices.back().begin(), slices.back().end());
    }
    Passes made(*this, node, *body, {node.inputs.begin(), node.inputs.begin() + static_cast<std::ptrdiff_t>(carried)}, {});
    for (size_t pass = 0; pass < static_cast<size_t>(*passes); ++pass) {
      ValueMap given;
      for (size_t i = 0; i < slices.size(); ++i) given[body->inputs[carried + i]] = slices[i][pass];
      made.add(std::move(given));
    }
    const std::vector<int64_t> to_axes = node.get_ints("scan_output_axes"), to_directions = node.get_ints("scan_output_directions");
    made.finish([&](size_t k) {
      return Rows{.axis = k < to_axes.size() ? to_axes[k] : 0, .reversed = k < to_directions.size() && to_directions[k] != 0};
    });
    return true;
  }

  // What stands at each place along the axis, without it.
  std::vector<Value*> slices_of(Value* x, size_t axis, int64_t count, const std::string& name) {
    if (count == 0) return {};
    std::vector<Value*> pieces = {x};
    if (count > 1) {
      pieces.clear();
      for (int64_t i = 0; i < count; ++i) pieces.push_back(graph_.add_value(graph_.fresh_name(name + "_slice")));
      Value* sizes = rewriter_.constant(make_int64s(std::vector<int64_t>(static_cast<size_t>(count), 1)), name + "_sizes");
      rewriter_.add_making("Split", {x, sizes}, pieces, {{"axis", static_cast<int64_t>(axis)}});
    }
    Value* axes = rewriter_.constant(make_int64s({static_cast<int64_t>(axis)}), name + "_axis");
    for (Value*& piece : pieces) piece = rewriter_.add("Squeeze", {piece, axes});
    return pieces;
  }

  // How an output that gets a row from each pass is put together.
  struct Rows {
    int64_t axis = 0;
    bool reversed = false;
  };
  // Where the carried values begin among the body's inputs and outputs.
  struct Places {
    size_t carried_in = 0, carried_out = 0;
  };

  // The passes of one loop.
  class Passes {
   public:
    Passes(LoopUnroller& unroller, Node& node, const Graph& body, std::vector<Value*> carried, Places places)
        : unroller_(unroller), node_(node), body_(body), carried_(std::move(carried)), places_(places) {
      for (const Value& v : body.all_values())
        if (v.constant) constants_[&v] = unroller.rewriter_.constant(v.constant, node.name + "/" + v.name);
      rows_.resize(body.outputs.size() - places.carried_out - carried_.size());
    }

    // `given`: the body's inputs that are not carried.
    void add(ValueMap given) {
      ValueMap mapping = constants_;
      mapping.merge(given);
      for (size_t i = 0; i < carried_.size(); ++i) mapping[body_.inputs[places_.carried_in + i]] = carried_[i];
      const std::string prefix = fmt::format("{}/{}", node_.name, pass_++);
      for (Node* copy : copy_nodes(body_, unroller_.graph_, mapping, prefix)) unroller_.rewriter_.place(*copy);
      const auto after = [&](size_t output) {
        Value* inner = body_.outputs[output];
        const auto found = mapping.find(inner);
        return found == mapping.end() ? inner : found->second;
      };
      for (size_t i = 0; i < carried_.size(); ++i) carried_[i] = after(places_.carried_out + i);
      for (size_t k = 0; k < rows_.size(); ++k) rows_[k].push_back(after(places_.carried_out + carried_.size() + k));
    }

    template <typename RowsOf>
    void finish(const RowsOf& rows_of) {
      for (size_t o = 0; o < node_.outputs.size(); ++o) {
        if (!node_.outputs[o]) continue;
        if (o < carried_.size())
          unroller_.hand_on(carried_[o], node_.outputs[o]);
        else
          join(rows_[o - carried_.size()], rows_of(o - carried_.size()), node_.outputs[o]);
      }
    }

   private:
    void join(std::vector<Value*> values, const Rows& rows, Value* output) {
      Rewriter& rewriter = unroller_.rewriter_;
      if (rows.reversed) std::reverse(values.begin(), values.end());
      Value* axes = rewriter.constant(make_int64s({rows.axis}), output->name + "_axis");
      for (Value*& v : values) v = rewriter.add("Unsqueeze", {v, axes}, {}, output->name + "_row");
      rewriter.add_making("Concat", std::move(values), {output}, {{"axis", rows.axis}});
    }

    LoopUnroller& unroller_;
    Node& node_;
    const Graph& body_;
    std::vector<Value*> carried_;
    const Places places_;
    ValueMap constants_;                     // those of the body, made once
    std::vector<std::vector<Value*>> rows_;  // of each output that is put together, by passes
    int pass_ = 0;
  };

  // `made` takes the place of a node's output that is no longer made.
  void hand_on(Value* made, Value* output) {
    if (uses_.is_output(output))
      rewriter_.add_making("Identity", {made}, {output});
    else
      replaced_[output] = made;
  }

  Graph& graph_;
  const ShapeFacts& facts_;
  const Uses uses_;
  Rewriter rewriter_;
  int64_t& nodes_left_;
  ValueMap replaced_;
};

bool has_loops(Graph& graph) {
  bool found = false;
  for_each_graph(graph, [&](const Graph& g) {
    found |= std::any_of(g.nodes.begin(), g.nodes.end(), [](const Node* node) { return node->is("Loop") || node->is("Scan"); });
  });
  return found;
}

}  // namespace

void unroll_loops(Model& model, const UnrollOptions& options) {
  int64_t nodes_left = options.most_nodes;
  bool changed = false;
  // Of loops in loops more is known when the outer one is unrolled, and of a loop behind another.
  while (has_loops(*model.graph)) {
    const ShapeFacts facts = infer_shapes(model);
    if (!LoopUnroller(*model.graph, facts, nodes_left).run()) break;
    changed = true;
    inline_branches(model);
    unpack_sequences(model);
  }
  if (changed) remove_dead_nodes(*model.graph);
}

}  // namespace fretsaw
