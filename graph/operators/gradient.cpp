// The gradient operators of the domain ai.fretsaw (graph/gradient_operators.h).
#include "graph/communication_schemas.h"
#include "graph/gradients.h"
#include "graph/operators/gradient_rules.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

using Kind = Factor::Kind;

// Dimensions align from the right: those that the result lacks, or has as 1, are summed.
FactorRule sum_to_factors(const Node& node) {
  RuleBuilder rule(node);
  const Shape* y = rule.output_shape(0);
  if (!y || y->size() > rule.rank(0)) throw NoRule{"the shape of its result is not known"};
  const size_t missing = rule.rank(0) - y->size();
  rule.out_rank(0, y->size());
  rule.set_shape_operand(1);
  for (size_t d = 0; d < rule.rank(0); ++d) {
    const std::string name = "i" + std::to_string(d);
    if (d < missing || (*y)[d - missing].value == 1) {
      rule.from(0, d, Kind::sum, name);
      continue;
    }
    if (!same_known(rule.dim(0, d), (*y)[d - missing])) throw NoRule{"what it sums over is found out while it runs"};
    const int f = rule.from(0, d, Kind::parallel, name);
    if (f >= 0) rule.out(0, d - missing, f);
  }
  return rule.done();
}

// dY [a, i..., b], indices [i...] -> [a, v, b]: the sum over i
FactorRule gather_grad_factors(const Node& node) {
  RuleBuilder rule(node);
  const Shape* x = rule.output_shape(0);
  if (!x) throw NoRule{"the shape of its result is not known"};
  const size_t rank = x->size(), indices = rule.rank(1), axis = axis_of(node.get_int("axis", 0), rank);
  if (rule.rank(0) + 1 != rank + indices) throw NoRule{"operands whose ranks do not fit"};
  rule.out_rank(0, rank);
  rule.set_shape_operand(2);
  for (size_t k = 0; k < indices; ++k) {
    const int f = rule.from(1, k, Kind::sum, "i" + std::to_string(k));
    if (f >= 0) rule.in(0, axis + k, f);
  }
  for (size_t d = 0; d < rank; ++d) {
    if (d == axis) {
      rule.out(0, d, rule.whole((*x)[d], "v"));
      continue;
    }
    const int f = rule.from(0, d < axis ? d : d + indices - 1, Kind::parallel, "d" + std::to_string(d));
    if (f >= 0) rule.out(0, d, f);
  }
  return rule.done();
}

// The channels [(g c)] of a grouped convolution's operand.
struct Groups {
  int group = -1, each = -1;  // group: -1 where there is one
};
Groups channels(RuleBuilder& rule, int group, const Dim& size, int64_t groups, Kind kind, const char* name) {
  Dim each = size;
  if (groups > 1) each = size.known() ? Dim(size.value / groups) : Dim();
  return {group, rule.add(each, kind, name)};
}
void place(std::vector<int>& factors, const Groups& g) {
  if (g.group >= 0) factors.push_back(g.group);
  factors.push_back(g.each);
}

int group_of(RuleBuilder& rule, int64_t groups) {
  if (groups <= 1) return -1;
  const int g = rule.parallel(Dim(groups), "g");
  rule.set_count("group", {g});
  return g;
}

// dY [n, (g o), h', w'], W [(g o), c, r, s] -> [n, (g c), h, w]
FactorRule conv_grad_input_factors(const Node& node) {
  RuleBuilder rule(node);
  const size_t rank = rule.rank(0);
  if (rank < 3 || rule.rank(1) != rank) throw NoRule{"operands whose ranks do not fit"};
  const int64_t groups = node.get_int("group", 1);
  const int n = rule.parallel(rule.dim(0, 0), "n"), g = group_of(rule, groups);
  const Groups o = channels(rule, g, rule.dim(1, 0), groups, Kind::sum, "o"), c{g, rule.parallel(rule.dim(1, 1), "c")};
  rule.in(0, 0, n);
  std::vector<int> outputs, inputs;
  place(outputs, o);
  place(inputs, c);
  for (int f : outputs) {
    rule.in(0, 1, f);
    rule.in(1, 0, f);
  }
  rule.in(1, 1, c.each);
  rule.rest_whole(0, "y");
  rule.rest_whole(1, "k");
  rule.out_rank(0, rank);
  rule.set_shape_operand(2);
  rule.out(0, 0, n);
  for (int f : inputs) rule.out(0, 1, f);
  rule.rest_whole_out(0, "x");
  return rule.done();
}

