// Attention and what stands beside it in transformers: RotaryEmbedding, LinearAttention.
#include <algorithm>

#include "graph/operators/gradient_rules.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

using Kind = Factor::Kind;

struct Heads {
  int64_t query = 0, key_value = 0;  // 0: not known
};
Heads heads_of(const Node& node, const RuleBuilder& rule) {
  Heads h{node.get_int("q_num_heads", 0), node.get_int("kv_num_heads", 0)};
  if (rule.rank(0) == 4 && rule.dim(0, 1).known()) h.query = rule.dim(0, 1).value;
  if (rule.rank(1) == 4 && rule.dim(1, 1).known()) h.key_value = rule.dim(1, 1).value;
  return h;
}

Dim per_head(const Dim& hidden, int64_t heads) {
  return hidden.known() && heads > 0 ? Dim(hidden.value / heads) : Dim();
}

// Query heads are (g r): r query heads share each of the g key-value heads.
//   q [b, (g r), s, d], k [b, g, t, d], v [b, g, t, e], mask [b, (g r), s, t], past [b, g, p, d] -> y [b, (g r), s, e], present [b, g, p+t,
//   d] or, of rank 3, q [b, s, (g r d)], k [b, t, (g d)], v [b, t, (g e)] -> y [b, s, (g r e)]
FactorRule attention_factors(const Node& node) {
  RuleBuilder rule(node);
  Heads heads = heads_of(node, rule);
  if (heads.query < 1 || heads.key_value < 1 || heads.query % heads.key_value != 0) throw NoRule{"its numbers of heads are not known"};
  bool flat = rule.rank(0) == 3;
  if (!flat && rule.rank(0) != 4) throw NoRule{"an operand of neither three nor four dimensions"};
  int b = rule.parallel(rule.dim(0, 0), "b"), g = rule.parallel(Dim(heads.key_value), "g");
  int r = rule.parallel(Dim(heads.query / heads.key_value), "r");
  // Queries know their position from their index (causal masks), so their axis is not cut.
  int s = rule.whole(rule.dim(0, flat ? 1 : 2), "s"), t = rule.whole(rule.dim(1, flat ? 1 : 2), "t");
  int d = rule.whole(flat ? per_head(rule.dim(0, 2), heads.query) : rule.dim(0, 3), "d");
  int e = rule.parallel(flat ? per_head(rule.dim(2, 2), heads.key_value) : rule.dim(2, 3), "e");
  auto place = [&](auto put, int length, std::vector<int> head, int depth) {
    put(0, b);
    if (flat) {
      put(1, length);
      head.push_back(depth);
      for (int f : head) put(2, f);
    } else {
      for (int f : head) put(1, f);
      put(2, length);
      put(3, depth);
    }
  };
  place([&](size_t k, int f) { rule.in(0, k, f); }, s, {g, r}, d);
  place([&](size_t k, int f) { rule.in(1, k, f); }, t, {g}, d);
  place([&](size_t k, int f) { rule.in(2, k, f); }, t, {g}, e);
  rule.out_rank(0, flat ? 3 : 4);
  place([&](size_t k, int f) { rule.out(0, k, f); }, s, {g, r}, e);
  rule.set_count("q_num_heads", {g, r});
  rule.set_count("kv_num_heads", {g});
  if (rule.has(3)) {  // aligned from the right to [b, heads, s, t]
    size_t rank = rule.rank(3);
    if (rank > 4) throw NoRule{"a mask of more than four dimensions"};
    for (size_t k = 0; k < rank; ++k) {
      size_t at = k + 4 - rank;
      if (rule.dim(3, k).value == 1) continue;
      if (at == 0) rule.in(3, k, b);
      if (at == 1) {
        rule.in(3, k, g);
        rule.in(3, k, r);
      }
    }
    rule.rest_whole(3, "m");
  }
  for (size_t i : {4, 5}) {
    if (!rule.has(i)) continue;
    rule.in(i, 0, b);
    rule.in(i, 1, g);
    if (i == 5) rule.in(i, 3, e);
    rule.rest_whole(i, "p");
  }
  if (rule.has(6)) rule.in(6, 0, b);
  for (size_t o : {1, 2}) {
    rule.out_rank(o, 4);
    if (!node.out(o)) continue;
    rule.out(o, 0, b);
    rule.out(o, 1, g);
    if (o == 2) rule.out(o, 3, e);
    rule.rest_whole_out(o, "p");
  }
  rule.out_rank(3, 4);
  if (node.out(3)) {
    rule.out(3, 0, b);
    for (int f : {g, r}) rule.out(3, 1, f);
    rule.rest_whole_out(3, "q");
  }
  return rule.done();
}

