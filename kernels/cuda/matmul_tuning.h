// How a product is computed: timed once on the device, and remembered on disk and in the process.
#pragma once
#include "kernels/cuda/matmul_lt.h"

namespace fretsaw::cuda {

struct ProductChoice {
  enum class Kind : uint8_t { simple, small, lt };
  Kind kind = Kind::simple;
  LtAlgorithm algorithm;           // of lt
  bool separate_epilogue = false;  // cuBLASLt knows no algorithm with the bias and activation: they follow in a kernel of their own
  // Of lt, where it is not 0: D goes to scratch memory in rows of whole packs, so many of them at a time, and is copied from there.
  int64_t staged_rows = 0;
  bool padded = false;  // of lt: its operands are those of pad_operands
};

// Of a staged D: elements from row to row, in spec.type.
int64_t staged_row(const ProductSpec& spec);
size_t staged_bytes(const ProductSpec& spec, int64_t rows);
// A product with `lt`, whose operands are those of `spec`, that stages D at `staged`, `rows` rows at a time, which divide M.
cublasStatus_t run_staged(const ProductSpec& spec, int64_t rows, LtProduct& lt, const LtAlgorithm& algorithm,
                          const ProductOperands& operands, void* staged, void* workspace, cudaStream_t stream);
// `spec` has at most one batch dimension, and elements. Where the choice is lt, `lt` is what runs it.
ProductChoice choose(GpuDevice& device, const ProductSpec& spec, size_t alignment, std::unique_ptr<LtProduct>& lt);

}  // namespace fretsaw::cuda
