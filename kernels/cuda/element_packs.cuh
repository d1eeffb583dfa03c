// Elements in device code: 16-byte packs, widening to the type that sums are taken in, and the choice of a type at run time.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "graph/errors.h"
#include "graph/types.h"

namespace fretsaw::cuda {

template <typename T>
using WideOf = std::conditional_t<std::is_same_v<T, double>, double, float>;  // what T computes in

__host__ __device__ inline float widen(float x) {
  return x;
}
__host__ __device__ inline double widen(double x) {
  return x;
}
__host__ __device__ inline float widen(__half x) {
  return __half2float(x);
}
__host__ __device__ inline float widen(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
template <typename T>
__host__ __device__ inline T narrow(WideOf<T> x) {
  if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(x);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16_rn(x);
  else
    return x;
}

// Neighbouring elements that are read and written as one.
template <typename T, int V>
struct alignas(sizeof(T) * V) Lanes {
  T at[V];
};
template <typename T>
constexpr int kPackOf16 = 16 / static_cast<int>(sizeof(T));

template <typename T>
struct TypeIs {
  using type = T;
};
// f(TypeIs<T>{}) for the device's type of a float dtype.
template <typename F>
void with_float_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::float32:
      return f(TypeIs<float>{});
    case DType::float16:
      return f(TypeIs<__half>{});
    case DType::bfloat16:
      return f(TypeIs<__nv_bfloat16>{});
    case DType::float64:
      return f(TypeIs<double>{});
    default:
      throw Error("a device kernel for floats was given " + std::string(name_of(dtype)), "report this as a fault");
  }
}

inline bool is_16_byte_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

}  // namespace fretsaw::cuda
