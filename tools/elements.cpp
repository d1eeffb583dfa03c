// Elements of tensors of any numeric type as doubles, for comparing, printing and filling.
#include "tools/elements.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "graph/errors.h"

namespace fretsaw {
namespace {

template <typename T>
double load(const void* data, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return static_cast<double>(value);
}

template <typename T>
void store(void* data, int64_t index, double value) {
  const T rounded = static_cast<T>(value);
  std::memcpy(static_cast<char*>(data) + index * static_cast<int64_t>(sizeof(T)), &rounded, sizeof(T));
}

template <typename T>
T raw(const void* data, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

// A small float: sign, `exponent_bits`, `mantissa_bits`. What its special codes mean differs between the formats.
struct FloatFormat {
  int exponent_bits, mantissa_bits, bias;
  enum class Special { ieee, only_nan, negative_zero_is_nan, none } special;  // ieee: infinities and NaNs at the top exponent
};

double decode(uint32_t bits, const FloatFormat& format) {
  const uint32_t mantissa = bits & ((1U << format.mantissa_bits) - 1);
  const uint32_t top = (1U << format.exponent_bits) - 1;
  const uint32_t exponent = (bits >> format.mantissa_bits) & top;
  const bool negative = (bits >> (format.mantissa_bits + format.exponent_bits)) & 1;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  using Special = FloatFormat::Special;
  if (format.special == Special::ieee && exponent == top)
    return mantissa ? nan : (negative ? -1 : 1) * std::numeric_limits<double>::infinity();
  if (format.special == Special::only_nan && exponent == top && mantissa == (1U << format.mantissa_bits) - 1) return nan;
  if (format.special == Special::negative_zero_is_nan && negative && exponent == 0 && mantissa == 0) return nan;
  const double fraction = std::ldexp(static_cast<double>(mantissa), -format.mantissa_bits);
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, 1 - format.bias) : std::ldexp(1 + fraction, static_cast<int>(exponent) - format.bias);
  return negative ? -magnitude : magnitude;
}

constexpr FloatFormat kHalf{5, 10, 15, FloatFormat::Special::ieee};
constexpr FloatFormat kE4M3FN{4, 3, 7, FloatFormat::Special::only_nan};
constexpr FloatFormat kE4M3FNUZ{4, 3, 8, FloatFormat::Special::negative_zero_is_nan};
constexpr FloatFormat kE5M2{5, 2, 15, FloatFormat::Special::ieee};
constexpr FloatFormat kE5M2FNUZ{5, 2, 16, FloatFormat::Special::negative_zero_is_nan};
constexpr FloatFormat kE2M1{2, 1, 1, FloatFormat::Special::none};

// Sub-byte element `index`, the first in the low bits.
uint32_t packed(const void* data, int64_t index, int bits) {
  const int each = 8 / bits;
  const auto byte = static_cast<const uint8_t*>(data)[index / each];
  return (byte >> (bits * static_cast<int>(index % each))) & ((1U << bits) - 1);
}
double sign_extended(uint32_t value, int bits) {
  return static_cast<double>(value >= (1U << (bits - 1)) ? static_cast<int>(value) - (1 << bits) : static_cast<int>(value));
}

// Round to nearest even; overflow gives infinity, as numpy does.
uint16_t half_bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  if (std::isnan(value)) return sign | 0x7E00;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude >= 65520) return sign | 0x7C00;
  if (magnitude < std::ldexp(1.0, -14)) return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, 24)));
  int exponent = 0;
  const double fraction = std::frexp(magnitude, &exponent);                               // [0.5, 1)
  const auto mantissa = static_cast<uint32_t>(std::nearbyint(std::ldexp(fraction, 11)));  // 1024..2048
  return static_cast<uint16_t>(sign | ((static_cast<uint32_t>(exponent + 14 - 1) << 10) + mantissa));
}

uint16_t bfloat_bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

}  // namespace

int64_t element_count(DType type, const Dims& dims) {
  const bool complex = type == DType::complex64 || type == DType::complex128;
  return count_of(dims) * (complex ? 2 : 1);
}

double element_at(DType type, const void* data, int64_t index) {
  switch (type) {
    case DType::float32:
    case DType::complex64:
      return load<float>(data, index);
    case DType::float64:
    case DType::complex128:
      return load<double>(data, index);
    case DType::uint8:
      return load<uint8_t>(data, index);
    case DType::int8:
      return load<int8_t>(data, index);
    case DType::uint16:
      return load<uint16_t>(data, index);
    case DType::int16:
      return load<int16_t>(data, index);
    case DType::int32:
      return load<int32_t>(data, index);
    case DType::int64:
      return load<int64_t>(data, index);
    case DType::uint32:
      return load<uint32_t>(data, index);
    case DType::uint64:
      return load<uint64_t>(data, index);
    case DType::boolean:
      return raw<uint8_t>(data, index) != 0;
    case DType::float16:
      return decode(raw<uint16_t>(data, index), kHalf);
    case DType::bfloat16:
      return std::bit_cast<float>(static_cast<uint32_t>(raw<uint16_t>(data, index)) << 16);
    case DType::float8e4m3fn:
      return decode(raw<uint8_t>(data, index), kE4M3FN);
    case DType::float8e4m3fnuz:
      return decode(raw<uint8_t>(data, index), kE4M3FNUZ);
    case DType::float8e5m2:
      return decode(raw<uint8_t>(data, index), kE5M2);
    case DType::float8e5m2fnuz:
      return decode(raw<uint8_t>(data, index), kE5M2FNUZ);
    case DType::float8e8m0: {
      const auto bits = raw<uint8_t>(data, index);
      return bits == 0xFF ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, bits - 127);
    }
    case DType::float4e2m1:
      return decode(packed(data, index, 4), kE2M1);
    case DType::uint4:
      return packed(data, index, 4);
    case DType::int4:
      return sign_extended(packed(data, index, 4), 4);
    case DType::uint2:
      return packed(data, index, 2);
    case DType::int2:
      return sign_extended(packed(data, index, 2), 2);
    case DType::string:
    case DType::undefined:
      break;
  }
  throw Error("elements of type " + std::string(name_of(type)) + " have no numeric value");
}

void set_element(DType type, void* data, int64_t index, double value) {
  switch (type) {
    case DType::float32:
      return store<float>(data, index, value);
    case DType::float64:
      return store<double>(data, index, value);
    case DType::uint8:
      return store<uint8_t>(data, index, value);
    case DType::int8:
      return store<int8_t>(data, index, value);
    case DType::uint16:
      return store<uint16_t>(data, index, value);
    case DType::int16:
      return store<int16_t>(data, index, value);
    case DType::int32:
      return store<int32_t>(data, index, value);
    case DType::int64:
      return store<int64_t>(data, index, value);
    case DType::uint32:
      return store<uint32_t>(data, index, value);
    case DType::uint64:
      return store<uint64_t>(data, index, value);
    case DType::boolean:
      return store<uint8_t>(data, index, value != 0);
    case DType::float16:
      return store<uint16_t>(data, index, half_bits(static_cast<float>(value)));
    case DType::bfloat16:
      return store<uint16_t>(data, index, bfloat_bits(static_cast<float>(value)));
    default:
      break;
  }
  throw Error("an element of type " + std::string(name_of(type)) + " can't be made up here",
              "give the input in a file (--input NAME=FILE)");
}

}  // namespace fretsaw
