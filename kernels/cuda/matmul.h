// What the files of the matrix product family share.
#pragma once
#include "kernels/cuda/matmul_product.h"

namespace fretsaw::cuda {

void register_einsum(KernelRegistry& registry);

}  // namespace fretsaw::cuda
