// Rows of neighbouring elements that a group of threads holds in registers: memory is read once and written once.
//
// Thread t of blockDim.x holds packs t, t + blockDim.x, ... of the row, kPacks of them, V elements each. A block has blockDim.y rows.
#pragma once
#include <algorithm>

#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/element_packs.cuh"
#include "kernels/cuda/fold_plan.h"

namespace fretsaw::cuda {

constexpr int kMostRowThreads = 1024;
constexpr int kMostRowElements = 32;  // of a thread: more would not leave registers for a block of kMostRowThreads

template <typename T, int V, int kPacks>
struct RowRegisters {
  using Wide = WideOf<T>;
  Lanes<T, V> packs[kPacks];
  int n;  // of this row; 0 where the block has more groups than there are rows

  __device__ __forceinline__ static int first_of(int k) { return static_cast<int>((k * blockDim.x + threadIdx.x) * V); }
  // n is a multiple of V.
  __device__ __forceinline__ void load(const T* row, int row_n) {
    n = row_n;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (first_of(k) < n) packs[k] = *reinterpret_cast<const Lanes<T, V>*>(row + first_of(k));
    }
  }
  // f(x) for each element of the thread.
  template <typename F>
  __device__ __forceinline__ void each(const F& f) const {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (first_of(k) >= n) break;
#pragma unroll
      for (int j = 0; j < V; ++j) f(widen(packs[k].at[j]));
    }
  }
  // row[i + j] = f(x, j) for each element of the thread; `prepare(i)` comes before each pack, which begins at element i.
  template <typename Prepare, typename F>
  __device__ __forceinline__ void write(T* row, const Prepare& prepare, const F& f) const {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int i = first_of(k);
      if (i >= n) break;
      prepare(i);
      Lanes<T, V> out;
#pragma unroll
      for (int j = 0; j < V; ++j) out.at[j] = narrow<T>(f(widen(packs[k].at[j]), j));
      *reinterpret_cast<Lanes<T, V>*>(row + i) = out;
    }
  }
};

// How many threads a row of n takes, and how many packs each of them.
struct RowShape {
  int vector = 1, packs = 1, threads = 1, rows_a_block = 1;
  bool fits = false;
};
// `vector`: elements that are read as one; n is a multiple.
inline RowShape row_shape(int64_t n, int vector) {
  RowShape shape;
  shape.vector = vector;
  const int most_packs = vector == 1 ? 8 : kMostRowElements / vector;
  const int64_t packs = (n + vector - 1) / vector;
  if (n == 0 || packs > int64_t{most_packs} * kMostRowThreads) return shape;
  shape.fits = true;
  // A warp where 4 packs a thread do; longer rows take more threads before they take more packs.
  const int64_t wanted = packs <= 32 ? packs : std::max<int64_t>((packs + 3) / 4, 32);
  shape.threads = static_cast<int>(std::min<int64_t>(power_of_two_from(wanted), kMostRowThreads));
  shape.packs = static_cast<int>(power_of_two_from((packs + shape.threads - 1) / shape.threads));
  shape.rows_a_block = std::max(1, 128 / shape.threads);
  return shape;
}

// f.operator()<V, kPacks>() for the numbers of a shape.
template <typename T, typename F>
void with_row_shape(const RowShape& shape, const F& f) {
  constexpr int kVector = kPackOf16<T>;
  const auto with_packs = [&]<int V>() {
    switch (shape.packs) {
      case 1:
        return f.template operator()<V, 1>();
      case 2:
        return f.template operator() < V, V == 1 ? 4 : 2 > ();  // single elements are rare: fewer kernels
      case 4:
        return f.template operator()<V, 4>();
      default:
        if constexpr (V * 8 <= kMostRowElements) return f.template operator()<V, 8>();
    }
  };
  if (shape.vector == 1)
    with_packs.template operator()<1>();
  else
    with_packs.template operator()<kVector>();
}

}  // namespace fretsaw::cuda
