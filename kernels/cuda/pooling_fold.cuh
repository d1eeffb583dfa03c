// How poolings fold values, in device code: the maximum, the sum of a mean, or the sum of powers of a norm.
#pragma once
#include <limits>

#include "kernels/cuda/element_packs.cuh"
#include "kernels/cuda/pooling.h"

namespace fretsaw::cuda {

__device__ inline float widen(int8_t x) {
  return x;
}
__device__ inline float widen(uint8_t x) {
  return x;
}

// Before any value. Integers have no infinity.
template <PoolKind kKind, typename T>
__device__ inline WideOf<T> fold_start() {
  if (kKind != PoolKind::max) return 0;
  return std::is_integral_v<T> ? WideOf<T>(std::numeric_limits<T>::lowest()) : -std::numeric_limits<WideOf<T>>::infinity();
}

// |x|^p: of the small powers without pow.
template <typename W>
__device__ inline W power_of(W x, int p) {
  x = fabs(x);
  return p == 1 ? x : p == 2 ? x * x : pow(x, W(p));
}
template <typename W>
__device__ inline W root_of(W x, int p) {
  return p == 1 ? x : p == 2 ? sqrt(x) : pow(x, W(1) / W(p));
}

// Whether x is taken for the maximum so far; NaN always is.
template <typename W>
__device__ inline bool is_greater(W x, W best) {
  return x > best || x != x;
}

// Two folded values as one.
template <PoolKind kKind, typename W>
__device__ inline W fold_two(W a, W b) {
  if (kKind == PoolKind::max) return is_greater(b, a) ? b : a;
  return a + b;
}
// One more value.
template <PoolKind kKind, typename W>
__device__ inline W fold_one(W sum, W x, int p) {
  return fold_two<kKind>(sum, kKind == PoolKind::lp ? power_of(x, p) : x);
}
// The result of a fold; `divisor` counts the cells of a mean.
template <PoolKind kKind, typename W>
__device__ inline W fold_end(W sum, W divisor, int p) {
  if (kKind == PoolKind::average) return divisor == W(0) ? W(0) : sum / divisor;
  return kKind == PoolKind::lp ? root_of(sum, p) : sum;
}

}  // namespace fretsaw::cuda
