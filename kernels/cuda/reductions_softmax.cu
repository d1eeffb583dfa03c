// Softmax, LogSoftmax and Hardmax along one axis: rows in registers where they are neighbours and fit, otherwise columns read twice.
#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/pointwise.h"
#include "kernels/cuda/row_registers.cuh"
#include "kernels/cuda/softmax.cuh"

namespace fretsaw::cuda {

namespace {

template <typename T, int V, int kPacks>
__global__ void __launch_bounds__(kMostRowThreads) softmax_rows(const T* x, T* y, int64_t rows, int n, bool logarithm) {
  __shared__ float shared[kMostRowThreads / 32];
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  RowRegisters<T, V, kPacks> held;
  held.load(x + row * n, row < rows ? n : 0);
  float top = -INFINITY, sum = 0;
  held.each([&](float v) {
    if (v > top || v != v) top = v;
  });
  top = join_group(top, -INFINITY, shared, LargerJoin{});
  held.each([&](float v) { sum += expf(v - top); });
  sum = join_group(sum, 0.0f, shared, AddJoin{});
  const float scale = 1.0f / sum, log_sum = logf(sum);
  held.write(
      y + row * n, [](int) {}, [&](float v, int) { return logarithm ? v - top - log_sum : expf(v - top) * scale; });
}

template <typename T>
__global__ void __launch_bounds__(kMostColumnThreads) softmax_columns(const T* x, T* y, Columns columns, bool logarithm) {
  using Wide = WideOf<T>;
  __shared__ TopAndSum<Wide> shared[kMostColumnThreads];
  const int64_t column = columns.own();
  const TopAndSum<Wide> all = fold_column(x, columns, column, shared);
  if (column >= columns.count) return;
  const Wide top = all.top, scale = static_cast<Wide>(1 / all.sum), log_sum = static_cast<Wide>(log(all.sum));
  const int64_t base = columns.base(column);
#pragma unroll 4
  for (int64_t i = threadIdx.y; i < columns.n; i += blockDim.y) {
    const Wide v = widen(x[base + i * columns.inner]);
    y[base + i * columns.inner] = narrow<T>(logarithm ? v - top - log_sum : exp_of(v - top) * scale);
  }
}

template <typename T>
struct Largest {
  WideOf<T> value;
  int index;
};
struct FirstLargest {
  template <typename S>
  __device__ void operator()(S& into, const S& other) const {
    if (other.index >= 0 && (into.index < 0 || other.value > into.value || (other.value == into.value && other.index < into.index)))
      into = other;
  }
};

// 1 where the first of the largest stands, 0 elsewhere.
template <typename T>
__global__ void __launch_bounds__(kMostColumnThreads) hardmax_columns(const T* x, T* y, Columns columns) {
  __shared__ Largest<T> shared[kMostColumnThreads];
  const int64_t column = columns.own();
  const bool real = column < columns.count;
  const int64_t base = real ? columns.base(column) : 0;
  Largest<T> best{{}, -1};
  for (int64_t i = threadIdx.y; real && i < columns.n; i += blockDim.y)
    FirstLargest{}(best, Largest<T>{widen(x[base + i * columns.inner]), static_cast<int>(i)});
  best = join_column(best, shared, FirstLargest{});
  for (int64_t i = threadIdx.y; real && i < columns.n; i += blockDim.y)
    y[base + i * columns.inner] = narrow<T>(static_cast<WideOf<T>>(i == best.index));
}

template <typename T>
void launch_columns(SoftmaxKind kind, const T* x, T* y, const AxisView& view, cudaStream_t stream) {
  const Columns columns(view);
  const ColumnLaunch launch = column_launch(columns);
  if (kind == SoftmaxKind::hardmax)
    hardmax_columns<<<launch.blocks, launch.threads, 0, stream>>>(x, y, columns);
  else
    softmax_columns<<<launch.blocks, launch.threads, 0, stream>>>(x, y, columns, kind == SoftmaxKind::log_softmax);
}

template <typename T>
void launch_rows(const RowShape& shape, bool logarithm, const T* x, T* y, const AxisView& view, cudaStream_t stream) {
  with_row_shape<T>(shape, [&]<int V, int kPacks>() {
    const dim3 threads(static_cast<unsigned>(shape.threads), static_cast<unsigned>(shape.rows_a_block));
    const auto blocks = static_cast<unsigned>((view.outer + shape.rows_a_block - 1) / shape.rows_a_block);
    softmax_rows<T, V, kPacks><<<blocks, threads, 0, stream>>>(x, y, view.outer, static_cast<int>(view.n), logarithm);
  });
}

template <SoftmaxKind kKind>
CompiledKernel make_softmax(const CompileContext& c) {
  return {[axis = c.node().get_int("axis", -1)](RunContext& r) {
    const TensorView& x = r.input(0);
    TensorView& y = r.output(0, x.dims);
    const AxisView view = x.rank() == 0 ? AxisView{} : along_axis(x.dims, normalise_axis(axis, x.rank()));
    launch_softmax(kKind, x.dtype, x.data, y.data, view, stream_of(r));
  }};
}

}  // namespace

void launch_softmax(SoftmaxKind kind, DType type, const void* x, void* y, const AxisView& view, cudaStream_t stream) {
  if (view.outer * view.n * view.inner == 0) return;
  with_float_type(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* from = static_cast<const T*>(x);
    auto* to = static_cast<T*>(y);
    if constexpr (!std::is_same_v<T, double>) {
      const bool packed = view.n % kPackOf16<T> == 0 && is_16_byte_aligned(x) && is_16_byte_aligned(y);
      const RowShape shape = row_shape(view.n, packed ? kPackOf16<T> : 1);
      if (kind != SoftmaxKind::hardmax && view.inner == 1 && shape.fits)
        return launch_rows(shape, kind == SoftmaxKind::log_softmax, from, to, view, stream);
    }
    launch_columns(kind, from, to, view, stream);
  });
  check_launch("softmax");
}

void register_softmax(KernelRegistry& registry) {
  registry.add(with_row_steps({.op = "Softmax", .make = make_softmax<SoftmaxKind::softmax>, .unsupported = refuse_other_floats}));
  registry.add(with_row_steps({.op = "LogSoftmax", .make = make_softmax<SoftmaxKind::log_softmax>, .unsupported = refuse_other_floats}));
  registry.add({.op = "Hardmax", .make = make_softmax<SoftmaxKind::hardmax>, .unsupported = refuse_other_floats});
}

}  // namespace fretsaw::cuda
