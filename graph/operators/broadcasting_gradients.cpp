// Gradients of elementwise operators with several operands: each operand's is summed over what it was broadcast along. Cast and Dropout.
#include <unordered_map>

#include "graph/operators/gradient_rules.h"
#include "graph/operators/gradient_terms.h"

namespace fretsaw {
namespace {

Term of_output(GradientContext& c) {
  return {c, c.of_output()};
}
Term input(GradientContext& c, size_t i) {
  return {c, c.input(i)};
}

// The rule of z = f(x, y) from the gradients of x and y before broadcasting is undone.
template <auto kFirst, auto kSecond>
std::vector<Value*> binary(GradientContext& c) {
  std::vector<Value*> found = c.none();
  Term g = of_output(c), x = input(c, 0), y = input(c, 1);
  if (c.wants(0)) found[0] = c.sum_to(kFirst(g, x, y), x);
  if (c.wants(1)) found[1] = c.sum_to(kSecond(g, x, y), y);
  return found;
}

Term div_second(Term g, Term, Term y) {
  return -(g * Term(*g.context, g.context->output(0)) / y);
}

Term prelu_first(Term g, Term x, Term slope) {
  return where(x > 0.0, g, g * slope);
}
Term prelu_second(Term g, Term x, Term) {
  return where(x > 0.0, 0.0, g * x);
}

// The whole number of times y is in x: rounded towards zero with fmod, else down.
Term mod_second(Term g, Term x, Term y) {
  Term quotient = x / y;
  if (g.context->node().get_int("fmod", 0) == 0) return -(g * apply("Floor", quotient));
  return -(g * apply("Sign", quotient) * apply("Floor", apply("Abs", quotient)));
}

// z = swish(x) y
Term swiglu_first(Term g, Term x, Term y) {
  const auto alpha = static_cast<double>(g.context->node().get_float("alpha", 1));
  Term s = apply("Sigmoid", x * alpha);
  return g * y * (s * (1.0 + x * alpha * (1.0 - s)));
}
Term swiglu_second(Term g, Term x, Term) {
  return g * (x * apply("Sigmoid", x * static_cast<double>(g.context->node().get_float("alpha", 1))));
}

// b x^(b-1), 0 where b is 0
Term power_slope(GradientContext& c, const Term& x, const Term& exponent) {
  if (auto b = c.constant_number(exponent)) {
    if (*b == 2) return 2.0 * x;
    if (*b == 3) return 3.0 * (x * x);
    if (*b == 0.5) return 0.5 / Term(c, c.output(0));
    return *b * x.made("Pow", {x, x.number(*b - 1)});
  }
  return where(exponent == 0.0, 0.0, exponent * x.made("Pow", {x, exponent - 1.0}));
}

std::vector<Value*> pow_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  Term g = of_output(c), x = input(c, 0), z(c, c.output(0));
  const DType type = x.value->type.dtype, exponent_type = c.input(1)->type.dtype;
  Term exponent = cast_to(type, input(c, 1));  // it may be of another type than the base and the result
  if (c.wants(0) && c.constant_number(c.input(1)) == 0.0)
    found[0] = c.zeros_like(x);
  else if (c.wants(0) && c.constant_number(c.input(1)) == 1.0)
    found[0] = c.sum_to(g, x);
  else if (c.wants(0))
    found[0] = c.sum_to(g * power_slope(c, x, c.constant_number(c.input(1)) ? input(c, 1) : exponent), x);
  if (c.wants(1)) {  // z log(x); 0 where x is 0
    Term slope = g * where(x == 0.0, 0.0, z * apply("Log", x));
    found[1] = c.sum_to(cast_to(exponent_type, slope), c.input(1));
  }
  return found;
}

std::vector<Value*> sum_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  for (size_t i = 0; i < found.size(); ++i)
    if (c.wants(i)) found[i] = c.sum_to(c.of_output(), c.input(i));
  return found;
}

std::vector<Value*> mean_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  Term share = of_output(c) / static_cast<double>(found.size());
  for (size_t i = 0; i < found.size(); ++i)
    if (c.wants(i)) found[i] = c.sum_to(share, c.input(i));
  return found;
}

