// Copying rows to or from the places that a functor of indexing.h names.
#pragma once
#include <algorithm>

#include "kernels/cuda/indexing.h"

namespace fretsaw::cuda {

constexpr int kInFlight = 4;  // loads that a thread starts before it waits for the first

// y [items, row] = the rows of x at places(item), zeros where there is no place. Counted in V, of which a row has row.divisor.
template <typename V, typename N, typename Places>
__global__ void __launch_bounds__(kThreads) gather_rows(V* y, const V* x, N count, Divider<N> row, Places places) {
  const N step = static_cast<N>(gridDim.x) * blockDim.x, width = static_cast<N>(row.divisor);
  for (N first = static_cast<N>(blockIdx.x) * blockDim.x + threadIdx.x; first < count; first += kInFlight * step) {
    V values[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const N at = first + u * step;
      values[u] = V{};
      if (at >= count) continue;
      const N item = row.quotient(at);
      const int64_t place = places(item);
      if (place >= 0) values[u] = x[place * width + (at - item * width)];
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (const N at = first + u * step; at < count) y[at] = values[u];
    }
  }
}

// The same for y [items, row]; make.operator()<N>() gives the places.
template <typename Make>
void launch_gather(RunContext& r, const TensorView& y, const TensorView& x, int64_t items, const Make& make) {
  const size_t row_bytes = items > 0 ? y.bytes() / static_cast<size_t>(items) : 0;
  if (row_bytes == 0) return;
  with_widest(row_bytes, {x.data, y.data}, [&]<typename V>() {
    const auto row = static_cast<int64_t>(row_bytes / sizeof(V)), count = items * row;
    with_count_type(count, [&]<typename N>() {
      gather_rows<V, N><<<blocks_for(count, kThreads, kInFlight), kThreads, 0, stream_of(r)>>>(
          y.as<V>(), x.as<const V>(), static_cast<N>(count), Divider<N>(row), make.template operator()<N>());
    });
    check_launch("gather_rows");
  });
}

// y's rows at places(item) = the rows of x [items, row], for places that differ. Rows without a place are left out.
template <typename V, typename N, typename Places>
__global__ void __launch_bounds__(kThreads) put_rows(V* y, const V* x, N count, Divider<N> row, Places places) {
  const N step = static_cast<N>(gridDim.x) * blockDim.x, width = static_cast<N>(row.divisor);
  for (N at = static_cast<N>(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += step) {
    const N item = row.quotient(at);
    const int64_t place = places(item);
    if (place >= 0) y[place * width + (at - item * width)] = x[at];
  }
}

// The same for x [items, row].
template <typename Make>
void launch_put(RunContext& r, const TensorView& y, const TensorView& x, int64_t items, const Make& make) {
  const size_t row_bytes = items > 0 ? x.bytes() / static_cast<size_t>(items) : 0;
  if (row_bytes == 0) return;
  with_widest(row_bytes, {x.data, y.data}, [&]<typename V>() {
    const auto row = static_cast<int64_t>(row_bytes / sizeof(V)), count = items * row;
    with_count_type(count, [&]<typename N>() {
      put_rows<V, N><<<blocks_for(count, kThreads), kThreads, 0, stream_of(r)>>>(y.as<V>(), x.as<const V>(), static_cast<N>(count),
                                                                                 Divider<N>(row), make.template operator()<N>());
    });
    check_launch("put_rows");
  });
}

}  // namespace fretsaw::cuda
