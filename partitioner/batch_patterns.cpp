// Proving that a value which does not depend on the batch is the same for every sample, or numbers the samples.
#include <algorithm>
#include <cstring>

#include "graph/catalogue.h"
#include "partitioner/batch_analysis.h"

namespace fretsaw {
namespace {

RowPattern varying(std::string why) {
  return {RowPattern::Kind::varying, {}, std::move(why)};
}

bool rows_equal(const Tensor& t, int64_t before, int64_t rows, int64_t row_elements) {
  if (t.dtype == DType::string) {
    for (int64_t b = 0; b < before; ++b)
      for (int64_t r = 1; r < rows; ++r)
        for (int64_t e = 0; e < row_elements; ++e)
          if (t.strings[(b * rows + r) * row_elements + e] != t.strings[b * rows * row_elements + e]) return false;
    return true;
  }
  int64_t bits = bits_of(t.dtype) * row_elements;
  if (bits % 8 != 0) return false;
  int64_t bytes = bits / 8;
  for (int64_t b = 0; b < before; ++b) {
    const std::byte* first = t.data + b * rows * bytes;
    for (int64_t r = 1; r < rows; ++r)
      if (std::memcmp(first, first + r * bytes, bytes) != 0) return false;
  }
  return true;
}

// What the columns of the last dimension find, where element (row r) is r * step + rest; nullopt when a column is neither that nor the same
// for all rows. Columns that find the same are one.
std::optional<std::vector<SampleIndex>> index_columns(const std::vector<int64_t>& v, int64_t before, int64_t rows, int64_t row_elements,
                                                      int64_t columns) {
  std::vector<SampleIndex> result(columns);
  if (rows < 2) return std::nullopt;
  for (int64_t c = 0; c < columns; ++c) {
    int64_t step = v[row_elements + c] - v[c], most = 0;
    if (step < 0) return std::nullopt;
    for (int64_t b = 0; b < before; ++b)
      for (int64_t e = c; e < row_elements; e += columns) {
        int64_t rest = v[b * rows * row_elements + e];
        if (step > 0 && (rest < 0 || rest >= step)) return std::nullopt;
        most = std::max(most, rest);
        for (int64_t r = 0; r < rows; ++r)
          if (v[(b * rows + r) * row_elements + e] != r * step + rest) return std::nullopt;
      }
    if (step > 0) result[c] = {DimProduct(step), DimProduct(most + 1)};
  }
  bool alike = std::all_of(result.begin(), result.end(), [&](const SampleIndex& i) { return i.step == result[0].step; });
  if (!alike || columns == 1) return result;
  for (const SampleIndex& i : result) result[0].below.number = std::max(result[0].below.number, i.below.number);
  result.resize(1);
  return result;
}

}  // namespace

RowPattern BatchAnalysis::constant_pattern(const Value& value, size_t dim, int64_t rows, int64_t inner) const {
  const Tensor& t = *value.constant;
  if (t.is_missing()) return varying("stands in a file that is missing, so that its rows cannot be compared");
  if (t.count() == 0) return {RowPattern::Kind::uniform, {}, ""};
  int64_t before = 1, row_elements = inner;
  for (size_t d = 0; d < t.dims.size(); ++d) (d < dim ? before : row_elements) *= d == dim ? 1 : t.dims[d];
  if (rows_equal(t, before, rows, row_elements)) return {RowPattern::Kind::uniform, {}, ""};
  if ((t.dtype == DType::int64 || t.dtype == DType::int32) && inner == 1) {
    auto ints = int_values(t);
    int64_t columns = dim + 1 < t.dims.size() ? t.dims.back() : 1;
    if (ints)
      if (auto numbers = index_columns(*ints, before, rows, row_elements, columns)) return {RowPattern::Kind::sample_index, *numbers, ""};
  }
  return varying("holds a different constant for each sample of the batch");
}

RowPattern BatchAnalysis::produced_pattern(const Value& value, size_t dim, const DimProduct& outer, const DimProduct& inner) {
  Node& node = *value.producer;
  std::string by = "is computed by '" + node.name + "' (" + node.op + "), ";
  if (node.is("Range")) {
    auto from = contents(node.input(0)), step = contents(node.input(2));
    if (from && step && (*from)[0] == DimProduct(0) && (*step)[0] == DimProduct(1))
      return {RowPattern::Kind::sample_index, {{DimProduct(1), DimProduct(1)}}, ""};
  }
  const OperatorRecord* record = find_operator(node.op, node.domain);
  if (!record || record->random) return varying(by + "which is not known to give each sample the same");
  FactorRule rule = factor_rule(node);
  auto o = static_cast<size_t>(value.output);
  if (!rule.unknown.empty() || o >= rule.outputs.size() || dim >= rule.outputs[o].size())
    return varying(by + "through which the batch axis cannot be followed");
  BatchAxis here;
  here.outer = outer;
  here.inner = inner;
  auto place = locate(rule, rule.outputs[o][dim], here);
  if (!place) return varying(by + "which does not keep the rows of the batch apart");
  const Factor& factor = rule.factors[place->factor];
  if (factor.repeated) return {RowPattern::Kind::uniform, {}, ""};
  if (factor.kind != Factor::Kind::parallel) return varying(by + "and differs from sample to sample");
  bool found = false;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (!node.inputs[i]) continue;
    for (size_t d = 0; d < rule.inputs[i].size(); ++d) {
      const std::vector<int>& dims = rule.inputs[i][d];
      auto at = std::find(dims.begin(), dims.end(), place->factor);
      if (at == dims.end()) continue;
      auto k = static_cast<size_t>(at - dims.begin());
      RowPattern p =
          pattern(node.inputs[i], d, product(rule, dims, 0, k) * place->outer, place->inner * product(rule, dims, k + 1, dims.size()));
      if (p.kind == RowPattern::Kind::varying) return p;
      if (p.kind == RowPattern::Kind::sample_index) {
        bool moves = i == 0 && p.columns.size() == 1 &&
                     (node.is("Unsqueeze") || node.is("Reshape") || node.is("Cast") || node.is("Expand") || node.is("Identity"));
        return moves ? p : varying(by + "from the numbers of the samples");
      }
      found = true;
    }
  }
  return found ? RowPattern{RowPattern::Kind::uniform, {}, ""} : varying(by + "and differs from sample to sample");
}

