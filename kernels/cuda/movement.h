// Registration of the parts of the movement and image families, and what they share.
#pragma once
#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

void register_views(KernelRegistry& registry);         // Reshape, Flatten, Squeeze, Unsqueeze, Identity
void register_padding(KernelRegistry& registry);       // Pad, CenterCropPad, Trilu, ReverseSequence
void register_constants(KernelRegistry& registry);     // ConstantOfShape, EyeLike
void register_resize(KernelRegistry& registry);        // Resize
void register_sampling(KernelRegistry& registry);      // GridSample, AffineGrid
void register_regions(KernelRegistry& registry);       // RoiAlign, MaxRoiPool, Col2Im
void register_quantization(KernelRegistry& registry);  // QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear

// The layout that the producer of input `i` left it in.
inline Layout offered_layout(const CompileContext& c, size_t i) {
  return i < c.offered.size() && c.offered[i] == Layout::nhwc ? Layout::nhwc : Layout::plain;
}

}  // namespace fretsaw::cuda
