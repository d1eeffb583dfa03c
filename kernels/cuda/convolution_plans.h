// The ways to compute a convolution.
#pragma once
#include "kernels/cuda/convolution.h"

namespace fretsaw::cuda {

// What may be fastest, most promising first; never empty.
std::vector<std::shared_ptr<ConvolutionPlan>> candidate_plans(GpuDevice& device, const Convolution& c);
// What `saved` of each kind of plan begins with; the rest is an inner plan's.
inline constexpr char kCudnn = 'c', kWithEpilogue = 'e', kWithPadding = 'p', kDepthwise = 'd', kFewChannels = 'f', kPatches = 'q',
                      kDirect = 'x', kWithCropping = 'm';
// Windows side by side, as rows of a product (convolution_patches.cpp). Whether this one is among those it does, and its plan.
bool has_patches(const Convolution& c);
std::shared_ptr<ConvolutionPlan> patches_plan(GpuDevice& device, const Convolution& c);
// The one that needs no library and always works.
std::shared_ptr<ConvolutionPlan> direct_plan(const Convolution& c);
// From what `saved` of a plan gave for the same convolution; null where that can't be done.
std::shared_ptr<ConvolutionPlan> restore_plan(GpuDevice& device, const Convolution& c, const std::string& saved);

}  // namespace fretsaw::cuda
