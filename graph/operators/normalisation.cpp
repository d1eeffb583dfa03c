// Softmax, norms and losses: operators that need a whole axis.
#include <algorithm>

#include "graph/operators/gradient_rules.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

using Kind = Factor::Kind;

// Output 0 has the input's shape; dimensions for which `whole` holds are whole, the others pass. The factors, -1 where the size is 1.
template <typename Whole>
std::vector<int> same_shape(RuleBuilder& rule, Whole whole) {
  size_t rank = rule.rank(0);
  std::vector<int> factors(rank, -1);
  rule.out_rank(0, rank);
  for (size_t d = 0; d < rank; ++d) {
    bool w = whole(d);
    factors[d] = rule.from(0, d, w ? Kind::whole : Kind::parallel, (w ? "j" : "i") + std::to_string(d));
    if (factors[d] >= 0) rule.out(0, d, factors[d]);
  }
  return factors;
}

FactorRule softmax_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t axis = axis_of(node.get_int("axis", -1), rule.rank(0));
  std::vector<int> f = same_shape(rule, [&](size_t d) { return d == axis; });
  if (f[axis] >= 0 && (node.is("Softmax") || node.is("LogSoftmax"))) rule.set_combined(f[axis], 2);
  return rule.done();
}

// x [..., j], scale [j], bias [j] -> y [..., j], mean [..., 1], inverse deviation [..., 1]; j: all dimensions from `axis` on
FactorRule layer_norm_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0), axis = axis_of(node.get_int("axis", -1), rank);
  std::vector<int> f = same_shape(rule, [&](size_t d) { return d >= axis; });
  for (size_t i = 1; i < node.inputs.size(); ++i) {
    if (!rule.has(i)) continue;
    size_t r = rule.rank(i);
    if (r > rank) throw NoRule{"a scale of higher rank than what it scales"};
    for (size_t d = 0; d < r; ++d) rule.in_unless_one(i, d, f[rank - r + d]);
  }
  for (size_t o = 1; o < node.outputs.size(); ++o) {
    rule.out_rank(o, rank);
    for (size_t d = 0; d < axis; ++d)
      if (f[d] >= 0) rule.out(o, d, f[d]);
  }
  if (axis + 1 == rank && f[axis] >= 0 && !node.out(1) && !node.out(2)) rule.set_combined(f[axis], node.is("RMSNormalization") ? 1 : 2);
  return rule.done();
}

// x [n, (g c), ...], scale [(g c)], bias [(g c)]
FactorRule group_norm_factors(const Node& node) {
  RuleBuilder rule(node);
  int64_t groups = node.get_int("num_groups", 1);
  size_t rank = rule.rank(0);
  if (rank < 2 || groups < 1) throw NoRule{"a tensor without channels"};
  const Dim& channels = rule.dim(0, 1);
  int n = rule.parallel(rule.dim(0, 0), "n"), g = rule.parallel(Dim(groups), "g");
  int c = rule.whole(channels.known() ? Dim(channels.value / groups) : Dim(), "c");
  rule.set_count("num_groups", {g});
  rule.in(0, 0, n);
  rule.in(0, 1, g);
  rule.in(0, 1, c);
  rule.out_rank(0, rank);
  rule.out(0, 0, n);
  rule.out(0, 1, g);
  rule.out(0, 1, c);
  for (size_t d = 2; d < rank; ++d) {
    int f = rule.from(0, d, Kind::whole, "s" + std::to_string(d));
    if (f >= 0) rule.out(0, d, f);
  }
  for (size_t i : {1, 2}) {
    if (!rule.has(i) || rule.rank(i) != 1) continue;
    rule.in(i, 0, g);
    if (rule.dim(i, 0).value != groups || channels.value == groups) rule.in(i, 0, c);
  }
  return rule.done();
}

// x [n, c, ...], scale [c], bias [c]: one mean for each sample and channel
FactorRule instance_norm_factors(const Node& node) {
  RuleBuilder rule(node);
  std::vector<int> f = same_shape(rule, [](size_t d) { return d >= 2; });
  for (size_t i : {1, 2})
    if (rule.has(i) && f.size() > 1) rule.in_unless_one(i, 0, f[1]);
  return rule.done();
}

