// Sums and maxima of rows, in an order that is the same on every machine: sixteen running results, joined at the end.
#pragma once
#include <cstdint>

#include "kernels/cpu/isa.h"

namespace fretsaw {

constexpr int64_t kLanes = 16;

// The sum of f(0) ... f(n - 1). Call it inside run_vectorised.
template <typename T, typename F>
FRETSAW_ALWAYS_INLINE inline T sum_terms(int64_t n, const F& f) {
  T lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
    for (int64_t k = 0; k < kLanes; ++k) lanes[k] += f(i + k);
  }
  for (int64_t k = 0; i + k < n; ++k) lanes[k] += f(i + k);
  for (int64_t step = kLanes / 2; step > 0; step /= 2) {
    for (int64_t k = 0; k < step; ++k) lanes[k] += lanes[k + step];
  }
  return lanes[0];
}

// The sum of f(x[i]) over a row. Call it inside run_vectorised.
template <typename T, typename F>
FRETSAW_ALWAYS_INLINE inline T sum_row(const T* x, int64_t n, const F& f) {
  return sum_terms<T>(n, [x, &f](int64_t i) FRETSAW_ALWAYS_INLINE { return f(x[i]); });
}

template <typename T>
FRETSAW_ALWAYS_INLINE inline T max_row(const T* x, int64_t n) {
  T lanes[kLanes];
  for (int64_t k = 0; k < kLanes; ++k) lanes[k] = x[0];
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
    for (int64_t k = 0; k < kLanes; ++k) lanes[k] = lanes[k] > x[i + k] ? lanes[k] : x[i + k];
  }
  for (int64_t k = 0; i + k < n; ++k) lanes[k] = lanes[k] > x[i + k] ? lanes[k] : x[i + k];
  T best = lanes[0];
  for (int64_t k = 1; k < kLanes; ++k) best = best > lanes[k] ? best : lanes[k];
  return best;
}

}  // namespace fretsaw
