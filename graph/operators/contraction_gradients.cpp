// Gradients of matrix products: MatMul, Gemm, Einsum.
#include <algorithm>
#include <unordered_map>

#include "graph/operators/einsum_equation.h"
#include "graph/operators/gradient_rules.h"
#include "graph/operators/gradient_terms.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

std::vector<int64_t> swaps_last_two(size_t rank) {
  std::vector<int64_t> perm(rank);
  for (size_t d = 0; d < rank; ++d) perm[d] = static_cast<int64_t>(d);
  std::swap(perm[rank - 2], perm[rank - 1]);
  return perm;
}

// What x [..., n, m] is the transpose [..., m, n] of, so that the backward pass keeps that one alone; null where x is no transpose.
Value* source_of_transpose(const Value* x, size_t rank) {
  const Node* node = x->producer;
  if (!node || !node->is("Transpose")) return nullptr;
  const std::vector<int64_t> perm = node->get_ints("perm");
  return perm == swaps_last_two(rank) || (perm.empty() && rank == 2) ? node->inputs[0] : nullptr;
}

void read_source(Value*& matrix, bool& transposes) {
  if (Value* source = source_of_transpose(matrix, 2)) matrix = source, transposes = !transposes;
}

Value* gemm(GradientContext& c, Value* a, bool transposes_a, Value* b, bool transposes_b, float alpha = 1) {
  read_source(a, transposes_a);
  read_source(b, transposes_b);
  std::vector<Attribute> attributes;
  if (alpha != 1) attributes.push_back({"alpha", alpha});
  if (transposes_a) attributes.push_back({"transA", int64_t{1}});
  if (transposes_b) attributes.push_back({"transB", int64_t{1}});
  return c.add("Gemm", {a, b}, attributes);
}

// [..., k] -> [rows, k]
Value* as_rows(GradientContext& c, Value* x, size_t rank) {
  return rank == 2 ? x : c.add("Flatten", {x}, {{"axis", static_cast<int64_t>(rank) - 1}});
}

// [..., m, n] -> [..., n, m]
Value* transposed(GradientContext& c, Value* x, size_t rank) {
  if (Value* source = source_of_transpose(x, rank)) return source;
  return c.add("Transpose", {x}, {{"perm", swaps_last_two(rank)}});
}

// a [..., m, k], b [k, n]: one product over all rows, da = g bT, db = aT g
std::vector<Value*> rows_by_matrix(GradientContext& c, size_t rank) {
  std::vector<Value*> found = c.none();
  Value *a = c.input(0), *b = c.input(1), *g = as_rows(c, c.of_output(), rank);
  if (c.wants(0)) {
    Value* rows = gemm(c, g, false, b, true);
    found[0] = rank == 2 ? rows : c.reshape_like(rows, a);
  }
  if (c.wants(1)) found[1] = gemm(c, as_rows(c, a, rank), true, g, false);
  return found;
}

// The leading dimensions of the result, then these two.
Shape batched(const Shape& result, size_t leading, const Dim& rows, const Dim& columns) {
  Shape shape(result.begin(), result.begin() + static_cast<int64_t>(leading));
  shape.push_back(rows);
  shape.push_back(columns);
  return shape;
}

// a [..., m, k], b [..., k, n] -> [..., m, n]; a vector has no m, or no n. Leading dimensions broadcast.
std::vector<Value*> matmul_gradient(GradientContext& c) {
  Value *a = c.input(0), *b = c.input(1), *g = c.of_output();
  const Shape &of_a = c.known_shape(a), &of_b = c.known_shape(b), &of_y = c.known_shape(c.output(0));
  const size_t ra = of_a.size(), rb = of_b.size();
  if (rb == 2 && ra >= 2) return rows_by_matrix(c, ra);
  std::vector<Value*> found = c.none();
  const Dim m = ra == 1 ? Dim(1) : of_a[ra - 2], n = rb == 1 ? Dim(1) : of_b[rb - 1], k = of_a[ra - 1];
  const size_t leading = of_y.size() - (ra > 1) - (rb > 1);
  if (rb == 1) g = c.add("Unsqueeze", {g, c.integers({-1})});
  if (ra == 1) g = c.add("Unsqueeze", {g, c.integers({-2})});
  if (c.wants(0)) {  // [..., m, k]
    Value* b_turned = rb == 1 ? c.add("Unsqueeze", {b, c.integers({0})}) : transposed(c, b, rb);
    const Shape has = batched(of_y, leading, m, k);
    found[0] = c.sum_to(c.add("MatMul", {g, b_turned}), &has, a);
  }
  if (c.wants(1)) {  // [..., k, n]
    Value* a_turned = ra == 1 ? c.add("Unsqueeze", {a, c.integers({1})}) : transposed(c, a, ra);
    Value* product = c.add("MatMul", {a_turned, g});
    Shape has = batched(of_y, leading, k, n);
    if (rb == 1) {
      product = c.add("Squeeze", {product, c.integers({-1})});
      has.pop_back();
    }
    found[1] = c.sum_to(product, &has, b);
  }
  return found;
}

