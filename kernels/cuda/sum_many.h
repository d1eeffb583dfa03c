// Sum of more tensors than an elementwise step takes.
#pragma once
#include "kernels/kernel.h"

namespace fretsaw::cuda {

// The record of Sum for tensors of one shape (the squared norms of a model's gradients); fewer of them are added in elementwise steps.
KernelRecord sum_of_many();

}  // namespace fretsaw::cuda
