// Operators that move data along axes: Transpose, Concat, Split, Slice, Pad, Expand, Tile, DepthToSpace, Trilu.
#include <algorithm>
#include <limits>

#include "graph/operators/gradient_rules.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

using Kind = Factor::Kind;

// Input 0 and output 0 of one rank; dimensions where `passes` holds share a factor, the others are whole on both sides.
template <typename Passes>
FactorRule axiswise(RuleBuilder& rule, Passes passes, size_t outputs = 1) {
  size_t rank = rule.rank(0);
  for (size_t o = 0; o < outputs; ++o) rule.out_rank(o, rank);
  for (size_t d = 0; d < rank; ++d) {
    bool same = passes(d);
    int f = rule.from(0, d, same ? Kind::parallel : Kind::whole, (same ? "i" : "w") + std::to_string(d));
    for (size_t o = 0; same && f >= 0 && o < outputs; ++o) rule.out(o, d, f);
  }
  for (size_t o = 0; o < outputs; ++o) {
    const Shape* s = rule.output_shape(o);
    for (size_t d = 0; d < rank; ++d)
      if (!passes(d)) rule.out(o, d, rule.whole(s && s->size() == rank ? (*s)[d] : Dim(), "w" + std::to_string(d) + "'"));
  }
  return rule.done();
}

FactorRule transpose_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0);
  std::vector<int64_t> perm = node.get_ints("perm");
  if (perm.empty())
    for (size_t d = rank; d-- > 0;) perm.push_back(static_cast<int64_t>(d));
  if (perm.size() != rank) throw NoRule{"its permutation does not fit the rank"};
  std::vector<int> f(rank);
  for (size_t d = 0; d < rank; ++d) f[d] = rule.from(0, d, Kind::parallel, "i" + std::to_string(d));
  rule.out_rank(0, rank);
  for (size_t d = 0; d < rank; ++d) {
    int from = f[axis_of(perm[d], rank)];
    if (from >= 0) rule.out(0, d, from);
  }
  return rule.done();
}

FactorRule concat_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0), axis = axis_of(node.get_int("axis", 0), rank);
  bool single = node.inputs.size() == 1;
  rule.out_rank(0, rank);
  for (size_t d = 0; d < rank; ++d) {
    if (d == axis && !single) {
      for (size_t i = 0; i < node.inputs.size(); ++i) rule.in(i, d, rule.whole(rule.dim(i, d), "s" + std::to_string(i)));
      const Shape* y = rule.output_shape(0);
      rule.out(0, d, rule.whole(y && y->size() == rank ? (*y)[d] : Dim(), "cat"));
      continue;
    }
    // Every operand has the same size here; a number is worth more than a symbol.
    Dim size = rule.dim(0, d);
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      if (rule.rank(i) != rank) throw NoRule{"operands of unlike ranks"};
      if (!size.known() && (rule.dim(i, d).known() || size.symbol.empty())) size = rule.dim(i, d);
    }
    int f = rule.parallel(size, "i" + std::to_string(d));
    for (size_t i = 0; i < node.inputs.size(); ++i) rule.in(i, d, f);
    rule.out(0, d, f);
  }
  if (!single) {
    std::vector<const Shape*> parts;
    for (size_t i = 0; i < node.inputs.size(); ++i) parts.push_back(&rule.shape(i));
    rule.set_segments(false, axis, parts);
  }
  return rule.done();
}

FactorRule split_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t axis = axis_of(node.get_int("axis", 0), rule.rank(0));
  bool single = node.outputs.size() == 1;
  std::vector<const Shape*> parts;
  for (size_t o = 0; o < node.outputs.size(); ++o) parts.push_back(rule.output_shape(o));
  if (!single) rule.set_segments(true, axis, parts);
  return axiswise(
      rule, [&](size_t d) { return single || d != axis; }, node.outputs.size());
}

