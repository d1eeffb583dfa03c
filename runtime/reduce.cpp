// Elementwise reductions of several buffers of any numeric type.
#include "runtime/reduce.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "graph/errors.h"

namespace fretsaw {
namespace {

// 16-bit floats: their bits, and how they turn into float32 and back (round to nearest even).
struct Half {
  _Float16 bits;
  float load() const { return static_cast<float>(bits); }
  static Half store(float v) { return {static_cast<_Float16>(v)}; }
};
struct Bfloat {
  uint16_t bits;
  float load() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
  static Bfloat store(float v) {
    uint32_t u = std::bit_cast<uint32_t>(v);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};  // NaN stays NaN
    return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
  }
};

template <typename T>
struct Arithmetic {
  using Wide = T;
  static Wide load(const T& v) { return v; }
  static T store(Wide v) { return v; }
};
template <>
struct Arithmetic<Half> {
  using Wide = float;
  static Wide load(const Half& v) { return v.load(); }
  static Half store(Wide v) { return Half::store(v); }
};
template <>
struct Arithmetic<Bfloat> {
  using Wide = float;
  static Wide load(const Bfloat& v) { return v.load(); }
  static Bfloat store(Wide v) { return Bfloat::store(v); }
};

// Signed overflow wraps, as it does in the other communicators.
template <typename W>
W combine(W a, W b, Reduction reduction) {
  auto wrap = [](auto op, W x, W y) -> W {
    if constexpr (std::is_integral_v<W> && !std::is_same_v<W, bool>) {
      using U = std::conditional_t<sizeof(W) < 4, unsigned, std::make_unsigned_t<W>>;
      return static_cast<W>(op(static_cast<U>(x), static_cast<U>(y)));
    } else {
      return static_cast<W>(op(x, y));
    }
  };
  switch (reduction) {
    case Reduction::sum:
    case Reduction::mean:
      return wrap([](auto x, auto y) { return x + y; }, a, b);
    case Reduction::product:
      return wrap([](auto x, auto y) { return x * y; }, a, b);
    case Reduction::max:
      return a != a ? a : b != b ? b : std::max(a, b);  // NaN wins
    case Reduction::min:
      return a != a ? a : b != b ? b : std::min(a, b);
  }
  return a;
}

template <typename T>
void reduce_typed(std::span<const std::byte* const> parts, std::byte* out, size_t first, size_t count, Reduction reduction) {
  using A = Arithmetic<T>;
  T* to = reinterpret_cast<T*>(out);
  for (size_t i = 0; i < count; ++i) {
    auto sum = A::load(reinterpret_cast<const T*>(parts[0])[first + i]);
    for (size_t p = 1; p < parts.size(); ++p) {
      sum = combine<typename A::Wide>(sum, A::load(reinterpret_cast<const T*>(parts[p])[first + i]), reduction);
    }
    if (reduction == Reduction::mean) sum = static_cast<typename A::Wide>(sum / static_cast<typename A::Wide>(parts.size()));
    to[i] = A::store(sum);
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
