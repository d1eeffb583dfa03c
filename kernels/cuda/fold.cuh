// The kernels that fold elements into results, for any fold, reader and shape.
//
// A fold is a struct with
//   State                                    what a thread knows of the elements that it has seen; trivially copyable
//   State start() const                      of no elements
//   void take(State&, Value x, int64_t e, Value origin) const   adds element number e of the result
//   void operator()(State& into, const State& other) const      joins what two threads know
//   void store(int64_t result, const State&, int64_t n, Value origin) const
// `origin` is the result's first element where kFromOrigin is true (for sums of differences), otherwise 0.
#pragma once
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/fold_plan.h"
#include "kernels/cuda/fold_readers.cuh"

namespace fretsaw::cuda {

constexpr int kFoldThreads = 256;

template <typename Fold, typename Reader>
__device__ typename Reader::Value origin_of(const FoldPlan& plan, const Reader& reader, int64_t base) {
  if constexpr (Fold::kFromOrigin) {
    if (plan.each > 0) return reader.load(base);
  }
  return {};
}

// Elements [begin, end) of a result whose elements are neighbours, in packs of V.
template <int V, typename Fold, typename Reader>
__device__ void fold_packs(const Fold& fold, const Reader& reader, typename Fold::State& state, int64_t base, int64_t begin, int64_t end,
                           typename Reader::Value origin) {
  const int64_t step = int64_t{blockDim.x} * V, packs_end = begin + (end - begin) / V * V;
#pragma unroll Reader::kUnroll
  for (int64_t e = begin + int64_t{threadIdx.x} * V; e < packs_end; e += step) {
    typename Reader::Value values[V];
    reader.load_pack(base + e, values);
#pragma unroll
    for (int k = 0; k < V; ++k) fold.take(state, values[k], e + k, origin);
  }
  for (int64_t e = packs_end + threadIdx.x; e < end; e += blockDim.x) fold.take(state, reader.load(base + e), e, origin);
}

// A group of blockDim.x threads folds a result, or the part blockIdx.y of it.
template <typename Fold, typename Reader>
__global__ void __launch_bounds__(kFoldThreads)
    fold_rows(const __grid_constant__ FoldPlan plan, Reader reader, Fold fold, bool packed, typename Fold::State* parts) {
  __shared__ typename Fold::State shared[kFoldThreads / 32];
  for (int64_t first = int64_t{blockIdx.x} * blockDim.y; first < plan.results; first += int64_t{gridDim.x} * blockDim.y) {
    const int64_t result = first + threadIdx.y;
    const bool real = result < plan.results;
    typename Fold::State state = fold.start();
    typename Reader::Value origin{};
    if (real) {
      const int64_t base = plan.kept.offset(result), begin = int64_t{blockIdx.y} * plan.part, end = min(plan.each, begin + plan.part);
      origin = origin_of<Fold>(plan, reader, base);
      if (packed) {
        if constexpr (Reader::kRowPack > 1) fold_packs<Reader::kRowPack>(fold, reader, state, base, begin, end, origin);
      } else {
        for (int64_t e = begin + threadIdx.x; e < end; e += blockDim.x) fold.take(state, reader.load(base + plan.element(e)), e, origin);
      }
    }
    state = join_group(state, fold.start(), shared, fold);
    if (!real || threadIdx.x != 0) continue;
    if (plan.parts > 1)
      parts[int64_t{blockIdx.y} * plan.results + result] = state;
    else
      fold.store(result, state, plan.each, origin);
  }
}

// A thread folds V neighbouring results; the threads of one threadIdx.x share their elements.
template <int V, typename Fold, typename Reader>
__global__ void __launch_bounds__(kFoldThreads)
    fold_columns(const __grid_constant__ FoldPlan plan, Reader reader, Fold fold, typename Fold::State* parts) {
  __shared__ typename Fold::State shared[kFoldThreads];
  const int64_t result = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * V;
  const bool real = result < plan.results;
  typename Fold::State states[V];
  typename Reader::Value origins[V] = {};
#pragma unroll
  for (int k = 0; k < V; ++k) states[k] = fold.start();
  if (real) {
    const int64_t base = plan.base(result), begin = int64_t{blockIdx.y} * plan.part, end = min(plan.each, begin + plan.part);
#pragma unroll
    for (int k = 0; k < V; ++k) origins[k] = origin_of<Fold>(plan, reader, base + k);
#pragma unroll Reader::kUnroll
    for (int64_t e = begin + threadIdx.y; e < end; e += blockDim.y) {
      typename Reader::Value values[V];
      reader.load_pack(base + plan.reduced.offset(e), values);
#pragma unroll
      for (int k = 0; k < V; ++k) fold.take(states[k], values[k], e, origins[k]);
    }
  }
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const typename Fold::State state = join_column(states[k], shared, fold);
    if (!real || threadIdx.y != 0) continue;
    if (plan.parts > 1)
      parts[int64_t{blockIdx.y} * plan.results + result + k] = state;
    else
      fold.store(result + k, state, plan.each, origins[k]);
  }
}

