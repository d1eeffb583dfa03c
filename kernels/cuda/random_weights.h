// Made-up weights in device memory.
#pragma once
#include <cuda_runtime.h>

#include "kernels/random_weights.h"

namespace fretsaw::cuda {

void make_random(void* to, const RandomWeights& weights, cudaStream_t stream);

}  // namespace fretsaw::cuda
