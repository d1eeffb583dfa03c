// CumSum and CumProd. Floats are accumulated in double.
#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/fold_plan.h"
#include "kernels/cuda/fold_readers.cuh"
#include "kernels/cuda/reductions.h"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256, kEach = 4;  // a tile is kThreads * kEach elements

struct Cumulative {
  int64_t n = 1, inner = 1, columns = 1;  // x, y [columns / inner, n, inner]
  bool exclusive = false, reverse = false, product = false;

  // Where a column's first element in the direction of the sums lies, and how far apart they are.
  FRETSAW_HOST_DEVICE int64_t base(int64_t column) const {
    const int64_t outer = column / inner;
    return (outer * n + (reverse ? n - 1 : 0)) * inner + (column - outer * inner);
  }
  FRETSAW_HOST_DEVICE int64_t step() const { return reverse ? -inner : inner; }
  template <typename S>
  FRETSAW_HOST_DEVICE S start() const {
    return product ? S(1) : S(0);
  }
  template <typename S>
  FRETSAW_HOST_DEVICE S join(S a, S b) const {
    return product ? a * b : a + b;
  }
};

// A thread runs through a column.
template <typename State, typename Reader, typename Store>
__global__ void __launch_bounds__(kThreads) accumulate_columns(Cumulative c, Reader reader, Store y) {
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= c.columns) return;
  State state = c.start<State>();
  int64_t at = c.base(column);
  for (int64_t i = 0; i < c.n; ++i, at += c.step()) {
    const State before = state;
    state = c.join(state, static_cast<State>(reader.load(at)));
    y(at, c.exclusive ? before : state);
  }
}

// What the threads before this one have in all; `total` becomes what the block has. `shared` [kThreads / 32].
template <typename State>
__device__ State scan_block(const Cumulative& c, State own, State* shared, State& total) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  State through = own;  // the lanes up to this one
  for (int distance = 1; distance < 32; distance *= 2) {
    const State below = __shfl_up_sync(0xffffffffu, through, static_cast<unsigned>(distance));
    if (lane >= distance) through = c.join(below, through);
  }
  const State below = __shfl_up_sync(0xffffffffu, through, 1);
  if (lane == 31) shared[warp] = through;
  __syncthreads();
  State before = c.start<State>();
  total = before;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before = c.join(before, shared[w]);
    total = c.join(total, shared[w]);
  }
  __syncthreads();
  return lane > 0 ? c.join(before, below) : before;
}

// A block runs through a column, a tile at a time.
template <typename State, typename Reader, typename Store>
__global__ void __launch_bounds__(kThreads) accumulate_tiles(Cumulative c, Reader reader, Store y) {
  __shared__ State shared[kThreads / 32];
  for (int64_t column = blockIdx.x; column < c.columns; column += gridDim.x) {
    const int64_t base = c.base(column);
    State carry = c.start<State>();
    for (int64_t tile = 0; tile < c.n; tile += kThreads * kEach) {
      const int64_t first = tile + int64_t{threadIdx.x} * kEach;
      State values[kEach], own = c.start<State>();
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        values[k] = first + k < c.n ? static_cast<State>(reader.load(base + (first + k) * c.step())) : c.start<State>();
        own = c.join(own, values[k]);
      }
      State total;
      State state = c.join(carry, scan_block(c, own, shared, total));
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const State before = state;
        state = c.join(state, values[k]);
        if (first + k < c.n) y(base + (first + k) * c.step(), c.exclusive ? before : state);
      }
      carry = c.join(carry, total);
    }
  }
}

template <typename State, typename Reader, typename Store>
void launch_cumulative(const Cumulative& c, const Reader& reader, const Store& y, int multiprocessors, cudaStream_t stream) {
  if (c.n <= 32 || (c.inner > 1 && c.columns >= int64_t{256} * multiprocessors))
    accumulate_columns<State><<<static_cast<unsigned>((c.columns + kThreads - 1) / kThreads), kThreads, 0, stream>>>(c, reader, y);
  else
    accumulate_tiles<State><<<blocks_for(c.columns, 1), kThreads, 0, stream>>>(c, reader, y);
  check_launch("cumulative");
}

// Unsigned, so that what is too large wraps around.
struct WrappingStore {
  IntegerStore y;
  __device__ void operator()(int64_t i, uint64_t value) const { y(i, static_cast<int64_t>(value)); }
};

void run_cumulative(RunContext& r, Cumulative c) {
  const TensorView& x = r.input(0);
  const AxisView view = along_axis(x.dims, normalise_axis(input_int(r, 1), x.rank()));
  TensorView& y = r.output(0, x.dims);
  if (x.count() == 0) return;
  c.n = view.n, c.inner = view.inner, c.columns = view.outer * view.inner;
  const int multiprocessors = gpu(r).multiprocessors();
  if (is_whole(x.dtype)) {
    const IntegerReader<int64_t> reader{x.data, x.dtype};
    return launch_cumulative<uint64_t>(c, reader, WrappingStore{{y.data, y.dtype}}, multiprocessors, stream_of(r));
  }
  with_float_type(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_cumulative<double>(c, FloatReader<T>{x.as<T>()}, FloatStore<T>{y.as<T>()}, multiprocessors, stream_of(r));
  });
}

template <bool kProduct>
CompiledKernel make_cumulative(const CompileContext& c) {
  Cumulative settings;
  settings.exclusive = c.node().get_int("exclusive", 0) != 0;
  settings.reverse = c.node().get_int("reverse", 0) != 0;
  settings.product = kProduct;
  return {[settings](RunContext& r) { run_cumulative(r, settings); }};
}

std::string unsupported_cumulative(const CompileContext& c) {
  return refuse_other_numbers(c);
}

}  // namespace

void register_cumulative(KernelRegistry& registry) {
  registry.add({.op = "CumSum", .make = make_cumulative<false>, .unsupported = unsupported_cumulative, .host_inputs = {1}});
  registry.add({.op = "CumProd", .make = make_cumulative<true>, .unsupported = unsupported_cumulative, .host_inputs = {1}});
}

}  // namespace fretsaw::cuda
