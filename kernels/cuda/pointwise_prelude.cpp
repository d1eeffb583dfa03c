// The CUDA text that stands before every kernel that is made for a step. It includes nothing: NVRTC finds no headers at a user's.
#include "kernels/cuda/pointwise_prelude.h"

namespace fretsaw::cuda {

// float32 functions that CUDA's library computes with errors above 2 units in the last place go through double.
const char* const pointwise_functions = R"cuda(
#define FN static __device__ __forceinline__
#define FN_MEMBER __device__ __forceinline__
namespace fretsaw {

template <typename T> constexpr bool is_floating = false;
template <> constexpr bool is_floating<float> = true;
template <> constexpr bool is_floating<double> = true;
template <typename T> constexpr bool is_signed = T(-1) < T(0);

FN float float_of(unsigned bits) { return __uint_as_float(bits); }
FN double double_of(unsigned long long bits) { return __longlong_as_double((long long)bits); }
template <typename T> FN T infinity() { return T(float_of(0x7f800000u)); }

// --- 16-bit floats, computed as float ---
struct Half {
  unsigned short bits;
  Half() = default;
  explicit FN_MEMBER Half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  explicit FN_MEMBER operator float() const { float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits)); return x; }
};
struct BFloat {
  unsigned short bits;
  BFloat() = default;
  explicit FN_MEMBER BFloat(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  explicit FN_MEMBER operator float() const { return float_of((unsigned)bits << 16); }
};
// Elements of 16 bytes that are only moved.
struct alignas(16) Pair { unsigned long long low, high; };

// --- helpers of the table's expressions ---
template <typename T> FN T min(T x, T y) { return (x < y) | (x != x) ? x : y; }
template <typename T> FN T max(T x, T y) { return (x > y) | (x != x) ? x : y; }
template <typename T> FN T negate(T x) {
  if constexpr (is_floating<T>) return -x;
  else return T(0ull - (unsigned long long)x);
}
FN float magnitude_of(float x) { return ::fabsf(x); }
FN double magnitude_of(double x) { return ::fabs(x); }
template <typename T> FN T abs(T x) {
  if constexpr (is_floating<T>) return magnitude_of(x);
  else return is_signed<T> && x < T(0) ? negate(x) : x;
}
template <typename T> FN T divide(T x, T y) {
  if constexpr (is_floating<T>) return x / y;
  else return y == T(0) ? T(0) : is_signed<T> && y == T(-1) ? negate(x) : T(x / y);
}
FN float remainder_of(float x, float y) { return ::fmodf(x, y); }
FN double remainder_of(double x, double y) { return ::fmod(x, y); }
template <typename T> FN T modulus(T x, T y, T c_remainder) {
  if constexpr (is_floating<T>) {
    const T r = remainder_of(x, y);
    return c_remainder == T(0) && r != T(0) && (r < T(0)) != (y < T(0)) ? r + y : r;
  } else {
    if (y == T(0) || (is_signed<T> && y == T(-1))) return T(0);
    const T r = T(x % y);
    return c_remainder == T(0) && r != T(0) && (r < T(0)) != (y < T(0)) ? T(r + y) : r;
  }
}
FN float power(float x, float y) { return float(::pow(double(x), double(y))); }
FN double power(double x, double y) { return ::pow(x, y); }
FN long long power(long long x, long long y) {
  if (y < 0) return x == 1 ? 1 : x == -1 ? (y % 2 ? -1 : 1) : 0;  // the integer part of a fraction
  unsigned long long result = 1, base = (unsigned long long)x;
  for (unsigned long long n = (unsigned long long)y; n; n >>= 1, base *= base) {
    if (n & 1) result *= base;
  }
  return (long long)result;
}
// A negative shift keeps no bit, as one that is too wide.
template <typename T> FN bool keeps_bits(T y) { return y >= T(0) && (unsigned long long)y < 8 * sizeof(T); }
template <typename T> FN T shift_left(T x, T y) { return keeps_bits(y) ? T((unsigned long long)x << y) : T(0); }
template <typename T> FN T shift_right(T x, T y) { return keeps_bits(y) ? T(x >> y) : x < T(0) ? T(-1) : T(0); }
template <typename T> FN int is_inf(T x) { return (x == infinity<T>()) - (x == -infinity<T>()); }

#define FRETSAW_LIBRARY(name) \
  FN float name(float x) { return ::name##f(x); } \
  FN double name(double x) { return ::name(x); }
#define FRETSAW_BY_DOUBLE(name) \
  FN float name(float x) { return float(::name(double(x))); } \
  FN double name(double x) { return ::name(x); }
FRETSAW_LIBRARY(floor) FRETSAW_LIBRARY(ceil) FRETSAW_LIBRARY(rint) FRETSAW_LIBRARY(sqrt)
FRETSAW_LIBRARY(exp) FRETSAW_LIBRARY(expm1) FRETSAW_LIBRARY(log) FRETSAW_LIBRARY(log1p) FRETSAW_LIBRARY(erf)
FRETSAW_LIBRARY(sin) FRETSAW_LIBRARY(cos) FRETSAW_LIBRARY(tanh) FRETSAW_LIBRARY(cosh)
FRETSAW_LIBRARY(asin) FRETSAW_LIBRARY(acos) FRETSAW_LIBRARY(atan)
FRETSAW_BY_DOUBLE(tan) FRETSAW_BY_DOUBLE(sinh) FRETSAW_BY_DOUBLE(asinh) FRETSAW_BY_DOUBLE(acosh) FRETSAW_BY_DOUBLE(atanh)

// --- casts ---
// double to float such that rounding once more, to fewer bits, gives what rounding the double would: round to odd.
FN float narrowed(float x) { return x; }
FN float narrowed(double x) {
  const float nearest = float(x);
  if (double(nearest) == x || x != x || nearest - nearest != 0.0f) return nearest;
  unsigned bits = __float_as_uint(nearest);
  if (::fabs(double(nearest)) > ::fabs(x)) --bits;
  return float_of(bits | 1u);
}
// Truncates; what long long can't hold becomes its smallest number. Narrower types keep the low bits.
template <typename F> FN long long to_int64(F x) {
  return x >= F(-9223372036854775808.0) && x < F(9223372036854775808.0) ? (long long)x : (-9223372036854775807ll - 1);
}
template <typename T, typename F> FN T to_integer(F x) {
  if (sizeof(T) == 8 && !is_signed<T> && x >= F(9223372036854775808.0) && x < F(18446744073709551616.0)) return T((unsigned long long)x);
  if (sizeof(T) < 8 && x >= F(-2147483648.0) && x < F(2147483648.0)) return T((int)x);
  return T(to_int64(x));
}

// erf with an absolute error up to 2e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
FN float coarse_erf(float x) {
  const float z = ::fabsf(x), t = __fdividef(1.0f, 1.0f + 0.3275911f * z);
  const float sum = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  return ::copysignf(1.0f - sum * __expf(-z * z), x);
}

// 8-bit floats: kExponent bits of exponent, kMantissa of mantissa. kSpecial: 0 infinities as in IEEE; 1 all ones is NaN; 2 NaN is -0.
template <int kExponent, int kMantissa, int kBias, int kSpecial> struct Float8 {
  static constexpr int kNan = kSpecial == 2 ? 0x80 : 0x7f, kInfinity = ((1 << kExponent) - 1) << kMantissa;
  static constexpr int kLargest = kSpecial == 0 ? kInfinity - 1 : kSpecial == 1 ? 0x7e : 0x7f;
  FN float decode(unsigned char bits) {
    const int magnitude = bits & 0x7f, exponent = magnitude >> kMantissa, fraction = magnitude & ((1 << kMantissa) - 1);
    const float sign = bits & 0x80 ? -1.0f : 1.0f;
    if (kSpecial == 2 ? bits == 0x80 : kSpecial == 1 ? magnitude == 0x7f : magnitude > kInfinity) return float_of(0x7fc00000u);
    if (kSpecial == 0 && magnitude == kInfinity) return sign * infinity<float>();
    const int whole = exponent ? fraction + (1 << kMantissa) : fraction;
    return sign * ::ldexpf(float(whole), (exponent ? exponent : 1) - kBias - kMantissa);
  }
  FN unsigned char overflow(int sign, bool saturate) {
    if (saturate) return kLargest | sign;
    return kSpecial == 0 ? kInfinity | sign : kSpecial == 2 ? kNan : kNan | sign;
  }
  FN unsigned char encode(float x, bool saturate) {
    const int sign = __float_as_uint(x) >> 24 & 0x80;
    if (x != x) return kSpecial == 2 ? kNan : kNan | sign;
    const float magnitude = ::fabsf(x);
    if (magnitude == infinity<float>()) return overflow(sign, saturate);
    int exponent = magnitude > 0 ? ::ilogbf(magnitude) : 1 - kBias;
    exponent = exponent < 1 - kBias ? 1 - kBias : exponent;
    if (exponent + kBias > (1 << kExponent)) return overflow(sign, saturate);
    // In units of the last place; rounding up to the next power of two carries into the exponent by itself.
    const int code = ((exponent + kBias - 1) << kMantissa) + int(::rintf(::ldexpf(magnitude, kMantissa - exponent)));
    if (code > kLargest) return overflow(sign, saturate);
    return kSpecial == 2 && code == 0 ? 0 : code | sign;
  }
};
typedef Float8<4, 3, 7, 1> Float8E4M3FN;
typedef Float8<4, 3, 8, 2> Float8E4M3FNUZ;
typedef Float8<5, 2, 15, 0> Float8E5M2;
typedef Float8<5, 2, 16, 2> Float8E5M2FNUZ;
// A power of two without sign: 2^(bits - 127); 255 is NaN. kRounding: 0 up, 1 down, 2 nearest.
struct Float8E8M0 {
  FN float decode(unsigned char bits) { return bits == 255 ? float_of(0x7fc00000u) : ::ldexpf(1.0f, int(bits) - 127); }
  template <int kRounding> FN unsigned char encode(float x, bool saturate) {
    const unsigned bits = __float_as_uint(x), fraction = bits & 0x7fffffu, exponent = bits >> 23 & 0xff;
    if (exponent == 0xff) return 0xff;
    const bool nearest_up = fraction > 0x400000u || (fraction == 0x400000u && exponent > 0);
    const bool up = kRounding == 0 ? fraction != 0 : kRounding == 2 && nearest_up;
    return exponent + (up && !(saturate && exponent == 0xfe));
  }
};

}  // namespace fretsaw
)cuda";

