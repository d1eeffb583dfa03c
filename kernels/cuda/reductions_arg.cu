// ArgMax and ArgMin.
#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/fold.cuh"
#include "kernels/cuda/reductions.h"

namespace fretsaw::cuda {

namespace {

// The best so far of one axis; index -1 before there is any.
template <typename Value>
struct Best {
  Value value;
  int64_t index;
};

template <typename Value>
struct Arg {
  static constexpr bool kFromOrigin = false;
  using State = Best<Value>;
  int64_t* y;
  bool larger, last;

  __device__ State start() const { return {Value{}, -1}; }
  // NaN is better than every number.
  __device__ void operator()(State& into, const State& other) const {
    if (other.index < 0) return;
    const bool nan = into.value != into.value, other_nan = other.value != other.value;
    const bool equal = nan || other_nan ? nan == other_nan : into.value == other.value;
    const bool better = nan || other_nan ? other_nan : larger ? other.value > into.value : other.value < into.value;
    if (into.index < 0 || (equal ? (last ? other.index > into.index : other.index < into.index) : better)) into = other;
  }
  __device__ void take(State& state, Value x, int64_t e, Value) const { (*this)(state, State{x, e}); }
  __device__ void store(int64_t result, const State& state, int64_t, Value) const { y[result] = state.index; }
};

// y: int64, the index of the best along the one axis that is reduced; of equals the first, or the last.
void reduce_arg(RunContext& r, const ReductionPlan& shape, TensorView& y, bool larger, bool last) {
  const TensorView& x = r.input(0);
  if (is_whole(x.dtype)) {
    const IntegerReader<int64_t> reader{x.data, x.dtype, order_flip(x.dtype)};
    return run_fold(r, shape, reader, Arg<int64_t>{y.as<int64_t>(), larger, last});
  }
  with_float_type(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    run_fold(r, shape, FloatReader<T>{x.as<T>()}, Arg<WideOf<T>>{y.as<int64_t>(), larger, last});
  });
}

template <bool kLarger>
CompiledKernel make_arg(const CompileContext& c) {
  const Node& node = c.node();
  return {[axis_attribute = node.get_int("axis", 0), keep = node.get_int("keepdims", 1) != 0,
           last = node.get_int("select_last_index", 0) != 0](RunContext& r) {
    const TensorView& x = r.input(0);
    const size_t axis = normalise_axis(axis_attribute, x.rank());
    std::vector<bool> reduce(x.rank(), false);
    reduce[axis] = true;
    Dims dims = x.dims;
    if (keep)
      dims[axis] = 1;
    else
      dims.erase(dims.begin() + static_cast<std::ptrdiff_t>(axis));
    TensorView& y = r.output(0, dims, DType::int64);
    const ReductionPlan shape = plan_reduction(x.dims, reduce);
    if (shape.results != 0 && shape.each == 0)
      throw Error("the best of no elements along axis " + std::to_string(axis), "give the axis a size");
    reduce_arg(r, shape, y, kLarger, last);
  }};
}

std::string unsupported_arg(const CompileContext& c) {
  return refuse_other_numbers(c);
}

}  // namespace

void register_arg_reductions(KernelRegistry& registry) {
  registry.add({.op = "ArgMax", .make = make_arg<true>, .unsupported = unsupported_arg});
  registry.add({.op = "ArgMin", .make = make_arg<false>, .unsupported = unsupported_arg});
}

}  // namespace fretsaw::cuda
