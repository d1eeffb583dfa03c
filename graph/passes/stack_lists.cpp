// Lists that every pass of a loop appends one tensor to become the loop's stacked rows.
//
//   s = Loop(.., [h]) { s' = SequenceInsert(s, b) }     rows = Loop(..) { b }
//   y = ConcatFromSequence<new_axis=1>(s)               y = Concat(Unsqueeze(h), rows)
#include <algorithm>
#include <optional>

#include "graph/passes.h"
#include "graph/passes/loops.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

// Whether a value of the body has one size in all passes: of numbers, and of symbols that values from outside have.
bool has_one_size(const Value& value, const Node& loop) {
  if (!value.type.is_tensor() || !value.type.shape) return false;
  const std::vector<Value*> outside = operands(loop);
  const auto stays = [&](const Dim& dim) {
    return dim.known() || (!dim.symbol.empty() && std::any_of(outside.begin(), outside.end(), [&](const Value* v) {
             return v->type.is_tensor() && v->type.shape && std::count(v->type.shape->begin(), v->type.shape->end(), dim) > 0;
           }));
  };
  return std::all_of(value.type.shape->begin(), value.type.shape->end(), stays);
}

class ListStacker {
 public:
  explicit ListStacker(Graph& graph) : graph_(graph), uses_(graph), rewriter_(graph) {}

  void run() {
    rewriter_.walk([&](Node& node) {
      if (node.is("Loop")) stack_lists_of(node);
      const auto list = node.inputs.empty() ? stacked_.end() : stacked_.find(node.inputs[0]);
      return list == stacked_.end() || !take(node, list->second);
    });
  }

 private:
  struct List {
    std::vector<Value*> first;  // what it begins with
    Value* rows;                // [passes, ...]
    int64_t rank;               // of an element
    Value* all = nullptr;       // both: made when it is asked for
  };

  void stack_lists_of(Node& loop) {
    const GraphPtr body = fitting_body(loop);
    if (!body) return;
    for (size_t k = loop.inputs.size() - 2; k-- > 0;) {
      const std::optional<std::vector<Value*>> first = elements_of(loop.inputs[2 + k]);
      Node* append = first ? append_of(*body, k, first->empty()) : nullptr;
      if (!append || !can_stack(*append->inputs[1], loop, *first) || !is_taken_as_tensors(loop.out(k))) continue;
      Value* rows = graph_.add_value(graph_.fresh_name(loop.name + "_rows"));
      Value* row = append->inputs[1];
      if (Value* list = loop.out(k)) stacked_[list] = {*first, rows, std::ssize(*row->type.shape)};
      loop.outputs.resize(body->outputs.size() - 1);
      body->outputs.push_back(row);
      Value* latest = follow_inside(*body, k, *append, std::ssize(*first));
      std::erase(body->nodes, append);
      append->outputs[0]->producer = nullptr;
      if (latest) {  // is carried in the list's place
        body->inputs[2 + k] = latest, body->outputs[1 + k] = row, loop.inputs[2 + k] = first->back(), loop.outputs[k] = nullptr;
      } else {
        erase(body->inputs, 2 + k), erase(body->outputs, 1 + k), erase(loop.inputs, 2 + k), erase(loop.outputs, k);
        for (size_t o = k; o < loop.outputs.size(); ++o)
          if (loop.outputs[o]) loop.outputs[o]->output = static_cast<int>(o);
      }
      loop.outputs.push_back(nullptr);
      set_output(loop, loop.outputs.size() - 1, rows);
    }
  }
  static void erase(std::vector<Value*>& values, size_t at) { values.erase(values.begin() + static_cast<std::ptrdiff_t>(at)); }

  // What a list begins with, where its elements are known.
  static std::optional<std::vector<Value*>> elements_of(const Value* list) {
    const Node* by = list ? list->producer : nullptr;
    if (by && by->is("SequenceEmpty")) return std::vector<Value*>();
    if (by && by->is("SequenceConstruct")) return by->inputs;
    return std::nullopt;
  }

  static bool takes_latest(const Node& node) {
    const Value* index = node.is("SequenceAt") ? node.input(1) : nullptr;
    const auto place = is_fixed(index) ? int_values(*index->constant) : std::nullopt;
    return place && place->size() == 1 && (*place)[0] == -1;
  }

  // The node that appends to a carried list, with which the body does nothing else but count it and take its latest element.
  static Node* append_of(Graph& body, size_t k, bool begins_empty) {
    Value *before = body.inputs[2 + k], *after = body.outputs[1 + k];
    Node* append = after->producer;
    if (!append || after->graph != &body || !append->is("SequenceInsert") || append->inputs[0] != before || append->input(2))
      return nullptr;
    bool follows = true;
    for_each_graph(body, [&](Graph& graph) {
      for (const Node* node : graph.nodes)
        for (const Value* v : node->inputs)
          if (v == before || v == after)
            follows = follows && ((v == before && node == append) || node->is("SequenceLength") ||
                                  (takes_latest(*node) && (v == after || !begins_empty)));
      follows = follows && std::count(graph.outputs.begin(), graph.outputs.end(), before) == 0 &&
                std::count(graph.outputs.begin(), graph.outputs.end(), after) == (&graph == &body ? 1 : 0);
    });
    return follows ? append : nullptr;
  }

