// Softmax over contiguous rows, for the softmax and attention families.
#pragma once
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/cpu/row_sums.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/kernel.h"

namespace fretsaw {

template <typename T>
FRETSAW_ALWAYS_INLINE inline T exp_of(T x) {
  if constexpr (std::is_same_v<T, float>)
    return math::exp(x);
  else
    return std::exp(x);
}

// y = e^(x - max) / sum of the same. `y` may be `x`. Call it inside run_vectorised.
template <typename T>
FRETSAW_ALWAYS_INLINE inline void softmax_row(const T* x, T* y, int64_t n) {
  if (n == 0) return;
  const T top = max_row(x, n);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = exp_of(x[i] - top);
  const T scale = T(1) / sum_row(y, n, [](T v) FRETSAW_ALWAYS_INLINE { return v; });
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] *= scale;
}

// y = x - max - log(sum of e^(x - max)).
template <typename T>
FRETSAW_ALWAYS_INLINE inline void log_softmax_row(const T* x, T* y, int64_t n) {
  if (n == 0) return;
  const T top = max_row(x, n);
  const T log_sum = std::log(sum_row(x, n, [top](T v) FRETSAW_ALWAYS_INLINE { return exp_of(v - top); }));
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] - top - log_sum;
}

void register_losses(KernelRegistry& registry);  // NegativeLogLikelihoodLoss, SoftmaxCrossEntropyLoss

}  // namespace fretsaw
