// The element types that C++ lacks: 16-bit, 8-bit and packed numbers, how they convert, and the dispatch from DType to type.
//
// Rounding is to nearest, ties to even. What is out of range becomes an infinity, or for 8-bit floats what ONNX's Cast says.
#pragma once
#include <bit>
#include <cmath>
#include <complex>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "graph/errors.h"
#include "graph/types.h"
#include "kernels/cpu/isa.h"

namespace fretsaw {

// --- 16-bit floats. The conversions have no branches, so that loops over them vectorise ---
FRETSAW_ALWAYS_INLINE inline float half_to_float(uint16_t half) {
  const uint32_t shifted = static_cast<uint32_t>(half & 0x7fff) << 13;
  // Moves the exponent from half's bias to float's; subnormals come out right because the multiplication is exact.
  uint32_t bits = std::bit_cast<uint32_t>(std::bit_cast<float>(shifted) * 0x1p112f);
  bits |= shifted >= 0x0f800000u ? 0x7f800000u : 0u;  // infinities and NaN
  return std::bit_cast<float>(bits | static_cast<uint32_t>(half & 0x8000) << 16);
}

FRETSAW_ALWAYS_INLINE inline uint16_t float_to_half(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
  // Adding 0.5 leaves half's subnormal in the low bits, rounded.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // rounds past 65504
  half = magnitude > 0x7f800000u ? 0x7e00u : half;   // NaN
  return static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}

FRETSAW_ALWAYS_INLINE inline float bfloat16_to_float(uint16_t value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

FRETSAW_ALWAYS_INLINE inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16 | 0x40u) : rounded);
}

struct Float16 {
  uint16_t bits;
  Float16() = default;
  explicit Float16(float value) : bits(float_to_half(value)) {}
  explicit operator float() const { return half_to_float(bits); }
};

struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  explicit BFloat16(float value) : bits(float_to_bfloat16(value)) {}
  explicit operator float() const { return bfloat16_to_float(bits); }
};

// --- 8-bit and 4-bit floats ---
enum class SpecialValues : uint8_t {
  infinities,     // the highest exponent is infinity and NaN, as IEEE has it
  nan_only,       // "FN": all ones is NaN, no infinity
  unsigned_zero,  // "FNUZ": NaN stands where -0 would, no infinity
  none,           // no NaN either
};

// A sign bit, `kExponent` bits of exponent and `kMantissa` of mantissa, in the low bits of a byte.
template <int kExponent, int kMantissa, int kBias, SpecialValues kSpecial>
struct SmallFloat {
  static constexpr uint8_t kSign = 1 << (kExponent + kMantissa);
  static constexpr uint8_t kMagnitude = kSign - 1;
  static constexpr uint8_t kNan = kSpecial == SpecialValues::unsigned_zero ? kSign : kMagnitude;
  static constexpr uint8_t kInfinity = ((1 << kExponent) - 1) << kMantissa;
  static constexpr uint8_t kLargest = kSpecial == SpecialValues::infinities ? kInfinity - 1
                                      : kSpecial == SpecialValues::nan_only ? kMagnitude - 1
                                                                            : kMagnitude;
  uint8_t bits;

  SmallFloat() = default;
  explicit SmallFloat(float value) : SmallFloat(value, true) {}
  SmallFloat(float value, bool saturate) : bits(encode(value, saturate)) {}
  explicit operator float() const { return decode(bits); }

  static float decode(uint8_t bits) {
    const uint8_t magnitude = bits & kMagnitude;
    const float sign = bits & kSign ? -1.0f : 1.0f;
    if (kSpecial == SpecialValues::unsigned_zero && bits == kNan) return std::numeric_limits<float>::quiet_NaN();
    if (kSpecial == SpecialValues::nan_only && magnitude == kMagnitude) return std::copysign(std::numeric_limits<float>::quiet_NaN(), sign);
    if (kSpecial == SpecialValues::infinities && magnitude >= kInfinity) {
      return sign * (magnitude == kInfinity ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN());
    }
    const int exponent = magnitude >> kMantissa, fraction = magnitude & ((1 << kMantissa) - 1);
    const int whole = exponent ? fraction + (1 << kMantissa) : fraction;
    return sign * std::ldexp(static_cast<float>(whole), (exponent ? exponent : 1) - kBias - kMantissa);
  }

