// What may run as one kernel: a contraction and the elementwise nodes after it. Logic on operator names, types and shapes alone.
#pragma once
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

// Conv, ConvTranspose, MatMul or Gemm in float32: what a fusion group starts with.
bool is_fusable_contraction(const Node& node);

// Whether `chain` may follow `contraction` in its group: chain[0] takes the contraction's output, chain[i] that of chain[i - 1].
// It answers for the whole chain; a caller that grows a chain node by node asks again with each node added. It does not look at who
// else uses the values between (the caller must know that nobody does). Allowed are
//
//   Conv | ConvTranspose | MatMul | Gemm   then up to 6 of
//     Relu LeakyRelu Clip Sigmoid HardSigmoid HardSwish Swish Gelu Tanh Elu Mish    (their parameters constant)
//     Add Mul                        with any operand from outside that broadcasts into the contraction's output shape
//     Sub Div                        likewise, the chain being the first operand
//
// so that Conv + bias Add + residual Add + Relu, or MatMul + bias Add + Gelu, are one kernel.
bool can_fuse(const Node& contraction, const std::vector<const Node*>& chain);

}  // namespace fretsaw