// y = alpha a' b' + beta c
std::vector<Value*> gemm_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  Value *a = c.input(0), *b = c.input(1), *g = c.of_output();
  const bool ta = c.node().get_int("transA", 0) != 0, tb = c.node().get_int("transB", 0) != 0;
  const float alpha = c.node().get_float("alpha", 1), beta = c.node().get_float("beta", 1);
  if (c.wants(0)) found[0] = ta ? gemm(c, b, tb, g, true, alpha) : gemm(c, g, false, b, !tb, alpha);
  if (c.wants(1)) found[1] = tb ? gemm(c, g, true, a, ta, alpha) : gemm(c, a, !ta, g, false, alpha);
  if (c.wants(2)) {
    Term sum(c, c.sum_to(g, c.shape(c.output(0)), c.input(2)));
    found[2] = beta == 1 ? sum : sum * static_cast<double>(beta);
  }
  return found;
}

std::string text_of(const EinsumTerm& t) {
  return t.before + (t.ellipsis ? "..." : "") + t.after;
}
std::string labels_of(const EinsumTerm& t) {
  return t.before + t.after;
}

// The gradient of operand i: an Einsum of g and the other operands. Labels that operand i alone has were summed: g is the same along them.
// Of an operand whose labels repeat the diagonal takes part: that gets the gradient, and the rest of the operand 0.
class EinsumGradient {
 public:
  EinsumGradient(GradientContext& c, const EinsumEquation& e, size_t i)
      : c_(c), e_(e), i_(i), mine_(e.terms[i]), operand_(c.input(i)), own_(c.shape(operand_)) {}

  Value* make() {
    const EinsumTerm whole = mine_;
    mine_ = {unique(whole.before, ""), unique(whole.after, whole.before), whole.ellipsis};
    const bool diagonal = labels_of(mine_).size() < labels_of(whole).size();
    std::optional<Shape> of_diagonal;
    if (diagonal) {
      const Shape& known = c_.known_shape(operand_);
      of_diagonal = einsum_shape({{whole}, mine_}, {&known});
      if (!of_diagonal) c_.refuse("its equation does not fit the ranks");
      operand_ = c_.add("Einsum", {operand_}, {{"equation", text_of(whole) + "->" + text_of(mine_)}});
      operand_->type.shape = of_diagonal;
      own_ = &*of_diagonal;
    }
    Value* made = of_operand();
    return diagonal ? along_diagonal(made, whole) : made;
  }

 private:
  Value* of_operand() {
    check();
    EinsumEquation product = {{e_.result}, {}};
    std::string inputs = text_of(e_.result);
    std::vector<Value*> operands = {c_.of_output()};
    std::vector<const Shape*> shapes = {c_.shape(c_.output(0))};
    for (size_t j = 0; j < e_.terms.size(); ++j) {
      if (j == i_) continue;
      product.terms.push_back(e_.terms[j]);
      inputs += "," + text_of(e_.terms[j]);
      operands.push_back(c_.input(j));
      shapes.push_back(c_.shape(c_.input(j)));
    }
    EinsumTerm& to = product.result;
    to = {shared(mine_.before, inputs), shared(mine_.after, inputs), inputs.find("...") != std::string::npos};
    if (!mine_.ellipsis) std::swap(to.before, to.after);  // what others broadcast stands in front, and is summed
    if (to.ellipsis) check_ellipsis();
    Value* made = c_.add("Einsum", operands, {{"equation", inputs + "->" + text_of(to)}});
    std::optional<Shape> has = einsum_shape(product, shapes);
    made = spread(made, inputs, to.ellipsis, has);
    return c_.sum_to(made, has ? &*has : nullptr, operand_);
  }

  // The first of each label, of those that `before` does not have.
  static std::string unique(const std::string& labels, const std::string& before) {
    std::string found;
    for (char label : labels)
      if (before.find(label) == std::string::npos && found.find(label) == std::string::npos) found += label;
    return found;
  }

  // The numbers 0, 1, ... along dimension `at` of `rank`.
  Value* places(Value* like, size_t at, size_t rank) {
    std::vector<int64_t> shape(rank, 1);
    shape[at] = -1;
    Value* end = c_.add("Squeeze", {c_.size_value(like, static_cast<int64_t>(at)), c_.integers({0})});
    return c_.add("Reshape", {c_.add("Range", {c_.integer(0), end, c_.integer(1)}, {}, DType::int64), c_.integers(shape)});
  }

