// Softmax and its relatives over any axis, and how the threads of a block share columns: used by softmax and losses.
#pragma once
#include <algorithm>

#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/fold_plan.h"
#include "kernels/cuda/log_sum_exp.cuh"
#include "kernels/cuda/reductions.h"

namespace fretsaw::cuda {

// Columns [outer, inner] of x [outer, n, inner]: blockDim.x neighbouring ones a block, each the work of blockDim.y threads.
struct Columns {
  int64_t count = 0, n = 1, inner = 1;

  explicit Columns(const AxisView& view) : count(view.outer * view.inner), n(view.n), inner(view.inner) {}
  __device__ int64_t own() const { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
  // Where the column begins; its elements are `inner` apart.
  __device__ int64_t base(int64_t column) const {
    const int64_t outer = column / inner;
    return outer * (n - 1) * inner + column;
  }
};
constexpr int kMostColumnThreads = 1024;

struct ColumnLaunch {
  unsigned blocks;
  dim3 threads;
};
inline ColumnLaunch column_launch(const Columns& columns) {
  const int64_t most = columns.n >= 16384 ? kMostColumnThreads : 256, neighbours = std::min<int64_t>(power_of_two_from(columns.inner), 32);
  const int64_t y = std::min(most / neighbours, power_of_two_from((columns.n + 3) / 4));
  const int64_t x = std::min(most / y, power_of_two_from(columns.count));
  return {static_cast<unsigned>((columns.count + x - 1) / x), dim3(static_cast<unsigned>(x), static_cast<unsigned>(y))};
}

// The fold of the column's elements, in all its threads.
template <typename T>
__device__ TopAndSum<WideOf<T>> fold_column(const T* x, const Columns& columns, int64_t column, TopAndSum<WideOf<T>>* shared) {
  const LogSumExp<WideOf<T>, int> fold{};
  TopAndSum<WideOf<T>> state = fold.start();
  if (column < columns.count) {
    const T* from = x + columns.base(column);
#pragma unroll 4
    for (int64_t i = threadIdx.y; i < columns.n; i += blockDim.y) fold.take(state, widen(from[i * columns.inner]), i, 0);
  }
  return join_column(state, shared, fold);
}

enum class SoftmaxKind : uint8_t { softmax, log_softmax, hardmax };
// x, y [outer, n, inner] of a float type.
void launch_softmax(SoftmaxKind kind, DType type, const void* x, void* y, const AxisView& view, cudaStream_t stream);

}  // namespace fretsaw::cuda