// The axes a Slice may shorten or turn round.
std::vector<bool> sliced_axes(const Node& node, RuleBuilder& rule) {
  size_t rank = rule.rank(0);
  std::vector<bool> cut(rank, false);
  auto axes = axes_of(node, 3, "axes", rank);
  auto starts = constant_ints(node, 1), ends = constant_ints(node, 2), steps = constant_ints(node, 4);
  if (!axes) {  // one start for each leading axis
    const Value* s = node.input(1);
    size_t n = starts                                                                            ? starts->size()
               : s && s->type.shape && s->type.shape->size() == 1 && (*s->type.shape)[0].known() ? (*s->type.shape)[0].value
                                                                                                 : rank;
    axes.emplace();
    for (size_t d = 0; d < std::min(n, rank); ++d) axes->push_back(d);
  }
  for (size_t k = 0; k < axes->size(); ++k) {
    const Dim& size = rule.dim(0, (*axes)[k]);
    bool step_one = !node.input(4) || (steps && k < steps->size() && (*steps)[k] == 1);
    bool from_start = starts && k < starts->size() && ((*starts)[k] == 0 || (size.known() && (*starts)[k] <= -size.value));
    bool to_end =
        ends && k < ends->size() && ((*ends)[k] >= std::numeric_limits<int32_t>::max() || (size.known() && (*ends)[k] >= size.value));
    if (!(step_one && from_start && to_end)) cut[(*axes)[k]] = true;
  }
  return cut;
}

FactorRule slice_factors(const Node& node) {
  RuleBuilder rule(node);
  std::vector<bool> cut = sliced_axes(node, rule);
  return axiswise(rule, [&](size_t d) { return !cut[d]; });
}

FactorRule pad_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0);
  auto axes = axes_of(node, 3, "axes", rank);
  if (!axes) {
    axes.emplace();
    for (size_t d = 0; d < rank; ++d) axes->push_back(d);
  }
  auto pads = constant_ints(node, 1);
  std::vector<bool> padded(rank, false);
  size_t n = axes->size();
  for (size_t k = 0; k < n; ++k) padded[(*axes)[k]] = !pads || pads->size() != 2 * n || (*pads)[k] != 0 || (*pads)[n + k] != 0;
  return axiswise(rule, [&](size_t d) { return !padded[d]; });
}

FactorRule center_crop_pad_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0);
  std::vector<bool> touched(rank, !node.has("axes"));
  for (int64_t a : node.get_ints("axes")) touched[axis_of(a, rank)] = true;
  return axiswise(rule, [&](size_t d) { return !touched[d]; });
}

FactorRule expand_factors(const Node& node) {
  RuleBuilder rule(node);
  const Shape* to = rule.output_shape(0);
  if (!to) throw NoRule{"the shape of its result is not known"};
  size_t rank = rule.rank(0), out = to->size();
  if (out < rank) throw NoRule{"its result has a lower rank"};
  rule.out_rank(0, out);
  rule.set_shape_operand(1);
  for (size_t o = 0; o < out; ++o) {
    std::string name = "i" + std::to_string(o);
    bool there = o + rank >= out && rule.dim(0, o + rank - out).value != 1;
    const Dim& size = (*to)[o];
    if (there) {
      int f = rule.from(0, o + rank - out, Kind::parallel, name);
      rule.out(0, o, f);
    } else if (size.value != 1) {
      rule.out(0, o, rule.repeated(size, name));
    }
  }
  return rule.done();
}

// [a, b] with repeats (2, 1) -> [(2 a), b]
FactorRule tile_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0);
  auto repeats = constant_ints(node, 1);
  const Shape* to = rule.output_shape(0);
  rule.out_rank(0, rank);
  for (size_t d = 0; d < rank; ++d) {
    Dim times;
    if (repeats && d < repeats->size()) {
      times = Dim((*repeats)[d]);
    } else if (to && to->size() == rank) {
      auto total = product_of((*to)[d]), part = product_of(rule.dim(0, d));
      auto q = total && part ? quotient(*total, *part) : std::nullopt;
      if (q) times = dim_of(*q);
    }
    if (times.value != 1) rule.out(0, d, rule.repeated(times, "t" + std::to_string(d)));
    int f = rule.from(0, d, Kind::parallel, "i" + std::to_string(d));
    if (f >= 0) rule.out(0, d, f);
  }
  return rule.done();
}

Dim divided(const Dim& d, int64_t by) {
  auto p = product_of(d);
  auto q = p ? quotient(*p, DimProduct(by)) : std::nullopt;
  return q ? dim_of(*q) : Dim();
}