// dY [n, (g o), h', w'], X [n, (g c), h, w] -> [(g o), c, r, s]: the sum over n
FactorRule conv_grad_weight_factors(const Node& node) {
  RuleBuilder rule(node);
  const size_t rank = rule.rank(0);
  if (rank < 3 || rule.rank(1) != rank) throw NoRule{"operands whose ranks do not fit"};
  const int64_t groups = node.get_int("group", 1);
  const int n = rule.sum(rule.dim(0, 0), "n"), g = group_of(rule, groups);
  std::vector<int> outputs, inputs;
  const Groups o = channels(rule, g, rule.dim(0, 1), groups, Kind::parallel, "o");
  const Groups c = channels(rule, g, rule.dim(1, 1), groups, Kind::parallel, "c");
  place(outputs, o);
  place(inputs, c);
  rule.in(0, 0, n);
  rule.in(1, 0, n);
  for (int f : outputs) rule.in(0, 1, f);
  for (int f : inputs) rule.in(1, 1, f);
  rule.rest_whole(0, "y");
  rule.rest_whole(1, "x");
  rule.out_rank(0, rank);
  for (int f : outputs) rule.out(0, 0, f);
  rule.out(0, 1, c.each);
  rule.rest_whole_out(0, "k");
  return rule.done();
}

// Two operations for each element of dY, input channel and element of the kernel.
double conv_grad_flops(const Node& node) {
  const Value* weights = node.op == "ConvGradWeight" ? node.out(0) : node.input(1);
  if (!weights || !weights->type.shape || weights->type.shape->empty()) return 0;
  return 2 * input_elements(node) * count_of(weights) / number_of(weights->type.shape->front());
}

// Those of the two products, by the samples and by the weights.
double deform_grad_flops(const Node& node) {
  const Value* weights = node.input(2);
  if (!weights || !weights->type.shape || weights->type.shape->empty()) return 0;
  return 4 * input_elements(node) * count_of(weights) / number_of(weights->type.shape->front());
}

// dY [n, c, h', w'] (and X [n, c, h, w]) -> [n, c, h, w]
FactorRule pool_grad_factors(const Node& node) {
  RuleBuilder rule(node);
  const bool takes_x = node.op == "MaxPoolGrad";
  const size_t rank = rule.rank(0);
  rule.out_rank(0, rank);
  if (!takes_x) rule.set_shape_operand(1);
  for (size_t d = 0; d < std::min<size_t>(rank, 2); ++d) {
    const int f = rule.parallel(rule.dim(0, d), d == 0 ? "n" : "c");
    rule.in(0, d, f);
    if (takes_x) rule.in(1, d, f);
    rule.out(0, d, f);
  }
  rule.rest_whole(0, "y");
  if (takes_x) rule.rest_whole(1, "x");
  rule.rest_whole_out(0, "x");
  return rule.done();
}

// dY, X [n, c, ...], scale [c] -> as X, [c], [c]: the statistics are over n and the rest
FactorRule batch_norm_grad_factors(const Node& node) {
  RuleBuilder rule(node);
  const size_t rank = rule.rank(1);
  if (rank < 2) throw NoRule{"a tensor without channels"};
  const int c = rule.parallel(rule.dim(1, 1), "c");
  rule.out_rank(0, rank);
  for (size_t d = 0; d < rank; ++d) {
    const int f = d == 1 ? c : rule.from(1, d, Kind::whole, "j" + std::to_string(d));
    if (f < 0) continue;
    rule.in_unless_one(0, d, f);
    if (d == 1) rule.in(1, d, f);
    rule.out(0, d, f);
  }
  rule.in(2, 0, c);
  for (size_t o : {1, 2}) {
    rule.out_rank(o, 1);
    rule.out(o, 0, c);
  }
  return rule.done();
}