  // The gradient of the diagonal in its place.
  Value* along_diagonal(Value* gradient, const EinsumTerm& whole) {
    Value* operand = c_.input(i_);
    const std::string labels = labels_of(whole);
    const size_t rank = c_.rank(operand), dots = rank - labels.size();
    const auto dim = [&](size_t k) { return k < whole.before.size() ? k : k + dots; };
    std::vector<int64_t> repeated;
    Value* on = nullptr;
    for (size_t k = 0; k < labels.size(); ++k) {
      const size_t first = labels.find(labels[k]);
      if (first == k) continue;
      repeated.push_back(static_cast<int64_t>(dim(k)));
      Value* same = c_.add("Equal", {places(operand, dim(first), rank), places(operand, dim(k), rank)}, {}, DType::boolean);
      on = on ? c_.add("And", {on, same}, {}, DType::boolean) : same;
    }
    const Term g(c_, c_.add("Unsqueeze", {gradient, c_.integers(repeated)}));
    return where({&c_, on}, g, 0);
  }

  void check() const {
    const bool any = std::any_of(e_.terms.begin(), e_.terms.end(), [](const EinsumTerm& t) { return t.ellipsis; });
    if (any && !e_.result.ellipsis) c_.refuse("there is no gradient for an equation that sums over an ellipsis");
  }

  static std::string shared(const std::string& labels, const std::string& others) {
    std::string found;
    for (char label : labels)
      if (others.find(label) != std::string::npos) found += label;
    return found;
  }

  void check_ellipsis() const {
    const size_t dots = c_.rank(c_.output(0)) - labels_of(e_.result).size(),
                 own_dots = (own_ ? own_->size() : c_.rank(operand_)) - labels_of(mine_).size();
    if (own_dots < dots && mine_.ellipsis && !mine_.before.empty())
      c_.refuse("there is no gradient for an ellipsis that broadcasts inside an operand");
  }

  // Along labels that g and the other operands don't have, or have as 1 where this operand has more. `has` follows. Where it is this
  // operand that has 1 the rest is summed afterwards.
  Value* spread(Value* product, const std::string& inputs, bool ellipsis, std::optional<Shape>& has) {
    std::vector<int64_t> alone;
    bool expands = false;
    const std::string labels = labels_of(mine_);
    const auto is_alone = [&](char label) { return inputs.find(label) == std::string::npos; };
    const size_t dots = own_ ? own_->size() - labels.size() : 0;
    for (size_t d = 0; d < labels.size(); ++d) {
      const Dim mine = own_ ? (*own_)[d < mine_.before.size() ? d : d + dots] : Dim();
      // Its place: from the front, or behind the ellipsis from the end, where later labels that are alone are still to come.
      const bool in_front = d < mine_.before.size() && (mine_.ellipsis || !ellipsis);
      const size_t later = labels.size() - d - 1;
      const auto shared_later =
          later - static_cast<size_t>(std::count_if(labels.end() - static_cast<int64_t>(later), labels.end(), is_alone));
      if (is_alone(labels[d])) {
        alone.push_back(in_front ? static_cast<int64_t>(d) : -static_cast<int64_t>(later) - 1);
        if (has) has->insert(has->begin() + static_cast<int64_t>(in_front ? d : has->size() - shared_later), mine);
      } else if (labels_of(e_.result).find(labels[d]) == std::string::npos && has && mine.value != 1) {
        Dim& size = (*has)[in_front ? d : has->size() - shared_later - 1];
        if (same_known(size, mine) || size.value > 1) continue;
        expands = true;
        size = size.value == 1 || mine.known() ? mine : Dim();
      }
    }
    if (!alone.empty()) product = c_.add("Unsqueeze", {product, c_.integers(alone)});
    return expands || !alone.empty() ? c_.expand_like(product, operand_) : product;
  }

  GradientContext& c_;
  const EinsumEquation& e_;
  size_t i_;
  EinsumTerm mine_;  // of the operand, or its diagonal
  Value* operand_;
  const Shape* own_;  // its shape
};

std::vector<Value*> einsum_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  const EinsumEquation e = parse_einsum(c.node().get_string("equation", ""));
  if (e.terms.size() != found.size()) c.refuse("its equation names another number of operands");
  for (size_t i = 0; i < found.size(); ++i)
    if (c.wants(i)) found[i] = EinsumGradient(c, e, i).make();
  return found;
}

}  // namespace

GradientRule contraction_gradient(const std::string& name) {
  static const std::unordered_map<std::string, GradientRule> rules = {
      {"MatMul", matmul_gradient},      {"Gemm", gemm_gradient},          {"Einsum", einsum_gradient},
      {"MatMulInteger", zero_gradient}, {"QLinearMatMul", zero_gradient},
  };
  auto it = rules.find(name);
  return it == rules.end() ? nullptr : it->second;
}

}  // namespace fretsaw
