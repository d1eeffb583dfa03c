// Gradients of reductions: g, in the shape of the reduced tensor, is spread over the elements that were reduced.
#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "graph/operators/gradient_rules.h"
#include "graph/operators/gradient_terms.h"
#include "graph/symbolic.h"

namespace fretsaw {
namespace {

// The axes of a reduction, counted from the front, each once; nullopt where they are computed while it runs.
std::optional<std::vector<int64_t>> reduced_axes(GradientContext& c) {
  auto given = c.input(1) ? c.constant_ints(1) : std::vector<int64_t>();
  if (!given) return std::nullopt;
  std::vector<int64_t> axes;
  const size_t rank = c.rank(c.input(0));
  for (int64_t a : *given) axes.push_back(static_cast<int64_t>(c.axis(a, rank)));
  std::sort(axes.begin(), axes.end());
  axes.erase(std::unique(axes.begin(), axes.end()), axes.end());
  if (axes.empty() && c.node().get_int("noop_with_empty_axes", 0) == 0) {
    axes.resize(rank);
    std::iota(axes.begin(), axes.end(), 0);
  }
  return axes;
}

// A value in the shape of the result with the reduced dimensions as 1, so that it broadcasts to the input.
Term restored(GradientContext& c, Value* v) {
  const Shape* result = c.shape(c.output(0));
  if (c.node().get_int("keepdims", 1) != 0 || (result && result->empty())) return {c, v};
  const auto axes = reduced_axes(c);
  if (axes && axes->empty()) return {c, v};
  return {c, c.add("Unsqueeze", {v, axes ? c.integers(*axes) : c.input(1)})};
}

// The rule of a reduction y of x: the gradient of x from g and y, which broadcast to x.
template <auto kFormula>
std::vector<Value*> reduction(GradientContext& c) {
  std::vector<Value*> found = c.none();
  found[0] = kFormula(restored(c, c.of_output()), Term(c, c.input(0)), restored(c, c.output(0)));
  return found;
}

// Sums and means need nothing but the shape of x.
std::vector<Value*> sum_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  found[0] = c.expand_like(restored(c, c.of_output()), c.input(0));
  return found;
}

std::vector<Value*> mean_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  Term share = divided_by_count(c, restored(c, c.of_output()), c.input(0), c.output(0));
  found[0] = c.expand_like(share, c.input(0));
  return found;
}

// Elements that are equally the largest (smallest) share the gradient, as in PyTorch's amax and amin.
std::vector<Value*> extreme_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  Term g = restored(c, c.of_output()), x(c, c.input(0));
  Term mask = as_number(x == restored(c, c.output(0)), g);
  std::vector<Value*> operands = {mask};
  if (c.input(1)) operands.push_back(c.input(1));
  std::vector<Attribute> attributes = c.attributes({"noop_with_empty_axes"});
  attributes.push_back({"keepdims", int64_t{1}});
  found[0] = g / mask.made("ReduceSum", operands, attributes) * mask;
  return found;
}

// Axis by axis: the gradient times the product of the other elements along the axis, which zeros do not disturb.
std::vector<Value*> product_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  const auto axes = reduced_axes(c);
  if (!axes) c.refuse("its gradient needs constant axes");
  std::vector<Term> partial = {Term(c, c.input(0))};  // [0]: x, [k]: x reduced over the first k axes
  for (size_t k = 0; k + 1 < axes->size(); ++k)
    partial.push_back(partial[k].made("ReduceProd", {partial[k], c.integers({(*axes)[k]})}, {{"keepdims", int64_t{1}}}));
  Term g = restored(c, c.of_output());
  for (size_t k = axes->size(); k-- > 0;) {
    const std::vector<Value*> along = {partial[k], c.integer((*axes)[k])};
    Term before = g.made("CumProd", along, {{"exclusive", int64_t{1}}});
    Term after = g.made("CumProd", along, {{"exclusive", int64_t{1}}, {"reverse", int64_t{1}}});
    g = g * (before * after);
  }
  found[0] = g;
  return found;
}

// y = log(sum): g / e^y for each element
std::vector<Value*> log_sum_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  const auto formula = [](const Term& g, const Term& y) { return g / apply("Exp", y); };
  found[0] = c.expand_like(in_float32(formula, restored(c, c.of_output()), restored(c, c.output(0))), c.input(0));
  return found;
}

// The rule of a reduction whose formula leaves the range of 16 bits.
template <auto kFormula>
Term widely(Term g, Term x, Term y) {
  return in_float32(kFormula, g, x, y);
}
Term l2(Term g, Term x, Term y) {  // 0 where all elements are 0
  return where(y == 0.0, 0.0, g * (x / y));
}
Term log_sum_exp(Term g, Term x, Term y) {
  return g * apply("Exp", x - y);
}

}  // namespace

// In float32 at least: float16 holds neither large counts nor what is divided by them.
Term divided_by_count(GradientContext& c, const Term& gradient, Value* x, Value* y) {
  const auto formula = [&](const Term& g) {
    const Shape *from = c.shape(x), *to = c.shape(y);
    if (from && to) {
      // A dimension of the same symbol in both, at any place, cancels.
      Dim all = dim_product(*from), kept = dim_product(*to);
      if (auto n = dim_divide(all, kept); n && n->known()) return n->value > 0 ? g * (1.0 / static_cast<double>(n->value)) : g;
    }
    auto size = [&](Value* v) { return as_number({&c, c.add("Size", {v}, {}, DType::int64)}, g); };
    if (to && to->empty()) return g / size(x);
    return g * (size(y) / size(x));
  };
  return in_float32(formula, gradient);
}

GradientRule reduction_gradient(const std::string& name) {
  static const std::unordered_map<std::string, GradientRule> rules = {
      {"ReduceSum", sum_gradient},         {"ReduceMean", mean_gradient},
      {"ReduceProd", product_gradient},    {"ReduceMin", extreme_gradient},
      {"ReduceMax", extreme_gradient},     {"ReduceL1", reduction<[](Term g, Term x, Term) { return g * apply("Sign", x); }>},
      {"ReduceL2", reduction<widely<l2>>}, {"ReduceSumSquare", reduction<[](Term g, Term x, Term) { return 2.0 * g * x; }>},
      {"ReduceLogSum", log_sum_gradient},  {"ReduceLogSumExp", reduction<widely<log_sum_exp>>},
      {"ArgMax", zero_gradient},           {"ArgMin", zero_gradient},
  };
  auto it = rules.find(name);
  return it == rules.end() ? nullptr : it->second;
}

}  // namespace fretsaw
