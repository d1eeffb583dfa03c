// The elementwise nodes of a fusion group, read once, and loops that compute them where a primitive can't.
#pragma once
#include <functional>
#include <vector>

#include "kernels/kernel.h"

namespace fretsaw {

// y[i] = f(x[i]) for n elements; y may be x.
using ElementLoop = std::function<void(const float* x, float* y, int64_t n)>;

// One node of the chain after the contraction: y = f(y), or y = y op operand.
struct FusedStep {
  enum class Kind : uint8_t {
    linear,
    relu,
    leaky_relu,
    clip,
    other,  // any other activation: only `loop` computes it
    add,
    subtract,
    multiply,
    divide,
  };
  Kind kind = Kind::relu;
  float alpha = 0, beta = 0;  // the slope of leaky_relu; the bounds of clip; linear is alpha * y + beta
  size_t operand = 0;         // of a binary step: index among the kernel's inputs
  ElementLoop loop;           // of relu, leaky_relu and other: what the operator's own kernel runs

  bool is_binary() const { return kind >= Kind::add; }
  // Whether a primitive gives the bits that the operator's own kernel gives: it rounds once. The others are left to loops, so that
  // a model's numbers don't depend on where it is cut.
  bool is_exact() const { return kind != Kind::other; }
};

// The steps of nodes[1], nodes[2], ... of a group. Throws Error for a node that graph/fusion_rules.h does not allow.
std::vector<FusedStep> read_chain(const CompileContext& c);

// Computes steps [first, end) on y, the contraction's result in a plain or nhwc layout. Operands may lie in either.
void apply_steps(RunContext& r, const std::vector<FusedStep>& steps, size_t first, TensorView& y);

}  // namespace fretsaw
