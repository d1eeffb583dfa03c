// Sums of elements, their magnitudes or squares, and products. Floats are added in double (numbers of 16 bits over leading axes: eight by
// eight in float32): the result then hardly depends on the order, which differs between layouts and devices. Integers are added as int64,
// or as double where the result is a function of the sum.
#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/fold.cuh"
#include "kernels/cuda/reductions.h"

namespace fretsaw::cuda {

namespace {

// Stores a function of the sum of n elements.
template <typename Store>
struct FinishedStore {
  Store y;
  SumFinish finish;
  int64_t n;

  __device__ void operator()(int64_t result, double sum) const {
    switch (finish) {
      case SumFinish::mean:
        return y(result, sum / static_cast<double>(n));
      case SumFinish::root:
        return y(result, sqrt(sum));
      case SumFinish::log:
        return y(result, log(sum));
      default:
        return y(result, sum);
    }
  }
};

template <typename Store>
struct Sum {
  static constexpr bool kFromOrigin = false;
  using State = double;
  Store y;
  SumTerm term;
  SumFinish finish;

  __device__ State start() const { return 0; }
  template <typename Value>
  __device__ void take(State& state, Value x, int64_t, Value) const {
    const double value = static_cast<double>(x);
    state += term == SumTerm::square ? value * value : term == SumTerm::magnitude ? fabs(value) : value;
  }
  __device__ void operator()(State& into, const State& other) const { into += other; }
  template <typename Value>
  __device__ void store(int64_t result, const State& state, int64_t n, Value) const {
    FinishedStore<Store>{y, finish, n}(result, state);
  }
};

// Unsigned arithmetic: what is too large wraps around.
struct IntegerSum {
  static constexpr bool kFromOrigin = false;
  using State = uint64_t;
  IntegerStore y;
  SumTerm term;

  __device__ State start() const { return 0; }
  __device__ void take(State& state, int64_t x, int64_t, int64_t) const {
    const auto value = static_cast<uint64_t>(x);
    const bool negative = x < 0 && y.type != DType::uint64;
    state += term == SumTerm::square ? value * value : term == SumTerm::magnitude && negative ? 0 - value : value;
  }
  __device__ void operator()(State& into, const State& other) const { into += other; }
  __device__ void store(int64_t result, const State& state, int64_t, int64_t) const { y(result, static_cast<int64_t>(state)); }
};

template <typename Store, typename Number>
struct Product {
  static constexpr bool kFromOrigin = false;
  using State = Number;
  Store y;

  __device__ State start() const { return 1; }
  template <typename Value>
  __device__ void take(State& state, Value x, int64_t, Value) const {
    state *= static_cast<Number>(x);
  }
  __device__ void operator()(State& into, const State& other) const { into *= other; }
  template <typename Value>
  __device__ void store(int64_t result, const State& state, int64_t, Value) const {
    if constexpr (std::is_same_v<Number, double>)
      y(result, state);
    else
      y(result, static_cast<int64_t>(state));
  }
};

// Whether all dimensions but some of the last ones are reduced: [each, width], of which columns are left.
bool keeps_columns(const ReductionPlan& shape) {
  return shape.width > 1 && shape.kept.empty() && shape.reduced.size() == 1;
}

}  // namespace

void reduce_sum(RunContext& r, const ReductionPlan& shape, TensorView& y, SumTerm term, SumFinish finish) {
  const TensorView& x = r.input(0);
  if (is_whole(x.dtype)) {
    const IntegerStore store{y.data, y.dtype};
    if (finish == SumFinish::none) return run_fold(r, shape, IntegerReader<int64_t>{x.data, x.dtype}, IntegerSum{store, term});
    return run_fold(r, shape, IntegerReader<double>{x.data, x.dtype}, Sum<IntegerStore>{store, term, finish});
  }
  with_float_type(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = x.as<T>();
    if (term == SumTerm::plain && keeps_columns(shape) && can_sum_columns(from, shape.each, shape.width))
      return launch_column_sums(r, from, shape.each, shape.width, FinishedStore<FloatStore<T>>{{y.as<T>()}, finish, shape.each});
    run_fold(r, shape, FloatReader<T>{from}, Sum<FloatStore<T>>{{y.as<T>()}, term, finish});
  });
}

void reduce_product(RunContext& r, const ReductionPlan& shape, TensorView& y) {
  const TensorView& x = r.input(0);
  if (is_whole(x.dtype)) {
    const Product<IntegerStore, uint64_t> product{{y.data, y.dtype}};
    return run_fold(r, shape, IntegerReader<int64_t>{x.data, x.dtype}, product);
  }
  with_float_type(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    run_fold(r, shape, FloatReader<T>{x.as<T>()}, Product<FloatStore<T>, double>{{y.as<T>()}});
  });
}

}  // namespace fretsaw::cuda