// A warp joins the parts of a result. parts [parts, results].
template <typename Fold, typename Reader>
__global__ void __launch_bounds__(kFoldThreads)
    fold_parts(const __grid_constant__ FoldPlan plan, Reader reader, Fold fold, const typename Fold::State* parts) {
  const int64_t result = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  if (result >= plan.results) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  typename Fold::State state = fold.start();
  for (int64_t p = lane; p < plan.parts; p += 32) fold(state, parts[p * plan.results + result]);
  state = join_lanes(state, 32, fold);
  if (lane == 0) fold.store(result, state, plan.each, origin_of<Fold>(plan, reader, plan.base(result)));
}

template <typename Fold, typename Reader>
FoldLaunch plan_fold_of(const ReductionPlan& shape, const Reader& reader, int multiprocessors) {
  return plan_fold(
      shape, {Reader::kRowPack, Reader::kColumnPack, is_16_byte_aligned(reader.data()), sizeof(typename Fold::State), multiprocessors});
}

// `scratch` has launch.scratch_bytes.
template <typename Fold, typename Reader>
void launch_fold(const FoldLaunch& launch, const Reader& reader, const Fold& fold, void* scratch, cudaStream_t stream) {
  const FoldPlan& plan = launch.plan;
  if (plan.results == 0) return;
  auto* parts = static_cast<typename Fold::State*>(scratch);
  const dim3 grid(static_cast<unsigned>(launch.blocks), static_cast<unsigned>(plan.parts));
  const dim3 block(static_cast<unsigned>(launch.threads_x), static_cast<unsigned>(launch.threads_y));
  if (!launch.columns)
    fold_rows<<<grid, block, 0, stream>>>(plan, reader, fold, launch.pack > 1, parts);
  else if (launch.pack > 1)
    fold_columns<Reader::kColumnPack><<<grid, block, 0, stream>>>(plan, reader, fold, parts);
  else
    fold_columns<1><<<grid, block, 0, stream>>>(plan, reader, fold, parts);
  check_launch("fold");
  if (plan.parts == 1) return;
  fold_parts<<<blocks_for(plan.results * 32, kFoldThreads), kFoldThreads, 0, stream>>>(plan, reader, fold,
                                                                                       static_cast<const typename Fold::State*>(parts));
  check_launch("fold_parts");
}

template <typename Fold, typename Reader>
void run_fold(RunContext& r, const ReductionPlan& shape, const Reader& reader, const Fold& fold) {
  if (shape.results == 0) return;
  const FoldLaunch launch = plan_fold_of<Fold>(shape, reader, gpu(r).multiprocessors());
  launch_fold(launch, reader, fold, launch.scratch_bytes ? r.scratch(launch.scratch_bytes) : nullptr, stream_of(r));
}

}  // namespace fretsaw::cuda