// Two matrix products and a softmax for each head.
double attention_flops(const Node& node) {
  FactorRule rule = factor_rule(node);
  if (!rule.unknown.empty() || rule.factors.size() < 7) return 0;
  auto size = [&](int f) { return number_of(rule.factors[f].size); };
  double keys = size(4);
  for (size_t i : {4, 5})
    if (node.input(i) && node.input(i)->type.shape && node.input(i)->type.shape->size() == 4) {
      keys += number_of((*node.input(i)->type.shape)[2]);
      break;
    }
  double scores = size(0) * size(1) * size(2) * size(3) * keys;
  return scores * (2 * size(5) + 2 * size(6) + 1);
}

// x [b, h, s, d] or [b, s, (h d)]; caches [positions, d/2] with position_ids [b, s], else [b, s, d/2]
FactorRule rotary_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0);
  if (rank != 3 && rank != 4) throw NoRule{"an operand of neither three nor four dimensions"};
  int b = rule.parallel(rule.dim(0, 0), "b"), s = rule.parallel(rule.dim(0, rank == 4 ? 2 : 1), "s");
  std::vector<std::vector<int>> dims;
  if (rank == 4) {
    int h = rule.parallel(rule.dim(0, 1), "h"), d = rule.whole(rule.dim(0, 3), "d");
    dims = {{b}, {h}, {s}, {d}};
  } else {
    int64_t heads = node.get_int("num_heads", 0);
    if (heads < 1) throw NoRule{"its number of heads is not known"};
    int h = rule.parallel(Dim(heads), "h"), d = rule.whole(per_head(rule.dim(0, 2), heads), "d");
    rule.set_count("num_heads", {h});
    dims = {{b}, {s}, {h, d}};
  }
  rule.out_rank(0, rank);
  for (size_t k = 0; k < rank; ++k)
    for (int f : dims[k]) {
      rule.in(0, k, f);
      rule.out(0, k, f);
    }
  bool positions = rule.has(3);
  if (positions) {
    rule.in_unless_one(3, 0, b);
    if (rule.rank(3) > 1) rule.in_unless_one(3, 1, s);
  }
  for (size_t i : {1, 2}) {
    if (!positions && rule.rank(i) == 3) {
      rule.in_unless_one(i, 0, b);
      rule.in_unless_one(i, 1, s);
    }
    rule.rest_whole(i, "c" + std::to_string(i));
  }
  return rule.done();
}

double rotary_flops(const Node& node) {
  return 3 * output_elements(node);
}

// q [b, t, (h d)], k, v, past_state [b, h, d, e], decay, beta: heads and time are given whole
FactorRule linear_attention_factors(const Node& node) {
  RuleBuilder rule(node);
  int b = rule.parallel(rule.dim(0, 0), "b");
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (!rule.has(i)) continue;
    if (rule.rank(i) < 3) throw NoRule{"an operand without a batch dimension"};
    rule.in(i, 0, b);
    rule.rest_whole(i, "x" + std::to_string(i));
  }
  for (size_t o = 0; o < 2; ++o) {
    rule.out_rank(o, o == 0 ? 3 : 4);
    rule.out(o, 0, b);
    rule.rest_whole_out(o, "y");
  }
  return rule.done();
}

// For each position and head: the state [d, e] is scaled, updated by an outer product and read by the query.
double linear_attention_flops(const Node& node) {
  const Value* state = node.out(1) ? node.out(1) : node.input(3);
  const Value* query = node.input(0);
  if (!state || !query || !query->type.shape || query->type.shape->size() < 2) return 2 * input_elements(node);
  return 4 * count_of(state) * number_of((*query->type.shape)[1]);
}

}  // namespace

std::vector<OperatorRecord> attention_operators() {
  std::vector<OperatorRecord> records = {
      {.name = "Attention", .since = 25, .role = Role::contraction, .factors = attention_factors, .flops = attention_flops},
      {.name = "RotaryEmbedding", .since = 23, .factors = rotary_factors, .flops = rotary_flops},
      {.name = "LinearAttention", .since = 27, .factors = linear_attention_factors, .flops = linear_attention_flops},
  };
  return with_gradients(std::move(records), attention_gradient);
}

}  // namespace fretsaw
