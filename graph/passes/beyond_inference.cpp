#include "graph/passes/beyond_inference.h"

#include "graph/symbolic.h"

namespace fretsaw {
namespace {

// The total of `x` over the product of the other target dimensions, where a target has one -1 and symbols elsewhere.
std::optional<Shape> reshape_target(const Node& node, const Elements& target, const Shape& x) {
  Shape out;
  std::optional<size_t> open;
  bool allow_zero = node.get_int("allowzero", 0) != 0;
  for (size_t i = 0; i < target.size(); ++i) {
    const ShapeElement& e = target[i];
    if (e.value && *e.value == 0 && !allow_zero) {
      if (i >= x.size()) return std::nullopt;
      out.push_back(x[i]);
    } else if (e.value && *e.value == -1) {
      if (open) return std::nullopt;
      open = i;
      out.emplace_back();
    } else if (e.value) {
      if (*e.value < 0) return std::nullopt;
      out.emplace_back(*e.value);
    } else {
      out.emplace_back(e.symbol);
    }
  }
  if (open) {
    Shape others = out;
    others.erase(others.begin() + static_cast<long>(*open));
    if (auto d = dim_divide(dim_product(x), dim_product(others))) out[*open] = *d;
  }
  return out;
}

}  // namespace

void infer_without_schema(Node& node) {
  const Value* x = node.input(0);
  if (!x || !node.out(0) || !node.domain.empty() || !x->type.is_tensor()) return;
  if (node.is("GroupNormalization") || node.is("MeanVarianceNormalization")) {
    node.out(0)->type = x->type;
  } else if (node.is("Compress")) {
    Type type = Type::tensor(x->type.dtype);
    const auto axis = node.attribute("axis") ? std::optional(node.get_int("axis", 0)) : std::nullopt;
    if (!axis) type.shape = Shape(1);
    if (axis && x->type.shape) {
      const auto rank = static_cast<int64_t>(x->type.shape->size());
      const int64_t at = *axis < 0 ? *axis + rank : *axis;
      if (at >= 0 && at < rank) type.shape = x->type.shape, (*type.shape)[static_cast<size_t>(at)] = Dim();
    }
    node.out(0)->type = type;
  }
}

void refine_shape(Node& node, const ContentsLookup& contents) {
  if (!node.domain.empty() || !node.out(0)) return;
  Type& type = node.out(0)->type;
  const Value* x = node.input(0);
  if (!x || !x->type.is_tensor() || !x->type.shape || !type.is_tensor()) return;
  if (type.shape && is_static(*type.shape)) return;
  if (node.op == "Reshape" && node.input(1)) {
    const Elements* target = contents(node.input(1));
    if (!target) return;
    if (auto shape = reshape_target(node, *target, *x->type.shape)) type.shape = std::move(*shape);
  } else if (node.op == "Flatten") {
    auto rank = static_cast<int64_t>(x->type.shape->size());
    int64_t axis = node.get_int("axis", 1);
    if (axis < 0) axis += rank;
    if (axis < 0 || axis > rank) return;
    auto at = static_cast<size_t>(axis);
    type.shape = Shape{dim_product(*x->type.shape, 0, at), dim_product(*x->type.shape, at)};
  } else if (node.op == "Concat" && type.shape) {
    auto rank = static_cast<int64_t>(type.shape->size());
    int64_t axis = node.get_int("axis", 0);
    if (axis < 0) axis += rank;
    if (axis < 0 || axis >= rank) return;
    Dim sum = 0;
    for (const Value* v : node.inputs) {
      if (!v || !v->type.shape || static_cast<int64_t>(v->type.shape->size()) != rank) return;
      sum = dim_add(sum, (*v->type.shape)[static_cast<size_t>(axis)]);
    }
    (*type.shape)[static_cast<size_t>(axis)] = sum;
  }
}

}  // namespace fretsaw