// x [n, c, ...], scale, bias, mean, variance [c]. In training mode the mean is over n and the rest, and the statistics are outputs [c].
FactorRule batch_norm_factors(const Node& node) {
  RuleBuilder rule(node);
  bool training = node.get_int("training_mode", 0) != 0;
  std::vector<int> f = same_shape(rule, [&](size_t d) { return training && d != 1; });
  if (f.size() < 2) throw NoRule{"a tensor without channels"};
  for (size_t i = 1; i < node.inputs.size(); ++i)
    if (rule.has(i)) rule.in_unless_one(i, 0, f[1]);
  for (size_t o = 1; o < node.outputs.size(); ++o) {
    rule.out_rank(o, 1);
    if (f[1] >= 0) rule.out(o, 0, f[1]);
  }
  return rule.done();
}

FactorRule lrn_factors(const Node& node) {
  RuleBuilder rule(node);
  same_shape(rule, [](size_t d) { return d == 1; });
  return rule.done();
}

FactorRule mean_variance_factors(const Node& node) {
  RuleBuilder rule(node);
  std::vector<size_t> axes;
  for (int64_t a : node.get_ints("axes", {0, 2, 3})) axes.push_back(axis_of(a, rule.rank(0)));
  same_shape(rule, [&](size_t d) { return std::find(axes.begin(), axes.end(), d) != axes.end(); });
  return rule.done();
}

// scores [n, c, d...], labels [n, d...], weights [c] -> loss [n, d...] or [], log probabilities as scores
FactorRule loss_factors(const Node& node) {
  RuleBuilder rule(node);
  std::string reduction = node.get_string("reduction", "mean");
  size_t rank = rule.rank(0);
  if (rank < 2) throw NoRule{"scores without classes"};
  // A weighted or masked mean divides by a count over everything, so only a sum leaves partial results that add up.
  Kind kind = reduction == "none" ? Kind::parallel : reduction == "sum" ? Kind::sum : Kind::whole;
  bool scores_out = node.out(1) != nullptr;
  if (scores_out && kind != Kind::parallel) kind = Kind::whole;
  if (reduction == "none") rule.out_rank(0, rank - 1);
  rule.out_rank(1, rank);
  for (size_t d = 0; d < rank; ++d) {
    int f = rule.from(0, d, d == 1 ? Kind::whole : kind, d == 1 ? "c" : "i" + std::to_string(d));
    if (f < 0) continue;
    if (scores_out) rule.out(1, d, f);
    if (d == 1) {
      if (rule.has(2)) rule.in(2, 0, f);
      continue;
    }
    size_t label = d == 0 ? 0 : d - 1;
    rule.in_unless_one(1, label, f);
    if (reduction == "none") rule.out(0, label, f);
  }
  return rule.done();
}

}  // namespace

std::vector<OperatorRecord> normalisation_operators() {
  constexpr Role norm = Role::normalisation;
  std::vector<OperatorRecord> records = {
      {.name = "Softmax", .since = 13, .role = norm, .factors = softmax_factors, .flops = output_elements},
      {.name = "LogSoftmax", .since = 13, .role = norm, .factors = softmax_factors, .flops = output_elements},
      {.name = "Hardmax", .since = 13, .role = norm, .factors = softmax_factors, .flops = output_elements},
      {.name = "LpNormalization", .since = 22, .role = norm, .factors = softmax_factors, .flops = output_elements},
      {.name = "LayerNormalization", .since = 17, .role = norm, .factors = layer_norm_factors, .flops = output_elements},
      {.name = "RMSNormalization", .since = 23, .role = norm, .factors = layer_norm_factors, .flops = output_elements},
      {.name = "GroupNormalization", .since = 21, .role = norm, .factors = group_norm_factors, .flops = output_elements},
      {.name = "InstanceNormalization", .since = 22, .role = norm, .factors = instance_norm_factors, .flops = output_elements},
      {.name = "BatchNormalization", .since = 15, .role = norm, .factors = batch_norm_factors, .flops = output_elements},
      {.name = "LRN", .since = 13, .role = norm, .factors = lrn_factors, .flops = output_elements},
      {.name = "MeanVarianceNormalization", .since = 13, .role = norm, .factors = mean_variance_factors, .flops = output_elements},
      {.name = "SoftmaxCrossEntropyLoss", .since = 13, .role = norm, .factors = loss_factors, .flops = input_elements},
      {.name = "NegativeLogLikelihoodLoss", .since = 22, .role = norm, .factors = loss_factors, .flops = output_elements},
  };
  return with_gradients(std::move(records), normalisation_gradient);
}

}  // namespace fretsaw
