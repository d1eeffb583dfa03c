// Sorting keys: numbers of every type as unsigned integers that ascend in the order that is asked for.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

// The slices of x [outer, extent, inner] along the middle axis, of which the first k in order are wanted.
struct Slices {
  const void* x;
  DType type;
  int64_t extent, inner, k;
  bool largest;

  // Where element i of a slice lies, and element i of its k results.
  __host__ __device__ int64_t at(int64_t slice, int64_t i) const { return (slice / inner * extent + i) * inner + slice % inner; }
  __host__ __device__ int64_t to(int64_t slice, int64_t i) const { return (slice / inner * k + i) * inner + slice % inner; }
};

// The unsigned integer of the same size that ascends as x does: NaN is the greatest number, equal to itself, and -0 equals 0.
__host__ __device__ inline uint32_t ascending(float x) {
  if (x != x) return ~uint32_t{0};
  x = x == 0 ? 0.0f : x;
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__host__ __device__ inline uint64_t ascending(double x) {
  if (x != x) return ~uint64_t{0};
  x = x == 0 ? 0.0 : x;
  uint64_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits >> 63 ? ~bits : bits | uint64_t{1} << 63;
}
template <typename T>
__host__ __device__ std::enable_if_t<std::is_integral_v<T>, std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>> ascending(T x) {
  using Key = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  // The sign bit is flipped, so that negative numbers come first.
  if constexpr (std::is_signed_v<T>) return static_cast<Key>(x) ^ (Key{1} << (8 * sizeof(Key) - 1));
  return static_cast<Key>(x);
}

// The key, ascending in the order asked for, of element `at`. Key is uint64_t for the types of 8 bytes, uint32_t for the others.
template <typename Key>
__device__ inline Key key_at(const Slices& s, int64_t at) {
  Key key = 0;
  if constexpr (sizeof(Key) == 8) {
    if (s.type == DType::int64) key = ascending(static_cast<const int64_t*>(s.x)[at]);
    if (s.type == DType::uint64) key = ascending(static_cast<const uint64_t*>(s.x)[at]);
    if (s.type == DType::float64) key = ascending(static_cast<const double*>(s.x)[at]);
  } else {
    switch (s.type) {
      case DType::float32:
        key = ascending(static_cast<const float*>(s.x)[at]);
        break;
      case DType::float16:
        key = ascending(__half2float(static_cast<const __half*>(s.x)[at]));
        break;
      case DType::bfloat16:
        key = ascending(__bfloat162float(static_cast<const __nv_bfloat16*>(s.x)[at]));
        break;
      case DType::int32:
        key = ascending(static_cast<const int32_t*>(s.x)[at]);
        break;
      case DType::uint32:
        key = ascending(static_cast<const uint32_t*>(s.x)[at]);
        break;
      case DType::int16:
        key = ascending(static_cast<const int16_t*>(s.x)[at]);
        break;
      case DType::uint16:
        key = ascending(static_cast<const uint16_t*>(s.x)[at]);
        break;
      case DType::int8:
        key = ascending(static_cast<const int8_t*>(s.x)[at]);
        break;
      default:
        key = ascending(static_cast<const uint8_t*>(s.x)[at]);
    }
  }
  return s.largest ? ~key : key;
}

// The two outputs; either may be left out. Values are copied, whatever their type.
struct TopKOutputs {
  void* values = nullptr;
  int64_t* indexes = nullptr;

  // Result i of a slice is its element `index`.
  __device__ void put(const Slices& s, int64_t slice, int64_t i, int64_t index, int element_bytes) const {
    const int64_t to = s.to(slice, i), from = s.at(slice, index);
    if (indexes) indexes[to] = index;
    if (!values) return;
    switch (element_bytes) {
      case 1:
        static_cast<uint8_t*>(values)[to] = static_cast<const uint8_t*>(s.x)[from];
        break;
      case 2:
        static_cast<uint16_t*>(values)[to] = static_cast<const uint16_t*>(s.x)[from];
        break;
      case 4:
        static_cast<uint32_t*>(values)[to] = static_cast<const uint32_t*>(s.x)[from];
        break;
      default:
        static_cast<uint64_t*>(values)[to] = static_cast<const uint64_t*>(s.x)[from];
    }
  }
};

// How the k first are found. Ties go to the lowest index in all of them.
//   sorting_warp.cu: a warp for each slice takes the best, k times (short slices, few results)
//   sorting_block.cu: a block for each slice selects by radix, and sorts what it has selected
//   sorting_device.cu: whole slices are sorted
bool fits_warp(const Slices& s);
void top_k_by_warps(RunContext& r, const Slices& s, int64_t slices, const TopKOutputs& out);
bool fits_block(const Slices& s, int64_t slices);
void top_k_by_blocks(RunContext& r, const Slices& s, int64_t slices, const TopKOutputs& out);
void top_k_by_sorting(RunContext& r, const Slices& s, int64_t slices, const TopKOutputs& out);

// Calls f.operator()<Key>() with the type of key_at for elements of this type.
template <typename F>
decltype(auto) with_key_type(DType type, F&& f) {
  if (bits_of(type) == 64) return f.template operator()<uint64_t>();
  return f.template operator()<uint32_t>();
}

}  // namespace fretsaw::cuda