  static bool can_stack(const Value& row, const Node& loop, const std::vector<Value*>& first) {
    return has_one_size(row, loop) && std::all_of(first.begin(), first.end(), [&](const Value* v) { return v && v->type == row.type; });
  }
  bool is_taken_as_tensors(const Value* list) const {
    if (!list) return true;
    return !uses_.is_output(list) && uses_.all_users(list, [](const Node* user) {
      return user->is("ConcatFromSequence") || user->is("SequenceLength") || user->is("SequenceAt");
    });
  }

  // How long the list is before and after each pass follows from the pass's number; its latest element is another value. Returns that
  // before a pass where it is needed.
  static Value* follow_inside(Graph& body, size_t k, const Node& append, int64_t begins_with) {
    const Value *before = body.inputs[2 + k], *after = append.outputs[0];
    Value *row = append.inputs[1], *latest = nullptr;
    ValueMap replaced;
    for_each_graph(body, [&](Graph& graph) {
      Rewriter rewriter(graph);
      rewriter.walk([&](Node& node) {
        const Value* list = node.input(0);
        if ((list != before && list != after) || &node == &append) return true;
        if (node.is("SequenceAt")) {
          if (list == before && !latest) latest = body.add_value(body.fresh_name(before->name + "_latest"), row->type);
          replaced[node.out(0)] = list == before ? latest : row;
        } else {
          Value* more = rewriter.constant(make_int64(begins_with + (list == before ? 0 : 1)), node.out(0)->name + "_more");
          rewriter.add_making("Add", {body.inputs[0], more}, {node.outputs[0]});
        }
        return false;
      });
    });
    replace_uses(body, replaced);
    return latest;
  }

  // True when the node may go: it takes rows.
  bool take(Node& node, List& list) {
    if (node.is("SequenceAt")) {
      rewriter_.add_making("Gather", {all(list), node.inputs[1]}, {node.outputs[0]});
    } else if (node.is("SequenceLength")) {
      Value* size = rewriter_.add("Shape", {all(list)}, {{"start", int64_t{0}}, {"end", int64_t{1}}});
      rewriter_.add_making("Squeeze", {size}, {node.outputs[0]});
    } else if (node.is("ConcatFromSequence")) {
      join(node, list);
    } else {
      return false;
    }
    return true;
  }
  void join(Node& node, List& list) {
    Value* rows = all(list);
    const int64_t rank = list.rank;
    const bool stacks = node.get_int("new_axis", 0) != 0;
    int64_t axis = node.get_int("axis", 0);
    if (axis < 0) axis += rank + (stacks ? 1 : 0);
    const std::vector<int64_t> order = first_moved_to(axis, rank + 1);
    if (stacks) {
      rewriter_.add_making("Transpose", {rows}, {node.outputs[0]}, {{"perm", order}});
      return;
    }
    // [.., passes, n, ..] -> [.., passes * n, ..]
    if (axis > 0) rows = rewriter_.add("Transpose", {rows}, {{"perm", order}});
    const auto dims = [&](int64_t begin, int64_t end) { return rewriter_.add("Shape", {rows}, {{"start", begin}, {"end", end}}); };
    Value* whole = rewriter_.constant(make_int64s({-1}), node.out(0)->name + "_whole");
    Value* shape = rewriter_.add("Concat", {dims(0, axis), whole, dims(axis + 2, rank + 1)}, {{"axis", int64_t{0}}});
    rewriter_.add_making("Reshape", {rows, shape}, {node.outputs[0]});
  }
  Value* all(List& list) {
    if (list.first.empty()) return list.rows;
    if (!list.all) {
      Value* axis = rewriter_.constant(make_int64s({0}), list.rows->name + "_axis");
      std::vector<Value*> parts;
      for (Value* v : list.first) parts.push_back(rewriter_.add("Unsqueeze", {v, axis}));
      parts.push_back(list.rows);
      list.all = rewriter_.add("Concat", std::move(parts), {{"axis", int64_t{0}}}, list.rows->name + "_all");
    }
    return list.all;
  }

  Graph& graph_;
  const Uses uses_;
  Rewriter rewriter_;
  std::unordered_map<const Value*, List> stacked_;
};

}  // namespace

void stack_lists(Model& model) {
  bool carries = false;
  for_each_graph(*model.graph, [&](Graph& graph) {
    for (const Node* node : graph.nodes) carries |= node->is("SequenceInsert") && graph.parent;
  });
  if (!carries) return;
  infer_shapes(model);
  for_each_graph(*model.graph, [](Graph& graph) { ListStacker(graph).run(); });
  remove_dead_nodes(*model.graph);
}

}  // namespace fretsaw
