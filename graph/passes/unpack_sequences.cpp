// Sequences whose elements are known by their places become those tensors: what SplitToSequence, SequenceConstruct, SequenceEmpty,
// SequenceInsert and SequenceErase make for SequenceAt, SequenceLength and ConcatFromSequence. Exporters write torch.split and torch.chunk
// so, and lists that a loop appends to, once it is unrolled.
#include <algorithm>
#include <optional>

#include "graph/passes.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

constexpr int64_t kMostPieces = 1024;

std::optional<std::vector<int64_t>> fixed_ints(const Value* value) {
  return is_fixed(value) ? int_values(*value->constant) : std::nullopt;
}

class SequenceUnpacker {
 public:
  explicit SequenceUnpacker(Graph& graph) : graph_(graph), uses_(graph), rewriter_(graph) {}

  void run() {
    rewriter_.walk([&](Node& node) {
      if (node.is("SequenceConstruct")) elements_[node.out(0)] = node.inputs;
      if (node.is("SequenceEmpty")) elements_[node.out(0)] = {};
      if (node.is("SequenceInsert") || node.is("SequenceErase")) edit(node);
      if (node.is("SequenceLength")) return !count(node);
      if (node.is("SplitToSequence")) return !split(node);
      if (node.is("SequenceAt")) return !take(node);
      if (node.is("ConcatFromSequence")) return !join(node);
      return true;
    });
    replace_uses(graph_, replaced_);
  }

 private:
  // The sizes of the pieces along the axis; null where they are not known. Without the operand `split` they are 1.
  static std::optional<std::vector<int64_t>> sizes_of(const Node& node, const Dim& dim) {
    std::vector<int64_t> wanted = {1};
    if (node.input(1)) {
      const auto fixed = fixed_ints(node.input(1));
      if (!fixed) return std::nullopt;
      wanted = *fixed;
      const auto& shape = node.input(1)->constant->dims;
      if (!shape.empty()) return wanted;
    }
    if (!dim.known() || wanted.size() != 1 || wanted[0] < 1 || dim.value / wanted[0] >= kMostPieces) return std::nullopt;
    std::vector<int64_t> sizes(static_cast<size_t>(dim.value / wanted[0]), wanted[0]);
    if (dim.value % wanted[0] != 0) sizes.push_back(dim.value % wanted[0]);
    return sizes;
  }

  // Which of `count` elements a SequenceAt takes; null where that is not known, or none of them.
  static std::optional<size_t> place_of(const Node& node, size_t count) {
    const auto index = fixed_ints(node.input(1));
    if (!index || index->size() != 1) return std::nullopt;
    const int64_t at = (*index)[0] < 0 ? (*index)[0] + static_cast<int64_t>(count) : (*index)[0];
    return at < 0 || at >= static_cast<int64_t>(count) ? std::nullopt : std::optional(static_cast<size_t>(at));
  }

  // True when the node may go: its pieces are the outputs of a Split.
  bool split(const Node& node) {
    const Value *x = node.input(0), *sequence = node.out(0);
    if (!x || !sequence || !x->type.is_tensor() || !x->type.shape || uses_.is_output(sequence)) return false;
    const auto rank = static_cast<int64_t>(x->type.shape->size());
    int64_t axis = node.get_int("axis", 0);
    if (axis < 0) axis += rank;
    if (axis < 0 || axis >= rank) return false;
    const auto sizes = sizes_of(node, (*x->type.shape)[static_cast<size_t>(axis)]);
    if (!sizes || sizes->empty()) return false;
    const bool is_taken_apart = uses_.all_users(sequence, [&](const Node* user) {
      return user->is("ConcatFromSequence") || user->is("SequenceLength") || (user->is("SequenceAt") && place_of(*user, sizes->size()));
    });
    if (!is_taken_apart) return false;
    std::vector<Value*> pieces;
    for (size_t i = 0; i < sizes->size(); ++i) pieces.push_back(graph_.add_value(graph_.fresh_name(sequence->name + "_piece")));
    rewriter_.add_making("Split", {node.inputs[0], rewriter_.constant(make_int64s(*sizes), sequence->name + "_sizes")}, pieces,
                         {{"axis", axis}});
    if (!node.input(1) && node.get_int("keepdims", 1) == 0) {
      Value* axes = rewriter_.constant(make_int64s({axis}), sequence->name + "_axis");
      for (Value*& piece : pieces) piece = rewriter_.add("Squeeze", {piece, axes}, {}, piece->name);
    }
    elements_[sequence] = std::move(pieces);
    return true;
  }

