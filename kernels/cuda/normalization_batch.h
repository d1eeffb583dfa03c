// BatchNormalization: what its files share.
#pragma once
#include <array>

#include "kernels/cuda/normalization.h"

namespace fretsaw::cuda {

// What follows the norm in a fused step: the residual is added, then Relu, each rounded as a node of its own rounds.
struct NormFollowers {
  int residual = -1;  // an input of the step, of X's shape and type; -1: none
  bool relu = false;
  std::array<int, 3> outputs = {0, 1, 2};  // of the step: the result, the running mean and variance; -1 where nobody takes it
};
// Fills `f` from the nodes after the first (normalization_followers.cpp). Returns a reason where they are others, or "".
std::string read_norm_followers(const CompileContext& c, NormFollowers& f);
// The image, the residual and the result channels last where the image is offered so.
void take_norm_layouts(const CompileContext& c, const NormFollowers& f, CompiledKernel& kernel);

// By the statistics of the batch (training_mode=1), with the new running ones as outputs 1 and 2 (normalization_training.cu).
CompiledKernel make_training_batch_norm(const CompileContext& c, const NormFollowers& f);

// y = x * factors[0, c] + factors[1, c], then what follows. x and y [N, C, D...] of one float type and layout; factors [2, C] of the type
// that x computes in.
void scale_by_factors(const RunContext& r, const TensorView& x, TensorView& y, const void* factors, const NormFollowers& f);

// BatchNormalizationGrad alone, or behind the gradient of a Relu, of whose result y is the part above 0:
//
//   Greater(y, 0) -> Where(_, dy, 0) -> BatchNormalizationGrad(_, x, scale)
struct NormGradientOperands {
  size_t dy = 0, x = 1, scale = 2;         // inputs of the step
  int y = -1;                              // likewise; -1: all of dy counts
  std::array<int, 3> outputs = {0, 1, 2};  // of the step: the gradients of x, scale and bias; -1 where nobody takes it
};
// Whether the step is of several nodes and has such a gradient as its last.
bool ends_in_norm_gradient(const CompileContext& c);
// Fills `at` (normalization_followers.cpp). Returns a reason where the nodes before the gradient are others, or "".
std::string read_norm_gradient(const CompileContext& c, NormGradientOperands& at);
// All images channels last where one of them is offered so.
void take_gradient_layouts(const CompileContext& c, const NormGradientOperands& at, CompiledKernel& kernel);
// Both forms of the step.
CompiledKernel make_norm_gradient(const CompileContext& c);
std::string unsupported_norm_gradient(const CompileContext& c);

}  // namespace fretsaw::cuda
