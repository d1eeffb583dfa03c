// Products whose operands have lines that are no whole packs of 16 bytes: cuBLASLt's fast algorithms want such lines, and copying a large
// operand into longer ones costs less than they gain.
#pragma once
#include "kernels/cuda/matmul_product.h"

namespace fretsaw::cuda {

// Whether the product is one of 16-bit floats, and so large that a copy of its operands is small beside it.
bool is_large_product(const ProductSpec& spec);
// Whether it is, has no batch, and at least one operand whose lines are no whole packs, or B's lines run along K and their number, N, is
// none.
bool takes_padding(const ProductSpec& spec);
// The product of the padded operands. M and N are as they were; K is whole packs where a padded operand has it along its lines; where B's
// lines run along N, or their number is made whole packs, `b_columns` says how many columns it then has. What is added is zero.
ProductSpec padded_form(const ProductSpec& spec);
// Scratch memory for the operands' copies.
size_t padded_bytes(const ProductSpec& spec);
// Copies the operands that differ in padded_form(spec) to `scratch`; the operands of that product.
ProductOperands pad_operands(const ProductSpec& spec, const ProductOperands& operands, void* scratch, cudaStream_t stream);

}  // namespace fretsaw::cuda
