// What the files of the recurrent gradients share: the work between their products.
#pragma once
#include <cstdint>

#include "kernels/cuda/recurrent.h"

namespace fretsaw::cuda {

// A run of LSTMGrad, GRUGrad or RNNGrad, with G gates, of which the first K take h R at once: all, but of a GRU whose reset gate comes
// before the product z and r alone. Row (t, b) stands where X has it: t B + b, or b T + t when batch_first. "Wide" is what elements are
// summed in (float32; float64 for double); all else has the elements of X.
struct CellGradient {
  int64_t T, B, H, D, G, K;
  bool first_reversed, batch_first, input_forget;
  float clip;
  CellActivation f[2][3];                      // for each direction
  const void *bias, *peephole;                 // [D, 2 G H], [D, 3 H]; null when left out
  const void *initial_h, *initial_c, *y, *dy;  // as the operator has them; null when left out, but y
  const int32_t* lengths;                      // [B]; null when all are T
  void* h;                                     // [T B, D, H]: the states before the steps; zeros where the sequence has ended
  void* inner;                                 // [T B, D, H] of a GRU: r h, or of the linear form the gradient of h R + b
  void* da;                                    // [T B, D, G H]: the gradients of what the activations are taken of
  void *step_da, *step_inner;                  // [D, B, K H], [D, B, H]: what one step gives to the products that lead to dh
  void* gates;                                 // wide [T B, D, G H]: X W', then the gates
  void *recurrent, *recurrent_inner;           // wide [D, T B, K H], [D, T B, H]: products of `h` and `inner` with R'
  void* slopes;                                // wide [D, T B, G H]: of the activations, then as `da`
  void* c;                                     // wide [T B, D, H] of an LSTM: the cell states before the steps
  void* linear;                                // wide [T B, D, H] of a GRU's linear form: h R + b, then its gradient
  void* through_reset;                         // wide [D, B, H] of a GRU's other form: the gradient of r h, one step's
  void *dh, *dc;                               // wide [D, B, H]: after the step at hand, then before it
  int64_t rows() const { return T * B; }
};

// --- in the order of a run, on the stream ---

// X with zeros where sequences have ended, rows of `width`.
void mask_ended_rows(DType dtype, const CellGradient& g, const void* x, int64_t width, void* to, cudaStream_t stream);
void find_states_before(DType dtype, const CellGradient& g, cudaStream_t stream);  // h
// Gates and slopes of all steps. Of a GRU in two parts: first gates and `inner`, then, with `recurrent_inner`, the candidate.
void replay_cells(DType dtype, CellPart part, const CellGradient& g, cudaStream_t stream);
// One step back: da, step_da, dh and dc, before what the products add to dh. Of a GRU in two parts: first the candidate and `step_inner`,
// then, with `through_reset`, the gates. `step` is counted from 0 in the order of the forward pass.
void step_back(DType dtype, CellPart part, const CellGradient& g, int64_t step, cudaStream_t stream);

// Columns x [rows, first `columns` of a row], of each of D directions added up into to [D, ..].
struct ColumnSums {
  const void* x;                               // wide
  int64_t rows, row_stride, direction_stride;  // elements of x
  int64_t columns, D;
  void *to, *again;   // the second one: null, or where the sums go too
  int64_t to_stride;  // elements from one direction to the next
};
void sum_columns(DType dtype, const ColumnSums& sums, cudaStream_t stream);
void sum_peepholes(DType dtype, const CellGradient& g, void* to, cudaStream_t stream);  // [D, 3 H] of an LSTM
void store_states(DType dtype, const CellGradient& g, const void* states, void* to,
                  cudaStream_t stream);  // dh or dc as the operator has it

}  // namespace fretsaw::cuda
