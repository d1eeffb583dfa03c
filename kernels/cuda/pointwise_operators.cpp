// What each operator computes: its values, from the rows of the table or written here.
#include "kernels/cuda/pointwise_operators.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <unordered_map>

#include "kernels/cpu/convert.h"
#include "kernels/cuda/pointwise_table.h"

namespace fretsaw::cuda {
namespace {

using Lowering = void (*)(StepBuilder&, const Node&);

int operand_of(StepBuilder& b, const Node& node, size_t i, TypeSet types) {
  const int value = b.required(node, i);
  if (!contains(types, b.at(value).dtype)) throw Refused{not_supported(b.at(value).dtype)};
  return value;
}

void require_same_type(StepBuilder& b, int x, int y) {
  if (b.at(x).dtype != b.at(y).dtype) throw Refused{"operands of two types"};
}

double number_attribute(const Node& node, const char* name, double absent) {
  const Attribute* found = node.attribute(name);
  if (!found) return absent;
  if (const auto* i = std::get_if<int64_t>(&found->value)) return static_cast<double>(*i);
  return node.get_float(name, 0);  // throws where it is no number
}

// "const T a = ...; " for the attributes that the row has.
std::string attributes_text(const PointRow& row, const Node& node) {
  std::string text;
  const auto add = [&](const char* letter, const char* name, double absent) {
    if (*name) text += fmt::format("const T {} = T({}); ", letter, literal_text(DType::float64, number_attribute(node, name, absent)));
  };
  add("a", row.a_name, row.a);
  add("b", row.b_name, row.b);
  return text;
}

const char* chosen_expression(const PointRow& row, const Node& node) {
  if (!*row.choice) return row.expression;
  const std::string value = node.get_string(row.choice, row.choice1);
  if (value != row.choice1 && value != row.choice2) throw Refused{"attribute " + std::string(row.choice) + " is '" + value + "'"};
  return value == row.choice2 ? row.second : row.expression;
}

// Rows whose operands are all of the type T.
void lower_row(StepBuilder& b, const Node& node) {
  const PointRow& row = *point_row(node.op);
  const bool two = row.kind == PointRow::Kind::binary || row.kind == PointRow::Kind::comparison;
  std::vector<int> arguments = {operand_of(b, node, 0, row.types & ~types::strings)};
  if (two) {
    arguments.push_back(b.required(node, 1));
    require_same_type(b, arguments[0], arguments[1]);
  }
  const DType type = b.at(arguments[0]).dtype;
  const bool answers = row.kind == PointRow::Kind::test || row.kind == PointRow::Kind::comparison;
  const std::string text = attributes_text(row, node) + fmt::format("return {}({});", answers ? "bool" : "T", chosen_expression(row, node));
  b.output(node, 0, b.function(node.op, answers ? DType::boolean : type, type, text, arguments));
}

// The operands folded one after another into z.
void lower_variadic(StepBuilder& b, const Node& node) {
  const PointRow& row = *point_row(node.op);
  int z = operand_of(b, node, 0, row.types);
  const DType type = b.at(z).dtype;
  for (size_t i = 1; i < node.inputs.size(); ++i) {
    const int x = b.required(node, i);
    require_same_type(b, x, z);
    z = b.function(node.op, type, fmt::format("const T z = y; return T({});", row.expression), {x, z});
  }
  if (std::string_view(row.second) != "z") {
    z = b.function(node.op, type, fmt::format("const T z = x; const int n = {}; return T({});", node.inputs.size(), row.second), {z});
  }
  b.output(node, 0, z);
}

void lower_where(StepBuilder& b, const Node& node) {
  const int x = operand_of(b, node, 0, types::booleans), y = b.required(node, 1), z = b.required(node, 2);
  require_same_type(b, y, z);
  b.output(node, 0, b.function(node.op, b.at(y).dtype, fmt::format("return {};", point_row(node.op)->expression), {x, y, z}));
}

int bound(StepBuilder& b, const Node& node, size_t i, int x) {
  const DType type = b.at(x).dtype;
  if (const int given = b.input(node, i); given >= 0) {
    require_same_type(b, given, x);
    if (b.at(given).dims && count_of(*b.at(given).dims) != 1) throw Refused{"a bound that is not one number"};
    return given;
  }
  const bool low = i == 1;
  if (is_float(type)) return b.literal(type, literal_text(type, low ? -INFINITY : INFINITY));
  std::string text;
  dispatch<types::integers>(type, [&]<typename T>() {
    const T limit = low ? std::numeric_limits<T>::lowest() : std::numeric_limits<T>::max();
    text = literal_text(type, &limit);
  });
  return b.literal(type, text);
}

void lower_clip(StepBuilder& b, const Node& node) {
  const int x = operand_of(b, node, 0, point_row(node.op)->types);
  const std::vector<int> arguments = {x, bound(b, node, 1, x), bound(b, node, 2, x)};
  const int y = b.function(node.op, b.at(x).dtype, fmt::format("return T({});", point_row(node.op)->expression), arguments);
  b.shape_like(y, x);
  b.output(node, 0, y);
}

// The exponents that models are full of, without pow; "" for others.
std::string common_power(StepBuilder& b, const Node& node, bool floating) {
  const TensorPtr known = b.constant(node, 1);
  if (!known || !known->data || known->count() != 1) return "";
  double exponent;
  load_as<double>(known->dtype, known->data, 0, 1, &exponent);
  if (exponent == 2) return "return x * x;";
  if (exponent == 3) return "return x * x * x;";
  if (!floating) return "";
  if (exponent == 0.5) return "return sqrt(x);";
  return exponent == -0.5 ? "return T(1) / sqrt(x);" : "";
}

// Computes as a type that holds both operands.
void lower_power(StepBuilder& b, const Node& node) {
  const TypeSet types = point_row(node.op)->types;
  const int x = operand_of(b, node, 0, types), y = operand_of(b, node, 1, types);
  const DType type = b.at(x).dtype;
  const bool floats = is_float(type) || is_float(b.at(y).dtype);
  const DType wide = wide_type(type) == DType::float32 ? DType::float32 : floats ? DType::float64 : DType::int64;
  const std::string common = common_power(b, node, is_float(wide));
  std::vector<int> arguments = {b.cast(x, wide)};
  if (common.empty()) arguments.push_back(b.cast(y, wide));
  const std::string text = common.empty() ? fmt::format("return {};", point_row(node.op)->expression) : common;
  int z = b.cast(b.function(node.op, wide, text, arguments), type);
  if (!common.empty()) {
    // An exponent of more dimensions than the base gives them to the result.
    const bool adds_dims = !b.at(y).dims || !b.at(x).dims || b.at(y).dims->size() > b.at(x).dims->size();
    if (adds_dims) z = b.function(node.op, type, "return x;", {z, y});
  }
  b.output(node, 0, z);
}

void lower_cast(StepBuilder& b, const Node& node) {
  const int64_t number = node.op == "CastLike" ? static_cast<int64_t>(b.at(b.required(node, 1)).dtype) : node.get_int("to", 0);
  if (number <= 0 || number > static_cast<int64_t>(DType::int2)) throw Refused{"attribute to names no element type"};
  const bool saturate = node.get_int("saturate", 1) != 0;
  b.output(node, 0, b.cast(b.required(node, 0), static_cast<DType>(number), saturate, node.get_string("round_mode", "up")));
}

bool is_known_zero(const TensorPtr& number) {
  double value = 1;
  if (number && number->data && number->count() == 1) load_as<double>(number->dtype, number->data, 0, 1, &value);
  return value == 0;
}

// In inference, and where nothing is dropped: a copy, and a mask of ones.
void lower_dropout(StepBuilder& b, const Node& node) {
  const TensorPtr training = b.constant(node, 2);
  if (b.has_input(node, 2) && !is_known_zero(b.constant(node, 1))) {
    const auto values = training ? int_values(*training) : std::nullopt;
    if (!values || values->size() != 1 || values->front() != 0) throw Refused{"training"};
  }
  const int x = operand_of(b, node, 0, types::floats | types::float8s);
  b.output(node, 0, x);
  if (!node.out(1)) return;
  const int mask = b.literal(DType::boolean, "true");
  b.shape_like(mask, x);
  b.output(node, 1, mask);
}

const std::unordered_map<std::string_view, Lowering>& lowerings() {
  static const auto all = [] {
    std::unordered_map<std::string_view, Lowering> made;
    for (const PointRow& row : point_rows()) made[row.op] = row.kind == PointRow::Kind::variadic ? lower_variadic : lower_row;
    made["Where"] = lower_where;
    made["Clip"] = lower_clip;
    made["Pow"] = lower_power;
    made["Cast"] = made["CastLike"] = lower_cast;
    made["Dropout"] = lower_dropout;
    return made;
  }();
  return all;
}

// --- casts ---

// The struct of the prelude that converts an 8-bit float; null for other types.
const char* float8_name(DType dtype) {
  switch (dtype) {
    case DType::float8e4m3fn:
      return "Float8E4M3FN";
    case DType::float8e4m3fnuz:
      return "Float8E4M3FNUZ";
    case DType::float8e5m2:
      return "Float8E5M2";
    case DType::float8e5m2fnuz:
      return "Float8E5M2FNUZ";
    case DType::float8e8m0:
      return "Float8E8M0";
    default:
      return nullptr;
  }
}

int rounding_number(const std::string& mode) {
  if (mode == "up") return 0;
  if (mode == "down") return 1;
  if (mode == "nearest") return 2;
  throw Refused{"round_mode is '" + mode + "'"};
}

std::string cast_text(DType from, DType to, bool saturate, const std::string& round_mode) {
  const std::string narrow = is_float(from) ? "narrowed(x)" : "narrowed(double(x))";
  if (const char* small = float8_name(to)) {
    const std::string rounding = to == DType::float8e8m0 ? fmt::format("<{}>", rounding_number(round_mode)) : "";
    return fmt::format("return {}::encode{}({}, {});", small, rounding, narrow, saturate);
  }
  if (to == DType::boolean) return "return x != 0;";
  if (contains(types::half_floats, to)) return "return " + narrow + ";";
  return is_float(from) && !is_float(to) ? "return to_integer<T>(x);" : "return T(x);";
}

}  // namespace

int StepBuilder::cast(int value, DType to, bool saturate, const std::string& round_mode) {
  constexpr TypeSet numbers = types::ordered | types::float8s;
  const DType from = at(value).dtype;
  if (!contains(numbers, from)) throw Refused{not_supported(from)};
  if (!contains(numbers, to)) throw Refused{not_supported(to)};
  if (from == to) return value;
  if (const char* small = float8_name(from)) {
    return cast(function("Cast", DType::float32, fmt::format("return {}::decode(x);", small), {value}), to, saturate, round_mode);
  }
  return function("Cast", to, cast_text(from, to, saturate, round_mode), {value});
}

std::vector<std::string> point_operators() {
  std::vector<std::string> names;
  for (const auto& [name, lower] : lowerings()) names.emplace_back(name);
  return names;
}

void lower_node(StepBuilder& b, const Node& node) {
  if (node.domain.empty() && lower_row_operator(b, node)) return;
  const auto found = lowerings().find(node.op);
  if (!node.domain.empty() || found == lowerings().end()) throw Refused{"no elementwise form of " + node.op};
  found->second(b, node);
}

}  // namespace fretsaw::cuda
