// Scores of classes in rows of whole packs.
#pragma once
#include "graph/ir.h"

namespace fretsaw {

// Tensor cores read and write rows of 16-bit numbers in packs of 16 bytes; scores of 50257 classes are none, and every product that makes
// or takes them would copy them. Where such scores [..., C] are a product's (MatMul or Gemm, with a bias or none) and go through Reshapes
// into CrossEntropy alone, the product's weights and bias get columns of zeros up to the next multiple of 64, and CrossEntropy is told, in
// `classes`, how many columns count. Before the graph is differentiated: the gradients of scores are in the same form, and those of the
// weights lose the columns again. Types must be known, and are known afterwards. Returns how many products it changed.
int pad_classes(Model& model);

}  // namespace fretsaw
