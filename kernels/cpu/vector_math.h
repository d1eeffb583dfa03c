// The functions that elementwise expressions call, in a form that vectorises: straight-line code, no branches, no libm for float32.
//
// Errors for float32 are at most about 2 units in the last place; infinities, NaN and subnormals come out as libm has them.
// The polynomials were fitted for the least largest error over the reduced ranges given beside them.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/cpu/isa.h"

namespace fretsaw::math {

#define FRETSAW_MATH FRETSAW_ALWAYS_INLINE inline

// --- helpers of the table's expressions ---
template <typename T>
FRETSAW_MATH T min(T x, T y) {
  return (x < y) | (x != x) ? x : y;  // no ||: a branch would keep loops from vectorising
}
template <typename T>
FRETSAW_MATH T max(T x, T y) {
  return (x > y) | (x != x) ? x : y;
}
template <typename T>
FRETSAW_MATH T abs(T x) {
  if constexpr (std::is_floating_point_v<T>)
    return std::fabs(x);
  else if constexpr (std::is_signed_v<T>)
    return x < 0 ? static_cast<T>(0 - static_cast<std::make_unsigned_t<T>>(x)) : x;
  else
    return x;
}
template <typename T>
FRETSAW_MATH T negate(T x) {
  if constexpr (std::is_floating_point_v<T>)
    return -x;
  else
    return static_cast<T>(0 - static_cast<std::make_unsigned_t<T>>(x));
}
template <typename T>
FRETSAW_MATH T divide(T x, T y) {
  if constexpr (std::is_floating_point_v<T>) {
    return x / y;
  } else {
    if (y == T(0)) return T(0);
    if constexpr (std::is_signed_v<T>) {
      if (y == T(-1)) return negate(x);  // the smallest number has no opposite
    }
    return static_cast<T>(x / y);
  }
}
template <typename T>
T modulus(T x, T y, T c_remainder) {
  if constexpr (std::is_floating_point_v<T>) {
    const T r = std::fmod(x, y);
    return c_remainder == T(0) && r != T(0) && (r < T(0)) != (y < T(0)) ? r + y : r;
  } else {
    if (y == T(0) || (std::is_signed_v<T> && y == static_cast<T>(-1))) return T(0);
    const T r = static_cast<T>(x % y);
    return c_remainder == T(0) && r != T(0) && (r < T(0)) != (y < T(0)) ? static_cast<T>(r + y) : r;
  }
}
template <typename T>
T power(T x, T y) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::pow(x, y);
  } else {
    if (std::is_signed_v<T> && y < T(0)) {  // the integer part of a fraction
      if (x == T(1)) return T(1);
      return x == static_cast<T>(-1) ? static_cast<T>(y % 2 ? -1 : 1) : T(0);
    }
    uint64_t result = 1, base = static_cast<uint64_t>(x);
    for (uint64_t n = static_cast<uint64_t>(y); n; n >>= 1, base *= base) {
      if (n & 1) result *= base;
    }
    return static_cast<T>(result);
  }
}
// Whether a shift by y keeps any bit; a negative y keeps none, as one that is too wide.
template <typename T>
FRETSAW_MATH bool keeps_bits(T y) {
  return static_cast<std::make_unsigned_t<T>>(y) < 8 * sizeof(T);
}
template <typename T>
FRETSAW_MATH T shift_left(T x, T y) {
  return keeps_bits(y) ? static_cast<T>(static_cast<uint64_t>(x) << y) : T(0);
}
template <typename T>
FRETSAW_MATH T shift_right(T x, T y) {
  return keeps_bits(y) ? static_cast<T>(x >> y) : x < T(0) ? static_cast<T>(-1) : T(0);
}
template <typename T>
FRETSAW_MATH int is_inf(T x) {
  return (x == std::numeric_limits<T>::infinity()) - (x == -std::numeric_limits<T>::infinity());
}
template <typename T>
FRETSAW_MATH constexpr T highest() {
  return std::numeric_limits<T>::has_infinity ? std::numeric_limits<T>::infinity() : std::numeric_limits<T>::max();
}
template <typename T>
FRETSAW_MATH constexpr T lowest() {
  return std::numeric_limits<T>::has_infinity ? -std::numeric_limits<T>::infinity() : std::numeric_limits<T>::lowest();
}

