// MatMul and its relatives, Gemm, Einsum.
#include <algorithm>
#include <map>
#include <set>

#include "graph/operators/einsum_equation.h"
#include "graph/operators/gradient_rules.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

using Kind = Factor::Kind;

struct MatMulFactors {
  int m = -1, n = -1;
};

// [..., m, k] x [..., k, n] at these operand numbers; vectors as numpy takes them.
MatMulFactors matmul_at(RuleBuilder& rule, size_t a, size_t b) {
  size_t ra = rule.rank(a), rb = rule.rank(b);
  if (ra == 0 || rb == 0) throw NoRule{"a scalar operand"};
  // Leading dimensions broadcast; a vector has none, and its contraction axis is its only one.
  std::vector<size_t> leading;
  if (ra > 2) leading.push_back(a);
  if (rb > 2) leading.push_back(b);
  std::vector<int> batch = leading.empty() ? std::vector<int>{} : broadcast(rule, leading, 2);
  MatMulFactors f;
  if (ra > 1) {
    f.m = rule.parallel(rule.dim(a, ra - 2), "m");
    rule.in(a, ra - 2, f.m);
  }
  const Dim& ka = rule.dim(a, ra - 1);
  int k = rule.sum(ka.known() ? ka : rule.dim(b, rb == 1 ? 0 : rb - 2), "k");
  rule.in(a, ra - 1, k);
  rule.in(b, rb == 1 ? 0 : rb - 2, k);
  if (rb > 1) {
    f.n = rule.parallel(rule.dim(b, rb - 1), "n");
    rule.in(b, rb - 1, f.n);
  }
  size_t rank = batch.size() + (f.m >= 0) + (f.n >= 0);
  rule.out_rank(0, rank);
  for (size_t d = 0; d < batch.size(); ++d)
    if (batch[d] >= 0) rule.out(0, d, batch[d]);
  if (f.m >= 0) rule.out(0, batch.size(), f.m);
  if (f.n >= 0) rule.out(0, rank - 1, f.n);
  return f;
}

FactorRule matmul_factors(const Node& node) {
  RuleBuilder rule(node);
  matmul_at(rule, 0, 1);
  return rule.done();
}

// Scales and zero points: scalars, or one for each row of a (m) or column of b (n).
void per_row(RuleBuilder& rule, size_t operand, int factor, bool row) {
  if (!rule.has(operand)) return;
  size_t rank = rule.rank(operand);
  if (rank == 0 || (rank == 1 && rule.dim(operand, 0).value == 1)) return;
  if (rank == 1) {
    if (factor < 0) throw NoRule{"a scale for each row of a vector"};
    rule.in(operand, 0, factor);
    return;
  }
  // [..., m, 1] or [..., 1, n]: leading dimensions are those of the operand it belongs to.
  size_t at = row ? rank - 2 : rank - 1;
  for (size_t d = 0; d < rank; ++d) {
    if (d == at)
      rule.in_unless_one(operand, d, factor);
    else if (rule.dim(operand, d).value != 1)
      throw NoRule{"a scale for each matrix of a batch"};
  }
}

FactorRule matmul_integer_factors(const Node& node) {
  RuleBuilder rule(node);
  MatMulFactors f = matmul_at(rule, 0, 1);
  per_row(rule, 2, f.m, true);
  per_row(rule, 3, f.n, false);
  return rule.done();
}

FactorRule qlinear_matmul_factors(const Node& node) {
  RuleBuilder rule(node);
  MatMulFactors f = matmul_at(rule, 0, 3);
  for (size_t i : {1, 2}) per_row(rule, i, f.m, true);
  for (size_t i : {4, 5}) per_row(rule, i, f.n, false);
  for (size_t i : {6, 7}) per_row(rule, i, f.m, true);
  rule.set_rounds();
  return rule.done();
}

FactorRule gemm_factors(const Node& node) {
  RuleBuilder rule(node);
  bool ta = node.get_int("transA", 0) != 0, tb = node.get_int("transB", 0) != 0;
  if (rule.rank(0) != 2 || rule.rank(1) != 2) throw NoRule{"operands that are not matrices"};
  int m = rule.parallel(rule.dim(0, ta ? 1 : 0), "m");
  const Dim& ka = rule.dim(0, ta ? 0 : 1);
  int k = rule.sum(ka.known() ? ka : rule.dim(1, tb ? 1 : 0), "k");
  int n = rule.parallel(rule.dim(1, tb ? 0 : 1), "n");
  rule.in(0, ta ? 1 : 0, m);
  rule.in(0, ta ? 0 : 1, k);
  rule.in(1, tb ? 1 : 0, k);
  rule.in(1, tb ? 0 : 1, n);
  if (rule.has(2)) {  // [n], [1, n], [m, 1], [m, n], []
    size_t rank = rule.rank(2);
    if (rank > 2) throw NoRule{"a bias of more than two dimensions"};
    // A dimension of 1 broadcasts unless the result's is 1 too, where it is both; no factor is right for both.
    if (rank >= 1) rule.in_unless_one(2, rank - 1, n);
    if (rank == 2) rule.in_unless_one(2, 0, m);
    rule.set_added(2);
  }
  rule.out_rank(0, 2);
  rule.out(0, 0, m);
  rule.out(0, 1, n);
  return rule.done();
}

