// Rotary embeddings of neighbouring parts of one value, as queries and keys of one merged product are, become one.
//
//   q, k, v = Split(x);  Rotary(q, ...), Rotary(k, ...)   ->   qk, v = Split(x);  Split(Rotary(qk, ...))
//
// Where x has more than one row, the parts of what comes out would have to be copied: only single rows are done.
#include <algorithm>
#include <optional>
#include <set>

#include "graph/passes.h"
#include "graph/passes/patterns.h"
#include "graph/passes/rewrite.h"
#include "graph/passes/strided_view.h"

namespace fretsaw {
namespace {

struct Rotation {
  Node *node = nullptr, *split = nullptr;
  size_t part = 0;
  int64_t width = 0, heads = 0;
};

bool is_row(const std::optional<Dims>& dims) {
  return dims && dims->size() == 3 && std::all_of(dims->begin(), dims->end() - 1, [](int64_t d) { return d == 1; });
}

class JoinRotations {
 public:
  explicit JoinRotations(Graph& graph) : graph_(graph), uses_(graph), edit_(graph) {}

  void run() {
    edit_.walk([&](Node& node) {
      if (gone_.contains(&node)) return false;
      if (const auto one = rotation(&node)) {
        if (const auto other = neighbour(*one)) join(*one, *other);
      }
      return true;
    });
  }

 private:
  // The node, if it rotates a part of a row that nothing else uses.
  std::optional<Rotation> rotation(Node* node) const {
    if (!node || !node->is("RotaryEmbedding")) return std::nullopt;
    const Value* x = node->input(0);
    if (!x || !x->producer || !x->producer->is("Split") || uses_.only_user(x) != node) return std::nullopt;
    Node* split = x->producer;
    const auto whole = static_dims(split->input(0)), dims = static_dims(x);
    const int64_t axis = split->get_int("axis", 0), heads = node->get_int("num_heads", 0);
    if (!is_row(whole) || !is_row(dims) || (axis != 2 && axis != -1) || heads <= 0) return std::nullopt;
    return Rotation{node, split, static_cast<size_t>(x->output), (*dims)[2], heads};
  }

  std::optional<Rotation> neighbour(const Rotation& one) const {
    for (const size_t part : {one.part + 1, one.part - 1}) {
      const Value* x = part < one.split->outputs.size() ? one.split->outputs[part] : nullptr;
      const auto other = x ? rotation(uses_.only_user(x)) : std::nullopt;
      if (other && rotates_alike(one, *other)) return other;
    }
    return std::nullopt;
  }
  static bool rotates_alike(const Rotation& a, const Rotation& b) {
    const auto operands = [](const Node* node) { return std::vector<Value*>(node->inputs.begin() + 1, node->inputs.end()); };
    return operands(a.node) == operands(b.node) && a.width * b.heads == b.width * a.heads &&
           a.node->get_int("interleaved", 0) == b.node->get_int("interleaved", 0) &&
           a.node->get_int("rotary_embedding_dim", 0) == b.node->get_int("rotary_embedding_dim", 0);
  }

  // At the place of `here`, which comes first.
  void join(const Rotation& here, const Rotation& later) {
    const Rotation &first = here.part < later.part ? here : later, &second = here.part < later.part ? later : here;
    const int64_t width = first.width + second.width;
    const Type type = Type::tensor(here.node->input(0)->type.dtype, shape_of({1, 1, width}));
    const auto fresh = [&](const std::string& wish) { return graph_.add_value(graph_.fresh_name(wish), type); };
    Value *both = fresh(here.node->input(0)->name + "_both"), *rotated = fresh(here.node->out(0)->name + "_both");
    widen_part(*here.split, first.part, both);
    const std::vector<Value*> results = {first.node->out(0), second.node->out(0)};
    for (Value* result : results) result->producer = nullptr;
    gone_.insert(later.node);
    here.node->inputs[0] = both;
    here.node->set("num_heads", first.heads + second.heads);
    set_output(*here.node, 0, rotated);
    edit_.add_making("Split", {rotated, graph_.add_constant(graph_.fresh_name("split"), make_int64s({first.width, second.width}))}, results,
                     {{"axis", int64_t{2}}}, /*after=*/true);
  }

  // The split gives `both` where it gave two parts.
  void widen_part(Node& split, size_t part, Value* both) {
    for (size_t i : {part, part + 1}) split.outputs[i]->producer = nullptr;
    split.outputs.erase(split.outputs.begin() + static_cast<int64_t>(part) + 1);
    set_output(split, part, both);
    std::vector<int64_t> sizes;
    for (size_t i = 0; i < split.outputs.size(); ++i) {
      split.outputs[i]->output = static_cast<int>(i);
      sizes.push_back((*static_dims(split.outputs[i]))[2]);
    }
    split.remove("num_outputs");
    split.inputs.resize(1);
    split.inputs.push_back(graph_.add_constant(graph_.fresh_name("split"), make_int64s(sizes)));
  }

  Graph& graph_;
  Uses uses_;
  Rewriter edit_;
  std::set<const Node*> gone_;
};

}  // namespace

void join_rotations(Model& model) {
  for_each_graph(*model.graph, [](Graph& graph) {
    if (has_any(graph, {"RotaryEmbedding"})) JoinRotations(graph).run();
  });
}

}  // namespace fretsaw
