// Reordering images between layouts.
#pragma once
#include <cuda_runtime_api.h>

#include "kernels/tensor_view.h"

namespace fretsaw::cuda {

// Between plain and nhwc; the views say which.
void reorder(const TensorView& from, const TensorView& to, cudaStream_t stream);

}  // namespace fretsaw::cuda
