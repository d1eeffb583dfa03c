// Shape arithmetic on small integer tensors, element by element: of rank 0 and 1, and what orders the elements of more dimensions.
#include "graph/passes/shape_contents.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "graph/symbolic.h"

namespace fretsaw {
namespace {

using Result = std::optional<Elements>;

ShapeElement element_of(const Dim& d) {
  ShapeElement e;
  if (d.known()) e.value = d.value;
  e.symbol = d.known() ? "" : d.symbol;
  return e;
}

std::string text_of(const ShapeElement& e) {
  return e.value ? std::to_string(*e.value) : e.symbol;
}

ShapeElement from_text(const std::string& text) {
  ShapeElement e;
  if (auto n = symbolic_number(text)) {
    e.value = *n;
  } else {
    e.symbol = text;
  }
  return e;
}

bool all_known(const Elements& elements) {
  return std::all_of(elements.begin(), elements.end(), [](const ShapeElement& e) { return e.value.has_value(); });
}

// The inputs of one node.
struct Inputs {
  const Node& node;
  const ContentsLookup& lookup;

  const Elements* operator()(size_t i) const { return node.input(i) ? lookup(node.input(i)) : nullptr; }
  std::optional<int64_t> scalar(size_t i) const {
    const Elements* e = (*this)(i);
    return e && e->size() == 1 ? (*e)[0].value : std::nullopt;
  }
  std::optional<std::vector<int64_t>> ints(size_t i) const {
    const Elements* e = (*this)(i);
    if (!e || !all_known(*e)) return std::nullopt;
    std::vector<int64_t> values;
    for (const ShapeElement& x : *e) values.push_back(*x.value);
    return values;
  }
  size_t rank(size_t i) const {  // SIZE_MAX when not known
    const Value* v = node.input(i);
    return v && v->type.shape ? v->type.shape->size() : SIZE_MAX;
  }
};

Result shape(const Inputs& in) {
  const Value* x = in.node.input(0);
  if (!x || !x->type.is_tensor() || !x->type.shape) return std::nullopt;
  auto rank = static_cast<int64_t>(x->type.shape->size());
  auto clamp = [&](int64_t i) { return std::clamp(i < 0 ? i + rank : i, int64_t{0}, rank); };
  int64_t start = clamp(in.node.get_int("start", 0)), end = clamp(in.node.get_int("end", rank));
  Elements e;
  for (int64_t i = start; i < end; ++i) e.push_back(element_of((*x->type.shape)[static_cast<size_t>(i)]));
  return e;
}

Result size(const Inputs& in) {
  const Value* x = in.node.input(0);
  if (!x || !x->type.is_tensor() || !x->type.shape) return std::nullopt;
  return Elements{element_of(dim_product(*x->type.shape))};
}

Result same(const Inputs& in) {
  const Elements* e = in(0);
  return e ? Result(*e) : std::nullopt;
}

Result cast(const Inputs& in) {
  const Elements* e = in(0);
  const DType to = in.node.is("CastLike") ? in.node.out(0)->type.dtype : static_cast<DType>(in.node.get_int("to", 0));
  if (!e) return std::nullopt;
  if (to == DType::int64 || to == DType::int32) return *e;
  if (to != DType::boolean || !all_known(*e)) return std::nullopt;
  Elements out = *e;
  for (ShapeElement& x : out) x.value = *x.value != 0;
  return out;
}

Result gather(const Inputs& in) {
  const Elements* data = in(0);
  auto indexes = in.ints(1);
  if (!data || !indexes || in.rank(0) != 1 || in.rank(1) > 1) return std::nullopt;
  auto n = static_cast<int64_t>(data->size());
  Elements out;
  for (int64_t i : *indexes) {
    if (i < 0) i += n;
    if (i < 0 || i >= n) return std::nullopt;
    out.push_back((*data)[static_cast<size_t>(i)]);
  }
  return out;
}

Result concat(const Inputs& in) {
  Elements out;
  for (size_t i = 0; i < in.node.inputs.size(); ++i) {
    if (in.rank(i) != 1) return std::nullopt;
    if (const Elements* e = in(i)) {
      out.insert(out.end(), e->begin(), e->end());
    } else {
      const Dim& d = (*in.node.inputs[i]->type.shape)[0];  // its elements are unknown, their number may be known
      if (!d.known() || d.value > static_cast<int64_t>(kMaxContents)) return std::nullopt;
      out.resize(out.size() + static_cast<size_t>(d.value));
    }
  }
  return out;
}

// The elements that lie at these steps from `offset`, dimension by dimension, the last one fastest.
Elements picked(const Elements& data, int64_t offset, const Dims& sizes, const Dims& steps) {
  Elements out;
  Dims at(sizes.size(), 0);
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return out;
  for (;;) {
    out.push_back(data[static_cast<size_t>(offset)]);
    size_t d = sizes.size();
    while (d > 0 && at[d - 1] + 1 == sizes[d - 1]) {
      --d;
      offset -= at[d] * steps[d];
      at[d] = 0;
    }
    if (d == 0) return out;
    ++at[d - 1];
    offset += steps[d - 1];
  }
}

// The dimensions of the first input, as far as they fit its elements.
std::optional<Dims> dims_of_first(const Inputs& in) {
  const Elements* data = in(0);
  if (!data || in.rank(0) == SIZE_MAX) return std::nullopt;
  const auto count = static_cast<int64_t>(data->size());
  if (in.rank(0) == 1) return Dims{count};
  const Shape& shape = *in.node.input(0)->type.shape;
  if (!is_static(shape) || count_of(dims_of(shape)) != count) return std::nullopt;
  return dims_of(shape);
}

Dims steps_of(const Dims& dims) {
  Dims steps(dims.size(), 1);
  for (size_t d = dims.size(); d-- > 1;) steps[d - 1] = steps[d] * dims[d];
  return steps;
}

Result slice(const Inputs& in) {
  auto dims = dims_of_first(in);
  auto starts = in.ints(1), ends = in.ints(2), axes = in.ints(3), steps = in.ints(4);
  if (!dims || !starts || !ends || starts->size() != ends->size()) return std::nullopt;
  if (in.node.input(3) && (!axes || axes->size() != starts->size())) return std::nullopt;
  if (in.node.input(4) && (!steps || steps->size() != starts->size())) return std::nullopt;
  const auto rank = static_cast<int64_t>(dims->size());
  const Dims own = steps_of(*dims);
  Dims sizes = *dims, strides = own;
  int64_t offset = 0;
  std::vector<bool> cut(dims->size(), false);
  for (size_t i = 0; i < starts->size(); ++i) {
    int64_t axis = axes ? (*axes)[i] : static_cast<int64_t>(i), step = steps ? (*steps)[i] : 1, start = (*starts)[i], end = (*ends)[i];
    if (axis < 0) axis += rank;
    if (axis < 0 || axis >= rank || cut[static_cast<size_t>(axis)] || step == 0 || step == INT64_MIN) return std::nullopt;
    const auto d = static_cast<size_t>(axis);
    cut[d] = true;
    const int64_t n = (*dims)[d];
    if (start < 0) start += n;
    if (start < 0 && step < 0) return std::nullopt;  // ONNX and NumPy disagree
    if (end < 0) end = end >= -n ? end + n : -1;
    start = std::clamp(start, int64_t{0}, step > 0 ? n : std::max<int64_t>(n - 1, 0));
    end = std::clamp(end, step > 0 ? int64_t{0} : int64_t{-1}, n);
    const int64_t length = step > 0 ? end - start : start - end, by = step > 0 ? step : -step;
    sizes[d] = n == 0 || length <= 0 ? 0 : (length - 1) / by + 1;
    offset += start * own[d];
    strides[d] = sizes[d] > 1 ? own[d] * step : 0;
  }
  return picked(*in(0), offset, sizes, strides);
}

Result transpose(const Inputs& in) {
  const auto dims = dims_of_first(in);
  if (!dims) return std::nullopt;
  std::vector<int64_t> perm = in.node.get_ints("perm");
  if (perm.empty())
    for (size_t d = dims->size(); d-- > 0;) perm.push_back(static_cast<int64_t>(d));
  if (perm.size() != dims->size()) return std::nullopt;
  const Dims own = steps_of(*dims);
  Dims sizes, steps;
  for (int64_t d : perm) {
    if (d < 0 || d >= std::ssize(*dims)) return std::nullopt;
    sizes.push_back((*dims)[static_cast<size_t>(d)]);
    steps.push_back(own[static_cast<size_t>(d)]);
  }
  if (count_of(sizes) != count_of(*dims)) return std::nullopt;
  return picked(*in(0), 0, sizes, steps);
}

ShapeElement combine(const std::string& op, const ShapeElement& a, const ShapeElement& b) {
  if (a.value && b.value) {
    int64_t x = *a.value, y = *b.value, r = 0;
    ShapeElement e;
    auto checked = [&](bool overflow) { return overflow ? e : ShapeElement{r, ""}; };
    if (op == "Add") return checked(__builtin_add_overflow(x, y, &r));
    if (op == "Sub") return checked(__builtin_sub_overflow(x, y, &r));
    if (op == "Mul") return checked(__builtin_mul_overflow(x, y, &r));
    if (op == "Div" || op == "Mod") {
      if (y == 0 || (x == INT64_MIN && y == -1)) return e;
      if (op == "Div") return {x / y, ""};
      int64_t m = x % y;
      return {m != 0 && (m < 0) != (y < 0) ? m + y : m, ""};
    }
    if (op == "Max") return {std::max(x, y), ""};
    if (op == "Min") return {std::min(x, y), ""};
    if (op == "Equal") return {x == y, ""};
    if (op == "Less") return {x < y, ""};
    if (op == "Greater") return {x > y, ""};
    if (op == "LessOrEqual") return {x <= y, ""};
    if (op == "GreaterOrEqual") return {x >= y, ""};
    if (op == "And") return {x && y, ""};
    if (op == "Or") return {x || y, ""};
    return e;
  }
  std::string x = text_of(a), y = text_of(b);
  if (op == "Add" || op == "Sub") return from_text(symbolic_add(x, y, op == "Add" ? 1 : -1));
  if (op == "Mul") return from_text(symbolic_mul(x, y));
  if (op == "Div") return from_text(symbolic_divide(x, y));
  // A dimension is never negative: comparisons with -1 are how exporters ask whether an Expand keeps it.
  if (op == "Equal" && !x.empty() && !y.empty()) {
    if (x == y) return {1, ""};
    if ((a.value && *a.value < 0 && y.find('-') == std::string::npos) || (b.value && *b.value < 0 && x.find('-') == std::string::npos))
      return {0, ""};
  }
  return {};
}

Result binary(const Inputs& in) {
  const Elements *a = in(0), *b = in(1);
  if (!a || !b || in.node.inputs.size() != 2) return std::nullopt;
  if (a->size() != b->size() && a->size() != 1 && b->size() != 1) return std::nullopt;
  if (a->empty() || b->empty()) return Elements{};
  Elements out(std::max(a->size(), b->size()));
  for (size_t i = 0; i < out.size(); ++i) out[i] = combine(in.node.op, (*a)[a->size() == 1 ? 0 : i], (*b)[b->size() == 1 ? 0 : i]);
  return out;
}

Result unary(const Inputs& in) {
  const Elements* a = in(0);
  if (!a) return std::nullopt;
  Elements out = *a;
  for (ShapeElement& e : out) {
    if (in.node.op == "Neg")
      e = from_text(symbolic_mul(text_of(e), "-1"));
    else if (!e.value)
      e = {};
    else if (in.node.op == "Not")
      e.value = !*e.value;
    else if (in.node.op == "Abs" && *e.value != INT64_MIN)
      e.value = std::abs(*e.value);
  }
  return out;
}

Result where(const Inputs& in) {
  const Elements *c = in(0), *a = in(1), *b = in(2);
  if (!c || !a || !b) return std::nullopt;
  size_t n = std::max({c->size(), a->size(), b->size()});
  auto fits = [&](const Elements* e) { return e->size() == n || e->size() == 1; };
  if (!fits(c) || !fits(a) || !fits(b)) return std::nullopt;
  Elements out(n);
  for (size_t i = 0; i < n; ++i) {
    const ShapeElement &x = (*a)[a->size() == 1 ? 0 : i], &y = (*b)[b->size() == 1 ? 0 : i], &condition = (*c)[c->size() == 1 ? 0 : i];
    if (condition.value)
      out[i] = *condition.value ? x : y;
    else if (x == y)
      out[i] = x;
  }
  return out;
}

Result constant_of_shape(const Inputs& in) {
  auto dims = in.ints(0);
  if (!dims || dims->size() > 1 || (dims->size() == 1 && ((*dims)[0] < 0 || (*dims)[0] > static_cast<int64_t>(kMaxContents))))
    return std::nullopt;
  TensorPtr value = in.node.get_tensor("value");
  if (!value) return std::nullopt;  // the default is a float
  auto v = int_values(*value);
  if (!v || v->size() != 1) return std::nullopt;
  return Elements(dims->empty() ? 1 : static_cast<size_t>((*dims)[0]), ShapeElement{(*v)[0], ""});
}

Result range(const Inputs& in) {
  auto start = in.scalar(0), limit = in.scalar(1), delta = in.scalar(2);
  if (!start || !limit || !delta || *delta == 0) return std::nullopt;
  Elements out;
  for (__int128 v = *start; *delta > 0 ? v < *limit : v > *limit; v += *delta) {
    if (out.size() >= kMaxContents) return std::nullopt;
    out.push_back({static_cast<int64_t>(v), ""});
  }
  return out;
}

Result reduce(const Inputs& in) {
  const Elements* a = in(0);
  if (!a || in.rank(0) > 1 || a->empty()) return std::nullopt;
  if (in.node.input(1) && !in.ints(1)) return std::nullopt;
  if (in.node.get_int("noop_with_empty_axes", 0) && (!in.node.input(1) || in.ints(1)->empty())) return *a;
  const std::string op = in.node.op == "ReduceProd" ? "Mul" : in.node.op == "ReduceSum" ? "Add" : in.node.op == "ReduceMax" ? "Max" : "Min";
  ShapeElement e = (*a)[0];
  for (size_t i = 1; i < a->size(); ++i) e = combine(op, e, (*a)[i]);
  return Elements{e};
}

Result expand(const Inputs& in) {
  const Elements* a = in(0);
  auto dims = in.ints(1);
  if (!a || !dims || dims->size() > 1) return std::nullopt;
  int64_t n = dims->empty() ? 1 : (*dims)[0];
  if (a->size() != 1 || n == 1) return *a;
  if (n < 0 || n > static_cast<int64_t>(kMaxContents)) return std::nullopt;
  return Elements(static_cast<size_t>(n), (*a)[0]);
}

const std::unordered_map<std::string, Result (*)(const Inputs&)>& rules() {
  static const std::unordered_map<std::string, Result (*)(const Inputs&)> table = {{"Shape", shape},
                                                                                   {"Size", size},
                                                                                   {"Identity", same},
                                                                                   {"Cast", cast},
                                                                                   {"CastLike", cast},
                                                                                   {"Gather", gather},
                                                                                   {"Concat", concat},
                                                                                   {"Slice", slice},
                                                                                   {"Transpose", transpose},
                                                                                   {"Unsqueeze", same},
                                                                                   {"Squeeze", same},
                                                                                   {"Reshape", same},
                                                                                   {"Flatten", same},
                                                                                   {"Add", binary},
                                                                                   {"Sub", binary},
                                                                                   {"Mul", binary},
                                                                                   {"Div", binary},
                                                                                   {"Mod", binary},
                                                                                   {"Max", binary},
                                                                                   {"Min", binary},
                                                                                   {"Equal", binary},
                                                                                   {"Less", binary},
                                                                                   {"Greater", binary},
                                                                                   {"LessOrEqual", binary},
                                                                                   {"GreaterOrEqual", binary},
                                                                                   {"And", binary},
                                                                                   {"Or", binary},
                                                                                   {"Not", unary},
                                                                                   {"Neg", unary},
                                                                                   {"Abs", unary},
                                                                                   {"Where", where},
                                                                                   {"ConstantOfShape", constant_of_shape},
                                                                                   {"Range", range},
                                                                                   {"ReduceProd", reduce},
                                                                                   {"ReduceSum", reduce},
                                                                                   {"ReduceMax", reduce},
                                                                                   {"ReduceMin", reduce},
                                                                                   {"Expand", expand}};
  return table;
}

// Operators whose rule holds for elements in more than one dimension too.
bool any_rank(const std::string& op) {
  static const std::unordered_set<std::string> ops = {"Identity", "Cast",    "CastLike", "Unsqueeze", "Squeeze",
                                                      "Reshape",  "Flatten", "Slice",    "Transpose"};
  return ops.contains(op);
}

bool integral(const Value* v) {
  if (!v || !v->type.is_tensor()) return false;
  return v->type.dtype == DType::int64 || v->type.dtype == DType::int32 || v->type.dtype == DType::boolean;
}

}  // namespace

std::optional<Elements> contents_of_node(const Node& node, const ContentsLookup& lookup) {
  if (!node.domain.empty() || !integral(node.out(0))) return std::nullopt;
  auto rule = rules().find(node.op);
  if (rule == rules().end()) return std::nullopt;
  const Value* out = node.out(0);
  if (out->type.shape && out->type.shape->size() > 1 && !any_rank(node.op)) return std::nullopt;
  for (const Value* v : node.inputs)
    if (v && node.op != "Shape" && node.op != "Size" && node.op != "Where" && v->type.is_tensor() && !integral(v)) return std::nullopt;
  Result result = rule->second({node, lookup});
  if (!result || result->size() > kMaxContents) return std::nullopt;
  return result;
}

std::vector<Elements> contents_of_split(const Node& node, const ContentsLookup& lookup) {
  const Elements* data = node.input(0) ? lookup(node.input(0)) : nullptr;
  if (!data || !node.input(0)->type.shape || node.input(0)->type.shape->size() != 1) return {};
  std::vector<Elements> parts;
  size_t at = 0;
  for (const Value* v : node.outputs) {
    if (!v || !v->type.shape || v->type.shape->size() != 1 || !(*v->type.shape)[0].known()) return {};
    auto n = static_cast<size_t>((*v->type.shape)[0].value);
    if (n > data->size() - at) return {};
    parts.emplace_back(data->begin() + static_cast<long>(at), data->begin() + static_cast<long>(at + n));
    at += n;
  }
  return parts;
}

}  // namespace fretsaw
