// Operators that regroup elements in their order: Reshape, Flatten, Squeeze, Unsqueeze.
//
//   [8, 64] -> [8, 4, 16]     a=8 b=4 c=16: [a, (b c)] -> [a, b, c]
//   [2, 16] -> [8, 4]         a=2 b=4 c=4:  [a, (b c)] -> [(a b), c]
//   [4, 9]  -> [6, 6]         a=2 is common; what is left, 2*9 and 3*6, has no common factors: whole
#include "graph/operators/gradient_rules.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

// Walks the dimensions of one side; `left` is the part of dimension `d` that no factor covers yet.
struct Side {
  std::vector<DimProduct> dims;
  size_t d = 0;
  DimProduct left;

  void start() {
    while (d < dims.size() && dims[d].is_one()) ++d;
    if (d < dims.size()) left = dims[d];
  }
  bool done() const { return d >= dims.size(); }
  void take(const DimProduct& part) {
    left = *quotient(left, part);
    if (!left.is_one()) return;
    ++d;
    start();
  }
};

std::vector<DimProduct> products_of(const Shape& shape, const char* prefix) {
  std::vector<DimProduct> dims;
  for (size_t d = 0; d < shape.size(); ++d) {
    auto p = product_of(shape[d]);
    dims.push_back(p ? *p : DimProduct(prefix + std::to_string(d)));  // a symbol of its own
  }
  return dims;
}

// Fills in the one unknown dimension of `to` from the number of elements.
Shape complete(const Shape& from, Shape to) {
  Dim* unknown = nullptr;
  DimProduct known(1), total(1);
  for (Dim& d : to) {
    if (auto p = product_of(d))
      known = known * *p;
    else if (unknown)
      return to;
    else
      unknown = &d;
  }
  for (const DimProduct& p : products_of(from, "?in")) total = total * p;
  if (!unknown) return to;
  if (auto q = quotient(total, known)) *unknown = dim_of(*q);
  return to;
}

// The residues of both sides have no common factor: whole dimensions up to where as many elements have passed on both.
void unfactorable(RuleBuilder& rule, size_t operand, Side& a, Side& b) {
  DimProduct pa = a.left, pb = b.left;
  size_t ea = a.d + 1, eb = b.d + 1;
  // The shortest runs of equal size; at the end of both sides everything has passed.
  [&] {
    DimProduct x = a.left;
    for (ea = a.d + 1; ea <= a.dims.size(); ++ea) {
      DimProduct y = b.left;
      for (eb = b.d + 1; eb <= b.dims.size(); ++eb) {
        if (x == y) return;
        if (eb < b.dims.size()) y = y * b.dims[eb];
      }
      if (ea < a.dims.size()) x = x * a.dims[ea];
    }
    ea = a.dims.size();
    eb = b.dims.size();
  }();
  for (size_t d = a.d; d < ea; ++d) rule.in(operand, d, rule.whole(dim_of(d == a.d ? pa : a.dims[d]), "u" + std::to_string(d)));
  for (size_t d = b.d; d < eb; ++d) rule.out(0, d, rule.whole(dim_of(d == b.d ? pb : b.dims[d]), "v" + std::to_string(d)));
  a.d = ea;
  b.d = eb;
  a.start();
  b.start();
}

FactorRule reshape_factors(const Node& node) {
  RuleBuilder rule(node);
  const Shape* to = rule.output_shape(0);
  if (!to) throw NoRule{"the shape of its result is not known"};
  regroup(rule, 0, rule.shape(0), *to);
  rule.set_shape_operand(1);
  return rule.done();
}

FactorRule flatten_factors(const Node& node) {
  RuleBuilder rule(node);
  const Shape& from = rule.shape(0);
  auto rank = static_cast<int64_t>(from.size());
  int64_t axis = node.get_int("axis", 1);
  if (axis < 0) axis += rank;
  if (axis < 0 || axis > rank) throw NoRule{"its axis is out of range"};
  Shape to(2);
  DimProduct parts[2];
  std::vector<DimProduct> dims = products_of(from, "?in");
  for (int64_t d = 0; d < rank; ++d) parts[d >= axis] = parts[d >= axis] * dims[d];
  for (size_t k : {0, 1}) to[k] = dim_of(parts[k]);
  regroup(rule, 0, from, to);
  return rule.done();
}

