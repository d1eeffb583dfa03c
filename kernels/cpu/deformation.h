// Where DeformConv reads its image, for the operator and its gradients, on the CPU and on devices.
#pragma once
#include <cmath>
#include <cstdint>
#include <optional>

#include "kernels/cpu/convolution.h"
#include "kernels/host_device.h"

namespace fretsaw {

// x [N, C, H, W], w [O, C/groups, kH, kW], offset [N, offset_groups * taps * 2, OH, OW], mask [N, offset_groups * taps, OH, OW],
// y [N, O, OH, OW].
struct Deformation {
  int64_t N, C, H, W, O, OH, OW;
  int64_t group_in, group_out;     // channels of a group
  int64_t offset_groups, sharing;  // sharing: the channels of an offset group
  int kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w, top, left;

  FRETSAW_HOST_DEVICE int64_t cells() const { return OH * OW; }
  FRETSAW_HOST_DEVICE int taps() const { return kernel_h * kernel_w; }
};

// Throws Error where the shapes do not go together. `bias`: its number of elements. y: the result's.
Deformation read_deformation(const Node& node, const Dims& x, const Dims& w, const Dims& offset, std::optional<int64_t> bias,
                             const std::optional<Dims>& mask, Dims& y);

// A point of an image.
template <typename F>
struct Spot {
  F h, w;
};
// Where the first tap would read for a cell, and where a tap does that is moved by `down` and `right`.
template <typename F>
FRETSAW_HOST_DEVICE Spot<F> first_spot(const Deformation& d, int64_t cell) {
  return {F(cell / d.OW * d.stride_h - d.top), F(cell % d.OW * d.stride_w - d.left)};
}
template <typename F>
FRETSAW_HOST_DEVICE Spot<F> spot_of(const Deformation& d, Spot<F> first, int tap, F down, F right) {
  return {first.h + F(tap / d.kernel_w * d.dilation_h) + down, first.w + F(tap % d.kernel_w * d.dilation_w) + right};
}

// The four elements around a point of an image [H, W], row by row, and what it takes of each; -1 where there is none.
template <typename F>
struct Corners {
  int64_t at[4] = {-1, -1, -1, -1};
  F weight[4] = {}, down[4] = {}, right[4] = {};  // and what that changes by as the point moves

  FRETSAW_HOST_DEVICE Corners(int64_t H, int64_t W, Spot<F> spot) {
    if (!(spot.h > F(-1) && spot.w > F(-1) && spot.h < F(H) && spot.w < F(W))) return;
    const F h0 = std::floor(spot.h), w0 = std::floor(spot.w), dh = spot.h - h0, dw = spot.w - w0;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int k = 0; k < 4; ++k) {
      const int64_t i = static_cast<int64_t>(h0) + k / 2, j = static_cast<int64_t>(w0) + k % 2;
      if (i < 0 || j < 0 || i >= H || j >= W) continue;
      const F rows = k / 2 ? dh : F(1) - dh, columns = k % 2 ? dw : F(1) - dw;
      at[k] = i * W + j, weight[k] = rows * columns;
      down[k] = k / 2 ? columns : -columns, right[k] = k % 2 ? rows : -rows;
    }
  }
};

}  // namespace fretsaw
