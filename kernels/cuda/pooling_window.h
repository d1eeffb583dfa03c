// The windows of a pooling, as kernels read them.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "graph/ir.h"

namespace fretsaw::cuda {

// Over three spatial dimensions, the first ones 1.
struct PoolWindow {
  int in[3] = {1, 1, 1}, out[3] = {1, 1, 1}, kernel[3] = {1, 1, 1}, stride[3] = {1, 1, 1}, dilation[3] = {1, 1, 1}, begin[3] = {},
      end[3] = {};
  int p = 2;
  bool includes_padding = false, column_major = false;

  __host__ __device__ int64_t in_cells() const { return int64_t{in[0]} * in[1] * in[2]; }
  __host__ __device__ int64_t out_cells() const { return int64_t{out[0]} * out[1] * out[2]; }
};

// Along one dimension: the taps that meet the input, and how many there are with padding.
struct Line {
  int start, first, last, with_padding;  // taps [first, last) are at start + tap * dilation
};
__host__ __device__ inline Line line_of(const PoolWindow& w, int d, int out) {
  const int64_t start = int64_t{out} * w.stride[d] - w.begin[d], step = w.dilation[d];
  const auto up_to = [&](int64_t end) {  // taps before `end`
    const int64_t taps = end <= start ? 0 : (end - start + step - 1) / step;
    return static_cast<int>(taps < w.kernel[d] ? taps : w.kernel[d]);
  };
  return {static_cast<int>(start), start < 0 ? static_cast<int>((-start + step - 1) / step) : 0, up_to(w.in[d]),
          up_to(int64_t{w.in[d]} + w.end[d])};
}

// The window over an input of these dimensions; fills in the output's. Throws Error for shapes that it does not fit.
PoolWindow read_pool(const Node& node, const Dims& x, Dims& y);

}  // namespace fretsaw::cuda
