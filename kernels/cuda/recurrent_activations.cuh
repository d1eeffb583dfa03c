// The activations of recurrent cells, and their derivatives.
#pragma once
#include "kernels/cuda/recurrent.h"

namespace fretsaw::cuda {

template <typename W>
__device__ inline W gate_activation(const CellActivation& f, W x) {
  using Kind = GateActivation::Kind;
  const W a = W(f.alpha), b = W(f.beta);
  switch (static_cast<Kind>(f.kind)) {
    case Kind::relu:
      return x < W(0) ? W(0) : x;
    case Kind::tanh:
      return tanh(x);
    case Kind::sigmoid:
      return W(1) / (W(1) + exp(-x));
    case Kind::affine:
      return a * x + b;
    case Kind::leaky_relu:
      return x < W(0) ? a * x : x;
    case Kind::thresholded_relu:
      return x > a ? x : W(0);
    case Kind::scaled_tanh:
      return a * tanh(b * x);
    case Kind::hard_sigmoid: {
      const W y = a * x + b;
      return y < W(0) ? W(0) : y > W(1) ? W(1) : y;
    }
    case Kind::elu:
      return x < W(0) ? a * expm1(x) : x;
    case Kind::softsign:
      return x / (W(1) + fabs(x));
    case Kind::softplus:
      return (x < W(0) ? W(0) : x) + log1p(exp(-fabs(x)));
  }
  return x;
}

// By the x that became y.
template <typename W>
__device__ inline W gate_slope(const CellActivation& f, W x, W y) {
  using Kind = GateActivation::Kind;
  const W a = W(f.alpha), b = W(f.beta);
  switch (static_cast<Kind>(f.kind)) {
    case Kind::relu:
      return x > W(0) ? W(1) : W(0);
    case Kind::tanh:
      return W(1) - y * y;
    case Kind::sigmoid:
      return y * (W(1) - y);
    case Kind::affine:
      return a;
    case Kind::leaky_relu:
      return x < W(0) ? a : W(1);
    case Kind::thresholded_relu:
      return x > a ? W(1) : W(0);
    case Kind::scaled_tanh:
      return a * b * (W(1) - tanh(b * x) * tanh(b * x));
    case Kind::hard_sigmoid:
      return y > W(0) && y < W(1) ? a : W(0);
    case Kind::elu:
      return x < W(0) ? y + a : W(1);
    case Kind::softsign:
      return W(1) / ((W(1) + fabs(x)) * (W(1) + fabs(x)));
    case Kind::softplus:
      return W(1) / (W(1) + exp(-x));
  }
  return W(0);
}

}  // namespace fretsaw::cuda