  // The sequence with one element more or less: at the place that is given, else at the end.
  void edit(const Node& node) {
    const auto before = elements_.find(node.input(0));
    if (before == elements_.end()) return;
    std::vector<Value*> elements = before->second;
    const bool inserts = node.is("SequenceInsert");
    const Value* position = node.input(inserts ? 2 : 1);
    auto at = static_cast<int64_t>(inserts ? elements.size() : elements.size() - 1);
    if (position) {
      const auto given = fixed_ints(position);
      if (!given || given->size() != 1) return;
      at = (*given)[0] < 0 ? (*given)[0] + std::ssize(elements) : (*given)[0];
    }
    if (at < 0 || at > std::ssize(elements) || (!inserts && at == std::ssize(elements))) return;
    if (inserts)
      elements.insert(elements.begin() + at, node.inputs[1]);
    else
      elements.erase(elements.begin() + at);
    elements_[node.out(0)] = std::move(elements);
  }

  bool count(const Node& node) {
    const auto elements = elements_.find(node.input(0));
    if (elements == elements_.end()) return false;
    rewriter_.add_making("Identity", {rewriter_.constant(make_int64(std::ssize(elements->second)), node.out(0)->name + "_number")},
                         {node.outputs[0]});
    return true;
  }

  bool take(const Node& node) {
    const auto elements = elements_.find(node.input(0));
    const auto place = elements == elements_.end() ? std::nullopt : place_of(node, elements->second.size());
    if (!place) return false;
    Value* element = elements->second[*place];
    if (uses_.is_output(node.out(0)))
      rewriter_.add_making("Identity", {element}, {node.outputs[0]});
    else
      replaced_[node.out(0)] = element;
    return true;
  }

  bool join(const Node& node) {
    const auto elements = elements_.find(node.input(0));
    if (elements == elements_.end() || elements->second.empty()) return false;
    const Attribute axis{"axis", node.get_int("axis", 0)};
    std::vector<Value*> parts = elements->second;
    if (node.get_int("new_axis", 0) != 0) {
      Value* axes = rewriter_.constant(make_int64s({node.get_int("axis", 0)}), node.out(0)->name + "_axis");
      for (Value*& part : parts) part = rewriter_.add("Unsqueeze", {part, axes}, {}, part->name + "_row");
    }
    rewriter_.add_making("Concat", std::move(parts), {node.outputs[0]}, {axis});
    return true;
  }

  Graph& graph_;
  const Uses uses_;
  Rewriter rewriter_;
  std::unordered_map<const Value*, std::vector<Value*>> elements_;  // of sequences
  ValueMap replaced_;
};

}  // namespace

void unpack_sequences(Model& model) {
  bool splits = false, takes = false;
  for_each_graph(*model.graph, [&](Graph& graph) {
    for (const Node* node : graph.nodes)
      splits |= node->is("SplitToSequence"),
          takes |= node->is("SequenceAt") || node->is("ConcatFromSequence") || node->is("SequenceLength");
  });
  if (!takes) return;
  if (splits) infer_shapes(model);
  for_each_graph(*model.graph, [](Graph& graph) { SequenceUnpacker(graph).run(); });
  remove_dead_nodes(*model.graph);
}

}  // namespace fretsaw
