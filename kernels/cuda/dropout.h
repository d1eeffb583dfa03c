// Dropout while a model is trained.
#pragma once
#include "kernels/kernel.h"

namespace fretsaw::cuda {

// The record of Dropout whose training_mode is true or not known before it runs. In inference it is a copy (pointwise_operators.cpp).
KernelRecord training_dropout();
// That of DropoutMask (graph/gradient_operators.h), whose masks are those of the CPU.
KernelRecord dropout_mask();

}  // namespace fretsaw::cuda