  static uint8_t encode(float value, bool saturate) {
    const uint8_t sign = std::signbit(value) ? kSign : 0;
    if (value != value) {
      if (kSpecial == SpecialValues::none) return kSign;  // -0: what is no number has no sign to keep
      return kSpecial == SpecialValues::unsigned_zero ? kNan : kNan | sign;
    }
    const float magnitude = std::fabs(value);
    if (std::isinf(magnitude)) return overflow(sign, saturate);
    int exponent = magnitude > 0 ? std::ilogb(magnitude) : 1 - kBias;
    exponent = exponent < 1 - kBias ? 1 - kBias : exponent;
    // In units of the last place; rounding up to the next power of two carries into the exponent by itself.
    const float rounded = std::nearbyint(std::ldexp(magnitude, kMantissa - exponent));
    if (exponent + kBias > (1 << kExponent)) return overflow(sign, saturate);
    const int code = ((exponent + kBias - 1) << kMantissa) + static_cast<int>(rounded);
    if (code > kLargest) return overflow(sign, saturate);
    if (kSpecial == SpecialValues::unsigned_zero && code == 0) return 0;
    return static_cast<uint8_t>(code) | sign;
  }

 private:
  static uint8_t overflow(uint8_t sign, bool saturate) {
    if (saturate || kSpecial == SpecialValues::none) return kLargest | sign;
    if (kSpecial == SpecialValues::infinities) return kInfinity | sign;
    return kSpecial == SpecialValues::unsigned_zero ? kNan : kNan | sign;
  }
};
using Float8E4M3FN = SmallFloat<4, 3, 7, SpecialValues::nan_only>;
using Float8E4M3FNUZ = SmallFloat<4, 3, 8, SpecialValues::unsigned_zero>;
using Float8E5M2 = SmallFloat<5, 2, 15, SpecialValues::infinities>;
using Float8E5M2FNUZ = SmallFloat<5, 2, 16, SpecialValues::unsigned_zero>;
using Float4E2M1Code = SmallFloat<2, 1, 1, SpecialValues::none>;  // one element, unpacked

// How a cast to float8e8m0 picks between two powers of two.
enum class ScaleRounding : uint8_t { up, down, nearest };

// A power of two without sign: 2^(bits - 127); 255 is NaN.
struct Float8E8M0 {
  uint8_t bits;

  Float8E8M0() = default;
  explicit Float8E8M0(float value) : Float8E8M0(value, true, ScaleRounding::up) {}
  Float8E8M0(float value, bool saturate, ScaleRounding rounding) : bits(encode(value, saturate, rounding)) {}
  explicit operator float() const {
    return bits == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, static_cast<int>(bits) - 127);
  }

  static uint8_t encode(float value, bool saturate, ScaleRounding rounding) {
    const uint32_t float_bits = std::bit_cast<uint32_t>(value), fraction = float_bits & 0x7fffffu;
    const uint32_t exponent = float_bits >> 23 & 0xff;
    if (exponent == 0xff) return 0xff;
    // Of two neighbours the nearest; the middle goes up, except from zero's exponent.
    const bool nearest_up = fraction > 0x400000u || (fraction == 0x400000u && exponent > 0);
    const bool up = rounding == ScaleRounding::up ? fraction != 0 : rounding == ScaleRounding::nearest && nearest_up;
    return static_cast<uint8_t>(exponent + (up && !(saturate && exponent == 0xfe)));
  }
};

// --- packed integers and float4: element i of a byte array, the first in the low bits ---
template <int kBits>
uint8_t get_packed(const uint8_t* packed, int64_t i) {
  constexpr int kEach = 8 / kBits;
  return packed[i / kEach] >> (i % kEach * kBits) & ((1 << kBits) - 1);
}
template <int kBits>
void set_packed(uint8_t* packed, int64_t i, uint8_t code) {
  constexpr int kEach = 8 / kBits;
  const int shift = static_cast<int>(i % kEach) * kBits, mask = (1 << kBits) - 1;
  packed[i / kEach] = static_cast<uint8_t>((packed[i / kEach] & ~(mask << shift)) | (code & mask) << shift);
}
// The number that a code of `kBits` bits stands for in two's complement.
template <int kBits>
int8_t sign_extended(uint8_t code) {
  return static_cast<int8_t>(static_cast<int8_t>(code << (8 - kBits)) >> (8 - kBits));
}

