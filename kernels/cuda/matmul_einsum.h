// Einsum's own kernels: copies that permute, take diagonals and sum, and a product without a matrix in it.
#pragma once
#include "kernels/cuda/matmul_product.h"

namespace fretsaw::cuda {

inline constexpr int kEinsumAxes = 12;

// Loops over the elements of a dense result, each a sum over more axes. Strides in elements, of two factors.
struct EinsumLoops {
  int kept = 0, summed = 0;
  int64_t kept_size[kEinsumAxes], summed_size[kEinsumAxes];
  int64_t kept_a[kEinsumAxes], kept_b[kEinsumAxes], summed_a[kEinsumAxes], summed_b[kEinsumAxes];
};

// y = sum of a * b, or of a alone where b is null. All number types that MatMul knows.
void run_einsum_loops(DType type, const EinsumLoops& loops, const void* a, const void* b, void* y, cudaStream_t stream);

}  // namespace fretsaw::cuda