// Operands that are equally the largest (smallest) share the gradient, as in PyTorch's maximum.
std::vector<Value*> extreme_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none(), masks;
  Term g = of_output(c), z(c, c.output(0));
  if (found.size() == 1) return {g};
  for (size_t i = 0; i < found.size(); ++i) masks.push_back(as_number(input(c, i) == z, z));
  Term share = g / g.made("Sum", masks);
  for (size_t i = 0; i < found.size(); ++i)
    if (c.wants(i)) found[i] = c.sum_to(share * Term(c, masks[i]), c.input(i));
  return found;
}

std::vector<Value*> where_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  Term g = of_output(c);
  const Condition condition{&c, c.input(0)};
  if (c.wants(1)) found[1] = c.sum_to(where(condition, g, 0.0), c.input(1));
  if (c.wants(2)) found[2] = c.sum_to(where(condition, 0.0, g), c.input(2));
  return found;
}

// min(max(x, low), high). x has the gradient on the bounds too, as in PyTorch.
std::vector<Value*> clip_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  Term g = of_output(c), x = input(c, 0);
  Value *low = c.input(1), *high = c.input(2);
  if (c.wants(0)) {
    Term passed = low ? where(x >= Term(c, low), g, 0.0) : g;
    found[0] = high ? where(x <= Term(c, high), passed, 0.0) : passed;
  }
  if (c.wants(1)) {
    Term below = where(x < Term(c, low), g, 0.0);
    found[1] = c.sum_to(high ? where(Term(c, low) <= Term(c, high), below, 0.0) : below, low);
  }
  if (c.wants(2)) {
    Term raised = low ? x.made("Max", {x, low}) : x;
    found[2] = c.sum_to(where(raised > Term(c, high), g, 0.0), high);
  }
  return found;
}

std::vector<Value*> cast_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  if (c.wants(0)) found[0] = cast_to(c.input(0)->type.dtype, of_output(c));
  return found;
}

// y = mask x / (1 - ratio) in training mode, else x
std::vector<Value*> dropout_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  Term g = of_output(c);
  Value *ratio = c.input(1), *training = c.input(2);
  const auto mode = c.constant_number(training), rate = ratio ? c.constant_number(ratio) : 0.5;
  found[0] = g;
  if (!training || mode == 0.0 || rate == 0.0) return found;
  const Condition mask{&c, c.output(1, DType::boolean)};
  Term scale = rate ? g.number(1 / (1 - *rate)) : 1.0 / (1.0 - cast_to(g.value->type.dtype, input(c, 1)));
  Term kept = where(mask, g * scale, 0.0);
  found[0] = mode ? kept : where({&c, training}, kept, g);
  return found;
}

}  // namespace

GradientRule broadcasting_gradient(const std::string& name) {
  static const std::unordered_map<std::string, GradientRule> rules = {
      {"Add", sum_gradient},
      {"Sub", binary<[](Term g, Term, Term) { return g; }, [](Term g, Term, Term) { return -g; }>},
      {"Mul", binary<[](Term g, Term, Term y) { return g * y; }, [](Term g, Term x, Term) { return g * x; }>},
      {"Div", binary<[](Term g, Term, Term y) { return g / y; }, div_second>},
      {"PRelu", binary<prelu_first, prelu_second>},
      {"Mod", binary<[](Term g, Term, Term) { return g; }, mod_second>},
      {"SwiGLU", binary<swiglu_first, swiglu_second>},
      {"Pow", pow_gradient},
      {"Sum", sum_gradient},
      {"Mean", mean_gradient},
      {"Min", extreme_gradient},
      {"Max", extreme_gradient},
      {"Where", where_gradient},
      {"Clip", clip_gradient},
      {"Cast", cast_gradient},
      {"CastLike", cast_gradient},
      {"Dropout", dropout_gradient},
      // No floating-point result.
      {"And", zero_gradient},
      {"Or", zero_gradient},
      {"Xor", zero_gradient},
      {"BitwiseAnd", zero_gradient},
      {"BitwiseOr", zero_gradient},
      {"BitwiseXor", zero_gradient},
      {"BitShift", zero_gradient},
      {"Equal", zero_gradient},
      {"Less", zero_gradient},
      {"LessOrEqual", zero_gradient},
      {"Greater", zero_gradient},
      {"GreaterOrEqual", zero_gradient},
  };
  auto it = rules.find(name);
  return it == rules.end() ? nullptr : it->second;
}

}  // namespace fretsaw
