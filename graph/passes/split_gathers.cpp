// Gathers that take one place each of an axis become one Split: x[:, 0], x[:, 1], ... of a loop that an exporter has unrolled. The gradient
// of a Split joins what comes back for each place, where that of each Gather fills a tensor of the whole size.
#include <algorithm>
#include <map>
#include <optional>

#include "graph/passes.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

constexpr int64_t kMostPlaces = 16384;
constexpr size_t kLeastTaken = 8;  // fewer cost little, and the patterns of attention take three of them apart

struct Taken {
  int64_t axis, size, place;  // of the operand
  bool keeps_axis;
};

std::optional<Taken> taken_by(const Node& node) {
  const Value *x = node.input(0), *index = node.input(1);
  if (!node.is("Gather") || !x || !index || x->is_constant() || !x->type.is_tensor() || !is_float(x->type.dtype) || !x->type.shape ||
      !is_fixed(index))
    return std::nullopt;
  const auto rank = std::ssize(*x->type.shape);
  int64_t axis = node.get_int("axis", 0);
  if (axis < 0) axis += rank;
  const auto numbers = int_values(*index->constant);
  if (axis < 0 || axis >= rank || !numbers || numbers->size() != 1 || index->constant->dims.size() > 1) return std::nullopt;
  const Dim& dim = (*x->type.shape)[static_cast<size_t>(axis)];
  if (!dim.known() || dim.value > kMostPlaces) return std::nullopt;
  const int64_t place = (*numbers)[0] < 0 ? (*numbers)[0] + dim.value : (*numbers)[0];
  if (place < 0 || place >= dim.value) return std::nullopt;
  return Taken{axis, dim.value, place, index->constant->dims.size() == 1};
}

class GatherSplitter {
 public:
  explicit GatherSplitter(Graph& graph) : rewriter_(graph) {
    for (const Node* node : graph.nodes)
      if (const auto taken = taken_by(*node)) axes_[{node->input(0), taken->axis}].pieces[taken->place] = nullptr;
  }

  void run() {
    rewriter_.walk([&](Node& node) {
      const auto taken = taken_by(node);
      if (!taken) return true;
      Axis& axis = axes_.at({node.input(0), taken->axis});
      if (axis.pieces.size() < kLeastTaken) return true;
      if (!axis.is_split) split(node, *taken, axis);
      Value* piece = axis.pieces.at(taken->place);
      if (taken->keeps_axis)
        rewriter_.add_making("Identity", {piece}, {node.outputs[0]});
      else
        rewriter_.add_making("Squeeze", {piece, axis.axes}, {node.outputs[0]});
      return false;
    });
  }

 private:
  struct Axis {
    std::map<int64_t, Value*> pieces;  // by place
    Value* axes = nullptr;
    bool is_split = false;
  };

  // Runs of places that nobody takes alone stay one piece.
  void split(Node& node, const Taken& taken, Axis& axis) {
    Value* x = node.inputs[0];
    std::vector<int64_t> sizes;
    std::vector<Value*> pieces;
    const auto add = [&](int64_t size) {
      sizes.push_back(size);
      return pieces.emplace_back(rewriter_.graph().add_value(rewriter_.graph().fresh_name(x->name + "_piece")));
    };
    int64_t next = 0;
    for (auto& [place, piece] : axis.pieces) {
      if (place > next) add(place - next);
      piece = add(1);
      next = place + 1;
    }
    if (next < taken.size) add(taken.size - next);
    axis.axes = rewriter_.constant(make_int64s({taken.axis}), x->name + "_axis");
    rewriter_.add_making("Split", {x, rewriter_.constant(make_int64s(sizes), x->name + "_sizes")}, pieces, {{"axis", taken.axis}});
    axis.is_split = true;
  }

  Rewriter rewriter_;
  std::map<std::pair<const Value*, int64_t>, Axis> axes_;
};

}  // namespace

void split_gathers(Model& model) {
  infer_shapes(model);
  for_each_graph(*model.graph, [](Graph& graph) { GatherSplitter(graph).run(); });
}

}  // namespace fretsaw
