// Elements of products in device code: what they are summed in, and 16 bytes of them as one.
#pragma once
#include "kernels/cuda/element_packs.cuh"

namespace fretsaw::cuda {

// What products of T are summed in: halves in float32, the others in their own type.
template <typename T>
using Sum = std::conditional_t<sizeof(T) == 2, float, T>;

__device__ inline int32_t widen(int32_t x) {
  return x;
}
__device__ inline uint32_t widen(uint32_t x) {
  return x;
}
__device__ inline int64_t widen(int64_t x) {
  return x;
}
__device__ inline uint64_t widen(uint64_t x) {
  return x;
}
template <typename T>
__device__ inline T rounded(Sum<T> x) {
  if constexpr (sizeof(T) == 2)
    return narrow<T>(x);
  else
    return x;
}

// 16 bytes of elements, moved as one.
template <typename T>
struct Bits16 {
  static constexpr int size = 16 / static_cast<int>(sizeof(T));
  union {
    uint4 bits;
    T elements[size];
  };
  __device__ Bits16() : bits{0, 0, 0, 0} {}
  __device__ float at(int i) const { return static_cast<float>(widen(elements[i])); }
};
// Two bfloat16 of one word widen by a shift and a mask.
template <>
__device__ inline float Bits16<__nv_bfloat16>::at(int i) const {
  const uint32_t word = i < 2 ? bits.x : i < 4 ? bits.y : i < 6 ? bits.z : bits.w;
  return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
}

template <typename T>
__device__ inline Bits16<T> load_bits(const T* from) {
  Bits16<T> pack;
  pack.bits = *reinterpret_cast<const uint4*>(from);
  return pack;
}
// Of data that no other thread of this multiprocessor reads: it should not push other data out of its cache. Of constants it may be read
// before earlier kernels have ended.
template <typename T>
__device__ inline Bits16<T> load_bits_once(const T* from) {
  Bits16<T> pack;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.bits.x), "=r"(pack.bits.y), "=r"(pack.bits.z), "=r"(pack.bits.w)
               : "l"(from)
               : "memory");
  return pack;
}
template <typename T>
__device__ inline Bits16<T> load_constant_bits_once(const T* from) {
  Bits16<T> pack;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(pack.bits.x), "=r"(pack.bits.y), "=r"(pack.bits.z), "=r"(pack.bits.w)
      : "l"(from));
  return pack;
}

}  // namespace fretsaw::cuda
