// Elements in device code: conversion to and from what is computed in, and 16-byte packs of them.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fretsaw::cuda {

// What elements of T are summed in: halves in float32, the others in their own type.
template <typename T>
struct SumOf {
  using type = T;
};
template <>
struct SumOf<__half> {
  using type = float;
};
template <>
struct SumOf<__nv_bfloat16> {
  using type = float;
};
template <typename T>
using Sum = typename SumOf<T>::type;

template <typename T>
__device__ inline Sum<T> widen(T x) {
  return x;
}
template <>
__device__ inline float widen(__half x) {
  return __half2float(x);
}
template <>
__device__ inline float widen(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <typename T>
__device__ inline T narrow(Sum<T> x) {
  return x;
}
template <>
__device__ inline __half narrow<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// 16 bytes of elements, moved as one.
template <typename T>
struct Pack {
  static constexpr int size = 16 / static_cast<int>(sizeof(T));
  union {
    uint4 bits;
    T elements[size];
  };
  __device__ Pack() : bits{0, 0, 0, 0} {}
  __device__ float at(int i) const { return static_cast<float>(widen(elements[i])); }
};
// Two bfloat16 of one word widen by a shift and a mask.
template <>
__device__ inline float Pack<__nv_bfloat16>::at(int i) const {
  const uint32_t word = i < 2 ? bits.x : i < 4 ? bits.y : i < 6 ? bits.z : bits.w;
  return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
}

template <typename T>
__device__ inline Pack<T> load_pack(const T* from) {
  Pack<T> pack;
  pack.bits = *reinterpret_cast<const uint4*>(from);
  return pack;
}
// Of data that no other thread of this multiprocessor reads: it should not push other data out of its cache.
template <typename T>
__device__ inline Pack<T> load_pack_once(const T* from) {
  Pack<T> pack;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(pack.bits.x), "=r"(pack.bits.y), "=r"(pack.bits.z), "=r"(pack.bits.w)
      : "l"(from));
  return pack;
}

}  // namespace fretsaw::cuda