double gemm_flops(const Node& node) {
  double bias = node.input(2) ? output_elements(node) : 0;
  return contraction_flops(node) + bias;
}

FactorRule einsum_factors(const Node& node) {
  RuleBuilder rule(node);
  EinsumEquation e = parse_einsum(node.get_string("equation", ""));
  if (e.terms.size() != node.inputs.size()) throw NoRule{"its equation names another number of operands"};
  size_t dots = 0;  // dimensions of the ellipsis
  for (size_t i = 0; i < e.terms.size(); ++i) {
    size_t named = e.terms[i].before.size() + e.terms[i].after.size();
    if (rule.rank(i) < named || (!e.terms[i].ellipsis && rule.rank(i) != named)) throw NoRule{"its equation does not fit the ranks"};
    dots = std::max(dots, rule.rank(i) - named);
  }
  std::string result = e.result.before + e.result.after;
  std::set<std::string> diagonal;  // labels that stand twice in a term: their dimensions are given whole
  for (const EinsumTerm& t : e.terms) {
    const std::string labels = t.before + t.after;
    for (char c : labels)
      if (std::count(labels.begin(), labels.end(), c) > 1) diagonal.insert(std::string(1, c));
  }
  std::map<std::string, int> factors;  // by label; "...0" for the ellipsis
  // An operand's dimension of 1 broadcasts, so the factor is made from the first operand where it is not 1.
  auto place = [&](size_t operand, size_t d, const std::string& label, bool parallel) {
    const Dim& size = rule.dim(operand, d);
    if (size.value == 1) return;
    if (diagonal.count(label)) return rule.in(operand, d, rule.whole(size, label + std::to_string(operand) + std::to_string(d)));
    auto [it, fresh] = factors.emplace(label, -1);
    if (fresh)
      it->second = rule.add(size, parallel ? Kind::parallel : Kind::sum, label);
    else if (!rule.factor(it->second).size.known())
      rule.factor(it->second).size = size;
    rule.in(operand, d, it->second);
  };
  for (size_t i = 0; i < e.terms.size(); ++i) {
    const EinsumTerm& t = e.terms[i];
    std::string labels = t.before + t.after;
    size_t mine = rule.rank(i) - labels.size();
    for (size_t d = 0; d < rule.rank(i); ++d) {
      if (d < t.before.size())
        place(i, d, std::string(1, t.before[d]), result.find(t.before[d]) != std::string::npos);
      else if (d < t.before.size() + mine)
        place(i, d, "..." + std::to_string(dots - mine + d - t.before.size()), e.result.ellipsis);
      else {
        char c = t.after[d - t.before.size() - mine];
        place(i, d, std::string(1, c), result.find(c) != std::string::npos);
      }
    }
  }
  size_t shown = e.result.ellipsis ? dots : 0;
  rule.out_rank(0, result.size() + shown);
  size_t o = 0;
  auto put = [&](const std::string& label) {
    auto it = factors.find(label);
    if (it != factors.end()) rule.out(0, o, it->second);
    const Shape* y = diagonal.count(label) ? rule.output_shape(0) : nullptr;
    if (diagonal.count(label) && !(y && (*y)[o].value == 1)) rule.out(0, o, rule.whole(y ? (*y)[o] : Dim(), label));
    ++o;
  };
  for (char c : e.result.before) put(std::string(1, c));
  for (size_t d = 0; d < shown; ++d) put("..." + std::to_string(d));
  for (char c : e.result.after) put(std::string(1, c));
  return rule.done();
}

double einsum_flops(const Node& node) {
  FactorRule rule = factor_rule(node);
  bool sums = std::any_of(rule.factors.begin(), rule.factors.end(), [](const Factor& f) { return f.kind == Kind::sum; });
  if (node.inputs.size() < 2) return sums ? input_elements(node) : 0;
  return sums ? contraction_flops(node) : output_elements(node);
}

}  // namespace

std::vector<OperatorRecord> contraction_operators() {
  std::vector<OperatorRecord> records = {
      {.name = "MatMul",
       .since = 13,
       .role = Role::contraction,
       .factors = matmul_factors,
       .flops = contraction_flops,
       .linear = Linear::each},
      {.name = "MatMulInteger", .since = 10, .role = Role::contraction, .factors = matmul_integer_factors, .flops = contraction_flops},
      {.name = "QLinearMatMul", .since = 21, .role = Role::contraction, .factors = qlinear_matmul_factors, .flops = contraction_flops},
      {.name = "Gemm", .since = 13, .role = Role::contraction, .factors = gemm_factors, .flops = gemm_flops},
      {.name = "Einsum", .since = 28, .role = Role::contraction, .factors = einsum_factors, .flops = einsum_flops},
  };
  return with_gradients(std::move(records), contraction_gradient);
}

}  // namespace fretsaw
