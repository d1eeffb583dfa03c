// Recurrent networks: samples are independent, time and the hidden state are not. Directions are named by an attribute and stay whole.
#include <algorithm>

#include "graph/operators/gradient_rules.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

// layout 0: x [t, b, i], y [t, dir, b, h], states [dir, b, h]; layout 1: x [b, t, i], y [b, t, dir, h], states [b, dir, h]
// w [dir, gates*h, i], r [dir, gates*h, h], bias [dir, 2*gates*h], lengths [b], peepholes [dir, 3*h]
FactorRule recurrent_factors(const Node& node) {
  RuleBuilder rule(node);
  bool batch_first = node.get_int("layout", 0) != 0;
  if (rule.rank(0) != 3) throw NoRule{"an input that is not of three dimensions"};
  int b = rule.parallel(rule.dim(0, batch_first ? 0 : 1), "b"), dir = rule.whole(rule.dim(1, 0), "dir");
  int t = rule.whole(rule.dim(0, batch_first ? 1 : 0), "t");
  int h = rule.whole(Dim(node.has("hidden_size") ? node.get_int("hidden_size", 0) : rule.dim(2, 2).value), "h");
  rule.in(0, batch_first ? 0 : 1, b);
  rule.in(0, batch_first ? 1 : 0, t);
  rule.rest_whole(0, "i");
  for (size_t i = 1; i < node.inputs.size(); ++i) {
    if (!rule.has(i)) continue;
    bool state = i == 5 || (i == 6 && node.op == "LSTM");
    if (i == 4) {
      rule.in(i, 0, b);
    } else if (state) {
      rule.in(i, batch_first ? 0 : 1, b);
      rule.in(i, batch_first ? 1 : 0, dir);
    } else {
      rule.in(i, 0, dir);
    }
    rule.rest_whole(i, "w" + std::to_string(i) + "_");
  }
  for (size_t o = 0; o < node.outputs.size(); ++o) {
    std::vector<int> dims = o == 0 ? (batch_first ? std::vector<int>{b, t, dir, h} : std::vector<int>{t, dir, b, h})
                                   : (batch_first ? std::vector<int>{b, dir, h} : std::vector<int>{dir, b, h});
    rule.out_rank(o, dims.size());
    for (size_t d = 0; d < dims.size(); ++d) rule.out(o, d, dims[d]);
  }
  return rule.done();
}

}  // namespace

// Each step multiplies the input and the state by their weights; gates then cost a few operations an element.
double recurrent_flops(const Node& node) {
  const Value* x = node.input(0);
  if (!x || !x->type.shape || x->type.shape->size() != 3) return 0;
  const Shape& s = *x->type.shape;
  double steps = number_of(s[0]) * number_of(s[1]);
  double weights = count_of(node.input(1)) + count_of(node.input(2));
  double gates = node.input(2) ? count_of(node.input(2)) / std::max<double>(1, static_cast<double>(node.get_int("hidden_size", 1))) : 0;
  return steps * (2 * weights + gates);
}

std::vector<OperatorRecord> recurrent_operators() {
  std::vector<OperatorRecord> records = {
      {.name = "LSTM", .since = 22, .role = Role::contraction, .factors = recurrent_factors, .flops = recurrent_flops},
      {.name = "GRU", .since = 22, .role = Role::contraction, .factors = recurrent_factors, .flops = recurrent_flops},
      {.name = "RNN", .since = 22, .role = Role::contraction, .factors = recurrent_factors, .flops = recurrent_flops},
  };
  return with_gradients(std::move(records), recurrent_gradient);
}

}  // namespace fretsaw
