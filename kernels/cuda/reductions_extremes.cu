// Minima and maxima (NaN where there is one), and the logarithm of a sum of exponentials.
#include <limits>

#include "kernels/cuda/fold.cuh"
#include "kernels/cuda/log_sum_exp.cuh"
#include "kernels/cuda/reductions.h"

namespace fretsaw::cuda {

namespace {

template <typename Value, typename Store>
struct Extreme {
  static constexpr bool kFromOrigin = false;
  using State = Value;
  Store y;
  bool larger;
  Value first;  // what every number takes the place of

  __device__ State start() const { return first; }
  __device__ void take(State& state, Value x, int64_t, Value) const {
    if (x != x || (larger ? x > state : x < state)) state = x;
  }
  __device__ void operator()(State& into, const State& other) const { take(into, other, 0, Value{}); }
  __device__ void store(int64_t result, const State& state, int64_t, Value) const { y(result, state); }
};

// The smallest or the largest number of an integer type, or false and true.
int64_t limit_of(DType type, bool largest) {
  if (type == DType::boolean) return largest;
  const int bits = bits_of(type);
  const bool is_unsigned = type == DType::uint8 || type == DType::uint16 || type == DType::uint32 || type == DType::uint64;
  if (is_unsigned) return !largest ? 0 : bits == 64 ? -1 : (int64_t{1} << bits) - 1;
  const int64_t top = static_cast<int64_t>((uint64_t{1} << (bits - 1)) - 1);
  return largest ? top : -top - 1;
}

}  // namespace

void reduce_extreme(RunContext& r, const ReductionPlan& shape, TensorView& y, bool larger) {
  const TensorView& x = r.input(0);
  if (is_whole(x.dtype)) {
    const int64_t flip = order_flip(x.dtype), first = limit_of(x.dtype, !larger) ^ flip;
    const Extreme<int64_t, IntegerStore> fold{{y.data, y.dtype, flip}, larger, first};
    return run_fold(r, shape, IntegerReader<int64_t>{x.data, x.dtype, flip}, fold);
  }
  with_float_type(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Value = WideOf<T>;
    const Value infinity = std::numeric_limits<Value>::infinity();
    const Extreme<Value, FloatStore<T>> fold{{y.as<T>()}, larger, larger ? -infinity : infinity};
    run_fold(r, shape, FloatReader<T>{x.as<T>()}, fold);
  });
}

void reduce_log_sum_exp(RunContext& r, const ReductionPlan& shape, TensorView& y) {
  const TensorView& x = r.input(0);
  if (is_whole(x.dtype))
    return run_fold(r, shape, IntegerReader<double>{x.data, x.dtype}, LogSumExp<double, IntegerStore>{{y.data, y.dtype}});
  with_float_type(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    run_fold(r, shape, FloatReader<T>{x.as<T>()}, LogSumExp<WideOf<T>, FloatStore<T>>{{y.as<T>()}});
  });
}

}  // namespace fretsaw::cuda
