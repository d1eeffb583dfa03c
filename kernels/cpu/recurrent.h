// What LSTM, GRU and RNN share on the CPU: the order of their steps.
#pragma once
#include <vector>

#include "kernels/cpu/matmul.h"
#include "kernels/cpu/recurrent_settings.h"

namespace fretsaw {

// In place on n elements.
template <typename T>
void activate(const GateActivation& f, T* x, int64_t n);

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
