// Operators that pick or place elements by index: Gather*, Scatter*, TopK, OneHot, CumSum and those of unpredictable size.
#include <algorithm>

#include "graph/operators/gradient_rules.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

using Kind = Factor::Kind;

// data [a, v, b], indices [i...] -> [a, i..., b]
FactorRule gather_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0), indices = rule.rank(1), axis = axis_of(node.get_int("axis", 0), rank);
  rule.out_rank(0, rank + indices - 1);
  size_t o = 0;
  for (size_t d = 0; d < rank; ++d) {
    if (d == axis) {
      int v = rule.whole(rule.dim(0, d), "v");  // an index may name any row
      rule.factor(v).when_cut = Factor::WhenCut::masked;
      rule.in(0, d, v);
      for (size_t k = 0; k < indices; ++k, ++o) {
        int f = rule.from(1, k, Kind::parallel, "i" + std::to_string(k));
        if (f >= 0) rule.out(0, o, f);
      }
      continue;
    }
    int f = rule.from(0, d, Kind::parallel, "d" + std::to_string(d));
    if (f >= 0) rule.out(0, o, f);
    ++o;
  }
  return rule.done();
}

// Away from the axis, index p looks at data p: one factor unless the index tensor is known to be shorter there.
FactorRule gather_elements_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0), axis = axis_of(node.get_int("axis", 0), rank);
  if (rule.rank(1) != rank) throw NoRule{"indices of another rank"};
  rule.out_rank(0, rank);
  for (size_t d = 0; d < rank; ++d) {
    const Dim &data = rule.dim(0, d), &index = rule.dim(1, d);
    int f = rule.from(1, d, Kind::parallel, "i" + std::to_string(d));
    if (f >= 0) rule.out(0, d, f);
    bool shorter = data.known() && index.known() && data != index;
    if (d == axis || shorter || f < 0) {
      rule.from(0, d, Kind::whole, d == axis ? "v" : "v" + std::to_string(d));
    } else {
      rule.in(0, d, f);
    }
  }
  return rule.done();
}

// data, indices, updates (as indices) -> as data
FactorRule scatter_elements_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0), axis = axis_of(node.get_int("axis", 0), rank);
  if (rule.rank(1) != rank || rule.rank(2) != rank) throw NoRule{"indices of another rank"};
  rule.out_rank(0, rank);
  for (size_t d = 0; d < rank; ++d) {
    const Dim &data = rule.dim(0, d), &index = rule.dim(1, d);
    bool shared = d != axis && !(data.known() && index.known() && data != index);
    int f = rule.from(0, d, shared ? Kind::parallel : Kind::whole, d == axis ? "v" : "d" + std::to_string(d));
    if (f >= 0) rule.out(0, d, f);
    int g = shared ? f : rule.whole(index, "u" + std::to_string(d));
    rule.in_unless_one(1, d, g);
    rule.in_unless_one(2, d, g);
  }
  return rule.done();
}

// data [b..., v..., d...], indices [b..., i..., k] -> [b..., i..., d...]; k says how many dimensions v has
FactorRule gather_nd_factors(const Node& node) {
  RuleBuilder rule(node);
  auto batch = static_cast<size_t>(node.get_int("batch_dims", 0));
  size_t rank = rule.rank(0), indices = rule.rank(1);
  if (indices == 0 || batch >= indices || batch > rank) throw NoRule{"its batch dimensions do not fit"};
  const Dim& tuple = rule.dim(1, indices - 1);
  if (!tuple.known() || batch + tuple.value > rank) throw NoRule{"the length of its index tuples is not known"};
  size_t first_kept = batch + static_cast<size_t>(tuple.value);
  rule.out_rank(0, indices - 1 + rank - first_kept);
  for (size_t d = 0; d + 1 < indices; ++d) {
    int f = rule.from(1, d, Kind::parallel, (d < batch ? "b" : "i") + std::to_string(d));
    if (f >= 0) rule.out(0, d, f);
    if (d < batch) rule.in_unless_one(0, d, f);
  }
  rule.in(1, indices - 1, rule.whole(tuple, "k"));
  for (size_t d = batch; d < rank; ++d) {
    bool kept = d >= first_kept;
    int f = rule.from(0, d, kept ? Kind::parallel : Kind::whole, (kept ? "d" : "v") + std::to_string(d));
    if (kept && f >= 0) rule.out(0, indices - 1 + d - first_kept, f);
  }
  return rule.done();
}

// data [v..., d...], indices [i..., k], updates [i..., d...] -> as data
FactorRule scatter_nd_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0), indices = rule.rank(1);
  if (indices == 0) throw NoRule{"indices without a dimension"};
  const Dim& tuple = rule.dim(1, indices - 1);
  if (!tuple.known() || static_cast<size_t>(tuple.value) > rank) throw NoRule{"the length of its index tuples is not known"};
  auto placed = static_cast<size_t>(tuple.value);
  if (rule.rank(2) != indices - 1 + rank - placed) throw NoRule{"updates of a rank that does not fit"};
  rule.out_rank(0, rank);
  for (size_t d = 0; d + 1 < indices; ++d) {
    int f = rule.from(1, d, Kind::whole, "i" + std::to_string(d));
    rule.in_unless_one(2, d, f);
  }
  rule.in(1, indices - 1, rule.whole(tuple, "k"));
  for (size_t d = 0; d < rank; ++d) {
    int f = rule.from(0, d, d < placed ? Kind::whole : Kind::parallel, (d < placed ? "v" : "d") + std::to_string(d));
    if (f < 0) continue;
    rule.out(0, d, f);
    if (d >= placed) rule.in_unless_one(2, indices - 1 + d - placed, f);
  }
  return rule.done();
}

