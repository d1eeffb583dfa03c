// The choice among all types of numbers at run time, and rounding to them.
#pragma once
#include "kernels/cuda/element_packs.cuh"

namespace fretsaw::cuda {

// Calls f(TypeIs<T>{}) with the device's type of these numbers; booleans are bytes.
template <typename F>
void with_number_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::int8:
      return f(TypeIs<int8_t>{});
    case DType::int16:
      return f(TypeIs<int16_t>{});
    case DType::int32:
      return f(TypeIs<int32_t>{});
    case DType::int64:
      return f(TypeIs<int64_t>{});
    case DType::boolean:
    case DType::uint8:
      return f(TypeIs<uint8_t>{});
    case DType::uint16:
      return f(TypeIs<uint16_t>{});
    case DType::uint32:
      return f(TypeIs<uint32_t>{});
    case DType::uint64:
      return f(TypeIs<uint64_t>{});
    default:
      return with_float_type(dtype, f);
  }
}

// The number as T; halves by way of float32, as on the CPU.
template <typename T>
__host__ __device__ inline T rounded(double x) {
  if constexpr (std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>)
    return narrow<T>(static_cast<float>(x));
  else
    return static_cast<T>(x);
}

}  // namespace fretsaw::cuda
