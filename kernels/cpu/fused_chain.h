// The elementwise nodes of a fusion group, read once, and loops that compute them where a primitive can't.
#pragma once
#include <vector>

#include "kernels/kernel.h"

namespace fretsaw {

// One node of the chain after the contraction: y = f(y), or y = y op operand.
struct FusedStep {
  enum class Kind : uint8_t {
    linear,
    relu,
    leaky_relu,
    clip,
    sigmoid,
    hard_sigmoid,
    hard_swish,
    swish,
    gelu_erf,
    gelu_tanh,
    tanh,
    elu,
    mish,
    add,
    subtract,
    multiply,
    divide,
  };
  Kind kind = Kind::relu;
  float alpha = 0, beta = 0;  // parameters of an activation; the bounds of clip; linear is alpha * y + beta
  size_t operand = 0;         // of a binary step: index among the kernel's inputs

  bool is_binary() const { return kind >= Kind::add; }
};

// The steps of nodes[1], nodes[2], ... of a group. Throws Error for a node that graph/fusion_rules.h does not allow.
std::vector<FusedStep> read_chain(const CompileContext& c);

// Computes steps [first, end) on y, the contraction's result in a plain or nhwc layout. Operands may lie in either.
void apply_steps(RunContext& r, const std::vector<FusedStep>& steps, size_t first, TensorView& y);

}  // namespace fretsaw
