// How folds read the elements of a reduction and store its results: floats by type, integers and booleans by a switch at run time (their
// reductions are small, and a kernel for each of nine types would only take space).
#pragma once
#include "kernels/cuda/element_packs.cuh"

namespace fretsaw::cuda {

template <typename T>
struct FloatReader {
  using Value = WideOf<T>;
  static constexpr int kRowPack = kPackOf16<T>, kColumnPack = sizeof(T) == 8 ? 2 : 4;
  static constexpr int kUnroll = 4;  // reads under way at a time
  const T* x;

  const void* data() const { return x; }
  __device__ Value load(int64_t i) const { return widen(x[i]); }
  template <int V>
  __device__ void load_pack(int64_t i, Value (&values)[V]) const {
    const auto pack = *reinterpret_cast<const Lanes<T, V>*>(x + i);
#pragma unroll
    for (int k = 0; k < V; ++k) values[k] = widen(pack.at[k]);
  }
};

template <typename T>
__device__ T rounded_from(double value) {
  if constexpr (std::is_same_v<T, __half>)
    return __double2half(value);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __double2bfloat16(value);
  else
    return static_cast<T>(value);
}

template <typename T>
struct FloatStore {
  T* y;
  __device__ void operator()(int64_t i, double value) const { y[i] = rounded_from<T>(value); }
};

// Element `i` of an integer or boolean array. W is double, or int64_t: numbers of uint64 keep their bits.
template <typename W>
__device__ W load_integer(const void* x, DType type, int64_t i) {
  switch (type) {
    case DType::boolean:
      return static_cast<W>(static_cast<const uint8_t*>(x)[i] != 0);
    case DType::uint8:
      return static_cast<W>(static_cast<const uint8_t*>(x)[i]);
    case DType::int8:
      return static_cast<W>(static_cast<const int8_t*>(x)[i]);
    case DType::uint16:
      return static_cast<W>(static_cast<const uint16_t*>(x)[i]);
    case DType::int16:
      return static_cast<W>(static_cast<const int16_t*>(x)[i]);
    case DType::uint32:
      return static_cast<W>(static_cast<const uint32_t*>(x)[i]);
    case DType::int32:
      return static_cast<W>(static_cast<const int32_t*>(x)[i]);
    case DType::uint64:
      return static_cast<W>(static_cast<const uint64_t*>(x)[i]);
    default:
      return static_cast<W>(static_cast<const int64_t*>(x)[i]);
  }
}

// Narrower types keep the low bits; a boolean is whether there are any.
__device__ inline void store_integer(void* y, DType type, int64_t i, int64_t value) {
  switch (type) {
    case DType::boolean:
      static_cast<uint8_t*>(y)[i] = value != 0;
      return;
    case DType::uint8:
    case DType::int8:
      static_cast<uint8_t*>(y)[i] = static_cast<uint8_t>(value);
      return;
    case DType::uint16:
    case DType::int16:
      static_cast<uint16_t*>(y)[i] = static_cast<uint16_t>(value);
      return;
    case DType::uint32:
    case DType::int32:
      static_cast<uint32_t*>(y)[i] = static_cast<uint32_t>(value);
      return;
    default:
      static_cast<int64_t*>(y)[i] = value;
  }
}

template <typename W>
struct IntegerReader {
  using Value = W;
  static constexpr int kRowPack = 1, kColumnPack = 1, kUnroll = 1;
  const void* x;
  DType type;
  int64_t flip = 0;  // the sign bit for uint64, where numbers are compared: as int64 they are then in order

  const void* data() const { return x; }
  __device__ W load(int64_t i) const {
    if constexpr (std::is_same_v<W, int64_t>)
      return load_integer<W>(x, type, i) ^ flip;
    else
      return load_integer<W>(x, type, i);
  }
  template <int V>
  __device__ void load_pack(int64_t i, W (&values)[V]) const {
#pragma unroll
    for (int k = 0; k < V; ++k) values[k] = load(i + k);
  }
};

struct IntegerStore {
  void* y;
  DType type;
  int64_t flip = 0;

  __device__ void operator()(int64_t i, int64_t value) const { store_integer(y, type, i, value ^ flip); }
  // Cut off; what int64 and uint64 can't hold becomes int64's smallest number, as on the CPU.
  __device__ void operator()(int64_t i, double value) const {
    int64_t whole = INT64_MIN;
    if (value >= -0x1p63 && value < 0x1p63)
      whole = static_cast<int64_t>(value);
    else if (type == DType::uint64 && value >= 0x1p63 && value < 0x1p64)
      whole = static_cast<int64_t>(static_cast<uint64_t>(value));
    store_integer(y, type, i, whole);
  }
};

inline bool is_whole(DType type) {
  return is_integer(type) || type == DType::boolean;
}
inline int64_t order_flip(DType type) {
  return type == DType::uint64 ? INT64_MIN : 0;
}

}  // namespace fretsaw::cuda
