// Where GridSample reads an image of one to three axes: for the operator and its gradients.
#pragma once
#include <algorithm>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/sampling_taps.h"
#include "kernels/cuda/element_packs.cuh"

namespace fretsaw::cuda {

constexpr int kMaxSpatial = 3;

struct Sampling {
  SampleRule rule;
  int64_t extents[kMaxSpatial] = {1, 1, 1};  // of x [N, C, D, H, W]; leading ones where it has fewer axes
  int rank = 0;                              // spatial axes
  int64_t channels = 0, places = 0;          // places: points of one image
};

// The elements of an image around a point; of an axis that the image lacks, one.
template <typename W, int kTaps, bool kDeep>
struct Neighbours {
  SampleTaps axes[kMaxSpatial];

  template <typename T>
  __device__ Neighbours(const Sampling& s, const T* point) {
    const int lacking = kMaxSpatial - s.rank;
#pragma unroll
    for (int d = 0; d < kMaxSpatial; ++d) {
      axes[d] = {{0, -1, -1, -1}, {1, 0, 0, 0}};
      // Points name the last axis first.
      if (d >= lacking) axes[d] = axis_taps_at(s.rule, static_cast<double>(widen(point[kMaxSpatial - 1 - d])), s.extents[d]);
    }
  }

  __device__ W weight(int a, int b, int c) const {
    return static_cast<W>(axes[0].weight[a]) * static_cast<W>(axes[1].weight[b]) * static_cast<W>(axes[2].weight[c]);
  }
  template <typename T>
  __device__ W sum(const Sampling& s, const T* plane) const {
    W sum = 0;
#pragma unroll
    for (int a = 0; a < (kDeep ? kTaps : 1); ++a) {
#pragma unroll
      for (int b = 0; b < kTaps; ++b) {
#pragma unroll
        for (int c = 0; c < kTaps; ++c) {
          const int64_t i = axes[0].index[a], j = axes[1].index[b], k = axes[2].index[c];
          if (i < 0 || j < 0 || k < 0) continue;
          sum += weight(a, b, c) * widen(plane[(i * s.extents[1] + j) * s.extents[2] + k]);
        }
      }
    }
    return sum;
  }
};

// Of x [N, C, D1, ..., Dr] and grid [N, G1, ..., Gr, r]; throws Error where they do not go together.
inline Sampling read_sampling(const SampleRule& rule, const TensorView& x, const TensorView& grid) {
  require(x.rank() >= 3 && x.rank() <= 2 + kMaxSpatial && grid.rank() == x.rank() && grid.dims[0] == x.dims[0] &&
              grid.dims.back() == static_cast<int64_t>(x.rank()) - 2,
          "the grid must be [N, ..., r] for an image [N, C, ...] of r spatial axes, at most three");
  Sampling s{rule};
  s.rank = static_cast<int>(x.rank()) - 2;
  std::copy(x.dims.begin() + 2, x.dims.end(), s.extents + kMaxSpatial - s.rank);
  s.channels = x.dims[1];
  s.places = product(grid.dims, 1, grid.rank() - 1);
  return s;
}

}  // namespace fretsaw::cuda
