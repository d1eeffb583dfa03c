// BatchNormalization: what its files share.
#pragma once
#include "kernels/cuda/normalization.h"

namespace fretsaw::cuda {

// By the statistics of the batch (training_mode=1), with the new running ones as outputs 1 and 2 (normalization_training.cu).
CompiledKernel make_training_batch_norm(const CompileContext& c);

// y = x * factors[0, c] + factors[1, c]. x and y [N, C, D...] of one float type and layout; factors [2, C] of the type that x computes in.
void scale_by_factors(const TensorView& x, TensorView& y, const void* factors, cudaStream_t stream);

}  // namespace fretsaw::cuda
