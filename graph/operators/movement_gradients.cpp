// Gradients of operators that move data: the elements of g go back to where they came from, and add up where one went to several places.
#include <algorithm>
#include <unordered_map>

#include "graph/operators/gradient_rules.h"
#include "graph/operators/gradient_terms.h"
#include "graph/operators/picked_axis.h"

namespace fretsaw {
namespace {

std::vector<Value*> reshape_gradient(GradientContext& c) {
  return only_first(c, c.reshape_like(c.of_output(), c.input(0)));
}

std::vector<Value*> squeeze_gradient(GradientContext& c) {
  if (!c.input(1)) return reshape_gradient(c);
  return only_first(c, c.add("Unsqueeze", {c.of_output(), c.input(1)}));
}

std::vector<Value*> unsqueeze_gradient(GradientContext& c) {
  return only_first(c, c.add("Squeeze", {c.of_output(), c.input(1)}));
}

std::vector<Value*> transpose_gradient(GradientContext& c) {
  const std::vector<int64_t> perm = c.node().get_ints("perm");
  if (perm.empty()) return only_first(c, c.add("Transpose", {c.of_output()}));  // reversed: its own inverse
  std::vector<int64_t> inverse(perm.size());
  for (size_t d = 0; d < perm.size(); ++d) inverse[c.axis(perm[d], perm.size())] = static_cast<int64_t>(d);
  return only_first(c, c.add("Transpose", {c.of_output()}, {{"perm", inverse}}));
}

// The sizes of the operands along the axis, as an int64 tensor.
Value* sizes_along(GradientContext& c, int64_t axis) {
  std::vector<int64_t> sizes;
  std::vector<Value*> parts;
  for (Value* x : c.node().inputs) {
    parts.push_back(c.size_value(x, axis));
    if (const Shape* s = c.shape(x)) sizes.push_back((*s)[c.axis(axis, s->size())].value);
  }
  const bool known = sizes.size() == parts.size() && std::count(sizes.begin(), sizes.end(), -1) == 0;
  return known ? c.integers(sizes) : c.add("Concat", parts, {{"axis", int64_t{0}}}, DType::int64);
}

std::vector<Value*> concat_gradient(GradientContext& c) {
  const int64_t axis = c.node().get_int("axis", 0);
  const size_t n = c.node().inputs.size();
  if (n == 1) return {c.of_output()};
  // All parts are made, so that the node stays a plain Split.
  return c.add_several("Split", {c.of_output(), sizes_along(c, axis)}, std::vector<bool>(n, true), {{"axis", axis}});
}

std::vector<Value*> split_gradient(GradientContext& c) {
  std::vector<Value*> parts;
  for (size_t o = 0; o < c.node().outputs.size(); ++o)
    parts.push_back(c.of_output(o) ? c.of_output(o) : c.zeros_like(c.output(o, c.input(0)->type.dtype)));
  if (parts.size() == 1) return only_first(c, parts[0]);
  return only_first(c, c.add("Concat", parts, {{"axis", c.node().get_int("axis", 0)}}));
}

// Known starts and ends in steps of 1 along known dimensions: zeros around g.
Value* padded_slice(GradientContext& c, const std::vector<int64_t>& axes) {
  const auto starts = c.constant_ints(1), ends = c.constant_ints(2), steps = c.constant_ints(4);
  if (!starts || !ends || (c.input(4) && !steps) || starts->size() != axes.size() || ends->size() != axes.size()) return nullptr;
  std::vector<int64_t> touched, before, after;
  for (size_t k = 0; k < axes.size(); ++k) {
    const int64_t size = c.known_shape(c.input(0))[static_cast<size_t>(axes[k])].value;
    if (size < 0 || (steps && steps->at(k) != 1)) return nullptr;
    auto from_front = [&](int64_t at) { return std::clamp<int64_t>(at < 0 ? at + size : at, 0, size); };
    const int64_t first = from_front((*starts)[k]), last = std::max(first, from_front((*ends)[k]));
    if (first == 0 && last == size) continue;
    touched.push_back(axes[k]);
    before.push_back(first);
    after.push_back(size - last);
  }
  if (touched.empty()) return c.of_output();
  before.insert(before.end(), after.begin(), after.end());
  return c.add("Pad", {c.of_output(), c.integers(before), nullptr, c.integers(touched)});
}

std::vector<int64_t> sliced_axes(GradientContext& c) {
  const size_t rank = c.rank(c.input(0));
  std::vector<int64_t> axes;
  if (!c.input(3)) {
    const Shape& starts = c.known_shape(c.input(1));
    if (starts.size() != 1 || !starts[0].known()) c.refuse("its gradient needs to know how many axes it slices");
    for (int64_t d = 0; d < starts[0].value; ++d) axes.push_back(d);
    return axes;
  }
  const auto given = c.constant_ints(3);
  if (!given) c.refuse("its gradient needs constant axes");
  for (int64_t a : *given) axes.push_back(static_cast<int64_t>(c.axis(a, rank)));
  return axes;
}

std::vector<Value*> slice_gradient(GradientContext& c) {
  const std::vector<int64_t> axes = sliced_axes(c);
  if (Value* padded = padded_slice(c, axes)) return only_first(c, padded);
  // Element k of each list, for a slice of one axis.
  auto slice = [&](Value* x, int64_t axis, size_t k) {
    std::vector<Value*> operands = {x, list_element(c, c.input(1), k), list_element(c, c.input(2), k), c.integers({axis})};
    if (c.input(4)) operands.push_back(list_element(c, c.input(4), k));
    return c.add("Slice", operands);
  };
  return only_first(c, unpick_axes(c, axes, slice));
}

// The sum of g over what was padded: 1 there, and 0 where x's elements are.
Value* padded_value_gradient(GradientContext& c) {
  Term g(c, c.of_output());
  std::vector<Value*> operands = {c.zeros_like(c.input(0)), c.input(1), g.number(1)};
  if (c.input(3)) operands.push_back(c.input(3));
  Term padded = g * g.made("Pad", operands);
  return c.reshape_like(padded.made("ReduceSum", {padded}, {{"keepdims", int64_t{0}}}), c.input(2));
}

std::vector<Value*> pad_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  const std::string mode = c.node().get_string("mode", "constant");
  const auto pads = c.constant_ints(1);
  if (mode == "constant") {  // negative padding cuts, and cuts are padded
    std::vector<int64_t> opposite;
    for (int64_t n : pads.value_or(std::vector<int64_t>())) opposite.push_back(-n);
    std::vector<Value*> operands = {c.of_output(), pads ? c.integers(opposite) : c.add("Neg", {c.input(1)})};
    if (c.input(3)) operands.insert(operands.end(), {nullptr, c.input(3)});
    found[0] = c.add("Pad", operands);
    if (c.wants(2)) found[2] = padded_value_gradient(c);
    return found;
  }
  const size_t rank = c.rank(c.input(0));
  auto named = c.input(3) ? c.constant_ints(3) : std::vector<int64_t>();
  if (!c.input(3))
    for (size_t d = 0; d < rank; ++d) named->push_back(static_cast<int64_t>(d));
  if (!pads || !named || pads->size() != 2 * named->size()) c.refuse("its gradient in mode " + mode + " needs constant pads and axes");
  std::vector<int64_t> axes, before, after;
  for (size_t k = 0; k < named->size(); ++k) {
    if ((*pads)[k] == 0 && (*pads)[named->size() + k] == 0) continue;
    axes.push_back(static_cast<int64_t>(c.axis((*named)[k], rank)));
    before.push_back((*pads)[k]);
    after.push_back((*pads)[named->size() + k]);
  }
  auto pad = [&](Value* x, int64_t axis, size_t k) {
    return c.add("Pad", {x, c.integers({before[k], after[k]}), nullptr, c.integers({axis})}, {{"mode", mode}});
  };
  found[0] = unpick_axes(c, axes, pad);
  return found;
}

std::vector<Value*> expand_gradient(GradientContext& c) {
  return only_first(c, c.sum_to(c.of_output(), c.shape(c.output(0)), c.input(0)));
}

// [(2 a), (3 b)] -> [2, a, 3, b], summed over the repeats
std::vector<Value*> tile_gradient(GradientContext& c) {
  const Shape& shape = c.known_shape(c.input(0));
  const auto repeats = c.constant_ints(1);
  std::vector<int64_t> target, axes;
  std::vector<Value*> parts;
  for (size_t d = 0; d < shape.size(); ++d) {
    axes.push_back(static_cast<int64_t>(2 * d));
    target.push_back(repeats ? repeats->at(d) : -1);
    target.push_back(shape[d].value);
    parts.push_back(repeats ? c.integers({repeats->at(d)}) : list_element(c, c.input(1), d));
    parts.push_back(c.size_value(c.input(0), static_cast<int64_t>(d)));
  }
  if (shape.empty()) return only_first(c, c.of_output());
  const bool constant = std::count(target.begin(), target.end(), -1) <= 1 && std::count(target.begin(), target.end(), 0) == 0;
  Value* to = constant ? c.integers(target) : c.add("Concat", parts, {{"axis", int64_t{0}}}, DType::int64);
  std::vector<Attribute> attributes;
  if (!constant) attributes.push_back({"allowzero", int64_t{1}});
  return only_first(c, c.reduce_sum(c.add("Reshape", {c.of_output(), to}, attributes), axes, false));
}

// Cuts what was padded and pads what was cut; both take the odd element at the end.
std::vector<Value*> center_crop_pad_gradient(GradientContext& c) {
  Value* shape = c.shape_value(c.input(0));
  if (c.node().has("axes")) shape = c.add("Gather", {shape, c.integers(c.node().get_ints("axes"))});
  return only_first(c, c.add("CenterCropPad", {c.of_output(), shape}, c.attributes({"axes"})));
}

std::vector<Value*> depth_to_space_gradient(GradientContext& c) {
  return only_first(c, c.add("SpaceToDepth", {c.of_output()}, c.attributes({"blocksize", "mode"})));
}
std::vector<Value*> space_to_depth_gradient(GradientContext& c) {
  return only_first(c, c.add("DepthToSpace", {c.of_output()}, c.attributes({"blocksize", "mode"})));
}

std::vector<Value*> trilu_gradient(GradientContext& c) {
  std::vector<Value*> operands = {c.of_output()};
  if (c.input(1)) operands.push_back(c.input(1));
  return only_first(c, c.add("Trilu", operands, c.attributes({"upper"})));
}

// Its own inverse.
std::vector<Value*> reverse_sequence_gradient(GradientContext& c) {
  return only_first(c, c.add("ReverseSequence", {c.of_output(), c.input(1)}, c.attributes({"batch_axis", "time_axis"})));
}

}  // namespace

