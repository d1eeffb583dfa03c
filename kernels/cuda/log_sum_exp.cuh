// The maximum of numbers and the sum of their exponentials below it, in one pass: the fold of ReduceLogSumExp, softmax and losses.
#pragma once
#include <cstdint>

#include "kernels/cuda/element_packs.cuh"

namespace fretsaw::cuda {

__device__ __forceinline__ float exp_of(float x) {
  return expf(x);
}
__device__ __forceinline__ double exp_of(double x) {
  return exp(x);
}

// The numbers so far: `sum` of e^(x - top). Infinite maxima are numbers like others: e^(top - top) counts as 1.
template <typename Value>
struct TopAndSum {
  Value top;
  double sum;
};

template <typename Value, typename Store>
struct LogSumExp {
  static constexpr bool kFromOrigin = false;
  using State = TopAndSum<Value>;
  Store y;

  __device__ State start() const { return {-static_cast<Value>(INFINITY), 0}; }
  __device__ void take(State& state, Value x, int64_t, Value) const {
    // Of the two exponentials one is 1. NaN goes into the sum.
    const Value below = x == state.top ? Value(0) : x - state.top;
    const auto factor = static_cast<double>(exp_of(below > 0 ? -below : below));
    if (x > state.top) {
      state.sum = state.sum * factor + 1;
      state.top = x;
    } else {
      state.sum += factor;
    }
  }
  __device__ void operator()(State& into, const State& other) const {
    const bool rises = other.top > into.top;
    const Value top = rises ? other.top : into.top, bottom = rises ? into.top : other.top;
    const auto factor = static_cast<double>(exp_of(bottom == top ? Value(0) : bottom - top));
    into.sum = rises ? other.sum + into.sum * factor : into.sum + other.sum * factor;
    into.top = top;
  }
  __device__ void store(int64_t result, const State& state, int64_t, Value) const {
    y(result, log(state.sum) + static_cast<double>(state.top));
  }
};

}  // namespace fretsaw::cuda
