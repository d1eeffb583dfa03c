// Where DeformConv reads its image: for the operator and its gradients.
#pragma once
#include <optional>

#include "kernels/cpu/convolution.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/element_packs.cuh"

namespace fretsaw::cuda {

// x [N, C, H, W], w [O, C/groups, kH, kW], offset [N, offset_groups * taps * 2, OH, OW], mask [N, offset_groups * taps, OH, OW],
// y [N, O, OH, OW].
struct Deformation {
  int64_t N, C, H, W, O, OH, OW, group_in, group_out, offset_groups, sharing;  // sharing: the channels of an offset group
  int kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w, top, left;

  __host__ __device__ int64_t cells() const { return OH * OW; }
  __host__ __device__ int taps() const { return kernel_h * kernel_w; }
};

// A point of an image.
template <typename F>
struct Spot {
  F h, w;
};
// Where the first tap would read for a cell, and where a tap does. `moved`: the first of the tap's offsets, [2, cells].
template <typename F>
__device__ Spot<F> first_spot(const Deformation& d, int64_t cell) {
  return {F(cell / d.OW * d.stride_h - d.top), F(cell % d.OW * d.stride_w - d.left)};
}
template <typename T>
__device__ Spot<WideOf<T>> spot_of(const Deformation& d, Spot<WideOf<T>> first, int tap, int64_t cell, const T* moved) {
  using F = WideOf<T>;
  return {first.h + F(tap / d.kernel_w * d.dilation_h) + widen(moved[cell]),
          first.w + F(tap % d.kernel_w * d.dilation_w) + widen(moved[d.cells() + cell])};
}

// The four elements around a point of an image [H, W], row by row, and what it takes of each; -1 where there is none.
template <typename F>
struct Corners {
  int64_t at[4] = {-1, -1, -1, -1};
  F weight[4] = {}, down[4] = {}, right[4] = {};  // and what that changes by as the point moves

  __device__ Corners(int64_t H, int64_t W, Spot<F> spot) {
    if (!(spot.h > F(-1) && spot.w > F(-1) && spot.h < F(H) && spot.w < F(W))) return;
    const F h0 = floor(spot.h), w0 = floor(spot.w), dh = spot.h - h0, dw = spot.w - w0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int64_t i = static_cast<int64_t>(h0) + k / 2, j = static_cast<int64_t>(w0) + k % 2;
      if (i < 0 || j < 0 || i >= H || j >= W) continue;
      const F rows = k / 2 ? dh : F(1) - dh, columns = k % 2 ? dw : F(1) - dw;
      at[k] = i * W + j, weight[k] = rows * columns;
      down[k] = k / 2 ? columns : -columns, right[k] = k % 2 ? rows : -rows;
    }
  }
};

// Throws Error where the shapes do not go together, as the CPU's kernel does. `bias`: its number of elements.
inline Deformation read_deformation(const Node& node, const Dims& x, const Dims& w, const Dims& offset, std::optional<int64_t> bias,
                                    const std::optional<Dims>& mask, Dims& y) {
  if (x.size() != 4) throw Error("DeformConv of shape " + to_string(x), "give it [N,C,H,W]");
  Window window;
  y = convolution_output(node, x, w, false, window);
  const int64_t groups = node.get_int("group", 1), offset_groups = node.get_int("offset_group", 1), taps = window.taps();
  if (offset_groups < 1 || x[1] % offset_groups != 0 || offset != Dims{y[0], offset_groups * taps * 2, y[2], y[3]} ||
      (bias && *bias != y[1]) || (mask && *mask != Dims{y[0], offset_groups * taps, y[2], y[3]})) {
    throw Error("the offsets, bias or mask do not fit the convolution", "check their shapes and offset_group");
  }
  const auto small = [](int64_t n) { return static_cast<int>(n); };
  return {x[0],
          x[1],
          x[2],
          x[3],
          y[1],
          y[2],
          y[3],
          x[1] / groups,
          y[1] / groups,
          offset_groups,
          x[1] / offset_groups,
          small(window.kernel[0]),
          small(window.kernel[1]),
          small(window.strides[0]),
          small(window.strides[1]),
          small(window.dilations[0]),
          small(window.dilations[1]),
          small(window.pads_begin[0]),
          small(window.pads_begin[1])};
}

}  // namespace fretsaw::cuda
