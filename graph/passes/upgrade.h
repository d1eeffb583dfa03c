// Upgrade rules: how a node of an old operator set is written in the newest. Private to graph/passes.
//
// A rule is a row {operator, version, rule}: it applies to nodes of operator sets below `version`. The rows of an operator
// are applied in order of version, so each rule only knows one change.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "graph/passes/rewrite.h"

namespace fretsaw {

struct Upgrade {
  Node& node;
  Rewriter& edit;
  const ElementTypes& types;
  const std::unordered_map<const Value*, Shape>& shapes;  // what inference on the old model told, where it was asked
  int64_t from;                                           // the operator set the node was written in
  bool drop = false;                                      // a rule sets it when other nodes make the outputs now

  // The attribute `name` (ints or one int) becomes input `index`, an int64 vector; nothing when it is absent.
  void ints_to_input(const std::string& name, size_t index);
  // A float scalar constant of the element type of `like`.
  Value* float_like(float number, const Value* like, const std::string& name);
  // The shape of a constant, a graph input or an inferred value; null when not even the rank is certain.
  const Shape* shape_of(const Value* value) const;
  void set_input(size_t index, Value* value);  // lengthens the inputs as needed
  Value* ints(const std::vector<int64_t>& values, const std::string& name);
};
using UpgradeRule = void (*)(Upgrade&);
struct UpgradeRow {
  const char* op;
  int64_t version;
  UpgradeRule rule;
};

std::span<const UpgradeRow> shape_upgrades();          // upgrade_shapes.cpp: Squeeze, Split, Slice, Pad, Reduce*, TopK, ...
std::span<const UpgradeRow> normalization_upgrades();  // upgrade_normalization.cpp: BatchNormalization, Softmax, Dropout, ...
std::span<const UpgradeRow> image_upgrades();          // upgrade_image.cpp: Upsample, Resize, GridSample, RoiAlign, Scan
std::span<const UpgradeRow> early_upgrades();          // upgrade_early.cpp: what changed before operator set 7

// Brings the nodes of the graph and its bodies from operator set `from` to the newest. `leave` names nodes that are not ONNX's (calls of
// functions).
void upgrade_graph(Graph& graph, int64_t from, const std::function<bool(const Node&)>& leave = nullptr);
// The same for a whole model; operator set 0 (none imported) counts as the newest.
void upgrade_model(Model& model, const std::function<bool(const Node&)>& leave);
// Constant nodes of this graph and its bodies become initializers; `model_path` is where bytes that were left in a file are.
void constants_to_initializers(Graph& graph, const std::string& model_path);

}  // namespace fretsaw