const char* const pointwise_accesses = R"cuda(
namespace fretsaw {

// A kernel may begin while the one before it still ends, and the next one may do the same (kernels/cuda/dependent_launch.cuh): it waits
// before it touches memory.
FN void begin_beside_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Neighbours in memory, read and written at once where they are aligned.
template <typename S, int kCount> struct alignas(sizeof(S) * kCount < 16 ? sizeof(S) * kCount : 16) Pack { S at[kCount]; };

// kCount elements from `from` on, of which `left` may be touched.
template <int kCount, typename S, typename I> FN Pack<S, kCount> load(const S* from, I left, bool whole) {
  Pack<S, kCount> pack = {};
  if (whole) return *reinterpret_cast<const Pack<S, kCount>*>(from);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if (I(j) < left) pack.at[j] = from[j];
  }
  return pack;
}
template <int kCount, typename S, typename I> FN void store(S* to, const Pack<S, kCount>& pack, I left, bool whole) {
  if (whole) {
    *reinterpret_cast<Pack<S, kCount>*>(to) = pack;
    return;
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if (I(j) < left) to[j] = pack.at[j];
  }
}

// A size of a dimension. Numbers below 2^31 are divided by a multiplication.
struct Size { unsigned size, magic, shift; };
FN unsigned quotient(unsigned x, const Size& d) { return (__umulhi(x, d.magic) + x) >> d.shift; }
FN unsigned long long quotient(unsigned long long x, const Size& d) { return x / d.size; }

