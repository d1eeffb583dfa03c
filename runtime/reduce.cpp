// Elementwise reductions of several buffers of any numeric type.
#include "runtime/reduce.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "graph/errors.h"
#include "kernels/cpu/isa.h"

namespace fretsaw {
namespace {

// 16-bit floats: their bits, and how they turn into float32 and back (round to nearest even).
struct Half {
  _Float16 bits;
  FRETSAW_ALWAYS_INLINE float load() const { return static_cast<float>(bits); }
  FRETSAW_ALWAYS_INLINE static Half store(float v) { return {static_cast<_Float16>(v)}; }
};
struct Bfloat {
  uint16_t bits;
  FRETSAW_ALWAYS_INLINE float load() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
  FRETSAW_ALWAYS_INLINE static Bfloat store(float v) {
    uint32_t u = std::bit_cast<uint32_t>(v);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};  // NaN stays NaN
    return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
  }
};

template <typename T>
struct Arithmetic {
  using Wide = T;
  FRETSAW_ALWAYS_INLINE static Wide load(const T& v) { return v; }
  FRETSAW_ALWAYS_INLINE static T store(Wide v) { return v; }
};
template <>
struct Arithmetic<Half> {
  using Wide = float;
  FRETSAW_ALWAYS_INLINE static Wide load(const Half& v) { return v.load(); }
  FRETSAW_ALWAYS_INLINE static Half store(Wide v) { return Half::store(v); }
};
template <>
struct Arithmetic<Bfloat> {
  using Wide = float;
  FRETSAW_ALWAYS_INLINE static Wide load(const Bfloat& v) { return v.load(); }
  FRETSAW_ALWAYS_INLINE static Bfloat store(Wide v) { return Bfloat::store(v); }
};

// Signed overflow wraps, as it does in the other communicators. No branches, so that the loops vectorise.
template <Reduction reduction, typename W>
FRETSAW_ALWAYS_INLINE inline W combine(W a, W b) {
  if constexpr (reduction == Reduction::max) {
    return (a > b) | (a != a) ? a : b;  // NaN wins
  } else if constexpr (reduction == Reduction::min) {
    return (a < b) | (a != a) ? a : b;
  } else if constexpr (std::is_integral_v<W>) {
    using U = std::conditional_t<sizeof(W) < 4, unsigned, std::make_unsigned_t<W>>;
    auto x = static_cast<U>(a), y = static_cast<U>(b);
    return static_cast<W>(reduction == Reduction::product ? x * y : x + y);
  } else {
    return reduction == Reduction::product ? a * b : a + b;
  }
}

constexpr size_t block_elements = 1024;  // what is being combined stays in the first-level cache

// One block: read from every part before anything is written, so that `out` may lie on one of them.
template <typename T, Reduction reduction>
FRETSAW_ALWAYS_INLINE inline void reduce_block(std::span<const std::byte* const> parts, T* out, size_t first, size_t count, bool mean) {
  using A = Arithmetic<T>;
  using W = typename A::Wide;
  W sums[block_elements];
  const T* x = reinterpret_cast<const T*>(parts[0]) + first;
  for (size_t i = 0; i < count; ++i) sums[i] = A::load(x[i]);
  for (size_t p = 1; p < parts.size(); ++p) {
    x = reinterpret_cast<const T*>(parts[p]) + first;
    for (size_t i = 0; i < count; ++i) sums[i] = combine<reduction>(sums[i], A::load(x[i]));
  }
  if (mean) {
    const W size = static_cast<W>(parts.size());
    for (size_t i = 0; i < count; ++i) sums[i] = static_cast<W>(sums[i] / size);
  }
  for (size_t i = 0; i < count; ++i) out[i] = A::store(sums[i]);
}

template <typename T, Reduction reduction>
void reduce_with(std::span<const std::byte* const> parts, std::byte* out, size_t first, size_t count, bool mean) {
  T* to = reinterpret_cast<T*>(out);
  run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
    for (size_t at = 0; at < count; at += block_elements) {
      reduce_block<T, reduction>(parts, to + at, first + at, std::min(block_elements, count - at), mean);
    }
  });
}

template <typename T>
void reduce_typed(std::span<const std::byte* const> parts, std::byte* out, size_t first, size_t count, Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
    case Reduction::mean:
      return reduce_with<T, Reduction::sum>(parts, out, first, count, reduction == Reduction::mean);
    case Reduction::product:
      return reduce_with<T, Reduction::product>(parts, out, first, count, false);
    case Reduction::max:
      return reduce_with<T, Reduction::max>(parts, out, first, count, false);
    case Reduction::min:
      return reduce_with<T, Reduction::min>(parts, out, first, count, false);
  }
}

}  // namespace

void reduce_parts(std::span<const std::byte* const> parts, std::byte* out, size_t first, size_t count, DType dtype, Reduction reduction) {
  switch (dtype) {
    case DType::float32:
      return reduce_typed<float>(parts, out, first, count, reduction);
    case DType::float64:
      return reduce_typed<double>(parts, out, first, count, reduction);
    case DType::float16:
      return reduce_typed<Half>(parts, out, first, count, reduction);
    case DType::bfloat16:
      return reduce_typed<Bfloat>(parts, out, first, count, reduction);
    case DType::int8:
      return reduce_typed<int8_t>(parts, out, first, count, reduction);
    case DType::int16:
      return reduce_typed<int16_t>(parts, out, first, count, reduction);
    case DType::int32:
      return reduce_typed<int32_t>(parts, out, first, count, reduction);
    case DType::int64:
      return reduce_typed<int64_t>(parts, out, first, count, reduction);
    case DType::uint8:
      return reduce_typed<uint8_t>(parts, out, first, count, reduction);
    case DType::uint16:
      return reduce_typed<uint16_t>(parts, out, first, count, reduction);
    case DType::uint32:
      return reduce_typed<uint32_t>(parts, out, first, count, reduction);
    case DType::uint64:
      return reduce_typed<uint64_t>(parts, out, first, count, reduction);
    default:
      throw Error("elements of type " + std::string(name_of(dtype)) + " can't be reduced over ranks", "cast the tensor before reducing it",
                  ErrorCode::device);
  }
}

}  // namespace fretsaw
