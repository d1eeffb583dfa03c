// QuantizeLinear and DequantizeLinear: the weights and activations that they round are trained as if they were not rounded, within the
// range of the integers ("straight through", arXiv 1308.3432), and scales by what a step's size changes (arXiv 1902.08153).
//
// The gradient of QuantizeLinear's integers is that of the numbers, in floating point: it goes to DequantizeLinear alone.
#include <numeric>

#include "graph/operators/gradient_rules.h"
#include "graph/operators/gradient_terms.h"

namespace fretsaw {
namespace {

DType wide_type(DType type) {
  return bits_of(type) < 32 ? DType::float32 : type;
}

// What both operators do with scales: one for all elements, one for each index along an axis, or one for each block of indexes.
class Scales {
 public:
  explicit Scales(GradientContext& c) : c_(c), x_(c.input(0)), scale_(c.input(1)), rank_(c.rank(x_)) {}

  // `integers` as DequantizeLinear makes floats of them, by scales of `type` or by ones.
  Term dequantized(Value* integers, DType type, bool by_ones = false) {
    std::vector<Value*> operands = {integers, by_ones ? c_.expand_like(c_.number(1, type), scale_) : cast_to(type, Term(c_, scale_)).value};
    if (c_.input(2)) operands.push_back(c_.input(2));
    return {c_, c_.add("DequantizeLinear", operands, c_.attributes({"axis", "block_size"}), type)};
  }
  // The scale of each element of x.
  Term of_each(DType type) {
    auto one = make_tensor(DType::int8, {1});
    *mutable_data(*one) = std::byte{1};
    Value* ones = c_.add("ConstantOfShape", {c_.shape_value(x_)}, {{"value", TensorPtr(one)}}, DType::int8);
    return {c_, c_.add("DequantizeLinear", {ones, cast_to(type, Term(c_, scale_))}, c_.attributes({"axis", "block_size"}), type)};
  }
  // Over the elements that have one scale: all, those of an index along the axis, or of a block of indexes.
  Value* summed(Value* terms) {
    const Shape& scales = c_.known_shape(scale_);
    std::vector<int64_t> others(rank_);
    std::iota(others.begin(), others.end(), 0);
    if (std::all_of(scales.begin(), scales.end(), [](const Dim& d) { return d.value == 1; }))
      return c_.reshape_like(c_.reduce_sum(terms, others, false), scale_);
    // A vector has one axis, whatever the attribute's default says.
    const size_t at = rank_ == 1 ? 0 : c_.axis(c_.node().get_int("axis", 1), rank_);
    const auto axis = static_cast<int64_t>(at);
    if (scales.size() > 1)
      return c_.add_own("GatherGrad", {terms, blocks(axis, c_.node().get_int("block_size", 0)), c_.shape_value(scale_)}, {{"axis", axis}});
    others.erase(others.begin() + axis);
    const Shape* x = c_.shape(x_);
    const Shape has = {x ? (*x)[at] : Dim()};
    return c_.sum_to(c_.reduce_sum(terms, others, false), &has, scale_);  // one of an open size may turn out to be one for all
  }

 private:
  // Of each index along the axis, its block.
  Value* blocks(int64_t axis, int64_t block) {
    if (block < 1) c_.refuse("its scales are for blocks, and it has no block_size");
    const Dim& size = c_.known_shape(x_)[static_cast<size_t>(axis)];
    if (!size.known()) {
      Value* end = c_.add("Squeeze", {c_.size_value(x_, axis), c_.integers({0})});
      return c_.add("Div", {c_.add("Range", {c_.integer(0), end, c_.integer(1)}, {}, DType::int64), c_.integer(block)});
    }
    std::vector<int64_t> found;
    for (int64_t i = 0; i < size.value; ++i) found.push_back(i / block);
    return c_.integers(found);
  }

  GradientContext& c_;
  Value *x_, *scale_;
  size_t rank_;
};

// y = (x - zero point) * scale. The differences are what the operator makes with scales of 1.
std::vector<Value*> dequantize_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  const DType type = c.input(1)->type.dtype, wide = wide_type(type);
  const Term g = cast_to(wide, Term(c, c.of_output()));
  if (c.wants(0)) found[0] = g * Scales(c).of_each(wide);
  if (c.wants(1)) {
    Scales scales(c);
    found[1] = cast_to(type, {c, scales.summed(g * scales.dequantized(c.input(0), wide, true))});
  }
  return found;
}

// y = round(x / scale) + zero point, as an integer of its type. Where that is beyond the integers, y stands for a number that is further
// from x than half a step: there y does not change with x.
std::vector<Value*> quantize_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  if (!c.of_output() || !is_integer(c.output(0)->type.dtype)) return found;
  const DType type = c.input(0)->type.dtype, wide = wide_type(type);
  Scales scales(c);
  constexpr double kHalf = 0.5005;  // and what rounding adds
  const Term x = cast_to(wide, Term(c, c.input(0))), each = scales.of_each(wide);
  const Term off = apply("Abs", x - scales.dequantized(c.output(0), wide));
  const Term share = where(off <= each * kHalf, cast_to(wide, Term(c, c.of_output())) / each, 0);
  if (c.wants(0)) found[0] = cast_to(type, share);
  if (c.wants(1)) found[1] = cast_to(c.input(1)->type.dtype, {c, scales.summed(-(share * x / each))});
  return found;
}

}  // namespace

GradientRule quantization_gradient(const std::string& name) {
  if (name == "DequantizeLinear") return dequantize_gradient;
  return name == "QuantizeLinear" ? quantize_gradient : nullptr;
}

}  // namespace fretsaw