FactorRule squeeze_factors(const Node& node) {
  RuleBuilder rule(node);
  const Shape& from = rule.shape(0);
  auto axes = axes_of(node, 1, "axes", from.size());
  std::vector<bool> gone(from.size(), false);
  if (axes)
    for (size_t a : *axes) gone[a] = true;
  else
    for (size_t d = 0; d < from.size(); ++d) gone[d] = from[d].value == 1;
  size_t o = 0;
  std::vector<int> kept;
  for (size_t d = 0; d < from.size(); ++d)
    if (!gone[d]) kept.push_back(rule.from(0, d, Factor::Kind::parallel, "i" + std::to_string(d)));
  rule.out_rank(0, kept.size());
  for (int f : kept) {
    if (f >= 0) rule.out(0, o, f);
    ++o;
  }
  return rule.done();
}

FactorRule unsqueeze_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0);
  std::vector<int64_t> axes = node.get_ints("axes");
  if (!node.has("axes")) {
    auto values = constant_ints(node, 1);
    if (!values) throw NoRule{"its axes are computed while it runs"};
    axes = *values;
  }
  size_t out = rank + axes.size();
  std::vector<bool> added(out, false);
  for (int64_t a : axes) added[axis_of(a, out)] = true;
  rule.out_rank(0, out);
  size_t d = 0;
  for (size_t o = 0; o < out; ++o) {
    if (added[o] || d >= rank) continue;
    int f = rule.from(0, d, Factor::Kind::parallel, "i" + std::to_string(d));
    if (f >= 0) rule.out(0, o, f);
    ++d;
  }
  return rule.done();
}

}  // namespace

void regroup(RuleBuilder& rule, size_t operand, const Shape& from, const Shape& given) {
  Shape to = complete(from, given);
  rule.out_rank(0, to.size());
  Side a{products_of(from, "?in"), 0, {}}, b{products_of(to, "?out"), 0, {}};
  for (const Side* side : {&a, &b})
    for (const DimProduct& p : side->dims)
      if (p.number == 0) {  // no elements: nothing flows
        rule.rest_whole(operand);
        rule.rest_whole_out(0);
        return;
      }
  a.start();
  b.start();
  int count = 0;
  while (!a.done() && !b.done()) {
    DimProduct common = common_divisor(a.left, b.left);
    if (common.is_one()) {
      unfactorable(rule, operand, a, b);
      continue;
    }
    int f = rule.parallel(dim_of(common), std::string(1, static_cast<char>('a' + count % 26)));
    ++count;
    rule.in(operand, a.d, f);
    rule.out(0, b.d, f);
    a.take(common);
    b.take(common);
  }
  for (; !a.done(); ++a.d, a.start()) rule.in(operand, a.d, rule.whole(dim_of(a.left), "u" + std::to_string(a.d)));
  for (; !b.done(); ++b.d, b.start()) rule.out(0, b.d, rule.whole(dim_of(b.left), "v" + std::to_string(b.d)));
}

std::vector<OperatorRecord> reshape_operators() {
  std::vector<OperatorRecord> records = {
      {.name = "Reshape", .since = 25, .role = Role::movement, .factors = reshape_factors, .linear = Linear::first},
      {.name = "Flatten", .since = 25, .role = Role::movement, .factors = flatten_factors, .linear = Linear::first},
      {.name = "Squeeze", .since = 25, .role = Role::movement, .factors = squeeze_factors, .linear = Linear::first},
      {.name = "Unsqueeze", .since = 25, .role = Role::movement, .factors = unsqueeze_factors, .linear = Linear::first},
  };
  return with_gradients(std::move(records), movement_gradient);
}

}  // namespace fretsaw
