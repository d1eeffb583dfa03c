// Products by plain loops over tiles: integers, empty sums, and whatever the libraries refuse.
#pragma once
#include "kernels/cuda/matmul_product.h"

namespace fretsaw::cuda {

// Any strides and all types that MatMul knows; `spec.batches` has at most one dimension.
void run_simple_product(const ProductSpec& spec, const ProductOperands& operands, cudaStream_t stream);
// D = activation(D + bias), D [rows, N].
void run_epilogue(const ProductSpec& spec, const void* bias, void* d, int64_t rows, cudaStream_t stream);
// to [M, N] = from at i * row + j * column.
void expand_matrix(DType type, const void* from, int64_t row, int64_t column, void* to, int64_t M, int64_t N, cudaStream_t stream);
// `rows` dense rows of a product's D from rows that are `row` elements of its type apart, whole packs of 16 bytes.
void copy_staged(const ProductSpec& spec, int64_t rows, const void* from, int64_t row, void* d, cudaStream_t stream);
// Numbers between -1 and 1 without order, to time on.
void fill_noise(DType type, void* to, int64_t count, cudaStream_t stream);

}  // namespace fretsaw::cuda
