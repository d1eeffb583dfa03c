// What LSTM, GRU and RNN say about themselves: attributes, activations and sizes, for the kernels of every device.
#pragma once
#include <string>
#include <vector>

#include "kernels/kernel.h"

namespace fretsaw {

struct GateActivation {
  enum class Kind : uint8_t {
    relu,
    tanh,
    sigmoid,
    affine,
    leaky_relu,
    thresholded_relu,
    scaled_tanh,
    hard_sigmoid,
    elu,
    softsign,
    softplus
  };
  Kind kind;
  float alpha = 0, beta = 0;
};

struct RecurrentSettings {
  int64_t gates = 1;  // of the cell: 4, 3 or 1
  int64_t directions = 1;
  bool first_reversed = false;  // the only direction runs backwards
  int64_t layout = 0;           // 1: batch first
  int64_t hidden = 0;           // 0: what the weights say
  float clip = 0;               // 0: none
  bool input_forget = false, linear_before_reset = false;
  std::vector<std::vector<GateActivation>> activations;  // for each direction
};
// Of LSTM, GRU and RNN, and of their gradients.
RecurrentSettings read_recurrent(const Node& node);

// Sizes of one run: X [T, B, I] (or [B, T, I]), H hidden.
struct RecurrentShape {
  int64_t T, B, I, H, D;
};
// Checks W [D, gates * H, I], R [D, gates * H, H] and the initial states.
RecurrentShape recurrent_shape(RunContext& r, const RecurrentSettings& s);

}  // namespace fretsaw