// dY, X [..., j] and the scale, which broadcasts to [j] -> as X; or [j], the sum over the rows
FactorRule row_norm_grad_factors(const Node& node) {
  RuleBuilder rule(node);
  const bool of_scale = node.op == "LayerNormalizationGradScale" || node.op == "RMSNormalizationGradScale";
  const size_t rank = rule.rank(1), axis = axis_of(node.get_int("axis", -1), rank);
  rule.out_rank(0, of_scale ? rank - axis : rank);
  std::vector<int> factors(rank, -1);
  for (size_t d = 0; d < rank; ++d) {
    const bool row = d < axis;
    factors[d] = rule.from(1, d, !row ? Kind::whole : of_scale ? Kind::sum : Kind::parallel, (row ? "i" : "j") + std::to_string(d));
    if (factors[d] < 0) continue;
    rule.in_unless_one(0, d, factors[d]);
    if (!of_scale) rule.out(0, d, factors[d]);
    if (of_scale && !row) rule.out(0, d - axis, factors[d]);
  }
  if (of_scale) return rule.done();
  const size_t scale = rule.rank(2);
  if (scale > rank) throw NoRule{"a scale of higher rank than what it scales"};
  for (size_t d = 0; d < scale; ++d) rule.in_unless_one(2, d, factors[rank - scale + d]);
  return rule.done();
}

// dLoss [] or [n, d...], scores [n, c, d...], labels [n, d...], weights [c] -> as scores. A mean divides by a count over everything.
FactorRule loss_grad_factors(const Node& node) {
  RuleBuilder rule(node);
  const std::string reduction = node.get_string("reduction", "mean");
  const size_t rank = rule.rank(1);
  if (rank < 2) throw NoRule{"scores without classes"};
  rule.out_rank(0, rank);
  for (size_t d = 0; d < rank; ++d) {
    const bool whole = d == 1 || reduction == "mean";
    const int f = rule.from(1, d, whole ? Kind::whole : Kind::parallel, d == 1 ? "c" : "i" + std::to_string(d));
    if (f < 0) continue;
    rule.out(0, d, f);
    if (d == 1) {
      if (rule.has(3)) rule.in(3, 0, f);
      continue;
    }
    const size_t label = d == 0 ? 0 : d - 1;
    rule.in_unless_one(2, label, f);
    if (reduction == "none") rule.in_unless_one(0, label, f);
  }
  return rule.done();
}

