// Operators that read a shape, and what has to be rewritten where the shape has the batch baked in.
#include <algorithm>
#include <limits>

#include "partitioner/batch_analysis.h"

namespace fretsaw {
namespace {

// The whole dimension, as the contents of a shape tensor have it.
DimProduct batch_dim(const BatchAxis& b) {
  return b.outer * batch_symbol() * b.inner;
}

// The multiple of the batch that `p` is; nullopt when it is none.
std::optional<DimProduct> times_of_batch(const DimProduct& p) {
  return mentions_batch(p) ? quotient(p, batch_symbol()) : std::nullopt;
}

std::optional<std::vector<int64_t>> all_numbers(const std::vector<DimProduct>& dims) {
  std::vector<int64_t> result;
  for (const DimProduct& p : dims) {
    if (!p.is_number()) return std::nullopt;
    result.push_back(p.number);
  }
  return result;
}

const char* const kUnknownTarget = "the shape it makes is computed in a way that cannot be followed";

}  // namespace

void BatchAnalysis::shape_of(Node& node) {
  Value* x = node.input(0);
  BatchAxis b = axis_of_value(x);
  if (b.unknown_shape) throw Mixing{b.mixed->why};
  if (!x->type.is_tensor() || !x->type.shape) {
    if (b.holds_batch()) throw Mixing{"the shape of its operand is not known"};
    return;
  }
  std::vector<DimProduct> all = dims(x);
  if (b.holds_batch()) all[b.axis] = batch_dim(b);
  if (node.is("Size")) {
    DimProduct total(1);
    for (const DimProduct& p : all) total = total * p;
    contents_[node.out(0)] = {total};
    return;
  }
  auto rank = static_cast<int64_t>(all.size());
  auto clamp = [&](int64_t i) { return std::clamp<int64_t>(i < 0 ? i + rank : i, 0, rank); };
  int64_t start = clamp(node.get_int("start", 0)), end = clamp(node.get_int("end", rank));
  contents_[node.out(0)] = start < end ? Contents(all.begin() + start, all.begin() + end) : Contents{};
}

// The dimensions of a result whose shape is given, as types have them; nullopt when they are not known.
std::optional<std::vector<DimProduct>> BatchAnalysis::made_shape(Node& node) {
  bool reshape = node.is("Reshape"), expand = node.is("Expand");
  std::vector<DimProduct> to;
  if (node.is("Range")) {
    auto start = contents(node.input(0)), limit = contents(node.input(1)), delta = contents(node.input(2));
    bool counts = start && limit && delta && (*start)[0] == DimProduct(0) && (*delta)[0] == DimProduct(1);
    if (!counts || (*limit)[0].number < 0) return std::nullopt;
    return std::vector<DimProduct>{in_types((*limit)[0])};
  }
  if (!reshape && !expand && !node.is("ConstantOfShape")) return std::nullopt;
  auto target = contents(node.input(reshape || expand ? 1 : 0));
  if (!target) return std::nullopt;
  for (const DimProduct& p : *target) to.push_back(in_types(p));
  if (node.is("ConstantOfShape")) return to;
  if (!node.input(0)->type.shape) return std::nullopt;
  std::vector<DimProduct> from = dims(node.input(0));
  if (expand) {
    while (to.size() < from.size()) to.insert(to.begin(), DimProduct(1));
    for (size_t k = 0; k < from.size(); ++k)
      if (!from[k].is_one()) to[to.size() - from.size() + k] = from[k];
    return to;
  }
  bool zero_copies = node.get_int("allowzero", 0) == 0;
  DimProduct known(1), total(1);
  int open = -1;
  for (const DimProduct& p : from) total = total * p;
  for (size_t k = 0; k < to.size(); ++k) {
    if (to[k] == DimProduct(0) && zero_copies && k < from.size()) to[k] = from[k];
    if (to[k] == DimProduct(-1))
      open = static_cast<int>(k);
    else
      known = known * to[k];
  }
  if (open >= 0) {
    auto rest = quotient(total, known);
    to[open] = rest ? *rest : fresh();
  }
  return to;
}

void BatchAnalysis::reshape(Node& node) {
  Value *x = node.input(0), *y = node.out(0);
  if (!axis_of_value(x).holds_batch()) {
    if (axes.count(x)) return by_rule(node, factor_rule(node), true);  // mixed, and the batch is in no dimension of it
    throw Mixing{"it gives a constant the size of the batch"};
  }
  if (auto to = made_shape(node); to && !(y->type.shape && y->type.shape->size() == to->size() && is_static(*y->type.shape)))
    set_shape(y, *to);
  by_rule(node, factor_rule(node), true);
  check_reshape_target(node);
}

void BatchAnalysis::check_reshape_target(Node& node) {
  Value *x = node.input(0), *y = node.out(0);
  BatchAxis from = axis_of_value(x), to = axis_of_value(y);
  if (!to.holds_batch()) return;
  std::vector<DimProduct> out = dims(y);
  auto k = static_cast<size_t>(to.axis);
  auto target = contents(node.input(1));
  bool zero_copies = node.get_int("allowzero", 0) == 0;
  Node* n = &node;
  if (target && target->size() == out.size()) {
    auto copies = [&](size_t d) { return (*target)[d] == DimProduct(0) && zero_copies; };
    bool fine = true, open_elsewhere = false;
    for (size_t d = 0; d < out.size(); ++d) {
      const DimProduct& e = (*target)[d];
      if (d == k) {
        bool copied = copies(d) && from.axis == to.axis && from.outer * from.inner == to.outer * to.inner;
        fine &= e == DimProduct(-1) || e == batch_dim(to) || copied;
      } else {
        if (mentions_batch(e)) throw Mixing{"its target shape has the batch in another dimension than its result"};
        fine &= !(copies(d) && from.axis == static_cast<int>(d));
        open_elsewhere |= e == DimProduct(-1);
      }
    }
    if (fine) return;
    // Written for one batch: the batch's element becomes -1, and one that was -1 its size.
    std::vector<int64_t> fixed;
    for (size_t d = 0; d < out.size(); ++d) {
      const DimProduct& e = (*target)[d];
      bool keep = copies(d) && from.axis != static_cast<int>(d);
      if (d == k)
        fixed.push_back(-1);
      else if (keep)
        fixed.push_back(0);
      else if (out[d].is_number())
        fixed.push_back(out[d].number);
      else if (e == DimProduct(-1) || !e.is_number())
        break;
      else
        fixed.push_back(e.number);
    }
    if (fixed.size() == out.size()) {
      edits.push_back([=](BatchRewriter& r) { r.set_constant(*n, 1, fixed); });
      return;
    }
    DimProduct times = to.outer * to.inner;
    auto [like, like_dim] = sample_source(node);
    if (!times.is_number() || copies(k)) throw Mixing{kUnknownTarget};
    size_t length = out.size();
    edits.push_back(
        [=, like = like, like_dim = like_dim](BatchRewriter& r) { r.shape_element(*n, 1, k, length, times.number, like, like_dim); });
    return;
  }
  std::vector<DimProduct> rest = out;
  rest[k] = DimProduct(-1);
  auto fixed = all_numbers(rest);
  if (!fixed) throw Mixing{kUnknownTarget};
  edits.push_back([=, fixed = *fixed](BatchRewriter& r) { r.set_constant(*n, 1, fixed); });
}

void BatchAnalysis::expand(Node& node) {
  Value *x = node.input(0), *y = node.out(0);
  auto target = contents(node.input(1));
  BatchAxis b = axis_of_value(x);
  if (!target) throw Mixing{kUnknownTarget};
  std::vector<DimProduct> from = dims(x);
  size_t n = std::max(from.size(), target->size());
  auto source = [&](size_t k) { return k + from.size() >= n ? from[k + from.size() - n] : DimProduct(1); };
  auto wanted = [&](size_t k) { return k + target->size() >= n ? (*target)[k + target->size() - n] : DimProduct(1); };
  int batch_dim_out = b.holds_batch() ? b.axis + static_cast<int>(n - from.size()) : -1, sized_dim = -1;
  for (size_t k = 0; k < n; ++k) {
    DimProduct w = wanted(k);
    if (!mentions_batch(w)) continue;
    if (static_cast<int>(k) == batch_dim_out) {
      if (w != batch_dim(b)) throw Mixing{"it expands the batch axis to another size"};
      continue;
    }
    if (sized_dim >= 0 || b.holds_batch()) throw Mixing{"it pairs every sample of the batch with every other"};
    sized_dim = static_cast<int>(k);
  }
  if (!(y->type.shape && y->type.shape->size() == n && is_static(*y->type.shape))) set_shape(y, *made_shape(node));
  if (b.holds_batch()) {
    auto k = static_cast<size_t>(batch_dim_out);
    DimProduct w = wanted(k);
    if (!w.is_one() && !mentions_batch(w)) {  // a fixed batch
      if (w != in_types(batch_dim(b))) throw Mixing{kUnknownTarget};
      std::vector<DimProduct> all = *target;
      const size_t length = all.size(), element = k + length - n;
      all[element] = DimProduct(1);
      Node* at = &node;
      if (auto fixed = all_numbers(all))
        edits.push_back([=, fixed = *fixed](BatchRewriter& r) { r.set_constant(*at, 1, fixed); });
      else  // the other elements are known only when it runs
        edits.push_back([=, axis = b.axis](BatchRewriter& r) { r.shape_element(*at, 1, element, length, 1, x, axis); });
    }
    BatchAxis result = b;
    result.sample_index.clear();
    bool kept = b.sample_index.empty() || keeps_sample_index(node, result);
    result.axis = batch_dim_out;
    axes[y] = result;
    if (!kept) throw Mixing{"it uses the position of samples in the batch", "", false};
    return;
  }
  if (sized_dim < 0) return by_rule(node, factor_rule(node), true);
  auto k = static_cast<size_t>(sized_dim);
  BatchAxis result;
  result.axis = sized_dim;
  result.inner = *times_of_batch(wanted(k));
  result.uniform = true;
  if (!source(k).is_one()) {  // a constant written for one batch
    std::vector<SampleIndex> columns = narrow_index(node, 0, k + from.size() - n, 1, result.inner);
    result.sample_index = columns;
    result.uniform = columns.empty();
  }
  axes[y] = result;
}

void BatchAnalysis::constant_of_shape(Node& node) {
  auto target = contents(node.input(0));
  if (!target) throw Mixing{kUnknownTarget};
  BatchAxis result;
  result.uniform = true;
  for (size_t k = 0; k < target->size(); ++k) {
    auto times = times_of_batch((*target)[k]);
    if (!times) continue;
    if (result.holds_batch()) throw Mixing{"it pairs every sample of the batch with every other"};
    result.axis = static_cast<int>(k);
    result.inner = *times;
  }
  set_shape(node.out(0), *target);
  if (result.holds_batch()) axes[node.out(0)] = result;
}

void BatchAnalysis::range(Node& node) {
  auto start = contents(node.input(0)), limit = contents(node.input(1)), delta = contents(node.input(2));
  if (!start || !limit || !delta || start->size() != 1 || limit->size() != 1 || delta->size() != 1 || !((*start)[0] == DimProduct(0)) ||
      !((*delta)[0] == DimProduct(1)) || !((*limit)[0] == batch_symbol()))
    throw Mixing{"it computes with the size of the batch"};
  BatchAxis result;
  result.axis = 0;
  result.sample_index = {{DimProduct(1), DimProduct(1)}};
  set_shape(node.out(0), {batch_symbol()});
  axes[node.out(0)] = result;
}

void BatchAnalysis::tile(Node& node) {
  if (!sized(node.input(1))) return by_rule(node, factor_rule(node));
  auto repeats = *contents(node.input(1));
  if (axes.count(node.input(0))) throw Mixing{"it repeats samples as often as there are samples"};
  std::vector<DimProduct> to = dims(node.input(0));
  BatchAxis result;
  result.uniform = true;
  for (size_t k = 0; k < repeats.size() && k < to.size(); ++k) {
    if (auto times = times_of_batch(repeats[k])) {
      if (result.holds_batch()) throw Mixing{"it pairs every sample of the batch with every other"};
      result.axis = static_cast<int>(k);
      result.inner = *times * to[k];
    }
    to[k] = to[k] * repeats[k];
  }
  set_shape(node.out(0), to);
  axes[node.out(0)] = result;
}

void BatchAnalysis::slice(Node& node) {
  Value *x = node.input(0), *y = node.out(0);
  BatchAxis b = axis_of_value(x);
  std::vector<DimProduct> from = dims(x);
  auto starts = contents(node.input(1)), ends = contents(node.input(2)), over = contents(node.input(3)), steps = contents(node.input(4));
  if (!starts || !ends || (node.input(3) && !over) || (node.input(4) && !steps))
    throw Mixing{"its bounds are computed in a way that cannot be followed"};
  BatchAxis result = b;
  std::vector<bool> cut(from.size(), false);
  for (size_t k = 0; k < starts->size(); ++k) {
    int64_t axis = over ? (*over)[k].number : static_cast<int64_t>(k);
    if (over && !(*over)[k].is_number()) throw Mixing{"its axes are computed while it runs"};
    if (axis < 0) axis += static_cast<int64_t>(from.size());
    if (axis < 0 || axis >= static_cast<int64_t>(from.size())) throw Mixing{"its axis is out of range"};
    bool step_one = !steps || (*steps)[k].is_one(), from_start = (*starts)[k] == DimProduct(0);
    const DimProduct& end = (*ends)[k];
    bool here = b.axis == axis;
    bool huge = end.is_number() &&
                (end.number >= std::numeric_limits<int32_t>::max() || (from[axis].is_number() && end.number >= from[axis].number));
    bool all = step_one && from_start && (huge || (here && end == batch_dim(b)));
    cut[axis] = !all;
    if (here && !all) throw Mixing{"it takes some of the samples"};
    if (mentions_batch((*starts)[k]) || (mentions_batch(end) && !here && b.holds_batch()))
      throw Mixing{"it computes with the size of the batch"};
    if (here || !mentions_batch(end)) continue;
    // As many rows of a constant as there are samples.
    auto times = times_of_batch(end);
    RowPattern rows;
    if (x->constant && from[axis].is_number() && times->is_number() && step_one && from_start && from[axis].number % times->number == 0)
      rows = constant_pattern(*x, axis, from[axis].number / times->number, times->number);
    else if (step_one && from_start && x->producer)
      rows = pattern(x, axis, 1, *times);
    if (rows.kind == RowPattern::Kind::varying) throw Mixing{"it takes as many rows as there are samples, and they differ"};
    result.axis = static_cast<int>(axis);
    result.inner = *times;
    result.uniform = rows.kind == RowPattern::Kind::uniform;
    result.sample_index = rows.columns;
  }
  if (!y->type.shape) y->type = Type::tensor(y->type.dtype, Shape(from.size()));
  for (size_t d = 0; d < from.size() && d < y->type.shape->size(); ++d) {
    Dim& dim = (*y->type.shape)[d];
    if (!dim.known() && dim.symbol.empty() && static_cast<int>(d) == result.axis)
      dim = dim_of(in_types(batch_dim(result)));
    else if (!dim.known() && dim.symbol.empty() && !cut[d])
      dim = dim_of(in_types(from[d]));
  }
  if (!result.holds_batch()) return;  // what it takes has to do with no sample
  bool kept = b.sample_index.empty() || keeps_sample_index(node, result);
  axes[y] = result;
  if (!kept) throw Mixing{"it uses the position of samples in the batch", "", false};
}

// Without axes, a micro-batch of one sample would lose its batch dimension.
void BatchAnalysis::squeeze(Node& node) {
  by_rule(node, factor_rule(node));
  if (node.input(1) || node.has("axes") || !axes.count(node.input(0))) return;
  std::vector<int64_t> ones;
  const Shape& shape = *node.input(0)->type.shape;
  for (size_t d = 0; d < shape.size(); ++d)
    if (shape[d].value == 1) ones.push_back(static_cast<int64_t>(d));
  Node* n = &node;
  edits.push_back([=](BatchRewriter& r) { r.set_constant(*n, 1, ones); });
}

void BatchAnalysis::resize(Node& node) {
  BatchAxis b = axis_of_value(node.input(0));
  if (!b.holds_batch() || !node.input(3) || node.get_string("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize" ||
      node.get_string("keep_aspect_ratio_policy", "stretch") != "stretch")
    return by_rule(node, factor_rule(node));
  auto sizes = contents(node.input(3));
  std::vector<DimProduct> from = dims(node.input(0));
  std::vector<int64_t> axes_given = node.get_ints("axes");
  if (axes_given.empty())
    for (size_t d = 0; d < from.size(); ++d) axes_given.push_back(static_cast<int64_t>(d));
  if (!sizes || sizes->size() != axes_given.size()) throw Mixing{"its sizes are computed in a way that cannot be followed"};
  std::vector<int64_t> other_axes, other_sizes;
  std::vector<DimProduct> to = from;
  bool fixed = false;
  for (size_t k = 0; k < axes_given.size(); ++k) {
    int64_t a = axes_given[k] < 0 ? axes_given[k] + static_cast<int64_t>(from.size()) : axes_given[k];
    const DimProduct& size = (*sizes)[k];
    to.at(a) = in_types(size);
    if (a != b.axis) {
      if (mentions_batch(size)) throw Mixing{"it computes with the size of the batch"};
      other_axes.push_back(a);
      other_sizes.push_back(size.is_number() ? size.number : -1);
      continue;
    }
    if (in_types(size) != in_types(batch_dim(b))) throw Mixing{"it interpolates between samples of the batch"};
    fixed = !mentions_batch(size);
  }
  if (!(node.out(0)->type.shape && is_static(*node.out(0)->type.shape))) set_shape(node.out(0), to);
  if (fixed) {
    if (std::find(other_sizes.begin(), other_sizes.end(), -1) != other_sizes.end()) throw Mixing{kUnknownTarget};
    Node* n = &node;
    edits.push_back([=](BatchRewriter& r) {
      n->set("axes", other_axes);
      r.set_constant(*n, 3, other_sizes);
    });
  }
  axes[node.out(0)] = b;
  if (!b.sample_index.empty()) {
    axes[node.out(0)].sample_index.clear();
    throw Mixing{"it uses the position of samples in the batch", "", false};
  }
}

}  // namespace fretsaw
