// The parts of Resize on the device: what a resized tensor looks like, and the kernels that read by tables of taps.
#pragma once
#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

constexpr int kMaxResized = 4;  // axes that change

// An axis that changes: output j is the sum over t of weight[t * out + j] * input[index[t * out + j]].
struct ResizedAxis {
  int64_t out = 1, taps = 1, stride = 0;  // stride of the input, in elements
  const int32_t* index = nullptr;         // null: the axis is none, of one element
  const void* weight = nullptr;           // of the type that is computed in
  const uint8_t* extrapolated = nullptr;  // null, or 1 where the output is the extrapolation value
};

// The dimensions between them, merged: of the output and of the input.
struct KeptAxis {
  int64_t extent = 1, stride = 0;
};

// Dimensions in the order of memory: kept[0], resized[0], kept[1], resized[1], ..., kept[kLevels].
template <int kLevels>
struct ResizePlan {
  ResizedAxis resized[kLevels];
  KeptAxis kept[kLevels + 1];

  int64_t count() const {
    int64_t count = 1;
    for (const ResizedAxis& axis : resized) count *= axis.out;
    for (const KeptAxis& axis : kept) count *= axis.extent;
    return count;
  }
};

// y = x through the plan: the nearest elements, of any type, or sums of neighbours.
void resize_nearest(ResizePlan<kMaxResized> plan, size_t element_bytes, const void* x, void* y, float outside, DType dtype,
                    cudaStream_t stream);
void resize_smooth(const ResizePlan<kMaxResized>& plan, const void* x, void* y, float outside, DType dtype, cudaStream_t stream);
bool computes_in_double(DType dtype);

}  // namespace fretsaw::cuda
