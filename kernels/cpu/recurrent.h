// What LSTM, GRU and RNN share: their attributes, activations and the order of their steps.
#pragma once
#include <string>
#include <vector>

#include "kernels/cpu/matmul.h"
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
// In place on n elements.
template <typename T>
void activate(const GateActivation& f, T* x, int64_t n);

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
// `defaults` are the cell's activations for one direction.
RecurrentSettings read_recurrent(const Node& node, int64_t gates, const std::vector<std::string>& defaults);

// Sizes of one run: X [T, B, I] (or [B, T, I]), H hidden.
struct RecurrentShape {
  int64_t T, B, I, H, D;
};
// Checks W [D, gates * H, I], R [D, gates * H, H] and the initial states.
RecurrentShape recurrent_shape(RunContext& r, const RecurrentSettings& s);

// One direction of a run, as buffers with time and batch in front: what cells work on.
template <typename T>
struct Direction {
  const T* x;         // [T, B, I]
  const T* W;         // [gates * H, I]
  const T* R;         // [gates * H, H]
  const T* bias;      // [2 * gates * H]: of W, then of R; null when left out
  const T* peephole;  // [3 * H] of an LSTM; null when left out
  T* h;               // [B, H]: the state, initial first and final in the end
  T* c;               // [B, H]: the cell state of an LSTM
  T* gates;           // [T, B, gates * H]: room for X W^T + bias of all steps
  T* work;            // [B, gates * H]: room for one step
  T* fresh;           // [B, H]: room for the new state
};

// Called for each step: gates_t [B, gates * H] holds X W^T with biases; leaves the new state in d.fresh (and d.c).
template <typename T>
using Cell = void (*)(const RecurrentSettings& s, const RecurrentShape& shape, const std::vector<GateActivation>& f, const Direction<T>& d,
                      T* gates_t, const bool* active);

// Runs all directions with the cell, and writes Y, Y_h and (for an LSTM) Y_c.
template <typename T>
void run_recurrent(RunContext& r, const RecurrentSettings& s, Cell<T> cell, bool has_cell_state);

}  // namespace fretsaw
