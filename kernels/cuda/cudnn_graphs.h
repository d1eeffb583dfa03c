// Convolutions as cuDNN graphs. The only user of cudnn-frontend is cudnn_graphs.cpp: its headers compile slowly.
#pragma once
#include "kernels/cuda/convolution.h"

namespace fretsaw::cuda {

// cuDNN's engines for the convolution, the one that it thinks fastest first: at most `limit`. With `fused` bias, residual and activation
// are part of it, otherwise they are left out. Float32 without tf32 is computed in float32 throughout, and all give the same bits every
// time.
std::vector<std::shared_ptr<ConvolutionPlan>> cudnn_plans(GpuDevice& device, const Convolution& c, bool fused, size_t limit);
// From what `saved` of such a plan gave; null when this cuDNN can't make it again.
std::shared_ptr<ConvolutionPlan> restored_cudnn_plan(GpuDevice& device, const std::string& saved);
// Changes with whatever changes the engines: the version of cuDNN.
std::string cudnn_identity();

}  // namespace fretsaw::cuda