RowPattern BatchAnalysis::pattern(const Value* value, size_t dim, const DimProduct& outer, const DimProduct& inner) {
  auto key = std::make_pair(value, dim);
  if (auto it = patterns_.find(key); it != patterns_.end()) return it->second;
  auto find = [&]() -> RowPattern {
    if (!outer.is_one() || !inner.is_number()) return varying("meets the batch within a dimension, not at its start");
    auto size = value->type.shape && dim < value->type.shape->size() ? product_of((*value->type.shape)[dim]) : std::nullopt;
    if (value->constant) {
      if (!size || *size != outer * batch_ * inner || !batch_.is_number()) return varying("has a fixed size along the batch axis");
      return constant_pattern(*value, dim, batch_.number, inner.number);
    }
    if (const auto begin = begins_.find(value); begin != begins_.end()) return pattern(begin->second, dim, outer, inner);
    if (!value->producer) return varying("is an input without a batch axis");
    return produced_pattern(*value, dim, outer, inner);
  };
  patterns_[key] = varying("depends on itself");
  return patterns_[key] = find();
}

// A number that all elements are below, where they are known to be at least 0: positions 0 to s - 1 are below s.
std::optional<DimProduct> BatchAnalysis::below(const Value* value, int depth) {
  if (!value || depth > 20) return std::nullopt;
  if (value->constant) {
    auto ints = value->constant->is_missing() ? std::nullopt : int_values(*value->constant);
    if (!ints || ints->empty() || *std::min_element(ints->begin(), ints->end()) < 0) return std::nullopt;
    return DimProduct(*std::max_element(ints->begin(), ints->end()) + 1);
  }
  const Node* node = value->producer;
  if (!node) return std::nullopt;
  if (node->is("Range")) {
    auto start = contents(node->input(0)), limit = contents(node->input(1)), step = contents(node->input(2));
    bool counts = start && limit && step && (*start)[0] == DimProduct(0) && (*step)[0] == DimProduct(1);
    return counts ? std::optional(in_types((*limit)[0])) : std::nullopt;
  }
  if (is_one_of(*node, {"ArgMax", "ArgMin"}) || (node->is("TopK") && value->output == 1)) {
    const Value* x = node->input(0);
    if (!x || !x->type.is_tensor() || !x->type.shape) return std::nullopt;
    const auto rank = std::ssize(*x->type.shape);
    int64_t axis = node->get_int("axis", node->is("TopK") ? -1 : 0);
    if (axis < 0) axis += rank;
    return axis >= 0 && axis < rank ? product_of((*x->type.shape)[static_cast<size_t>(axis)]) : std::nullopt;
  }
  if (is_one_of(*node, {"Unsqueeze", "Squeeze", "Reshape", "Flatten", "Expand", "Transpose", "Identity", "Cast", "Slice", "ReduceMax",
                        "ReduceMin", "Gather"}))
    return below(node->input(0), depth + 1);
  return std::nullopt;
}

// The number of samples, or a multiple of it, as an exporter writes it: an integer, or that as a float.
bool BatchAnalysis::is_batch_size(const Value* value) {
  while (value && value->producer && is_one_of(*value->producer, {"Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape"}) && !sized(value))
    value = value->producer->input(0);
  if (!value || !sized(value)) return false;
  const Contents& sizes = contents_.at(value);
  const auto times = sizes.size() == 1 ? quotient(sizes[0], batch_symbol()) : std::nullopt;
  return times && !mentions_batch(*times);
}

bool BatchAnalysis::is_sum(const Value* value) const {
  const auto found = axes.find(value);
  return found != axes.end() && found->second.mixed && found->second.mixed->partial == "sum" && !found->second.holds_batch();
}

}  // namespace fretsaw