// --- folds over the kThreads threads that share a row ---
struct Add {
  template <typename T> static __device__ T start() { return T(0); }
  template <typename T> __device__ T operator()(T x, T y) const { return x + y; }
};
struct Multiply {
  template <typename T> static __device__ T start() { return T(1); }
  template <typename T> __device__ T operator()(T x, T y) const { return x * y; }
};
struct Smaller {
  template <typename T> static __device__ T start() { return infinity<T>(); }
  template <typename T> __device__ T operator()(T x, T y) const { return min(x, y); }
};
struct Larger {
  template <typename T> static __device__ T start() { return -infinity<T>(); }
  template <typename T> __device__ T operator()(T x, T y) const { return max(x, y); }
};
template <int kThreads, typename Fold, typename T> FN T fold_row(T x, T* shared) {
  constexpr int kWidth = kThreads < 32 ? kThreads : 32, kWarps = kThreads / 32;
#pragma unroll
  for (int step = kWidth / 2; step > 0; step /= 2) x = Fold()(x, __shfl_xor_sync(0xffffffffu, x, step));
  if constexpr (kWarps > 1) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = lane < kWarps ? shared[lane] : Fold::template start<T>();
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = Fold()(x, __shfl_xor_sync(0xffffffffu, x, step));
  }
  return x;
}

}  // namespace fretsaw
)cuda";

}  // namespace fretsaw::cuda
