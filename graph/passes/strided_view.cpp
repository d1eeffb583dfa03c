// Strided views: mixed-radix arithmetic on indexes, and what each operator does to them.
#include "graph/passes/strided_view.h"

#include <algorithm>
#include <numeric>

#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

// One digit of a value's row-major index: a step of it moves by `weight` elements in the node's input.
struct Digit {
  int64_t size = 1, weight = 0;
};

std::vector<int64_t> strides_of_digits(const std::vector<Digit>& digits) {
  std::vector<int64_t> strides(digits.size(), 1);
  for (size_t i = digits.size(); i-- > 1;) strides[i - 1] = strides[i] * digits[i].size;
  return strides;
}

// Writes the view, which counts in a value whose index has these digits, in elements of the node's input. The digits must not carry.
bool remap(StridedView& view, const std::vector<Digit>& digits, int64_t constant) {
  const std::vector<int64_t> strides = strides_of_digits(digits);
  std::vector<int64_t> reach(digits.size());
  int64_t offset = constant;
  for (size_t j = 0; j < digits.size(); ++j) {
    reach[j] = view.offset / strides[j] % digits[j].size;
    offset += reach[j] * digits[j].weight;
  }
  std::vector<StridedView::Axis> axes;
  for (StridedView::Axis axis : view.axes) {
    if (axis.stride == 0) axes.push_back(axis);
    while (axis.size > 1 && axis.stride != 0) {
      size_t j = 0;  // the digit that the axis begins in
      while (j < digits.size() && (axis.stride % strides[j] != 0 || axis.stride / strides[j] >= digits[j].size)) ++j;
      if (j == digits.size()) return false;
      const int64_t step = axis.stride / strides[j];
      int64_t here = axis.size;
      if ((axis.size - 1) * step >= digits[j].size) {
        here = digits[j].size / step;
        if (digits[j].size % step != 0 || axis.size % here != 0) return false;
      }
      axes.push_back({here, axis.at, step * digits[j].weight});
      reach[j] += (here - 1) * step;
      axis = {axis.size / here, axis.at * here, strides[j] * digits[j].size};
    }
  }
  for (size_t j = 0; j < digits.size(); ++j)
    if (reach[j] >= digits[j].size) return false;
  view.axes = std::move(axes);
  view.offset = offset;
  return true;
}

std::vector<int64_t> row_major(const Dims& dims) {
  std::vector<int64_t> strides(dims.size(), 1);
  for (size_t i = dims.size(); i-- > 1;) strides[i - 1] = strides[i] * dims[i];
  return strides;
}

// What a node does: the digits of its output's index, and the input that they count in.
struct Step {
  Value* input = nullptr;
  std::vector<Digit> digits;
  int64_t constant = 0;
  double scale = 1;
  bool same_order = false;  // the digits say nothing: the elements keep their order
};

bool constant_ints(const Node& node, size_t i, std::vector<int64_t>& values) {
  const Value* v = node.input(i);
  if (!v || !is_fixed(v)) return false;
  auto found = int_values(*v->constant);
  if (found) values = *found;
  return found.has_value();
}

int64_t axis_of(const Node& node, int64_t absent, size_t rank) {
  const int64_t axis = node.get_int("axis", absent);
  return axis < 0 ? axis + static_cast<int64_t>(rank) : axis;
}

bool transpose_step(const Node& node, const Dims& x, Step& step) {
  std::vector<int64_t> perm = node.get_ints("perm");
  if (perm.empty())
    for (size_t i = x.size(); i-- > 0;) perm.push_back(static_cast<int64_t>(i));
  const auto strides = row_major(x);
  for (int64_t p : perm) {
    const auto at = static_cast<size_t>(p);
    if (at >= x.size()) return false;
    step.digits.push_back({x[at], strides[at]});
  }
  return true;
}

bool slice_step(const Node& node, const Dims& x, const Dims& y, Step& step) {
  std::vector<int64_t> starts, ends, axes, steps;
  if (!constant_ints(node, 1, starts) || !constant_ints(node, 2, ends) || y.size() != x.size()) return false;
  axes.resize(starts.size());
  std::iota(axes.begin(), axes.end(), 0);
  steps.assign(starts.size(), 1);
  if (node.input(3) && !constant_ints(node, 3, axes)) return false;
  if (node.input(4) && !constant_ints(node, 4, steps)) return false;
  if (axes.size() != starts.size() || steps.size() != starts.size()) return false;
  const auto strides = row_major(x);
  for (size_t i = 0; i < x.size(); ++i) step.digits.push_back({y[i], strides[i]});
  for (size_t k = 0; k < axes.size(); ++k) {
    const auto at = static_cast<size_t>(axes[k] < 0 ? axes[k] + static_cast<int64_t>(x.size()) : axes[k]);
    if (at >= x.size() || steps[k] < 1) return false;
    const int64_t start = std::clamp<int64_t>(starts[k] < 0 ? starts[k] + x[at] : starts[k], 0, x[at]);
    step.digits[at].weight *= steps[k];
    step.constant += start * strides[at];
  }
  return true;
}

bool split_step(const Node& node, size_t output, const Dims& x, const Dims& y, Step& step) {
  const auto at = static_cast<size_t>(axis_of(node, 0, x.size()));
  if (at >= x.size() || y.size() != x.size()) return false;
  int64_t before = 0;
  for (size_t k = 0; k < output; ++k) {
    auto dims = static_dims(node.out(k));
    if (!dims || dims->size() != x.size()) return false;
    before += (*dims)[at];
  }
  const auto strides = row_major(x);
  for (size_t i = 0; i < x.size(); ++i) step.digits.push_back({y[i], strides[i]});
  step.constant = before * strides[at];
  return true;
}

