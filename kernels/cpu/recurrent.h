// What LSTM, GRU and RNN share on the CPU: the order of their steps.
#pragma once
#include <array>
#include <vector>

#include "kernels/cpu/matmul.h"
#include "kernels/cpu/recurrent_settings.h"

namespace fretsaw {

// In place on n elements.
template <typename T>
void activate(const GateActivation& f, T* x, int64_t n);
// The same of x bounded to [-clip, clip] (0: not at all), and the derivatives by the x that was: zero beyond the bounds.
template <typename T>
void activate_with_slopes(const GateActivation& f, float clip, T* x, T* slopes, int64_t n);

// Where row (d, b) of a state lies, and row (t, d, b) of Y.
struct StateRows {
  const RecurrentShape& s;
  bool batch_first;
  Dims dims() const { return batch_first ? Dims{s.B, s.D, s.H} : Dims{s.D, s.B, s.H}; }
  int64_t state(int64_t d, int64_t b) const { return (batch_first ? b * s.D + d : d * s.B + b) * s.H; }
  int64_t output(int64_t t, int64_t d, int64_t b) const { return (batch_first ? (b * s.T + t) * s.D + d : (t * s.D + d) * s.B + b) * s.H; }
};
// One direction of a state as [B, H]: zeros where the input is left out.
template <typename T>
void load_state(RunContext& r, size_t input, const StateRows& rows, int64_t d, T* to);
template <typename T>
void store_state(TensorView* y, const StateRows& rows, int64_t d, const T* from);

// The lengths of the sequences [B], from 0 to T; empty where they are left out: all are T.
std::vector<int64_t> sequence_lengths(RunContext& r, const RecurrentShape& shape);
inline bool is_active(const std::vector<int64_t>& lengths, int64_t t, int64_t b) {
  return lengths.empty() || t < lengths[static_cast<size_t>(b)];
}

// X W^T + bias for all steps at once: x [T, B, I], W [gates * H, I], bias [2 * gates * H] or null -> gates [T, B, gates * H].
template <typename T>
void project_input(const RecurrentSettings& s, const RecurrentShape& shape, const T* x, const T* W, const T* bias, T* gates);
// gates [rows, width] = h [rows, H] R^T + keep * gates, for rows [first, first + count) of R, which become columns of the gates.
template <typename T>
void add_recurrence(int64_t rows, int64_t H, const T* h, const T* R, int64_t first, int64_t count, T* gates, int64_t width, T keep = T(1)) {
  multiply_strided<T>(rows, count, H, {h, H, 1}, {R + first * H, 1, H}, gates + first, width, T(1), keep);
}

// Scratch memory for arrays of these numbers of elements, each from a cache line of its own on.
template <typename T, size_t kCount>
std::array<T*, kCount> scratch_arrays(RunContext& r, const std::array<int64_t, kCount>& sizes) {
  const auto padded = [](int64_t n) { return (n + 15) / 16 * 16; };
  int64_t total = 16;
  for (int64_t n : sizes) total += padded(n);
  T* block = static_cast<T*>(r.scratch(static_cast<size_t>(total) * sizeof(T)));
  std::array<T*, kCount> arrays;
  for (size_t i = 0; i < kCount; ++i) arrays[i] = block, block += padded(sizes[i]);
  return arrays;
}

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
