// Operands of attention: strided views compared with the layouts that the operator takes.
#include "graph/passes/attention_operands.h"

#include <algorithm>

namespace fretsaw {
namespace {

// The strides of a layout.
struct LayoutStrides {
  int64_t batch, head, row;
};

// Cuts axes that run over batches and heads in two.
std::vector<StridedView::Axis> cut_at_heads(const StridedView& view, const OperandDims& d) {
  std::vector<StridedView::Axis> axes;
  const int64_t matrix = d.L * d.D, at_batch = d.H * matrix;
  for (const StridedView::Axis& a : view.axes) {
    if (a.at >= matrix && a.at < at_batch && a.at * a.size > at_batch && at_batch % a.at == 0) {
      const int64_t inner = at_batch / a.at;
      axes.push_back({inner, a.at, a.stride});
      axes.push_back({a.size / inner, at_batch, a.stride * inner});
    } else {
      axes.push_back(a);
    }
  }
  return axes;
}

// How many neighbouring heads are the same one repeated.
int64_t repeats_of(const std::vector<StridedView::Axis>& axes, const OperandDims& d) {
  int64_t repeats = 1;
  for (bool more = true; more;) {
    more = false;
    for (const auto& a : axes)
      if (a.stride == 0 && a.size > 1 && a.at == repeats * d.L * d.D && repeats * a.size <= d.H) repeats *= a.size, more = true;
  }
  return repeats;
}

bool lies_so(const std::vector<StridedView::Axis>& axes, const OperandDims& d, int64_t repeats, const LayoutStrides& wanted) {
  const int64_t matrix = d.L * d.D, at_batch = d.H * matrix;
  return std::all_of(axes.begin(), axes.end(), [&](const StridedView::Axis& a) {
    if (a.size == 1) return true;
    if (a.at >= at_batch) return a.stride == a.at / at_batch * wanted.batch;
    if (a.at >= matrix) {
      const int64_t head = a.at / matrix;
      return head < repeats ? a.stride == 0 : head % repeats == 0 && a.stride == head / repeats * wanted.head;
    }
    const bool row = d.transposed ? a.at < d.L : a.at >= d.D;
    return row ? a.stride == a.at / d.at_row() * wanted.row : a.stride == a.at / d.at_column();
  });
}

// The forms that an operand has in its base.
void add_choices(const StridedView& view, const OperandDims& d, std::vector<Choice>& choices) {
  auto dims = static_dims(view.base);
  if (!dims) return;
  const auto axes = cut_at_heads(view, d);
  const int64_t repeats = repeats_of(axes, d), heads = d.H / repeats, count = count_of(*dims), own = d.B * heads * d.L * d.D;
  auto offer = [&](Choice c, const Dims& exact) {
    c.base = view.base, c.heads = heads, c.scale = view.scale, c.copies = view.copies;
    for (Choice& old : choices) {
      if (old.form != c.form || old.heads != c.heads || old.parts != c.parts) continue;
      if (*dims == exact || static_dims(old.base) != exact) old = c;  // the earlier value, but not for a Reshape more
      return;
    }
    choices.push_back(c);
  };
  const int64_t width = heads * d.D;
  if (view.offset == 0 && count == own) {
    if (lies_so(axes, d, repeats, {d.L * width, d.D, width})) offer({Choice::Form::flat}, {d.B, d.L, width});
    if (lies_so(axes, d, repeats, {d.L * width, d.L * d.D, d.D})) offer({Choice::Form::four}, {d.B, heads, d.L, d.D});
  } else if (count > own && count % own == 0) {
    const int64_t parts = count / own, whole = parts * width;
    if (parts > 8 || view.offset % width != 0 || view.offset >= whole) return;
    if (!lies_so(axes, d, repeats, {d.L * whole, d.D, whole})) return;
    Choice c{Choice::Form::part};
    c.part = view.offset / width, c.parts = parts;
    offer(c, {d.B, d.L, whole});
  }
}

}  // namespace

std::vector<Choice> choices_of(Value* value, const Dims& lead, const OperandDims& d, bool scaled) {
  std::vector<Choice> choices;
  Dims dims = lead;
  dims.push_back(d.transposed ? d.D : d.L);
  dims.push_back(d.transposed ? d.L : d.D);
  auto view = whole_view(value, dims);
  if (!view) return choices;
  do add_choices(*view, d, choices);
  while (step_back(*view, scaled));
  if (d.transposed && count_of(*static_dims(value)) == count_of(dims)) {
    Choice c{Choice::Form::four};  // a transposed cache, say: turned round when nothing better is there
    c.base = value, c.heads = d.H, c.transposed = true;
    choices.push_back(c);
  }
  return choices;
}

const Choice* best_of(const std::vector<Choice>& choices, int64_t heads, bool flat) {
  const Choice* best = nullptr;
  for (const Choice& c : choices) {
    if (c.heads != heads || (c.form != Choice::Form::four) != flat) continue;
    // The parts of a value are cut out of it by a Split of our own, which has to replace more than one node.
    if (!best || (c.form == Choice::Form::part && c.copies > best->copies + 1)) best = &c;
  }
  return best;
}

Value* OperandMaker::reshaped(Value* value, const Dims& dims) {
  if (static_dims(value) == dims) return value;
  Value* v = edit_.add("Reshape", {value, ints(dims)}, {}, value->name);
  v->type = Type::tensor(value->type.dtype, shape_of(dims));
  return v;
}

Value* OperandMaker::make(const Choice& c, int64_t B, int64_t L, int64_t D) {
  if (c.form == Choice::Form::flat) return reshaped(c.base, {B, L, c.heads * D});
  if (c.form == Choice::Form::part) return part_of(c, {B, L, c.heads * D});
  if (!c.transposed) return reshaped(c.base, {B, c.heads, L, D});
  Value* turned =
      edit_.add("Transpose", {reshaped(c.base, {B, c.heads, D, L})}, {{"perm", std::vector<int64_t>{0, 1, 3, 2}}}, c.base->name);
  turned->type = Type::tensor(c.base->type.dtype, shape_of({B, c.heads, L, D}));
  return turned;
}

// One Split serves all parts of a value.
Value* OperandMaker::part_of(const Choice& c, const Dims& dims) {
  auto& parts = parts_[{c.base, c.parts}];
  if (parts.empty()) {
    Graph& graph = edit_.graph();
    Value* whole = reshaped(c.base, {dims[0], dims[1], dims[2] * c.parts});
    for (int64_t i = 0; i < c.parts; ++i)
      parts.push_back(graph.add_value(graph.fresh_name(c.base->name + "_part"), Type::tensor(whole->type.dtype, shape_of(dims))));
    edit_.add_making("Split", {whole}, parts, {{"axis", int64_t{2}}, {"num_outputs", c.parts}});
  }
  return parts[static_cast<size_t>(c.part)];
}

}  // namespace fretsaw