// --- rounding and roots: single instructions where the machine has them ---
template <typename T>
FRETSAW_MATH T floor(T x) {
  return std::floor(x);
}
template <typename T>
FRETSAW_MATH T ceil(T x) {
  return std::ceil(x);
}
template <typename T>
FRETSAW_MATH T rint(T x) {
  return std::nearbyint(x);
}
template <typename T>
FRETSAW_MATH T sqrt(T x) {
  return std::sqrt(x);
}

// --- exponentials ---
// e^x = 2^n (1 + r + r^2 q(r)) with r in [-ln2/2, ln2/2].
struct Exponent {
  float n_bits;  // n + 1.5 * 2^23: n stands in the low bits
  float r;
  float tail;  // r^2 q(r)
};
FRETSAW_MATH Exponent reduce_exponent(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float n_bits = x * 1.44269504088896341f + kRound;
  const float n = n_bits - kRound;
  const float r = (x - n * 0.693145751953125f) - n * 1.42860682030941723e-6f;  // ln2 in two parts
  float q = 0x1.a1b50ap-13f;
  q = q * r + 0x1.6d969ap-10f;
  q = q * r + 0x1.11080p-7f;
  q = q * r + 0x1.555480p-5f;
  q = q * r + 0x1.555556p-3f;
  q = q * r + 0.5f;
  return {n_bits, r, r * r * q};
}
FRETSAW_MATH int32_t exponent_of(const Exponent& e) {
  return std::bit_cast<int32_t>(e.n_bits) - std::bit_cast<int32_t>(12582912.0f);
}
FRETSAW_MATH float power_of_two(int32_t n) {
  return std::bit_cast<float>(static_cast<uint32_t>(n + 127) << 23);
}

FRETSAW_MATH float exp(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  const Exponent e = reduce_exponent(x);
  // Two factors, so that results near the ends of float's range neither overflow early nor lose their subnormals.
  const int32_t n = x == x ? exponent_of(e) : 0, half = n >> 1;
  return (1.0f + (e.r + e.tail)) * power_of_two(half) * power_of_two(n - half);
}
FRETSAW_MATH float expm1(float x) {
  float clamped = x > 89.0f ? 89.0f : x;
  clamped = clamped < -20.0f ? -20.0f : clamped;
  const Exponent e = reduce_exponent(clamped);
  const float scale = power_of_two((x == x ? exponent_of(e) : 0) - 1);  // half of 2^n, which may be just past the range
  return 2.0f * (scale * (e.r + e.tail) + (scale - 0.5f));
}

// --- logarithms ---
// log x = k ln2 + f - f^2/2 + f^3 p(f) with x = 2^k (1 + f) and 1 + f in [sqrt(1/2), sqrt(2)].
FRETSAW_MATH float log(float x) {
  const bool tiny = x < 0x1p-126f;
  const float scaled = tiny ? x * 0x1p23f : x;
  const int32_t bits = std::bit_cast<int32_t>(scaled);
  const int32_t k = (bits - 0x3f3504f3) >> 23;
  const float f = std::bit_cast<float>(static_cast<uint32_t>(bits) - (static_cast<uint32_t>(k) << 23)) - 1.0f;
  const float n = static_cast<float>(k - (tiny ? 23 : 0));
  float p = -0x1.41ed50p-4f;
  p = p * f + 0x1.07d0ccp-3f;
  p = p * f - 0x1.0ce08ep-3f;
  p = p * f + 0x1.226e50p-3f;
  p = p * f - 0x1.54788ap-3f;
  p = p * f + 0x1.99a596p-3f;
  p = p * f - 0x1.000222p-2f;
  p = p * f + 0x1.55554ap-2f;
  const float square = f * f;
  const float tail = (square * f * p + n * 1.42860682030941723e-6f) - 0.5f * square;
  float result = (f + tail) + n * 0.693145751953125f;
  result = x == 0.0f ? -std::numeric_limits<float>::infinity() : result;
  result = x < 0.0f ? std::numeric_limits<float>::quiet_NaN() : result;
  return x < std::numeric_limits<float>::infinity() ? result : x + x;  // +inf and NaN
}
FRETSAW_MATH float log1p(float x) {
  const float sum = 1.0f + x;
  const float lost = x - (sum - 1.0f);  // what rounding the sum dropped
  return log(sum) + (sum > 0.0f && sum < std::numeric_limits<float>::infinity() ? lost / sum : 0.0f);
}

