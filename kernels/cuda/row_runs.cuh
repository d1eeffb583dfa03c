// Sums of terms that go to rows by data (what gradients of samples give to the elements around them): a stable sort brings the terms of a
// row together, and each row adds up its own, in an order that their number decides. No float atomics, so the same bits in every run.
#pragma once
#include <algorithm>

#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/element_packs.cuh"
#include "kernels/cuda/indexing_scatter.h"

namespace fretsaw::cuda {

// The items of row i are order[begins[i]], ..., order[ends[i] - 1], ascending.
template <typename N>
struct RowRuns {
  const N *order, *begins, *ends;
  N rows;
};

template <typename N>
__global__ void __launch_bounds__(kThreads) mark_runs(N items, N rows, const N* targets, N* begins, N* ends) {
  const N step = static_cast<N>(gridDim.x) * blockDim.x;
  for (N k = static_cast<N>(blockIdx.x) * blockDim.x + threadIdx.x; k < items; k += step) {
    const N row = targets[k];
    if (row == rows) continue;
    if (k == 0 || targets[k - 1] != row) begins[row] = k;
    if (k + 1 == items || targets[k + 1] != row) ends[row] = k + 1;
  }
}

// Bytes of scratch memory for find_runs.
template <typename N>
size_t bytes_to_find_runs(int64_t items, int64_t rows) {
  const TensorView none;
  return (bytes_to_order<N>({none, none, items, 1, rows}) + 15) / 16 * 16 + 2 * static_cast<size_t>(rows) * sizeof(N);
}

// `scratch` begins with the row that each item goes to (`rows`: none) and the numbers of the items, 0, 1, 2, ..., each N[items].
template <typename N>
RowRuns<N> find_runs(RunContext& r, int64_t items, int64_t rows, void* scratch) {
  const TensorView none;
  const Updates u{none, none, items, 1, rows};
  auto* begins = reinterpret_cast<N*>(static_cast<char*>(scratch) + (bytes_to_order<N>(u) + 15) / 16 * 16);
  N* ends = begins + rows;
  r.device().clear(begins, 2 * static_cast<size_t>(rows) * sizeof(N));
  const Ordered<N> sorted = bring_together<N>(r, u, scratch);
  mark_runs<N><<<blocks_for(items, kThreads), kThreads, 0, stream_of(r)>>>(static_cast<N>(items), static_cast<N>(rows), sorted.targets,
                                                                           begins, ends);
  check_launch("mark_runs");
  return {sorted.order, begins, ends, static_cast<N>(rows)};
}

// A thread for each row; a row of many terms is added up by its whole warp. `Terms` has
//   Wide, kTogether: what is added up in, and how many channels at a time
//   channels: every row has so many sums
//   add(row, item, channel, Wide (&sums)[kTogether]), store(row, channel, sums): for the channels from `channel` on
template <typename N, typename Terms>
__global__ void __launch_bounds__(kThreads) sum_runs(RowRuns<N> runs, Terms terms) {
  constexpr N kAlone = 64;
  constexpr int kTogether = Terms::kTogether;
  using Wide = typename Terms::Wide;
  const N row = static_cast<N>(blockIdx.x) * kThreads + threadIdx.x, lane = threadIdx.x % 32;
  const bool real = row < runs.rows;
  const N begin = real ? runs.begins[row] : 0, end = real ? runs.ends[row] : 0;
  const bool is_long = end - begin > kAlone;
  const uint32_t long_ones = __ballot_sync(0xffffffffu, is_long);
  for (int64_t channel = int64_t{blockIdx.y} * kTogether; channel < terms.channels; channel += int64_t{gridDim.y} * kTogether) {
    if (real && !is_long) {
      Wide sums[kTogether] = {};
      for (N k = begin; k < end; ++k) terms.add(row, runs.order[k], channel, sums);
      terms.store(row, channel, sums);
    }
    for (uint32_t left = long_ones; left != 0; left &= left - 1) {
      const N at = row - lane + static_cast<N>(__ffs(static_cast<int>(left)) - 1), last = runs.ends[at];
      Wide sums[kTogether] = {};
      for (N k = runs.begins[at] + lane; k < last; k += 32) terms.add(at, runs.order[k], channel, sums);
      __syncwarp();
#pragma unroll
      for (int u = 0; u < kTogether; ++u) sums[u] = join_lanes(sums[u], 32, AddJoin{});
      if (lane == 0) terms.store(at, channel, sums);
    }
  }
}

template <typename N, typename Terms>
void launch_sum_runs(RunContext& r, const RowRuns<N>& runs, const Terms& terms) {
  const int64_t blocks = (static_cast<int64_t>(runs.rows) + kThreads - 1) / kThreads,
                groups = (terms.channels + Terms::kTogether - 1) / Terms::kTogether;
  if (blocks == 0 || groups == 0) return;
  // Channels share what is read of a row's run unless too few threads would be left.
  const int64_t shares = std::clamp<int64_t>(8 * gpu(r).multiprocessors() / blocks, 1, std::min<int64_t>(groups, 65535));
  sum_runs<N, Terms><<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(shares)), kThreads, 0, stream_of(r)>>>(runs, terms);
  check_launch("sum_runs");
}

// A block for samples whose channels the threadIdx.y share, to be joined by join_column.
inline dim3 threads_sharing(int64_t channels) {
  unsigned shares = 1;
  while (shares < 8 && 2 * shares <= channels) shares *= 2;
  return dim3(kThreads / shares, shares);
}

// Of samples of images [images, channels, plane], `places` of them in each: item t points + (image places + place) gives tap t of the
// sample `weights` times its number in each channel of from [images, channels, places]. Row image plane + i is element i of the image.
template <typename Source, typename T, typename N>
struct SampleTerms {
  using Wide = WideOf<T>;
  static constexpr int kTogether = 4;
  const Source* from;
  T* to;  // [images, channels, plane]
  const Wide* weights;
  int64_t channels, places;
  Divider<N> points, plane;  // points: images places

  __device__ void add(N row, N item, int64_t channel, Wide (&sums)[kTogether]) const {
    const N point = item - points.quotient(item) * points.divisor;
    const int64_t image = plane.quotient(row);
    const Source* at = from + (image * (channels - 1) + channel) * places + point;  // `point` counts the places of all images
    const Wide weight = weights[item];
#pragma unroll
    for (int u = 0; u < kTogether; ++u)
      if (channel + u < channels) sums[u] += weight * widen(at[u * places]);
  }
  __device__ void store(N row, int64_t channel, const Wide (&sums)[kTogether]) const {
    const int64_t image = plane.quotient(row), size = plane.divisor;
    T* at = to + (image * (channels - 1) + channel) * size + row;
#pragma unroll
    for (int u = 0; u < kTogether; ++u)
      if (channel + u < channels) at[u * size] = narrow<T>(sums[u]);
  }
};

}  // namespace fretsaw::cuda