// Gather of one index.
bool gather_step(const Node& node, const Dims& x, const Dims& y, Step& step) {
  std::vector<int64_t> index;
  const auto at = static_cast<size_t>(axis_of(node, 0, x.size()));
  if (!constant_ints(node, 1, index) || index.size() != 1 || at >= x.size()) return false;
  const auto strides = row_major(x);
  for (size_t i = 0; i < x.size(); ++i)
    if (i != at) step.digits.push_back({x[i], strides[i]});
  step.constant = (index[0] < 0 ? index[0] + x[at] : index[0]) * strides[at];
  return count_of(y) * x[at] == count_of(x);  // any dimensions of 1 in its place change nothing
}

bool expand_step(const Dims& x, const Dims& y, Step& step) {
  if (y.size() < x.size()) return false;
  const auto strides = row_major(x);
  const size_t more = y.size() - x.size();
  for (size_t i = 0; i < y.size(); ++i) step.digits.push_back({y[i], i < more || x[i - more] != y[i] ? 0 : strides[i - more]});
  return true;
}

// `repeats` copies of each dimension: Tile, and Concat of one value with itself.
bool repeat_step(const Dims& x, const std::vector<int64_t>& repeats, Step& step) {
  if (repeats.size() != x.size()) return false;
  const auto strides = row_major(x);
  for (size_t i = 0; i < x.size(); ++i) {
    if (repeats[i] < 1) return false;
    if (repeats[i] > 1) step.digits.push_back({repeats[i], 0});
    step.digits.push_back({x[i], strides[i]});
  }
  return true;
}

bool concat_step(const Node& node, const Dims& x, Step& step) {
  const Value* first = node.inputs[0];
  if (std::any_of(node.inputs.begin(), node.inputs.end(), [&](const Value* v) { return v != first; })) return false;
  std::vector<int64_t> repeats(x.size(), 1);
  const auto at = static_cast<size_t>(axis_of(node, 0, x.size()));
  if (at >= x.size()) return false;
  repeats[at] = static_cast<int64_t>(node.inputs.size());
  return repeat_step(x, repeats, step);
}

bool scale_step(const Node& node, const Dims& y, Step& step) {
  if (node.inputs.size() != 2) return false;
  double number = 0;
  size_t at = 1;
  bool scalar = scalar_value(node.input(1), number);
  if (!scalar && node.is("Mul")) at = 0, scalar = scalar_value(node.input(0), number);
  if (!scalar || number == 0) return false;
  step.input = node.inputs[1 - at];
  step.scale = node.is("Div") ? 1 / number : number;
  step.same_order = true;
  auto x = static_dims(step.input);
  return x && *x == y;
}

bool step_of(const Value& value, const Dims& y, bool scaled, Step& step) {
  const Node& node = *value.producer;
  step.input = node.input(0);
  auto x = static_dims(step.input);
  if (!x) return false;
  if (node.is("Reshape") || node.is("Squeeze") || node.is("Unsqueeze") || node.is("Flatten") || node.is("Identity"))
    return step.same_order = true;
  if (node.is("Cast")) return step.same_order = step.input->type.dtype == value.type.dtype;
  if (node.is("Transpose")) return transpose_step(node, *x, step);
  if (node.is("Slice")) return slice_step(node, *x, y, step);
  if (node.is("Split")) return split_step(node, static_cast<size_t>(value.output), *x, y, step);
  if (node.is("Gather")) return gather_step(node, *x, y, step);
  if (node.is("Expand")) return expand_step(*x, y, step);
  if (node.is("Concat")) return concat_step(node, *x, step);
  if (node.is("Tile")) {
    std::vector<int64_t> repeats;
    return constant_ints(node, 1, repeats) && repeat_step(*x, repeats, step);
  }
  return scaled && (node.is("Mul") || node.is("Div")) && scale_step(node, y, step);
}

}  // namespace

Value* dims_constant(Graph& graph, const Dims& dims) {
  return graph.add_constant(graph.fresh_name("dims"), make_int64s(dims));
}

std::optional<Dims> static_dims(const Value* value) {
  if (!value) return std::nullopt;
  if (value->constant) return value->constant->dims;
  if (!value->type.is_tensor() || !value->type.shape || !is_static(*value->type.shape)) return std::nullopt;
  return dims_of(*value->type.shape);
}

std::optional<StridedView> whole_view(Value* value, const Dims& dims) {
  auto own = static_dims(value);
  if (!own || own->size() > dims.size()) return std::nullopt;
  StridedView view;
  view.base = value;
  const auto strides = row_major(*own), at = row_major(dims);
  const size_t more = dims.size() - own->size();
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] == 0) return std::nullopt;
    if (dims[i] == 1) continue;
    const bool there = i >= more && (*own)[i - more] == dims[i];
    if (!there && i >= more && (*own)[i - more] != 1) return std::nullopt;
    view.axes.push_back({dims[i], at[i], there ? strides[i - more] : 0});
  }
  return view;
}

bool step_back(StridedView& view, bool scaled) {
  const Value* value = view.base;
  if (!value || !value->producer || value->graph != value->producer->graph) return false;
  auto y = static_dims(value);
  Step step;
  if (!y || count_of(*y) == 0 || !step_of(*value, *y, scaled, step)) return false;
  if (step.input->graph != value->graph) return false;  // of a graph around this one: its producer may not be seen
  StridedView next = view;
  if (!step.same_order && !remap(next, step.digits, step.constant)) return false;
  next.base = step.input;
  next.scale *= step.scale;
  next.copies += !step.same_order;
  view = std::move(next);
  return true;
}

}  // namespace fretsaw