// --- from DType to type ---
template <typename T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>) return DType::float32;
  if constexpr (std::is_same_v<T, double>) return DType::float64;
  if constexpr (std::is_same_v<T, Float16>) return DType::float16;
  if constexpr (std::is_same_v<T, BFloat16>) return DType::bfloat16;
  if constexpr (std::is_same_v<T, bool>) return DType::boolean;
  if constexpr (std::is_same_v<T, uint8_t>) return DType::uint8;
  if constexpr (std::is_same_v<T, int8_t>) return DType::int8;
  if constexpr (std::is_same_v<T, uint16_t>) return DType::uint16;
  if constexpr (std::is_same_v<T, int16_t>) return DType::int16;
  if constexpr (std::is_same_v<T, uint32_t>) return DType::uint32;
  if constexpr (std::is_same_v<T, int32_t>) return DType::int32;
  if constexpr (std::is_same_v<T, uint64_t>) return DType::uint64;
  if constexpr (std::is_same_v<T, int64_t>) return DType::int64;
  if constexpr (std::is_same_v<T, std::string>) return DType::string;
  if constexpr (std::is_same_v<T, Float8E4M3FN>) return DType::float8e4m3fn;
  if constexpr (std::is_same_v<T, Float8E4M3FNUZ>) return DType::float8e4m3fnuz;
  if constexpr (std::is_same_v<T, Float8E5M2>) return DType::float8e5m2;
  if constexpr (std::is_same_v<T, Float8E5M2FNUZ>) return DType::float8e5m2fnuz;
  if constexpr (std::is_same_v<T, Float8E8M0>) return DType::float8e8m0;
  return DType::undefined;
}

// Sets of element types.
using TypeSet = uint32_t;
constexpr TypeSet set_of(DType type) {
  return TypeSet{1} << static_cast<int>(type);
}
template <typename... Types>
constexpr TypeSet set_of(DType first, Types... rest) {
  return (set_of(first) | ... | set_of(rest));
}
namespace types {
constexpr TypeSet half_floats = set_of(DType::float16, DType::bfloat16);
constexpr TypeSet wide_floats = set_of(DType::float32, DType::float64);
constexpr TypeSet floats = half_floats | wide_floats;
constexpr TypeSet signed_integers = set_of(DType::int8, DType::int16, DType::int32, DType::int64);
constexpr TypeSet unsigned_integers = set_of(DType::uint8, DType::uint16, DType::uint32, DType::uint64);
constexpr TypeSet integers = signed_integers | unsigned_integers;
constexpr TypeSet signed_numbers = floats | signed_integers;
constexpr TypeSet numbers = floats | integers;
constexpr TypeSet booleans = set_of(DType::boolean);
constexpr TypeSet ordered = numbers | booleans;
constexpr TypeSet strings = set_of(DType::string);
constexpr TypeSet float8s = set_of(DType::float8e4m3fn, DType::float8e4m3fnuz, DType::float8e5m2, DType::float8e5m2fnuz, DType::float8e8m0);
constexpr TypeSet packed = set_of(DType::int4, DType::uint4, DType::int2, DType::uint2, DType::float4e2m1);
constexpr TypeSet everything = numbers | booleans | strings;
}  // namespace types
constexpr bool contains(TypeSet set, DType type) {
  return (set & set_of(type)) != 0;
}

// Why a type outside a set is refused.
inline std::string not_supported(DType type) {
  return "elements of type " + std::string(name_of(type)) + " are not supported";
}

// Calls f.template operator()<T>() with the C++ type of `type`, compiled for the types of `kTypes` alone; throws Error for others.
// Example: dispatch<types::floats>(x.dtype, [&]<typename T>() { fill(x.as<T>()); });
template <TypeSet kTypes, typename F>
decltype(auto) dispatch(DType type, F&& f) {
#define FRETSAW_CASE(name, T)                      \
  case DType::name:                                \
    if constexpr (contains(kTypes, DType::name)) { \
      return f.template operator()<T>();           \
    }                                              \
    break;
  switch (type) {
    FRETSAW_CASE(float32, float)
    FRETSAW_CASE(float64, double)
    FRETSAW_CASE(float16, Float16)
    FRETSAW_CASE(bfloat16, BFloat16)
    FRETSAW_CASE(boolean, bool)
    FRETSAW_CASE(uint8, uint8_t)
    FRETSAW_CASE(int8, int8_t)
    FRETSAW_CASE(uint16, uint16_t)
    FRETSAW_CASE(int16, int16_t)
    FRETSAW_CASE(uint32, uint32_t)
    FRETSAW_CASE(int32, int32_t)
    FRETSAW_CASE(uint64, uint64_t)
    FRETSAW_CASE(int64, int64_t)
    FRETSAW_CASE(string, std::string)
    FRETSAW_CASE(float8e4m3fn, Float8E4M3FN)
    FRETSAW_CASE(float8e4m3fnuz, Float8E4M3FNUZ)
    FRETSAW_CASE(float8e5m2, Float8E5M2)
    FRETSAW_CASE(float8e5m2fnuz, Float8E5M2FNUZ)
    FRETSAW_CASE(float8e8m0, Float8E8M0)
    FRETSAW_CASE(complex64, std::complex<float>)
    FRETSAW_CASE(complex128, std::complex<double>)
    default:
      break;
  }
#undef FRETSAW_CASE
  throw Error(not_supported(type), "cast the tensor to another type");
}

}  // namespace fretsaw