// past [b, ..., t, ...], update (shorter at `axis`), write_indices [b] -> as past
FactorRule tensor_scatter_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0), axis = axis_of(node.get_int("axis", -2), rank);
  rule.out_rank(0, rank);
  for (size_t d = 0; d < rank; ++d) {
    int f = rule.add(rule.dim(0, d), d == axis ? Kind::whole : Kind::parallel, (d == axis ? "t" : "i") + std::to_string(d));
    rule.in(0, d, f);
    rule.out(0, d, f);
    rule.in(1, d, d == axis ? rule.whole(rule.dim(1, d), "u") : f);
    if (d == 0 && axis != 0 && rule.has(2)) rule.in(2, 0, f);
  }
  return rule.done();
}

FactorRule topk_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0), axis = axis_of(node.get_int("axis", -1), rank);
  for (size_t o = 0; o < node.outputs.size(); ++o) rule.out_rank(o, rank);
  for (size_t d = 0; d < rank; ++d) {
    int f = rule.from(0, d, d == axis ? Kind::whole : Kind::parallel, d == axis ? "v" : "i" + std::to_string(d));
    const Shape* y = rule.output_shape(0);
    int g = d != axis ? f : rule.whole(y && y->size() == rank ? (*y)[d] : Dim(), "k");
    for (size_t o = 0; g >= 0 && o < node.outputs.size(); ++o) rule.out(o, d, g);
    if (d == axis && f >= 0 && constant_ints(node, 1)) rule.set_combined(f, 2);
  }
  return rule.done();
}

FactorRule cumulative_factors(const Node& node) {
  RuleBuilder rule(node);
  auto axis_value = constant_ints(node, 1);
  if (!axis_value || axis_value->size() != 1) throw NoRule{"its axis is computed while it runs"};
  size_t rank = rule.rank(0), axis = axis_of((*axis_value)[0], rank);
  rule.out_rank(0, rank);
  for (size_t d = 0; d < rank; ++d) {
    int f = rule.from(0, d, d == axis ? Kind::whole : Kind::parallel, (d == axis ? "j" : "i") + std::to_string(d));
    if (f >= 0) rule.out(0, d, f);
  }
  return rule.done();
}

// indices [i...], depth, values [2] -> [i..., depth at `axis`]
FactorRule one_hot_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0), axis = axis_of(node.get_int("axis", -1), rank + 1);
  rule.out_rank(0, rank + 1);
  for (size_t d = 0; d < rank; ++d) {
    int f = rule.from(0, d, Kind::parallel, "i" + std::to_string(d));
    if (f >= 0) rule.out(0, d < axis ? d : d + 1, f);
  }
  rule.rest_whole(2, "values");
  const Shape* y = rule.output_shape(0);
  rule.out(0, axis, rule.whole(y && y->size() == rank + 1 ? (*y)[axis] : Dim(), "depth"));
  return rule.done();
}

// samples [n, classes] -> [n, draws]
FactorRule multinomial_factors(const Node& node) {
  RuleBuilder rule(node);
  if (rule.rank(0) != 2) throw NoRule{"an operand that is not a matrix"};
  int n = rule.parallel(rule.dim(0, 0), "n");
  rule.in(0, 0, n);
  rule.rest_whole(0, "classes");
  rule.out_rank(0, 2);
  rule.out(0, 0, n);
  rule.rest_whole_out(0, "draws");
  return rule.done();
}

OperatorRecord random_operator(OperatorRecord r) {
  r.random = true;
  return r;
}

}  // namespace

std::vector<OperatorRecord> indexing_operators() {
  constexpr Role move = Role::movement;
  std::vector<OperatorRecord> records = {
      {.name = "Gather", .since = 13, .role = move, .factors = gather_factors},
      {.name = "GatherElements", .since = 13, .role = move, .factors = gather_elements_factors},
      {.name = "GatherND", .since = 13, .role = move, .factors = gather_nd_factors},
      {.name = "Scatter", .since = 11, .role = move, .factors = scatter_elements_factors},
      {.name = "ScatterElements", .since = 18, .role = move, .factors = scatter_elements_factors},
      {.name = "ScatterND", .since = 18, .role = move, .factors = scatter_nd_factors},
      {.name = "TensorScatter", .since = 24, .role = move, .factors = tensor_scatter_factors},
      {.name = "TopK", .since = 24, .role = Role::reduction, .factors = topk_factors, .flops = input_elements},
      {.name = "CumSum", .since = 14, .factors = cumulative_factors, .flops = output_elements},
      {.name = "CumProd", .since = 26, .factors = cumulative_factors, .flops = output_elements},
      {.name = "OneHot", .since = 28, .role = move, .factors = one_hot_factors},
      random_operator({.name = "Multinomial", .since = 22, .factors = multinomial_factors}),
      {.name = "Compress", .since = 28},
      {.name = "NonZero", .since = 13},
      {.name = "Unique", .since = 28},
      {.name = "NonMaxSuppression", .since = 11},
  };
  return with_gradients(std::move(records), indexing_gradient);
}

}  // namespace fretsaw
