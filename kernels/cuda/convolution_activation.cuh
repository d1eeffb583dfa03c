// The activations that follow a convolution, in device code.
#pragma once
#include "kernels/cuda/convolution.h"
#include "kernels/cuda/element_packs.cuh"

namespace fretsaw::cuda {

// NaN stays NaN, as in the operators' own kernels.
template <typename W>
__device__ inline W fused_activation(const FusedActivation& f, W x) {
  using Kind = FusedActivation::Kind;
  const W a = W(f.a), b = W(f.b);
  switch (f.kind) {
    case Kind::none:
      return x;
    case Kind::relu:
      return x < W(0) ? W(0) : x;
    case Kind::clip:
      return x > b ? b : x < a ? a : x;
    case Kind::leaky_relu:
      return x < W(0) ? a * x : x;
    case Kind::sigmoid:
      return W(1) / (W(1) + exp(-x));
    case Kind::swish:
      return x / (W(1) + exp(-a * x));
    case Kind::hard_swish: {
      const W gate = x / W(6) + W(0.5);
      return x * (gate < W(0) ? W(0) : gate > W(1) ? W(1) : gate);
    }
    case Kind::gelu:
      return W(0.5) * x * (W(1) + erf(x * W(0.70710678118654752440)));
    case Kind::gelu_tanh:
      return W(0.5) * x * (W(1) + tanh(W(0.79788456080286535588) * (x + W(0.044715) * x * x * x)));
    case Kind::tanh:
      return tanh(x);
  }
  return x;
}

}  // namespace fretsaw::cuda