// DCR: [n, (x y c), h, w] -> [n, c, (h x), (w y)]; CRD: [n, (c x y), h, w]
FactorRule depth_to_space_factors(const Node& node) {
  RuleBuilder rule(node);
  int64_t block = node.get_int("blocksize", 1);
  if (rule.rank(0) != 4 || block < 1) throw NoRule{"it needs four dimensions and a block size"};
  int n = rule.parallel(rule.dim(0, 0), "n"), c = rule.parallel(divided(rule.dim(0, 1), block * block), "c");
  int x = rule.whole(Dim(block), "x"), y = rule.whole(Dim(block), "y");  // the block size is the same on every part
  int h = rule.parallel(rule.dim(0, 2), "h"), w = rule.parallel(rule.dim(0, 3), "w");
  bool crd = node.get_string("mode", "DCR") == "CRD";
  rule.in(0, 0, n);
  for (int f : crd ? std::vector<int>{c, x, y} : std::vector<int>{x, y, c}) rule.in(0, 1, f);
  rule.in(0, 2, h);
  rule.in(0, 3, w);
  rule.out_rank(0, 4);
  rule.out(0, 0, n);
  rule.out(0, 1, c);
  for (int f : {h, x}) rule.out(0, 2, f);
  for (int f : {w, y}) rule.out(0, 3, f);
  return rule.done();
}

// [n, c, (h x), (w y)] -> DCR: [n, (x y c), h, w]; CRD: [n, (c x y), h, w]
FactorRule space_to_depth_factors(const Node& node) {
  RuleBuilder rule(node);
  int64_t block = node.get_int("blocksize", 1);
  if (rule.rank(0) != 4 || block < 1) throw NoRule{"it needs four dimensions and a block size"};
  int n = rule.parallel(rule.dim(0, 0), "n"), c = rule.parallel(rule.dim(0, 1), "c");
  int x = rule.whole(Dim(block), "x"), y = rule.whole(Dim(block), "y");  // the block size is the same on every part
  int h = rule.parallel(divided(rule.dim(0, 2), block), "h"), w = rule.parallel(divided(rule.dim(0, 3), block), "w");
  rule.in(0, 0, n);
  rule.in(0, 1, c);
  for (int f : {h, x}) rule.in(0, 2, f);
  for (int f : {w, y}) rule.in(0, 3, f);
  rule.out_rank(0, 4);
  rule.out(0, 0, n);
  const bool crd = node.get_string("mode", "DCR") == "CRD";
  for (int f : crd ? std::vector<int>{c, x, y} : std::vector<int>{x, y, c}) rule.out(0, 1, f);
  rule.out(0, 2, h);
  rule.out(0, 3, w);
  return rule.done();
}

FactorRule trilu_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0);
  rule.out_rank(0, rank);
  for (size_t d = 0; d < rank; ++d) {
    bool whole = d + 2 >= rank;
    int f = rule.from(0, d, whole ? Kind::whole : Kind::parallel, (whole ? "j" : "i") + std::to_string(d));
    if (f >= 0) rule.out(0, d, f);
  }
  return rule.done();
}

// The time axis is turned round for each sample by its own length: data [t, b, ...], lengths [b].
FactorRule reverse_sequence_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0), batch = axis_of(node.get_int("batch_axis", 1), rank), time = axis_of(node.get_int("time_axis", 0), rank);
  rule.out_rank(0, rank);
  for (size_t d = 0; d < rank; ++d) {
    int f = rule.from(0, d, d == time ? Kind::whole : Kind::parallel, (d == time ? "t" : "i") + std::to_string(d));
    if (f < 0) continue;
    rule.out(0, d, f);
    if (d == batch) rule.in_unless_one(1, 0, f);
  }
  return rule.done();
}

}  // namespace

std::vector<OperatorRecord> movement_operators() {
  constexpr Role move = Role::movement;
  std::vector<OperatorRecord> records = {
      {.name = "Transpose", .since = 25, .role = move, .factors = transpose_factors, .linear = Linear::first},
      {.name = "Concat", .since = 13, .role = move, .factors = concat_factors, .linear = Linear::all},
      {.name = "Split", .since = 18, .role = move, .factors = split_factors, .linear = Linear::first},
      {.name = "Slice", .since = 13, .role = move, .factors = slice_factors, .linear = Linear::first},
      {.name = "Pad", .since = 25, .role = move, .factors = pad_factors},
      {.name = "CenterCropPad", .since = 18, .role = move, .factors = center_crop_pad_factors},
      {.name = "Expand", .since = 13, .role = move, .factors = expand_factors, .linear = Linear::first},
      {.name = "Tile", .since = 13, .role = move, .factors = tile_factors},
      {.name = "DepthToSpace", .since = 28, .role = move, .factors = depth_to_space_factors},
      {.name = "SpaceToDepth", .since = 28, .role = move, .factors = space_to_depth_factors},
      {.name = "Trilu", .since = 14, .role = move, .factors = trilu_factors},
      {.name = "ReverseSequence", .since = 28, .role = move, .factors = reverse_sequence_factors},
  };
  return with_gradients(std::move(records), movement_gradient);
}

}  // namespace fretsaw
