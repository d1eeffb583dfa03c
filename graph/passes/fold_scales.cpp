// The scales of Resize as constants. Exporters write them in pieces: [1, 1] and [2, 2] joined, or new sizes over old ones.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "graph/passes.h"
#include "graph/passes/narrow_floats.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

using Floats = std::vector<float>;

constexpr size_t kMostScales = 64;
constexpr int kDeepest = 16;

class ScaleReader {
 public:
  explicit ScaleReader(const ShapeFacts& facts) : facts_(facts) {}

  // The elements of a float32 value of rank 0 or 1, as far as constants and known sizes tell.
  std::optional<Floats> read(const Value* value, int depth = 0) const {
    if (!value || depth > kDeepest || rank(value) > 1) return std::nullopt;
    if (value->constant) return of_constant(value);
    const Node* node = value->producer;
    if (!node || !node->domain.empty() || value->output != 0 || value->type.dtype != DType::float32) return std::nullopt;
    if (node->is("Cast")) return of_cast(*node, depth);
    if (node->is("Concat")) return joined(*node, depth);
    for (const char* same : {"Identity", "Unsqueeze", "Squeeze", "Reshape", "Flatten"})
      if (node->is(same)) return read(node->input(0), depth + 1);
    if (node->is("Floor") || node->is("Ceil")) {
      auto x = read(node->input(0), depth + 1);
      if (!x) return std::nullopt;
      for (float& f : *x) f = node->is("Floor") ? std::floor(f) : std::ceil(f);
      return x;
    }
    return combined(*node, depth);
  }

 private:
  static size_t rank(const Value* v) { return v->type.is_tensor() && v->type.shape ? v->type.shape->size() : 0; }

  static std::optional<Floats> of_constant(const Value* value) {
    std::vector<double> numbers;
    const Tensor& tensor = *value->constant;
    if (tensor.dims.size() > 1 || tensor.count() > static_cast<int64_t>(kMostScales) || !float_values(value, numbers)) return std::nullopt;
    return Floats(numbers.begin(), numbers.end());
  }

  std::optional<Floats> of_cast(const Node& node, int depth) const {
    const auto known = facts_.contents.find(node.input(0));
    if (known == facts_.contents.end()) return read(node.input(0), depth + 1);
    Floats out;
    for (const ShapeElement& e : known->second) {
      if (!e.value || out.size() == kMostScales) return std::nullopt;
      out.push_back(static_cast<float>(*e.value));
    }
    return out;
  }

  std::optional<Floats> joined(const Node& node, int depth) const {
    Floats all;
    for (const Value* v : node.inputs) {
      const auto part = read(v, depth + 1);
      if (!part || all.size() + part->size() > kMostScales) return std::nullopt;
      all.insert(all.end(), part->begin(), part->end());
    }
    return all;
  }

  std::optional<Floats> combined(const Node& node, int depth) const {
    if (!node.is("Mul") && !node.is("Div") && !node.is("Add") && !node.is("Sub")) return std::nullopt;
    const auto a = read(node.input(0), depth + 1), b = read(node.input(1), depth + 1);
    if (!a || !b || a->empty() || b->empty() || (a->size() != b->size() && a->size() != 1 && b->size() != 1)) return std::nullopt;
    Floats out(std::max(a->size(), b->size()));
    for (size_t i = 0; i < out.size(); ++i) {
      const float x = (*a)[a->size() == 1 ? 0 : i], y = (*b)[b->size() == 1 ? 0 : i];
      out[i] = node.is("Mul") ? x * y : node.is("Div") ? x / y : node.is("Add") ? x + y : x - y;
    }
    return out;
  }

  const ShapeFacts& facts_;
};

}  // namespace

bool fold_scales(Model& model, const ShapeFacts& facts) {
  bool folded = false;
  Graph& graph = *model.graph;
  for (Node* node : graph.nodes) {
    Value* scales = node->is("Resize") ? node->input(2) : nullptr;
    if (!scales || !scales->producer || scales->graph != &graph) continue;
    const auto numbers = ScaleReader(facts).read(scales);
    if (!numbers) continue;
    const Dims dims = {static_cast<int64_t>(numbers->size())};
    Value* constant = graph.add_constant(graph.fresh_name(scales->name + "_folded"),
                                         float_tensor(DType::float32, dims, {numbers->begin(), numbers->end()}));
    constant->type = Type::tensor(DType::float32, shape_of(dims));
    constant->source = scales->source_name();
    node->inputs[2] = constant;
    folded = true;
  }
  return folded;
}

void fold_shapes(Model& model) {
  ShapeFacts facts = infer_shapes(model);
  bool folded = false;
  for (; fold_scales(model, facts); folded = true) facts = infer_shapes(model);  // more sizes are known
  if (fold_shape_arithmetic(model, facts) > 0 || folded) remove_dead_nodes(*model.graph);
}

}  // namespace fretsaw