Value* list_element(GradientContext& c, Value* list, size_t k) {
  Value* at = c.add("Slice", {list, c.integers({static_cast<int64_t>(k)}), c.integers({static_cast<int64_t>(k) + 1}), c.integers({0})});
  return list->type.dtype == DType::int64 ? at : c.add("Cast", {at}, {{"to", static_cast<int64_t>(DType::int64)}}, DType::int64);
}

Value* unpick_axes(GradientContext& c, const std::vector<int64_t>& axes,
                   const std::function<Value*(Value* x, int64_t axis, size_t k)>& pick) {
  std::vector<Value*> stages = {c.input(0)};  // [k]: after the first k axes
  for (size_t k = 0; k + 1 < axes.size(); ++k) stages.push_back(pick(stages[k], axes[k], k));
  Value* g = c.of_output();
  for (size_t k = axes.size(); k-- > 0;) {
    Value* size = c.add("Squeeze", {c.size_value(stages[k], axes[k])}, {}, DType::int64);
    Value* positions = pick(c.add("Range", {c.integer(0), size, c.integer(1)}, {}, DType::int64), 0, k);
    g = c.add_own("GatherGrad", {g, positions, c.shape_value(stages[k])}, {{"axis", axes[k]}});
  }
  return g;
}

GradientRule movement_gradient(const std::string& name) {
  static const std::unordered_map<std::string, GradientRule> rules = {
      {"Reshape", reshape_gradient},
      {"Flatten", reshape_gradient},
      {"Squeeze", squeeze_gradient},
      {"Unsqueeze", unsqueeze_gradient},
      {"Transpose", transpose_gradient},
      {"Concat", concat_gradient},
      {"Split", split_gradient},
      {"Slice", slice_gradient},
      {"Pad", pad_gradient},
      {"CenterCropPad", center_crop_pad_gradient},
      {"Expand", expand_gradient},
      {"Tile", tile_gradient},
      {"DepthToSpace", depth_to_space_gradient},
      {"SpaceToDepth", space_to_depth_gradient},
      {"Trilu", trilu_gradient},
      {"ReverseSequence", reverse_sequence_gradient},
  };
  auto it = rules.find(name);
  return it == rules.end() ? nullptr : it->second;
}

}  // namespace fretsaw
