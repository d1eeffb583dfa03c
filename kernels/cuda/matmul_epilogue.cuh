// What is done to a sum before it is stored.
#pragma once
#include "kernels/cuda/matmul_product.h"
#include "kernels/cuda/product_types.cuh"

namespace fretsaw::cuda {

template <typename T>
__device__ inline T activate(T x, ProductActivation activation) {
  if (activation == ProductActivation::relu) return x > T(0) || x != x ? x : T(0);
  if constexpr (static_cast<T>(0.5) != T(0)) {
    if (activation == ProductActivation::gelu_tanh)
      return T(0.5) * x * (T(1) + tanh(T(0.79788456080286535588) * (x + T(0.044715) * x * x * x)));
  }
  return x;
}

// One element of D from its sum; `at` is its place in D and C.
template <typename T>
struct Epilogue {
  Sum<T> alpha, beta;
  const void* c;  // null where there is none, like the bias
  const T* bias;
  void* d;
  bool wide;  // C and D are of float32, whatever T is
  ProductActivation activation;

  __device__ Sum<T> of_c(int64_t at) const {
    return wide ? static_cast<Sum<T>>(static_cast<const float*>(c)[at]) : static_cast<Sum<T>>(widen(static_cast<const T*>(c)[at]));
  }

  __device__ void store(int64_t at, int64_t column, Sum<T> sum) const {
    Sum<T> value = alpha * sum;
    if (c) value += beta * of_c(at);
    if (bias) value += widen(bias[column]);
    value = activate(value, activation);
    if (wide)
      static_cast<float*>(d)[at] = static_cast<float>(value);
    else
      static_cast<T*>(d)[at] = rounded<T>(value);
  }
};

template <typename T>
Epilogue<T> epilogue_of(const ProductSpec& spec, const ProductOperands& o) {
  return {static_cast<Sum<T>>(spec.alpha),
          static_cast<Sum<T>>(spec.beta),
          spec.beta != 0 ? o.c : nullptr,
          spec.bias ? static_cast<const T*>(o.bias) : nullptr,
          o.d,
          output_type(spec) == DType::float32,
          spec.activation};
}

}  // namespace fretsaw::cuda