// dY [b, (g r), s, e], Q [b, (g r), s, d], K [b, g, t, d], V [b, g, t, e], mask -> as Q, K, V; of rank 3 with heads beside d and e.
// Query heads that share a key head stay together, as its gradient is their sum.
FactorRule attention_grad_factors(const Node& node) {
  RuleBuilder rule(node);
  const size_t rank = rule.rank(0);
  if (rank != 3 && rank != 4) throw NoRule{"an operand of neither three nor four dimensions"};
  const bool flat = rank == 3;
  const Dim q_heads = flat ? Dim(node.get_int("q_num_heads", 0)) : rule.dim(1, 1);
  const Dim kv_heads = flat ? Dim(node.get_int("kv_num_heads", 0)) : rule.dim(2, 1);
  if (q_heads.value < 1 || kv_heads.value < 1 || q_heads.value % kv_heads.value != 0) throw NoRule{"its numbers of heads are not known"};
  const auto depth = [&](size_t i, const Dim& heads) {
    const Dim& last = rule.dim(i, rank - 1);
    return flat && last.known() ? Dim(last.value / heads.value) : flat ? Dim() : last;
  };
  const size_t rows = flat ? 1 : 2;
  const int b = rule.parallel(rule.dim(1, 0), "b"), g = rule.parallel(kv_heads, "g");
  const int r = rule.whole(Dim(q_heads.value / kv_heads.value), "r");
  const int s = rule.whole(rule.dim(1, rows), "s"), t = rule.whole(rule.dim(2, rows), "t");
  const int d = rule.whole(depth(1, q_heads), "d"), e = rule.whole(depth(3, kv_heads), "e");
  const auto place = [&](auto put, int length, bool queries, int width) {
    const size_t heads = flat ? 2 : 1;
    put(size_t{0}, b);
    put(rows, length);
    put(heads, g);
    if (queries) put(heads, r);
    put(rank - 1, width);
  };
  const auto in = [&](size_t i) { return [&rule, i](size_t k, int f) { rule.in(i, k, f); }; };
  const auto out = [&](size_t o) { return [&rule, o](size_t k, int f) { rule.out(o, k, f); }; };
  place(in(0), s, true, e);
  place(in(1), s, true, d);
  place(in(2), t, false, d);
  place(in(3), t, false, e);
  for (size_t o : {0, 1, 2}) rule.out_rank(o, rank);
  if (node.out(0)) place(out(0), s, true, d);
  if (node.out(1)) place(out(1), t, false, d);
  if (node.out(2)) place(out(2), t, false, e);
  rule.set_count("q_num_heads", {g, r});
  rule.set_count("kv_num_heads", {g});
  if (!rule.has(4)) return rule.done();
  const size_t mask = rule.rank(4);
  if (mask > 4) throw NoRule{"a mask of more than four dimensions"};
  for (size_t k = 0; k < mask; ++k) {
    if (rule.dim(4, k).value == 1) continue;
    if (k + 4 - mask == 0) rule.in(4, k, b);
    if (k + 4 - mask == 1) rule.in(4, k, g), rule.in(4, k, r);
  }
  rule.rest_whole(4, "m");
  return rule.done();
}

// Five matrix products for each head: the probabilities once more, and their gradients and those of the three operands.
double attention_grad_flops(const Node& node) {
  const Value *q = node.input(1), *k = node.input(2);
  if (!q || !k || !q->type.shape || !k->type.shape || k->type.shape->size() < 3) return 0;
  const Shape& keys = *k->type.shape;  // [B, G, T, D], or [B, T, G * D]
  return 10 * count_of(q) * number_of(keys[keys.size() - 2]);
}

// The gates once more, and two products for each of theirs.
double recurrent_grad_flops(const Node& node) {
  return 3 * recurrent_flops(node);
}

// Running products: dY, X [...] and the axis -> as X. Determinants: dY [...], X [..., m, m] -> as X.
FactorRule product_grad_factors(const Node& node) {
  RuleBuilder rule(node);
  const bool det = node.op == "DetGrad";
  const auto given = det ? std::vector<int64_t>{-1} : constant_ints(node, 2);
  if (!given || given->size() != 1) throw NoRule{"its axis is computed while it runs"};
  const size_t rank = rule.rank(1), axis = axis_of((*given)[0], rank);
  if (rule.rank(0) + (det ? 2 : 0) != rank) throw NoRule{"operands whose ranks do not fit"};
  rule.out_rank(0, rank);
  for (size_t d = 0; d < rank; ++d) {
    const bool whole = det ? d + 2 >= rank : d == axis;
    const int f = rule.from(1, d, whole ? Kind::whole : Kind::parallel, (whole ? "w" : "i") + std::to_string(d));
    if (f < 0) continue;
    if (!det || !whole) rule.in(0, d, f);
    rule.out(0, d, f);
  }
  return rule.done();
}

// An elimination, and a triangle's inverse twice.
double det_grad_flops(const Node& node) {
  const Value* x = node.input(1);
  if (!x || !x->type.shape || x->type.shape->empty()) return 0;
  return 2 * count_of(x) * number_of(x->type.shape->back());
}

// Only the samples are independent; the rest is given whole.
FactorRule linear_attention_grad_factors(const Node& node) {
  RuleBuilder rule(node);
  const int b = rule.parallel(rule.dim(0, 0), "b");
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (!rule.has(i)) continue;
    rule.in(i, 0, b);
    rule.rest_whole(i, "x" + std::to_string(i));
  }
  for (size_t o = 0; o < node.outputs.size(); ++o) {
    if (!node.out(o)) continue;
    rule.out_rank(o, rule.rank(o));
    rule.out(o, 0, b);
    rule.rest_whole_out(o, "y");
  }
  return rule.done();
}

