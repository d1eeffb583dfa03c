// The helpers that factor functions share: axes, constants, broadcasting, counting.
#include "graph/operators/rule_builder.h"

#include <algorithm>
#include <numeric>

namespace fretsaw {
namespace {

const Shape* shape_of_value(const Value* value) {
  if (!value || !value->type.is_tensor() || !value->type.shape) return nullptr;
  return &*value->type.shape;
}

}  // namespace

RuleBuilder::RuleBuilder(const Node& node) : node_(node) {
  rule_.inputs.resize(node.inputs.size());
  rule_.outputs.resize(node.outputs.size());
  for (size_t i = 0; i < node.inputs.size(); ++i)
    if (const Shape* s = shape_of_value(node.inputs[i])) rule_.inputs[i].resize(s->size());
}

const Shape& RuleBuilder::shape(size_t operand) const {
  const Value* value = node_.input(operand);
  if (!value) throw NoRule{"operand " + std::to_string(operand) + " is missing"};
  const Shape* s = shape_of_value(value);
  if (!s) throw NoRule{"the shape of '" + value->name + "' is not known"};
  return *s;
}

const Dim& RuleBuilder::dim(size_t operand, size_t d) const {
  const Shape& s = shape(operand);
  if (d >= s.size()) throw NoRule{"operand " + std::to_string(operand) + " has " + std::to_string(s.size()) + " dimensions"};
  return s[d];
}

const Shape* RuleBuilder::output_shape(size_t output) const {
  return shape_of_value(node_.out(output));
}

int RuleBuilder::add(const Dim& size, Kind kind, std::string name) {
  rule_.factors.push_back({size, kind, std::move(name)});
  return static_cast<int>(rule_.factors.size()) - 1;
}

int RuleBuilder::repeated(const Dim& size, std::string name) {
  int f = parallel(size, std::move(name));
  rule_.factors[f].repeated = true;
  return f;
}

void RuleBuilder::out_rank(size_t output, size_t rank) {
  if (output < rule_.outputs.size()) rule_.outputs[output].resize(rank);
}

void RuleBuilder::out(size_t output, size_t d, int factor) {
  if (output < rule_.outputs.size()) rule_.outputs[output].at(d).push_back(factor);
}

void RuleBuilder::rest_whole(size_t operand, const std::string& name) {
  if (!has(operand)) return;
  const Shape& s = shape(operand);
  for (size_t d = 0; d < s.size(); ++d)
    if (rule_.inputs[operand][d].empty()) from(operand, d, Kind::whole, name + std::to_string(d));
}

void RuleBuilder::rest_whole_out(size_t output, const std::string& name) {
  if (output >= rule_.outputs.size()) return;
  auto& dims = rule_.outputs[output];
  const Shape* s = output_shape(output);
  for (size_t d = 0; d < dims.size(); ++d)
    if (dims[d].empty()) dims[d].push_back(whole(s && d < s->size() ? (*s)[d] : Dim(), name + std::to_string(d) + "'"));
}

int RuleBuilder::from(size_t operand, size_t d, Kind kind, std::string name) {
  const Dim& size = shape(operand).at(d);
  if (size.value == 1) return -1;
  int f = add(size, kind, std::move(name));
  in(operand, d, f);
  return f;
}

void RuleBuilder::in_unless_one(size_t operand, size_t d, int factor) {
  if (factor >= 0 && shape(operand).at(d).value != 1) in(operand, d, factor);
}

void RuleBuilder::set_added(size_t operand) {
  if (has(operand)) rule_.added.push_back(operand);
}

void RuleBuilder::set_count(const char* attribute, std::vector<int> factors) {
  if (node_.has(attribute)) rule_.counts.push_back({attribute, std::move(factors)});
}

void RuleBuilder::set_segments(bool splits, size_t axis, const std::vector<const Shape*>& parts) {
  Segments segments{splits, axis, {}, 0};
  for (const Shape* part : parts) {
    if (!part || axis >= part->size() || !(*part)[axis].known()) return;
    segments.sizes.push_back((*part)[axis].value);
    if (segments.sizes.back() == 0) return;
    segments.factor = std::gcd(segments.factor, segments.sizes.back());
  }
  if (segments.factor > 1) rule_.segments = std::move(segments);
}

size_t axis_of(int64_t axis, size_t rank) {
  auto n = static_cast<int64_t>(rank);
  if (axis < -n || axis >= n) throw NoRule{"axis " + std::to_string(axis) + " is out of range for rank " + std::to_string(rank)};
  return static_cast<size_t>(axis < 0 ? axis + n : axis);
}

const Tensor* constant_operand(const Node& node, size_t operand) {
  const Value* value = node.input(operand);
  if (!value || !value->constant || value->constant->is_missing()) return nullptr;
  const auto& inputs = value->graph->inputs;
  return std::find(inputs.begin(), inputs.end(), value) == inputs.end() ? value->constant.get() : nullptr;
}

std::optional<std::vector<int64_t>> constant_ints(const Node& node, size_t operand) {
  const Tensor* tensor = constant_operand(node, operand);
  return tensor ? int_values(*tensor) : std::nullopt;
}

std::optional<std::vector<size_t>> axes_of(const Node& node, size_t operand, const char* attribute, size_t rank) {
  std::vector<int64_t> axes;
  if (node.has(attribute)) {
    axes = node.get_ints(attribute);
  } else if (node.input(operand)) {
    auto values = constant_ints(node, operand);
    if (!values) throw NoRule{"its axes are computed while it runs"};
    axes = *values;
  } else {
    return std::nullopt;
  }
  std::vector<size_t> result;
  for (int64_t a : axes) result.push_back(axis_of(a, rank));
  return result;
}

bool same_known(const Dim& a, const Dim& b) {
  return a == b && (a.known() || !a.symbol.empty());
}

std::vector<int> broadcast(RuleBuilder& rule, const std::vector<size_t>& operands, size_t skip_last) {
  size_t rank = 0;
  for (size_t o : operands) rank = std::max(rank, rule.rank(o) < skip_last ? 0 : rule.rank(o) - skip_last);
  std::vector<int> factors(rank, -1);
  for (size_t d = 0; d < rank; ++d) {
    std::optional<Dim> size;  // a number above 1 where an operand has one, else a symbol
    auto at = [&](size_t o) -> std::optional<size_t> {
      size_t r = rule.rank(o) < skip_last ? 0 : rule.rank(o) - skip_last;
      if (r + d < rank) return std::nullopt;
      return r + d - rank;
    };
    for (size_t o : operands) {
      auto k = at(o);
      if (!k) continue;
      const Dim& here = rule.dim(o, *k);
      if (here.value == 1) continue;
      if (size && size->known() && here.known() && *size != here)
        throw NoRule{"dimensions " + std::to_string(size->value) + " and " + std::to_string(here.value) + " do not broadcast"};
      if (!size || (!size->known() && (here.known() || size->symbol.empty()))) size = here;
    }
    if (!size) continue;
    factors[d] = rule.parallel(*size, "i" + std::to_string(d));
    for (size_t o : operands)
      if (auto k = at(o)) rule.in_unless_one(o, *k, factors[d]);
  }
  return factors;
}

double number_of(const Dim& dim) {
  if (dim.known()) return static_cast<double>(dim.value);
  return dim.symbol.empty() ? 1 : static_cast<double>(DimProduct(dim.symbol).number);
}

double count_of(const Value* value) {
  if (!value) return 0;
  double n = 1;
  if (const Shape* s = shape_of_value(value))
    for (const Dim& d : *s) n *= number_of(d);
  return n;
}

double output_elements(const Node& node) {
  return count_of(node.out(0));
}
double input_elements(const Node& node) {
  return count_of(node.input(0));
}

double factor_product(const FactorRule& rule) {
  double n = 1;
  for (const Factor& f : rule.factors) n *= number_of(f.size);
  return n;
}

double contraction_flops(const Node& node) {
  FactorRule rule = factor_rule(node);
  return rule.unknown.empty() ? 2 * factor_product(rule) : 0;
}

}  // namespace fretsaw
