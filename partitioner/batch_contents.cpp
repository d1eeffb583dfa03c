// Shape arithmetic: the elements of small integer tensors, as products in which the batch is a symbol.
#include <algorithm>
#include <cmath>

#include "graph/passes/rewrite.h"
#include "partitioner/batch_analysis.h"

namespace fretsaw {
namespace {

constexpr int64_t kLongest = 256;  // shapes and what is computed from them are short

bool integral(DType t) {
  return is_integer(t) || t == DType::boolean;
}

// Comparisons hold for every size a symbol may have, which is at least 1.
std::optional<int64_t> compare(const DimProduct& a, const DimProduct& b) {
  if (a == b) return 0;
  if (a.is_number() && b.is_number()) return a.number < b.number ? -1 : 1;
  if (a.is_number() && a.number < b.number) return -1;
  if (b.is_number() && b.number < a.number) return 1;
  return std::nullopt;
}

std::optional<DimProduct> add(const DimProduct& a, const DimProduct& b, int sign) {
  if (b.number == 0) return a;
  if (a.symbols != b.symbols && a.number != 0) return std::nullopt;
  DimProduct r = b;
  r.number = a.number + sign * b.number;
  if (r.number == 0) r.symbols.clear();
  return r;
}

std::optional<DimProduct> divide(const DimProduct& a, const DimProduct& b) {
  if (b.number == 0) return std::nullopt;
  if (a.is_number() && b.is_number()) return DimProduct(a.number / b.number);
  return quotient(a, b);
}

std::optional<DimProduct> binary(const std::string& op, const DimProduct& a, const DimProduct& b) {
  if (op == "Add") return add(a, b, 1);
  if (op == "Sub") return add(a, b, -1);
  if (op == "Mul") return a * b;
  if (op == "Div") return divide(a, b);
  auto c = compare(a, b);
  if (op == "Max") return c ? std::optional(*c >= 0 ? a : b) : std::nullopt;
  if (op == "Min") return c ? std::optional(*c <= 0 ? a : b) : std::nullopt;
  if (op == "Mod" && a.is_number() && b.is_number() && a.number >= 0 && b.number > 0) return DimProduct(a.number % b.number);
  if (op == "And") return a.is_number() && b.is_number() ? std::optional(DimProduct(a.number && b.number)) : std::nullopt;
  if (op == "Or") return a.is_number() && b.is_number() ? std::optional(DimProduct(a.number || b.number)) : std::nullopt;
  if (!c) return std::nullopt;
  if (op == "Equal") return DimProduct(*c == 0);
  if (op == "Less") return DimProduct(*c < 0);
  if (op == "LessOrEqual") return DimProduct(*c <= 0);
  if (op == "Greater") return DimProduct(*c > 0);
  if (op == "GreaterOrEqual") return DimProduct(*c >= 0);
  return std::nullopt;
}

bool is_binary(const std::string& op) {
  for (const char* known :
       {"Add", "Sub", "Mul", "Div", "Max", "Min", "Mod", "And", "Or", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
    if (op == known) return true;
  return false;
}

std::optional<std::vector<int64_t>> numbers(const std::optional<Contents>& contents) {
  if (!contents) return std::nullopt;
  std::vector<int64_t> result;
  for (const DimProduct& p : *contents) {
    if (!p.is_number()) return std::nullopt;
    result.push_back(p.number);
  }
  return result;
}

int64_t clamp_index(int64_t i, int64_t n) {
  return std::clamp<int64_t>(i < 0 ? i + n : i, 0, n);
}

// Whole numbers that are written as floats.
std::optional<Contents> whole_numbers(const Value* value) {
  std::vector<double> numbers;
  if (!value || !value->constant || value->constant->is_missing() || value->constant->count() > kLongest) return std::nullopt;
  if (!is_float(value->constant->dtype) || value->constant->dims.size() > 1 || !float_values(value, numbers)) return std::nullopt;
  Contents result;
  for (const double x : numbers) {
    if (x != std::floor(x) || std::abs(x) > 1e9) return std::nullopt;
    result.push_back(static_cast<int64_t>(x));
  }
  return result;
}

}  // namespace

const DimProduct& batch_symbol() {
  static const DimProduct symbol(std::string("$batch"));
  return symbol;
}

bool mentions_batch(const DimProduct& p) {
  return std::find(p.symbols.begin(), p.symbols.end(), batch_symbol().symbols[0]) != p.symbols.end();
}

bool mentions_batch(const Contents& contents) {
  return std::any_of(contents.begin(), contents.end(), [](const DimProduct& p) { return mentions_batch(p); });
}

DimProduct BatchAnalysis::fresh() {
  return DimProduct("?" + std::to_string(++fresh_count_));
}

DimProduct BatchAnalysis::in_types(const DimProduct& p) const {
  if (!mentions_batch(p)) return p;
  return in_types(*quotient(p, batch_symbol()) * batch_);
}

std::vector<DimProduct> BatchAnalysis::dims(const Value* value) {
  std::vector<DimProduct> result;
  if (!value->type.shape) throw Mixing{"the shape of '" + value->name + "' is not known"};
  for (const Dim& d : *value->type.shape) {
    auto p = product_of(d);
    result.push_back(p ? *p : fresh());
  }
  return result;
}

bool BatchAnalysis::sized(const Value* value) {
  auto it = contents_.find(value);
  return it != contents_.end() && mentions_batch(it->second);
}

std::optional<Contents> BatchAnalysis::contents(const Value* value) {
  if (!value || axes.count(value)) return std::nullopt;
  if (auto it = contents_.find(value); it != contents_.end()) return it->second;
  if (!value->type.is_tensor() || !integral(value->type.dtype)) return std::nullopt;
  if (!value->type.shape || value->type.shape->size() > 1) return std::nullopt;
  Contents result;
  if (value->constant) {
    if (value->constant->is_missing() || value->constant->count() > kLongest) return std::nullopt;
    auto ints = int_values(*value->constant);
    if (!ints) return std::nullopt;
    result.assign(ints->begin(), ints->end());
  } else {  // unknown, but the same for every batch
    int64_t n = value->type.shape->empty() ? 1 : value->type.shape->front().value;
    if (n < 0 || n > kLongest) return std::nullopt;
    for (int64_t k = 0; k < n; ++k) result.push_back(fresh());
  }
  return contents_[value] = std::move(result);
}

std::optional<Contents> BatchAnalysis::evaluate(Node& node) {
  const Value* y = node.out(0);
  if (!y || !node.domain.empty() || node.inputs.empty()) return std::nullopt;
  if (y->type.kind == Type::Kind::tensor && y->type.dtype != DType::undefined && !integral(y->type.dtype)) return std::nullopt;
  if (y->type.shape && y->type.shape->size() > 1) return std::nullopt;
  for (Value* v : node.inputs)
    if (v && (axes.count(v) || !v->type.shape || v->type.shape->size() > 1)) return std::nullopt;
  if (node.is("Where") || node.is("Not") || node.is("Neg") || (is_binary(node.op) && node.inputs.size() == 2))
    return evaluate_elementwise(node);
  return evaluate_movement(node);
}

std::optional<Contents> BatchAnalysis::evaluate_elementwise(const Node& node) {
  std::vector<Contents> operands;
  size_t n = 1;
  bool scalar = true, batch = false;
  for (Value* v : node.inputs) {
    auto c = contents(v);
    if (!c) return std::nullopt;
    if (c->size() != 1 && n != 1 && c->size() != n) return std::nullopt;
    scalar &= v->type.shape->empty();
    if (c->size() != 1 || c->empty()) n = c->size();
    operands.push_back(std::move(*c));
  }
  Contents result;
  for (size_t k = 0; k < n; ++k) {
    auto at = [&](size_t o) -> const DimProduct& { return operands[o][operands[o].size() == 1 ? 0 : k]; };
    std::optional<DimProduct> r;
    batch = false;
    for (size_t o = 0; o < operands.size(); ++o) batch |= mentions_batch(at(o));
    if (node.is("Where")) {
      if (at(0).is_number())
        r = at(0).number != 0 ? at(1) : at(2);
      else if (at(1) == at(2))
        r = at(1);
    } else if (node.is("Not")) {
      if (at(0).is_number()) r = DimProduct(at(0).number == 0);
    } else if (node.is("Neg")) {
      r = at(0) * DimProduct(-1);
    } else {
      r = binary(node.op, at(0), at(1));
    }
    if (!r && batch) return std::nullopt;  // some function of the batch size
    result.push_back(r ? *r : fresh());
  }
  return result;
}

std::optional<Contents> BatchAnalysis::evaluate_movement(const Node& node) {
  auto x = contents(node.input(0));
  if (!x && node.is("Cast")) x = whole_numbers(node.input(0));
  if (!x) return std::nullopt;
  auto argument = [&](size_t i) { return numbers(contents(node.input(i))); };
  if (node.is("Identity") || node.is("Squeeze") || node.is("Unsqueeze") || node.is("Reshape")) return x;
  if (node.is("Cast")) return integral(static_cast<DType>(node.get_int("to", 0))) ? x : std::nullopt;
  if (node.is("Concat")) {
    Contents all;
    for (Value* v : node.inputs) {
      auto c = contents(v);
      if (!c) return std::nullopt;
      all.insert(all.end(), c->begin(), c->end());
    }
    return all;
  }
  auto n = static_cast<int64_t>(x->size());
  if (node.is("Gather")) {
    auto indices = argument(1);
    if (!indices || node.input(0)->type.shape->empty()) return std::nullopt;
    Contents picked;
    for (int64_t i : *indices) {
      if (i < -n || i >= n) return std::nullopt;
      picked.push_back((*x)[i < 0 ? i + n : i]);
    }
    return picked;
  }
  if (node.is("Slice")) {
    auto starts = argument(1), ends = argument(2), steps = argument(4);
    if (!starts || !ends || starts->size() != 1 || ends->size() != 1 || (node.input(4) && (!steps || steps->size() != 1)))
      return std::nullopt;
    int64_t step = steps ? (*steps)[0] : 1;
    if (step < 1) return std::nullopt;
    Contents part;
    for (int64_t i = clamp_index((*starts)[0], n); i < clamp_index((*ends)[0], n); i += step) part.push_back((*x)[i]);
    return part;
  }
  if (node.is("ReduceProd") || node.is("ReduceSum")) {
    DimProduct total = node.is("ReduceProd") ? 1 : 0;
    for (const DimProduct& p : *x) {
      auto next = node.is("ReduceProd") ? std::optional(total * p) : add(total, p, 1);
      if (!next) return std::nullopt;
      total = *next;
    }
    return Contents{total};
  }
  if (node.is("ConstantOfShape") || node.is("Expand")) {
    auto shape = node.is("Expand") ? argument(1) : numbers(x);
    if (!shape || shape->size() > 1 || (!shape->empty() && ((*shape)[0] < 0 || (*shape)[0] > kLongest))) return std::nullopt;
    size_t length = shape->empty() ? 1 : static_cast<size_t>((*shape)[0]);
    if (node.is("Expand")) {
      if (x->size() == 1) return Contents(length, (*x)[0]);
      return length == 1 || length == x->size() ? x : std::nullopt;
    }
    TensorPtr value = node.get_tensor("value");
    auto ints = value ? int_values(*value) : std::nullopt;
    if (!ints || ints->size() != 1) return std::nullopt;
    return Contents(length, DimProduct((*ints)[0]));
  }
  if (node.is("Range")) {
    auto start = numbers(x), limit = argument(1), delta = argument(2);
    if (!start || !limit || !delta || (*delta)[0] == 0) return std::nullopt;
    Contents result;
    int64_t step = (*delta)[0];
    for (int64_t v = (*start)[0]; step > 0 ? v < (*limit)[0] : v > (*limit)[0]; v += step) {
      if (static_cast<int64_t>(result.size()) >= kLongest) return std::nullopt;
      result.emplace_back(v);
    }
    return result;
  }
  return std::nullopt;
}

}  // namespace fretsaw