// The states twice more, and for each position and head four products of a state's size on the way back.
double linear_attention_grad_flops(const Node& node) {
  const Value *query = node.input(0), *value = node.input(2);
  const double heads = number_of(Dim(node.get_int("q_num_heads", 1)));
  if (!value || !value->type.shape || value->type.shape->size() != 3) return 12 * count_of(query);
  return 12 * count_of(query) * number_of(value->type.shape->back()) / heads;
}

double elements_of_second(const Node& node) {
  return count_of(node.input(1));
}

OperatorRecord record(const char* name, Role role, FactorRule (*factors)(const Node&), double (*flops)(const Node&)) {
  return {.name = name, .domain = kCommunicationDomain, .since = 1, .role = role, .factors = factors, .flops = flops};
}

}  // namespace

std::vector<OperatorRecord> gradient_operators() {
  constexpr Role norm = Role::normalisation;
  return {
      record("SumTo", Role::reduction, sum_to_factors, input_elements),
      record("GatherGrad", Role::reduction, gather_grad_factors, input_elements),
      record("ConvGradInput", Role::contraction, conv_grad_input_factors, conv_grad_flops),
      record("ConvGradWeight", Role::contraction, conv_grad_weight_factors, conv_grad_flops),
      record("DeformConvGrad", Role::contraction, nullptr, deform_grad_flops),
      record("MaxPoolGrad", Role::reduction, pool_grad_factors, elements_of_second),
      record("AveragePoolGrad", Role::reduction, pool_grad_factors, output_elements),
      record("BatchNormalizationGrad", norm, batch_norm_grad_factors, elements_of_second),
      record("LayerNormalizationGrad", norm, row_norm_grad_factors, elements_of_second),
      record("LayerNormalizationGradScale", norm, row_norm_grad_factors, elements_of_second),
      record("RMSNormalizationGrad", norm, row_norm_grad_factors, elements_of_second),
      record("RMSNormalizationGradScale", norm, row_norm_grad_factors, elements_of_second),
      record("SoftmaxCrossEntropyLossGrad", norm, loss_grad_factors, elements_of_second),
      record("NegativeLogLikelihoodLossGrad", norm, loss_grad_factors, elements_of_second),
      {.name = "CrossEntropy",
       .domain = kCommunicationDomain,
       .since = 1,
       .role = norm,
       .flops = input_elements,
       .gradient = loss_gradient("CrossEntropy")},
      record("CrossEntropyGrad", norm, nullptr, elements_of_second),
      record("AttentionGrad", Role::contraction, attention_grad_factors, attention_grad_flops),
      record("LSTMGrad", Role::contraction, nullptr, recurrent_grad_flops),
      record("GRUGrad", Role::contraction, nullptr, recurrent_grad_flops),
      record("RNNGrad", Role::contraction, nullptr, recurrent_grad_flops),
      record("GridSampleGrad", Role::other, nullptr, elements_of_second),
      record("RoiAlignGrad", Role::other, nullptr, elements_of_second),
      record("MaxRoiPoolGrad", Role::other, nullptr, elements_of_second),
      record("CumProdGrad", Role::other, product_grad_factors, elements_of_second),
      record("DetGrad", Role::other, product_grad_factors, det_grad_flops),
      record("LinearAttentionGrad", Role::other, linear_attention_grad_factors, linear_attention_grad_flops),
      {.name = "SquaredSum", .domain = kCommunicationDomain, .since = 1, .role = Role::reduction, .flops = input_elements},
      {.name = "DropoutMask", .domain = kCommunicationDomain, .since = 1, .gradient = zero_gradient},
      {.name = "RandomAt", .domain = kCommunicationDomain, .since = 1, .gradient = zero_gradient},
  };
}

}  // namespace fretsaw
