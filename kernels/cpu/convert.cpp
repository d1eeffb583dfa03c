// Conversions between any two numeric types, through four wide ones.
#include "kernels/cpu/convert.h"

#include "kernels/cpu/isa.h"

namespace fretsaw {

namespace {

constexpr TypeSet kBytewise = types::numbers | types::booleans | types::float8s;

// double to float such that rounding once more, to fewer bits, gives what rounding the double would: round to odd.
inline float narrowed(double value) {
  const float nearest = static_cast<float>(value);
  const double back = static_cast<double>(nearest);
  if (back == value || value != value || std::isinf(nearest)) return nearest;
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (std::fabs(back) > std::fabs(value)) --bits;  // towards zero
  return std::bit_cast<float>(bits | 1u);
}

// Truncates; what int64 can't hold becomes its smallest number, as the machine's instruction has it. Narrower types keep the low bits.
template <typename F>
FRETSAW_ALWAYS_INLINE inline int64_t to_int64(F value) {
  return value >= F(-0x1p63) && value < F(0x1p63) ? static_cast<int64_t>(value) : std::numeric_limits<int64_t>::min();
}

template <typename To, typename From>
FRETSAW_ALWAYS_INLINE inline To converted(From value, const CastRules& rules) {
  constexpr bool kFromFloat = std::is_floating_point_v<From>;
  if constexpr (std::is_same_v<To, bool>) {
    return value != From(0);
  } else if constexpr (std::is_same_v<To, float> || std::is_same_v<To, double>) {
    return static_cast<To>(value);
  } else if constexpr (std::is_same_v<To, uint64_t> && kFromFloat) {
    if (value >= From(0x1p63) && value < From(0x1p64)) return static_cast<uint64_t>(value);
    return static_cast<uint64_t>(to_int64(value));
  } else if constexpr (std::is_integral_v<To>) {
    if constexpr (kFromFloat && sizeof(To) < sizeof(int64_t) && std::is_same_v<From, float>) {
      // Within int32, which vectorises; the rest by way of int64.
      if (value >= -0x1p31f && value < 0x1p31f) return static_cast<To>(static_cast<int32_t>(value));
    }
    if constexpr (kFromFloat) return static_cast<To>(to_int64(value));
    return static_cast<To>(value);
  } else {
    float narrow;
    if constexpr (std::is_same_v<From, float>)
      narrow = value;
    else
      narrow = narrowed(static_cast<double>(value));
    if constexpr (std::is_same_v<To, Float16> || std::is_same_v<To, BFloat16>)
      return To(narrow);
    else if constexpr (std::is_same_v<To, Float8E8M0>)
      return To(narrow, rules.saturate, rules.rounding);
    else
      return To(narrow, rules.saturate);
  }
}

template <typename W, typename T>
FRETSAW_ALWAYS_INLINE inline W widened(T value) {
  if constexpr (std::is_arithmetic_v<T>)
    return converted<W>(value, CastRules{});
  else
    return converted<W>(static_cast<float>(value), CastRules{});
}

template <typename W, int kBits, bool kSigned>
void load_packed(const uint8_t* data, int64_t offset, int64_t n, W* out) {
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t code = get_packed<kBits>(data, offset + i);
    out[i] = static_cast<W>(kSigned ? sign_extended<kBits>(code) : static_cast<int8_t>(code));
  }
}

template <typename W, int kBits>
void store_packed(uint8_t* data, int64_t offset, int64_t n, const W* in) {
  for (int64_t i = 0; i < n; ++i) set_packed<kBits>(data, offset + i, static_cast<uint8_t>(converted<int64_t>(in[i], CastRules{})));
}

}  // namespace

DType wide_type(DType type) {
  if (type == DType::float64) return DType::float64;
  if (is_float(type)) return DType::float32;
  return type == DType::uint64 ? DType::uint64 : DType::int64;
}

template <typename W>
void load_as(DType type, const void* data, int64_t offset, int64_t n, W* out) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  switch (type) {
    case DType::uint4:
      return load_packed<W, 4, false>(bytes, offset, n, out);
    case DType::int4:
      return load_packed<W, 4, true>(bytes, offset, n, out);
    case DType::uint2:
      return load_packed<W, 2, false>(bytes, offset, n, out);
    case DType::int2:
      return load_packed<W, 2, true>(bytes, offset, n, out);
    case DType::float4e2m1:
      for (int64_t i = 0; i < n; ++i) out[i] = widened<W>(Float4E2M1Code::decode(get_packed<4>(bytes, offset + i)));
      return;
    default:
      break;
  }
  dispatch<kBytewise>(type, [&]<typename T>() {
    const T* in = static_cast<const T*>(data) + offset;
    run_vectorised([=]() FRETSAW_ALWAYS_INLINE {
      for (int64_t i = 0; i < n; ++i) out[i] = widened<W>(in[i]);
    });
  });
}

template <typename W>
void store_from(DType type, void* data, int64_t offset, int64_t n, const W* in, const CastRules& rules) {
  auto* bytes = static_cast<uint8_t*>(data);
  switch (type) {
    case DType::uint4:
    case DType::int4:
      return store_packed<W, 4>(bytes, offset, n, in);
    case DType::uint2:
    case DType::int2:
      return store_packed<W, 2>(bytes, offset, n, in);
    case DType::float4e2m1:
      for (int64_t i = 0; i < n; ++i) set_packed<4>(bytes, offset + i, converted<Float4E2M1Code>(in[i], rules).bits);
      return;
    default:
      break;
  }
  dispatch<kBytewise>(type, [&]<typename T>() {
    T* out = static_cast<T*>(data) + offset;
    run_vectorised([=]() FRETSAW_ALWAYS_INLINE {
      for (int64_t i = 0; i < n; ++i) out[i] = converted<T>(in[i], rules);
    });
  });
}

#define FRETSAW_INSTANTIATE(W)                                        \
  template void load_as<W>(DType, const void*, int64_t, int64_t, W*); \
  template void store_from<W>(DType, void*, int64_t, int64_t, const W*, const CastRules&);
FRETSAW_INSTANTIATE(float)
FRETSAW_INSTANTIATE(double)
FRETSAW_INSTANTIATE(int64_t)
FRETSAW_INSTANTIATE(uint64_t)
#undef FRETSAW_INSTANTIATE

}  // namespace fretsaw
