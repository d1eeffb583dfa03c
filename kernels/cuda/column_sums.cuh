// Sums of the columns of [rows, columns], read once: blocks take columns and every so many rows, and a second kernel joins what they have
// found. The order of additions is decided by the shape and the number of multiprocessors alone.
#pragma once
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/channel_pixels.cuh"

namespace fretsaw::cuda {

constexpr int kRowBatch = 8;      // rows of a thread that are loaded together
constexpr int kColumnBlocks = 3;  // blocks of sum_columns that run at once on a multiprocessor

// What a batch of rows is added in, before it is added to the others in double. Eight numbers of 16 bits come out exact in float32 unless
// one is more than 2^10 times (bfloat16: 2^13) another, and converting each of them to double would take much of the time of reading them.
template <typename T>
using BatchOf = std::conditional_t<sizeof(T) == 2, float, double>;

// On a grid of column_grid; x has fewer than 2^31 packs. store(column, sum) where gridDim.y is 1, otherwise parts [gridDim.y, columns].
template <typename T, int V, typename Store>
__global__ void __launch_bounds__(kChannelThreads, kColumnBlocks)
    sum_columns(const T* x, int64_t rows, int64_t columns, double* parts, Store store) {
  let_later_begin();
  wait_for_earlier();
  constexpr int kWarps = kChannelThreads / 32, kLine = 32 + 16 / V;  // writes and reads of such lines meet all banks evenly
  __shared__ double shared[kWarps][V][kLine];
  double sums[V] = {};
  const uint32_t packs = static_cast<uint32_t>(columns) / V, pack = blockIdx.x * blockDim.x + threadIdx.x;
  if (pack < packs) {
    const uint32_t first = blockIdx.y * blockDim.y + threadIdx.y, step = gridDim.y * blockDim.y, stride = step * packs;
    uint32_t at = first * packs + pack;
    const auto* from = reinterpret_cast<const Held<T, V>*>(x);
    for (int left = static_cast<int>((static_cast<uint32_t>(rows) + step - 1 - first) / step); left > 0; left -= kRowBatch) {
      Held<T, V> held[kRowBatch];
#pragma unroll
      for (int b = 0; b < kRowBatch; ++b, at += stride) held[b] = b < left ? from[at] : Held<T, V>{};
      BatchOf<T> batch[V] = {};
#pragma unroll
      for (int b = 0; b < kRowBatch; ++b) {
        WideOf<T> values[V];
        unpack<T, V>(held[b], values);
#pragma unroll
        for (int v = 0; v < V; ++v) batch[v] += values[v];
      }
#pragma unroll
      for (int v = 0; v < V; ++v) sums[v] += batch[v];
    }
  }
  const int width = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.y) * width + static_cast<int>(threadIdx.x);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    for (int mask = width; mask < 32; mask *= 2) sums[v] += shuffle_xor(sums[v], mask);
    if (thread % 32 < width) shared[thread / 32][v][thread % 32] = sums[v];
  }
  __syncthreads();
  // A thread adds up one column over the warps.
  const int64_t column = int64_t{blockIdx.x} * (width * V) + thread;
  if (thread >= width * V || column >= columns) return;
  double total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += shared[w][thread % V][thread / V];
  if (gridDim.y == 1)
    store(column, total);
  else
    parts[blockIdx.y * columns + column] = total;
}

constexpr int kJoinWidth = 32, kJoinHeight = 16;

// store(column, sum) of parts [count, columns]. A thread of threadIdx.x a column; the threadIdx.y share its parts.
template <typename Part, typename Store>
__global__ void __launch_bounds__(kJoinWidth* kJoinHeight) join_columns(const Part* parts, int64_t count, int64_t columns, Store store) {
  let_later_begin();
  wait_for_earlier();
  __shared__ double shared[kJoinWidth * kJoinHeight];
  const int64_t column = int64_t{blockIdx.x} * kJoinWidth + threadIdx.x;
  double sum = 0;
  for (int64_t first = threadIdx.y; column < columns && first < count; first += kJoinHeight * kRowBatch) {
    Part held[kRowBatch];
#pragma unroll
    for (int b = 0; b < kRowBatch; ++b) {
      const int64_t part = first + b * kJoinHeight;
      held[b] = part < count ? parts[part * columns + column] : Part(0);
    }
#pragma unroll
    for (int b = 0; b < kRowBatch; ++b) sum += static_cast<double>(held[b]);
  }
  sum = join_column(sum, shared, AddJoin{});
  if (column < columns && threadIdx.y == 0) store(column, sum);
}

template <typename Part, typename Store>
void launch_join_columns(const Part* parts, int64_t count, int64_t columns, const Store& store, cudaStream_t stream) {
  launch_dependent(join_columns<Part, Store>, static_cast<unsigned>((columns + kJoinWidth - 1) / kJoinWidth), dim3(kJoinWidth, kJoinHeight),
                   stream, parts, count, columns, store);
  check_launch("join_columns");
}

// Whether launch_column_sums takes these. With fewer rows the threads of a block would have none to share.
template <typename T>
bool can_sum_columns(const T* x, int64_t rows, int64_t columns) {
  return rows >= 32 && columns > 0 && columns % kPackOf16<T> == 0 && is_16_byte_aligned(x) && rows * columns / kPackOf16<T> >> 31 == 0;
}

inline PixelGrid column_grid(int64_t rows, int64_t columns, int V, int multiprocessors) {
  PixelGrid grid = pixel_grid(rows, columns, V, int64_t{kColumnBlocks} * multiprocessors);
  const int64_t batches = rows / (int64_t{grid.threads.y} * kRowBatch);  // of a thread, were there one part
  if (batches <= 2)
    grid.blocks.y = 1;  // these take no longer than another kernel
  else
    grid.blocks.y = static_cast<unsigned>(std::min<int64_t>(grid.blocks.y, batches));
  return grid;
}

template <typename T, typename Store>
void launch_column_sums(RunContext& r, const T* x, int64_t rows, int64_t columns, const Store& store) {
  constexpr int V = kPackOf16<T>;
  const PixelGrid grid = column_grid(rows, columns, V, gpu(r).multiprocessors());
  const int64_t count = grid.blocks.y;
  double* parts = count == 1 ? nullptr : static_cast<double*>(r.scratch(static_cast<size_t>(count * columns) * sizeof(double)));
  launch_dependent(sum_columns<T, V, Store>, grid.blocks, grid.threads, stream_of(r), x, rows, columns, parts, store);
  check_launch("sum_columns");
  if (count > 1) launch_join_columns<double>(parts, count, columns, store, stream_of(r));
}

}  // namespace fretsaw::cuda
