// Gradients of unary operators and activations. g is the gradient of y = f(x); where there is a kink, the derivative is PyTorch's.
#include <cmath>
#include <numbers>
#include <unordered_map>

#include "graph/operators/gradient_rules.h"
#include "graph/operators/gradient_terms.h"

namespace fretsaw {
namespace {

double attribute_of(const Term& g, const char* name, float absent) {
  return static_cast<double>(g.context->node().get_float(name, absent));
}

// The rule of y = f(x) from a formula of g, x and y.
template <auto kFormula>
std::vector<Value*> unary(GradientContext& c) {
  return {kFormula(Term(c, c.of_output()), Term(c, c.input(0)), Term(c, c.output(0)))};
}

// x / 6 + 1/2 between -3 and 3
Term hard_swish(Term g, Term x, Term) {
  return where(x < -3.0, 0.0, where(x <= 3.0, g * (x / 3.0 + 0.5), g));
}

// y = x w, w = tanh(softplus(x)): w + x sigmoid(x) (1 - w^2)
Term mish(Term g, Term x, Term) {
  Term w = apply("Tanh", apply("Softplus", x));
  return g * (w + x * apply("Sigmoid", x) * (1.0 - w * w));
}

Term softsign(Term g, Term x, Term) {
  Term d = 1.0 + apply("Abs", x);
  return g / (d * d);
}

Term leaky_relu(Term g, Term x, Term) {
  return where(x > 0.0, g, g * attribute_of(g, "alpha", 0.01F));
}

Term thresholded_relu(Term g, Term x, Term) {
  return where(x > attribute_of(g, "alpha", 1), g, 0.0);
}

// y = a (e^x - 1) below 0, so that a e^x = y + a
Term elu(Term g, Term x, Term y) {
  return where(x > 0.0, g, g * (y + attribute_of(g, "alpha", 1)));
}

// y = a (e^(x/a) - 1) below 0
Term celu(Term g, Term x, Term y) {
  return where(x > 0.0, g, g * (y / attribute_of(g, "alpha", 1) + 1.0));
}

Term selu(Term g, Term x, Term y) {
  const double alpha = attribute_of(g, "alpha", 1.67326319217681884765625F), gamma = attribute_of(g, "gamma", 1.05070102214813232421875F);
  return where(x > 0.0, g * gamma, g * (y + alpha * gamma));
}

Term hard_sigmoid(Term g, Term, Term y) {
  return where(both(y > 0.0, y < 1.0), g * attribute_of(g, "alpha", 0.2F), 0.0);
}

// y = x s, s = sigmoid(a x): s (1 + a x (1 - s))
Term swish(Term g, Term x, Term) {
  const double alpha = attribute_of(g, "alpha", 1);
  Term scaled = alpha == 1 ? x : x * alpha, s = apply("Sigmoid", scaled);
  return g * (s * (1.0 + scaled * (1.0 - s)));
}

Term shrink(Term g, Term x, Term) {
  return where(apply("Abs", x) > attribute_of(g, "lambd", 0.5F), g, 0.0);
}

// x Phi(x): Phi(x) + x phi(x)
Term gelu_exact(const Term& g, const Term& x) {
  Term cumulative = 0.5 + 0.5 * apply("Erf", x * std::numbers::sqrt2 / 2.0);
  Term density = apply("Exp", x * x * -0.5) * (std::numbers::inv_sqrtpi / std::numbers::sqrt2);
  return g * (cumulative + x * density);
}

// x (1 + t) / 2, t = tanh(k (x + c x^3)): (1 + t) / 2 + x (1 - t^2) k (1 + 3 c x^2) / 2
Term gelu_tanh(const Term& g, const Term& x) {
  const double k = std::numbers::sqrt2 * std::numbers::inv_sqrtpi, cubic = 0.044715;
  Term square = x * x;
  Term t = apply("Tanh", x * (k + (k * cubic) * square));
  Term slope = 1.0 - t * t;  // 0 far out, where the square may be infinite
  return g * (0.5 + 0.5 * t + where(slope == 0.0, 0.0, x * slope * (0.5 * k + (1.5 * k * cubic) * square)));
}

Term gelu(Term g, Term x, Term) {
  return in_float32(g.context->node().get_string("approximate", "none") == "tanh" ? gelu_tanh : gelu_exact, g, x);
}

}  // namespace

GradientRule elementwise_gradient(const std::string& name) {
  static const std::unordered_map<std::string, GradientRule> rules = {
      {"Abs", unary<[](Term g, Term x, Term) { return g * apply("Sign", x); }>},
      {"Neg", unary<[](Term g, Term, Term) { return -g; }>},
      {"Reciprocal", unary<[](Term g, Term, Term y) { return -(g * y * y); }>},
      {"Sqrt", unary<[](Term g, Term, Term y) { return g * 0.5 / y; }>},
      {"Exp", unary<[](Term g, Term, Term y) { return g * y; }>},
      {"Log", unary<[](Term g, Term x, Term) { return g / x; }>},
      {"Erf", unary<[](Term g, Term x, Term) { return g * (2 * std::numbers::inv_sqrtpi) * apply("Exp", -(x * x)); }>},
      {"Sin", unary<[](Term g, Term x, Term) { return g * apply("Cos", x); }>},
      {"Cos", unary<[](Term g, Term x, Term) { return -(g * apply("Sin", x)); }>},
      {"Tan", unary<[](Term g, Term, Term y) { return g * (1.0 + y * y); }>},
      {"Asin", unary<[](Term g, Term x, Term) { return g / apply("Sqrt", 1.0 - x * x); }>},
      {"Acos", unary<[](Term g, Term x, Term) { return -(g / apply("Sqrt", 1.0 - x * x)); }>},
      {"Atan", unary<[](Term g, Term x, Term) { return g / (1.0 + x * x); }>},
      {"Sinh", unary<[](Term g, Term x, Term) { return g * apply("Cosh", x); }>},
      {"Cosh", unary<[](Term g, Term x, Term) { return g * apply("Sinh", x); }>},
      {"Tanh", unary<[](Term g, Term, Term y) { return g * (1.0 - y * y); }>},
      {"Asinh", unary<[](Term g, Term x, Term) { return g / apply("Sqrt", x * x + 1.0); }>},
      {"Acosh", unary<[](Term g, Term x, Term) { return g / apply("Sqrt", x * x - 1.0); }>},
      {"Atanh", unary<[](Term g, Term x, Term) { return g / (1.0 - x * x); }>},
      {"Relu", unary<[](Term g, Term, Term y) { return where(y > 0.0, g, 0.0); }>},
      {"Sigmoid", unary<[](Term g, Term, Term y) { return g * y * (1.0 - y); }>},
      {"HardSwish", unary<hard_swish>},
      {"Mish", unary<mish>},
      {"Softplus", unary<[](Term g, Term x, Term) { return g * apply("Sigmoid", x); }>},
      {"Softsign", unary<softsign>},
      {"LeakyRelu", unary<leaky_relu>},
      {"ThresholdedRelu", unary<thresholded_relu>},
      {"Elu", unary<elu>},
      {"Celu", unary<celu>},
      {"Selu", unary<selu>},
      {"HardSigmoid", unary<hard_sigmoid>},
      {"Swish", unary<swish>},
      {"Shrink", unary<shrink>},
      {"Gelu", unary<gelu>},
      {"Identity", unary<[](Term g, Term, Term) { return g; }>},
      // Steps, and what has no floating-point result.
      {"Sign", zero_gradient},
      {"Floor", zero_gradient},
      {"Ceil", zero_gradient},
      {"Round", zero_gradient},
      {"Not", zero_gradient},
      {"BitwiseNot", zero_gradient},
      {"IsNaN", zero_gradient},
      {"IsInf", zero_gradient},
  };
  auto it = rules.find(name);
  return it == rules.end() ? broadcasting_gradient(name) : it->second;
}

}  // namespace fretsaw
