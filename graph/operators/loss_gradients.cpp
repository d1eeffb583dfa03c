// Gradients of Softmax and of losses.
#include <unordered_map>

#include "graph/operators/gradient_rules.h"
#include "graph/operators/gradient_terms.h"

namespace fretsaw {
namespace {

Term sum_along(const Term& x, int64_t axis) {
  return x.made("ReduceSum", {x, x.context->integers({axis})}, {{"keepdims", int64_t{1}}});
}

// y (g - sum(g y))
std::vector<Value*> softmax_gradient(GradientContext& c) {
  const int64_t axis = c.node().get_int("axis", -1);
  const auto formula = [&](const Term& g, const Term& y) { return y * (g - sum_along(g * y, axis)); };
  return {in_float32(formula, Term(c, c.of_output()), Term(c, c.output(0)))};
}

// g - e^y sum(g), y being the logarithm
Term log_softmax(const Term& g, const Term& y, int64_t axis) {
  const auto formula = [&](const Term& of_y, const Term& logs) { return of_y - apply("Exp", logs) * sum_along(of_y, axis); };
  return in_float32(formula, g, y);
}
std::vector<Value*> log_softmax_gradient(GradientContext& c) {
  return {log_softmax(Term(c, c.of_output()), Term(c, c.output(0)), c.node().get_int("axis", -1))};
}

// The gradient of the scores [N, C, ...] from that of the loss.
Value* of_scores(GradientContext& c, const char* op) {
  if (c.wants(2)) c.refuse("there is no gradient for the weights of classes", "freeze them");
  std::vector<Value*> operands = {c.of_output(), c.input(0), c.input(1)};
  if (c.input(2)) operands.push_back(c.input(2));
  return c.add_own(op, operands, c.attributes({"reduction", "ignore_index"}));
}

std::vector<Value*> likelihood_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  found[0] = of_scores(c, "NegativeLogLikelihoodLossGrad");
  return found;
}

// The second output, the logarithms of the probabilities, may be used too.
std::vector<Value*> cross_entropy_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  if (c.of_output()) found[0] = of_scores(c, "SoftmaxCrossEntropyLossGrad");
  if (!c.of_output(1)) return found;
  Term second = log_softmax(Term(c, c.of_output(1)), Term(c, c.output(1)), 1);
  found[0] = found[0] ? Term(c, found[0]) + second : second;
  return found;
}

std::vector<Value*> row_cross_entropy_gradient(GradientContext& c) {
  if (c.of_output(1)) c.refuse("has no gradient for its second result");
  std::vector<Value*> found = c.none();
  found[0] = c.add_own("CrossEntropyGrad", {c.of_output(), c.input(0), c.input(1), c.output(1, DType::float32)},
                       c.attributes({"label_smoothing", "ignore_index", "classes"}));
  found[0]->type.dtype = c.input(0)->type.dtype;
  return found;
}

}  // namespace

GradientRule loss_gradient(const std::string& name) {
  static const std::unordered_map<std::string, GradientRule> rules = {
      {"Softmax", softmax_gradient},
      {"LogSoftmax", log_softmax_gradient},
      {"Hardmax", zero_gradient},
      {"NegativeLogLikelihoodLoss", likelihood_gradient},
      {"SoftmaxCrossEntropyLoss", cross_entropy_gradient},
      {"CrossEntropy", row_cross_entropy_gradient},
  };
  auto it = rules.find(name);
  return it == rules.end() ? nullptr : it->second;
}

}  // namespace fretsaw
