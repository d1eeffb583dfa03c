// Element types, shapes and types of values: sizes, names and text.
#include "graph/types.h"

#include <array>
#include <limits>

#include "graph/errors.h"

namespace fretsaw {
namespace {

struct DTypeInfo {
  std::string_view name;
  int bits;
};
// In the order of DType.
constexpr std::array<DTypeInfo, 27> kDTypes = {{
    {"undefined", 0},
    {"float32", 32},
    {"uint8", 8},
    {"int8", 8},
    {"uint16", 16},
    {"int16", 16},
    {"int32", 32},
    {"int64", 64},
    {"string", 0},
    {"bool", 8},
    {"float16", 16},
    {"float64", 64},
    {"uint32", 32},
    {"uint64", 64},
    {"complex64", 64},
    {"complex128", 128},
    {"bfloat16", 16},
    {"float8_e4m3fn", 8},
    {"float8_e4m3fnuz", 8},
    {"float8_e5m2", 8},
    {"float8_e5m2fnuz", 8},
    {"uint4", 4},
    {"int4", 4},
    {"float4_e2m1", 4},
    {"float8_e8m0", 8},
    {"uint2", 2},
    {"int2", 2},
}};

}  // namespace

int bits_of(DType type) {
  auto i = static_cast<size_t>(type);
  return i < kDTypes.size() ? kDTypes[i].bits : 0;
}

std::string_view name_of(DType type) {
  auto i = static_cast<size_t>(type);
  return i < kDTypes.size() ? kDTypes[i].name : kDTypes[0].name;
}

bool is_float(DType type) {
  switch (type) {
    case DType::float32:
    case DType::float16:
    case DType::float64:
    case DType::bfloat16:
    case DType::float8e4m3fn:
    case DType::float8e4m3fnuz:
    case DType::float8e5m2:
    case DType::float8e5m2fnuz:
    case DType::float8e8m0:
    case DType::float4e2m1:
      return true;
    default:
      return false;
  }
}

bool is_integer(DType type) {
  switch (type) {
    case DType::uint8:
    case DType::int8:
    case DType::uint16:
    case DType::int16:
    case DType::int32:
    case DType::int64:
    case DType::uint32:
    case DType::uint64:
    case DType::uint4:
    case DType::int4:
    case DType::uint2:
    case DType::int2:
      return true;
    default:
      return false;
  }
}

size_t bytes_of(DType type, int64_t count) {
  if (count <= 0) return 0;
  int bits = bits_of(type);
  auto n = static_cast<unsigned __int128>(count) * bits;
  n = (n + 7) / 8;
  if (n > static_cast<unsigned __int128>(std::numeric_limits<int64_t>::max())) throw Error("a tensor of more than 2^63 bytes");
  return static_cast<size_t>(n);
}

int64_t count_of(const Dims& dims) {
  int64_t n = 1;
  bool overflow = false;
  for (int64_t d : dims) {
    if (d < 0) throw Error("a negative dimension in " + to_string(dims));
    if (d == 0) return 0;
    overflow |= __builtin_mul_overflow(n, d, &n);
  }
  if (overflow) throw Error("a tensor of shape " + to_string(dims) + " has more than 2^63 elements");
  return n;
}

std::string to_string(const Dims& dims) {
  std::string s = "[";
  for (size_t i = 0; i < dims.size(); ++i) {
    if (i) s += ',';
    s += std::to_string(dims[i]);
  }
  return s + "]";
}

bool is_static(const Shape& shape) {
  for (const Dim& d : shape)
    if (!d.known()) return false;
  return true;
}

Dims dims_of(const Shape& shape, int64_t assume) {
  Dims dims;
  dims.reserve(shape.size());
  for (const Dim& d : shape) dims.push_back(d.known() ? d.value : assume);
  return dims;
}

Shape shape_of(const Dims& dims) {
  return {dims.begin(), dims.end()};
}

std::string to_string(const Shape& shape) {
  std::string s = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i) s += ',';
    const Dim& d = shape[i];
    s += d.known() ? std::to_string(d.value) : d.symbol.empty() ? "?" : d.symbol;
  }
  return s + "]";
}

Type Type::tensor(DType dtype, std::optional<Shape> shape) {
  Type t;
  t.kind = Kind::tensor;
  t.dtype = dtype;
  t.shape = std::move(shape);
  return t;
}

Type Type::sequence(Type element) {
  Type t;
  t.kind = Kind::sequence;
  t.element = std::make_shared<const Type>(std::move(element));
  return t;
}

Type Type::optional(Type element) {
  Type t;
  t.kind = Kind::optional;
  t.element = std::make_shared<const Type>(std::move(element));
  return t;
}

bool operator==(const Type& a, const Type& b) {
  if (a.kind != b.kind || a.dtype != b.dtype || a.shape != b.shape) return false;
  if (!a.element || !b.element) return a.element == b.element;
  return *a.element == *b.element;
}

std::string to_string(const Type& type) {
  auto tensor = [&] { return std::string(name_of(type.dtype)) + (type.shape ? to_string(*type.shape) : "[...]"); };
  auto inner = [&] { return type.element ? to_string(*type.element) : std::string("?"); };
  switch (type.kind) {
    case Type::Kind::tensor:
      return tensor();
    case Type::Kind::sparse_tensor:
      return "sparse(" + tensor() + ")";
    case Type::Kind::sequence:
      return "seq(" + inner() + ")";
    case Type::Kind::optional:
      return "optional(" + inner() + ")";
    case Type::Kind::map:
      return "map(" + std::string(name_of(type.dtype)) + ", " + inner() + ")";
    case Type::Kind::unknown:
      break;
  }
  return "?";
}

}  // namespace fretsaw
