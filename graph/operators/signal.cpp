// Signal processing and small matrices: DFT, STFT, windows, Det.
#include <cmath>

#include "graph/operators/gradient_rules.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

using Kind = Factor::Kind;

double log2_flops(const Node& node, size_t axis_from_end) {
  const Value* x = node.input(0);
  if (!x || !x->type.shape || x->type.shape->size() < axis_from_end) return 0;
  double n = number_of((*x->type.shape)[x->type.shape->size() - axis_from_end]);
  return n > 1 ? 5 * count_of(x) * std::log2(n) / 2 : 0;
}

double dft_flops(const Node& node) {
  return log2_flops(node, 2);
}

// x [..., n, ..., 1 or 2] -> [..., n', ..., 2 or 1]
FactorRule dft_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0);
  int64_t axis = node.get_int("axis", -2);
  if (rule.has(2)) {
    auto value = constant_ints(node, 2);
    if (!value || value->size() != 1) throw NoRule{"its axis is computed while it runs"};
    axis = (*value)[0];
  }
  size_t over = axis_of(axis, rank);
  rule.out_rank(0, rank);
  for (size_t d = 0; d < rank; ++d) {
    bool passes = d != over && d + 1 != rank;
    int f = rule.from(0, d, passes ? Kind::parallel : Kind::whole, (passes ? "i" : "w") + std::to_string(d));
    if (passes && f >= 0) rule.out(0, d, f);
    if (!passes) rule.out(0, d, rule.whole(Dim(), "w" + std::to_string(d) + "'"));
  }
  return rule.done();
}

// signal [b, samples, 1 or 2] -> [b, frames, bins, 2]
FactorRule stft_factors(const Node& node) {
  RuleBuilder rule(node);
  int b = rule.parallel(rule.dim(0, 0), "b");
  rule.in(0, 0, b);
  rule.rest_whole(0, "x");
  if (rule.has(2)) rule.rest_whole(2, "window");
  rule.out_rank(0, 4);
  rule.out(0, 0, b);
  rule.rest_whole_out(0, "y");
  return rule.done();
}

double stft_flops(const Node& node) {
  const Value* y = node.out(0);
  double bins = y && y->type.shape && y->type.shape->size() == 4 ? number_of((*y->type.shape)[2]) : 1;
  return bins > 1 ? 5 * output_elements(node) * std::log2(bins) / 2 : output_elements(node);
}

// [..., m, m] -> [...]
FactorRule det_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0);
  if (rank < 2) throw NoRule{"an operand that is not a matrix"};
  rule.out_rank(0, rank - 2);
  for (size_t d = 0; d < rank; ++d) {
    int f = rule.from(0, d, d + 2 < rank ? Kind::parallel : Kind::whole, (d + 2 < rank ? "i" : "w") + std::to_string(d));
    if (d + 2 < rank && f >= 0) rule.out(0, d, f);
  }
  return rule.done();
}

double det_flops(const Node& node) {
  const Value* x = node.input(0);
  if (!x || !x->type.shape || x->type.shape->empty()) return 0;
  return count_of(x) * number_of(x->type.shape->back()) * 2 / 3;
}

}  // namespace

std::vector<OperatorRecord> signal_operators() {
  std::vector<OperatorRecord> records = {
      {.name = "DFT", .since = 20, .factors = dft_factors, .flops = dft_flops},
      {.name = "STFT", .since = 17, .factors = stft_factors, .flops = stft_flops},
      {.name = "MelWeightMatrix", .since = 17},
      {.name = "HannWindow", .since = 17},
      {.name = "HammingWindow", .since = 17},
      {.name = "BlackmanWindow", .since = 17},
      {.name = "Det", .since = 22, .factors = det_factors, .flops = det_flops},
  };
  return with_gradients(std::move(records), signal_gradient);
}

}  // namespace fretsaw
