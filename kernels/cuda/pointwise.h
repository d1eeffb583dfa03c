// Steps that are compiled at run time: elementwise operators, alone and fused, and rows over the last axis with elementwise nodes around.
#pragma once
#include <string>

#include "kernels/kernel.h"

namespace fretsaw::cuda {

// For the records of operators over rows (Softmax, LayerNormalization, Reduce*, ...; pointwise_row_operators.cpp lists them): whether the
// step, which may be the node alone, can be done in rows held in registers, and its kernel. A row gives the same bits in any step.
// An input with axes must be constant. The dimensions must be known.
std::string unsupported_row_step(const CompileContext& c);
CompiledKernel make_row_step(const CompileContext& c);
// The record of such an operator: steps that it leads, and itself over the last axis, are done in rows, the rest as `general` has it.
//   registry.add(with_row_steps({.op = "Softmax", .make = make_softmax_of_any_axis}));
KernelRecord with_row_steps(KernelRecord general);

}  // namespace fretsaw::cuda
