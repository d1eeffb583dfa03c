// Element types, dimensions and types of values: the vocabulary everything else speaks.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fretsaw {

// The numbers are those of ONNX's TensorProto.DataType.
enum class DType : uint8_t {
  undefined = 0,
  float32 = 1,
  uint8 = 2,
  int8 = 3,
  uint16 = 4,
  int16 = 5,
  int32 = 6,
  int64 = 7,
  string = 8,
  boolean = 9,
  float16 = 10,
  float64 = 11,
  uint32 = 12,
  uint64 = 13,
  complex64 = 14,
  complex128 = 15,
  bfloat16 = 16,
  float8e4m3fn = 17,
  float8e4m3fnuz = 18,
  float8e5m2 = 19,
  float8e5m2fnuz = 20,
  uint4 = 21,
  int4 = 22,
  float4e2m1 = 23,
  float8e8m0 = 24,
  uint2 = 25,
  int2 = 26,
};

// Bits an element takes in memory; 4-bit and 2-bit types are packed, the first element in the low bits. Strings: 0.
int bits_of(DType type);
// "float32", "int64", ... as numpy spells them; "undefined" for a number ONNX does not define.
std::string_view name_of(DType type);
bool is_float(DType type);    // float16, bfloat16, float32, float64 and the 8- and 4-bit floats
bool is_integer(DType type);  // signed and unsigned, not boolean
// Bytes that `count` elements take; sub-byte types are rounded up to whole bytes.
size_t bytes_of(DType type, int64_t count);

using Dims = std::vector<int64_t>;  // a concrete shape

int64_t count_of(const Dims& dims);       // number of elements; 1 for a scalar, throws Error on overflow
std::string to_string(const Dims& dims);  // "[2,3]"

// One dimension: a number, a symbol ("batch", "batch*16"), or unknown.
struct Dim {
  int64_t value = -1;  // -1 when it is not a known number
  std::string symbol;  // empty when known or nameless

  Dim() = default;
  Dim(int64_t v) : value(v) {}  // NOLINT: a number is a dimension
  explicit Dim(std::string s) : symbol(std::move(s)) {}
  bool known() const { return value >= 0; }
  bool operator==(const Dim&) const = default;
};
using Shape = std::vector<Dim>;

bool is_static(const Shape& shape);                    // every dimension is a number
Dims dims_of(const Shape& shape, int64_t assume = 1);  // unknown dimensions count as `assume`
Shape shape_of(const Dims& dims);
std::string to_string(const Shape& shape);  // "[batch,3,?]"

// The type of a value: a tensor, or a sequence, optional or map of such.
struct Type {
  enum class Kind : uint8_t { unknown, tensor, sparse_tensor, sequence, optional, map };
  Kind kind = Kind::unknown;
  DType dtype = DType::undefined;       // of tensors; the key type of maps
  std::optional<Shape> shape;           // of tensors; nullopt: not even the rank is known
  std::shared_ptr<const Type> element;  // of sequences and optionals; the value type of maps

  static Type tensor(DType dtype, std::optional<Shape> shape = std::nullopt);
  static Type sequence(Type element);
  static Type optional(Type element);
  bool is_tensor() const { return kind == Kind::tensor; }
};
bool operator==(const Type& a, const Type& b);
std::string to_string(const Type& type);  // "float32[batch,3]", "seq(int64[?])"

}  // namespace fretsaw