// --- hyperbolic tangent and error function ---
FRETSAW_MATH float tanh(float x) {
  const float magnitude = std::fabs(x);
  const float e = expm1(2.0f * (magnitude > 10.0f ? 10.0f : magnitude));
  return std::copysign(e / (e + 2.0f), x);
}
// erf x = x + x p(x^2) up to 0.95, and 1 - e^-q(x) above.
FRETSAW_MATH float erf(float x) {
  const float magnitude = std::fabs(x);
  const float square = x * x;
  float p = -0x1.529368p-17f;
  p = p * square + 0x1.de0744p-14f;
  p = p * square - 0x1.bda498p-11f;
  p = p * square + 0x1.563a4cp-8f;
  p = p * square - 0x1.b82afep-6f;
  p = p * square + 0x1.ce2f14p-4f;
  p = p * square - 0x1.812746p-2f;
  p = p * square + 0x1.06eba8p-3f;
  const float inner = x + x * p;
  const float a = magnitude > 4.0f ? 4.0f : magnitude;
  float q = -0x1.2a2c0ep-20f;
  q = q * a + 0x1.2baefep-16f;
  q = q * a - 0x1.b1b94ep-14f;
  q = q * a + 0x1.f36270p-15f;
  q = q * a + 0x1.816e38p-9f;
  q = q * a - 0x1.7ad760p-6f;
  q = q * a + 0x1.b2dc80p-4f;
  q = q * a + 0x1.44fe6cp-1f;
  q = q * a + 0x1.2104d0p+0f;
  q = q * a - 0x1.6876b4p-14f;
  const Exponent e = reduce_exponent(-q);  // q is at most 18: one factor does
  const float outer = std::copysign(1.0f - (1.0f + (e.r + e.tail)) * power_of_two(x == x ? exponent_of(e) : 0), x);
  return magnitude > 0.95f ? outer : inner;  // NaN takes the inner one, which is NaN too
}

// --- the rest and other types: libm ---
#define FRETSAW_FROM_LIBM(name) \
  template <typename T>         \
  inline T name(T x) {          \
    return std::name(x);        \
  }
FRETSAW_FROM_LIBM(exp)
FRETSAW_FROM_LIBM(expm1)
FRETSAW_FROM_LIBM(log)
FRETSAW_FROM_LIBM(log1p)
FRETSAW_FROM_LIBM(tanh)
FRETSAW_FROM_LIBM(erf)
FRETSAW_FROM_LIBM(sin)
FRETSAW_FROM_LIBM(cos)
FRETSAW_FROM_LIBM(tan)
FRETSAW_FROM_LIBM(asin)
FRETSAW_FROM_LIBM(acos)
FRETSAW_FROM_LIBM(atan)
FRETSAW_FROM_LIBM(sinh)
FRETSAW_FROM_LIBM(cosh)
FRETSAW_FROM_LIBM(asinh)
FRETSAW_FROM_LIBM(acosh)
FRETSAW_FROM_LIBM(atanh)
#undef FRETSAW_FROM_LIBM

#undef FRETSAW_MATH

}  // namespace fretsaw::math
