// Reading a step: its inputs, its nodes one after another, and what of it is used.
#include "kernels/cuda/pointwise_step.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/pointwise_operators.h"

namespace fretsaw::cuda {
namespace {

constexpr size_t most_values = 256, most_addresses = 32;

// The operand of an input that is one known number, printed into the kernel; otherwise one that is read.
int add_operand(StepBuilder& b, size_t i) {
  const CompileContext& c = b.context;
  const DType dtype = c.input_dtype(i);
  if (dtype == DType::undefined) throw Refused{"an input whose type is not known"};
  if (!compute_type(dtype)) throw Refused{not_supported(dtype)};
  const TensorPtr& constant = c.constants[i];
  PointValue v{.kind = PointValue::Kind::operand, .dtype = dtype, .type = dtype, .name = "", .text = "", .arguments = {}, .dims = {}};
  v.dims = c.input_dims(i);
  if (constant) v.dims = constant->dims;
  if (constant && constant->data && constant->count() == 1) {
    v.text = literal_text(dtype, constant->data);
    if (!v.text.empty()) v.kind = PointValue::Kind::literal;
  }
  v.per_row = v.kind == PointValue::Kind::literal || (v.dims && (v.dims->empty() || v.dims->back() == 1));
  b.step.values.push_back(std::move(v));
  return static_cast<int>(b.step.values.size()) - 1;
}

// Drops what no output needs; inputs keep their values, whose shapes may be asked for.
void drop_unused(PointStep& step) {
  std::vector<bool> used(step.values.size(), false);
  for (const auto& place : step.outputs) used[static_cast<size_t>(place.value)] = true;
  for (const auto& place : step.inputs) used[static_cast<size_t>(place.value)] = true;
  for (size_t i = step.values.size(); i-- > 0;) {
    if (!used[i]) continue;
    for (int argument : step.values[i].arguments) used[static_cast<size_t>(argument)] = true;
    if (step.values[i].dims_like >= 0) used[static_cast<size_t>(step.values[i].dims_like)] = true;
  }
  std::vector<int> place(step.values.size(), -1);
  std::vector<PointValue> kept;
  for (size_t i = 0; i < step.values.size(); ++i) {
    if (!used[i]) continue;
    place[i] = static_cast<int>(kept.size());
    kept.push_back(std::move(step.values[i]));
  }
  const auto moved = [&](int& value) { value = place[static_cast<size_t>(value)]; };
  for (PointValue& v : kept) {
    for (int& argument : v.arguments) moved(argument);
    if (v.dims_like >= 0) moved(v.dims_like);
  }
  for (auto& p : step.inputs) moved(p.value);
  for (auto& p : step.outputs) moved(p.value);
  step.values = std::move(kept);
}

Dims dims_of_value(const PointStep& step, const PointValue& v) {
  if (v.dims_like >= 0) return *step.at(v.dims_like).dims;
  Dims dims;
  for (int argument : v.arguments) dims = broadcast_dims(dims, *step.at(argument).dims);
  if (v.kind == PointValue::Kind::reduction) dims.back() = 1;
  if (v.dropped) dims.pop_back();
  return dims;
}

bool arguments_known(const PointStep& step, const PointValue& v) {
  const auto known = [&](int value) { return step.at(value).dims.has_value(); };
  return (v.dims_like < 0 || known(v.dims_like)) && std::all_of(v.arguments.begin(), v.arguments.end(), known);
}

std::string float_text(double number, bool is_double) {
  if (std::isfinite(number)) return fmt::format("{:a}{}", number, is_double ? "" : "f");
  if (is_double) return fmt::format("double_of({:#x}ull)", std::bit_cast<uint64_t>(number));
  return fmt::format("float_of({:#x}u)", std::bit_cast<uint32_t>(static_cast<float>(number)));
}

}  // namespace

int StepBuilder::function(const std::string& name, DType dtype, DType type, const std::string& text, std::vector<int> arguments) {
  PointValue v{.kind = PointValue::Kind::function, .dtype = dtype, .type = type, .name = name, .text = text, .arguments = {}, .dims = {}};
  v.per_row = true;
  for (int argument : arguments) {
    if (at(argument).dropped) throw Refused{"a reduction without its axis inside a step"};
    v.per_row &= at(argument).per_row;
  }
  v.arguments = std::move(arguments);
  if (arguments_known(step, v)) v.dims = dims_of_value(step, v);
  step.values.push_back(std::move(v));
  if (step.values.size() > most_values) throw Refused{"too many values in one step"};
  return static_cast<int>(step.values.size()) - 1;
}

int StepBuilder::literal(DType dtype, const std::string& text) {
  step.values.push_back(
      {.kind = PointValue::Kind::literal, .dtype = dtype, .type = dtype, .name = "", .text = text, .arguments = {}, .dims = Dims{}});
  step.values.back().per_row = true;
  return static_cast<int>(step.values.size()) - 1;
}

int StepBuilder::reduction(const std::string& fold, int value) {
  const DType dtype = at(value).dtype == DType::float64 ? DType::float64 : DType::float32;
  const int made = function("", dtype, fold, {value});
  PointValue& v = step.values[static_cast<size_t>(made)];
  v.kind = PointValue::Kind::reduction;
  v.per_row = true;
  v.dims = dims_of_value(step, v);
  return made;
}

void StepBuilder::shape_like(int value, int other) {
  PointValue& v = step.values[static_cast<size_t>(value)];
  v.dims_like = other;
  v.dims = at(other).dims;
}

void StepBuilder::drop_axis(int value) {
  PointValue& v = step.values[static_cast<size_t>(value)];
  v.dropped = true;
  v.dims = dims_of_value(step, v);
}

int StepBuilder::input(const Node& node, size_t i) const {
  const Value* v = node.input(i);
  if (!v) return -1;
  if (const auto made = results.find(v); made != results.end()) return made->second;
  const auto found = operands.find(v);
  if (found == operands.end()) throw Refused{"an input that the step is not given"};
  return found->second;
}

int StepBuilder::required(const Node& node, size_t i) const {
  const int value = input(node, i);
  if (value < 0) throw Refused{"an input is left out"};
  return value;
}

TensorPtr StepBuilder::constant(const Node& node, size_t i) const {
  const auto& inputs = context.inputs;
  const auto found = node.input(i) ? std::find(inputs.begin(), inputs.end(), node.input(i)) : inputs.end();
  return found == inputs.end() ? nullptr : context.constants[static_cast<size_t>(found - inputs.begin())];
}

void StepBuilder::output(const Node& node, size_t i, int value) {
  if (node.out(i)) results[node.out(i)] = value;
}

void infer_dims(PointStep& step) {
  for (PointValue& v : step.values) {
    const bool given = v.kind == PointValue::Kind::operand || (v.kind == PointValue::Kind::literal && v.dims_like < 0);
    if (!given) v.dims = dims_of_value(step, v);
  }
}

PointStep read_step(const CompileContext& c) {
  StepBuilder b(c);
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    if (!c.inputs[i]) continue;
    auto [found, fresh] = b.operands.try_emplace(c.inputs[i], -1);
    if (fresh) found->second = add_operand(b, i);
    b.step.inputs.push_back({i, found->second});
  }
  for (const Node* node : c.nodes) {
    lower_node(b, *node);
    b.step.members.push_back(node->op);
  }
  for (size_t i = 0; i < c.outputs.size(); ++i) {
    if (!c.outputs[i]) continue;
    const auto found = b.results.find(c.outputs[i]);
    if (found == b.results.end()) throw Refused{"an output that is not computed"};
    b.step.outputs.push_back({i, found->second});
  }
  drop_unused(b.step);
  const auto is_reduction = [](const PointValue& v) { return v.kind == PointValue::Kind::reduction; };
  b.step.reduces = std::any_of(b.step.values.begin(), b.step.values.end(), is_reduction);
  const auto is_operand = [](const PointValue& v) { return v.kind == PointValue::Kind::operand; };
  const auto operands = std::count_if(b.step.values.begin(), b.step.values.end(), is_operand);
  if (static_cast<size_t>(operands) + b.step.outputs.size() > most_addresses) throw Refused{"too many inputs for one step"};
  return std::move(b.step);
}

