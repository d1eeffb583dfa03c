// LRN, over neighbouring channels, and LpNormalization, over an axis.
#include <algorithm>

#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/normalization.h"
#include "kernels/cuda/softmax.cuh"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256;

struct Response {
  int64_t size = 1;
  float alpha = 1e-4f, beta = 0.75f, bias = 1;
};

// x, y [N, C, cells]: y = x / (bias + alpha / size * sum of the squares of `size` neighbouring channels)^beta
template <typename T>
__global__ void __launch_bounds__(kThreads)
    local_response(const T* x, T* y, int64_t count, WideDivider cells, WideDivider channels, Response s) {
  using Wide = WideOf<T>;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    int64_t channel = cells.quotient(i);
    split_off(channels, channel);
    const int64_t first = max(int64_t{0}, channel - (s.size - 1) / 2), last = min(channels.divisor - 1, channel + s.size / 2);
    const T* near = x + i - (channel - first) * cells.divisor;
    Wide sum = 0;
    for (int64_t c = first; c <= last; ++c, near += cells.divisor) sum += widen(*near) * widen(*near);
    const Wide base = static_cast<Wide>(s.bias) + static_cast<Wide>(s.alpha) / static_cast<Wide>(s.size) * sum;
    y[i] = narrow<T>(widen(x[i]) / pow(base, static_cast<Wide>(s.beta)));
  }
}

CompiledKernel make_response(const CompileContext& c) {
  const Node& node = c.node();
  Response s;
  s.size = node.get_int("size", 0);
  s.alpha = node.get_float("alpha", 1e-4f), s.beta = node.get_float("beta", 0.75f), s.bias = node.get_float("bias", 1.0f);
  require(s.size >= 1, "attribute size of LRN is missing or not positive", "give it");
  return {[s](RunContext& r) {
    const TensorView& x = r.input(0);
    require(x.rank() >= 2, "LRN needs [N,C,D1,...]", "give it channels");
    TensorView& y = r.output(0, x.dims);
    if (x.count() == 0) return;
    const WideDivider cells(product(x.dims, 2, x.rank())), channels(x.dims[1]);
    with_float_type(x.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      local_response<<<blocks_for(x.count(), kThreads), kThreads, 0, stream_of(r)>>>(x.as<T>(), y.as<T>(), x.count(), cells, channels, s);
    });
    check_launch("local_response");
  }};
}

// Each column divided by its p-norm; a norm of 0 gives 0.
template <typename T>
__global__ void __launch_bounds__(kMostColumnThreads) lp_columns(const T* x, T* y, Columns columns, bool squares) {
  using Wide = WideOf<T>;
  __shared__ double shared[kMostColumnThreads];
  const int64_t column = columns.own();
  const bool real = column < columns.count;
  const int64_t base = real ? columns.base(column) : 0;
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.y; real && i < columns.n; i += blockDim.y) {
    const auto v = static_cast<double>(widen(x[base + i * columns.inner]));
    sum += squares ? v * v : fabs(v);
  }
  sum = join_column(sum, shared, AddJoin{});
  const auto norm = static_cast<Wide>(squares ? sqrt(sum) : sum);
#pragma unroll 4
  for (int64_t i = threadIdx.y; real && i < columns.n; i += blockDim.y) {
    const int64_t at = base + i * columns.inner;
    y[at] = narrow<T>(norm == Wide(0) ? Wide(0) : widen(x[at]) / norm);
  }
}

CompiledKernel make_lp_norm(const CompileContext& c) {
  const int64_t p = c.node().get_int("p", 2);
  require(p == 1 || p == 2, "LpNormalization with a p that is neither 1 nor 2", "use 1 or 2");
  return {[p, axis = c.node().get_int("axis", -1)](RunContext& r) {
    const TensorView& x = r.input(0);
    const Columns columns(along_axis(x.dims, normalise_axis(axis, x.rank())));
    TensorView& y = r.output(0, x.dims);
    if (x.count() == 0) return;
    const ColumnLaunch launch = column_launch(columns);
    with_float_type(x.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      lp_columns<<<launch.blocks, launch.threads, 0, stream_of(r)>>>(x.as<T>(), y.as<T>(), columns, p == 2);
    });
    check_launch("lp_columns");
  }};
}

}  // namespace

void register_local_normalization(KernelRegistry& registry) {
  registry.add({.op = "LRN", .make = make_response, .unsupported = cuda::refuse_other_floats});
  registry.add({.op = "LpNormalization", .make = make_lp_norm, .unsupported = cuda::refuse_other_floats});
}

}  // namespace fretsaw::cuda
