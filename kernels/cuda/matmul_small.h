// Products of few rows with a large matrix: each element of the matrix is read once, at the speed of the memory.
#pragma once
#include "kernels/cuda/matmul_product.h"

namespace fretsaw::cuda {

inline constexpr int64_t kSmallRows = 8;

// Whether `run_small_product` takes it: one product (no batch) of up to kSmallRows rows with a constant B in float32, float16 or
// bfloat16, with 16-byte aligned lines. B is read while earlier kernels may still run.
bool takes_small_product(const ProductSpec& spec);
void run_small_product(const ProductSpec& spec, const ProductOperands& operands, int multiprocessors, cudaStream_t stream);

}  // namespace fretsaw::cuda