const char* compute_type(DType dtype) {
  return dtype == DType::float16 || dtype == DType::bfloat16 ? "float" : storage_type(dtype);
}

const char* storage_type(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return "float";
    case DType::float64:
      return "double";
    case DType::float16:
      return "Half";
    case DType::bfloat16:
      return "BFloat";
    case DType::boolean:
      return "bool";
    case DType::int8:
      return "signed char";
    case DType::int16:
      return "short";
    case DType::int32:
      return "int";
    case DType::int64:
      return "long long";
    case DType::uint8:
    case DType::float8e4m3fn:
    case DType::float8e4m3fnuz:
    case DType::float8e5m2:
    case DType::float8e5m2fnuz:
    case DType::float8e8m0:
      return "unsigned char";
    case DType::uint16:
      return "unsigned short";
    case DType::uint32:
      return "unsigned";
    case DType::uint64:
    case DType::complex64:
      return "unsigned long long";
    case DType::complex128:
      return "Pair";
    default:
      return nullptr;
  }
}

std::string literal_text(DType dtype, double number) {
  if (dtype == DType::boolean) return number != 0 ? "true" : "false";
  if (is_float(dtype)) return float_text(dtype == DType::float64 ? number : static_cast<float>(number), dtype == DType::float64);
  return fmt::format("({})({}ll)", storage_type(dtype), static_cast<int64_t>(number));
}

// "" for types whose elements have no literal here.
std::string literal_text(DType dtype, const void* data) {
  if (!contains(types::ordered, dtype)) return "";
  if (is_float(dtype)) {
    double number;
    load_as<double>(dtype, data, 0, 1, &number);
    return literal_text(dtype, number);
  }
  if (dtype == DType::uint64) return fmt::format("{}ull", *static_cast<const uint64_t*>(data));
  int64_t number;
  load_as<int64_t>(dtype, data, 0, 1, &number);
  if (dtype == DType::boolean) return number ? "true" : "false";
  if (number == std::numeric_limits<int64_t>::min()) return "(-9223372036854775807ll - 1)";
  return fmt::format("({})({}ll)", storage_type(dtype), number);
}

}  // namespace fretsaw::cuda
