// What the files of the recurrent family share: one step of LSTM, GRU or RNN in both directions.
#pragma once
#include <cstdint>

#include "graph/types.h"
#include "kernels/cpu/recurrent_settings.h"
#include "kernels/cuda/cuda.h"
#include "kernels/scratch_pieces.h"

namespace fretsaw::cuda {

// What one launch computes. A GRU whose reset gate comes before the product needs two: the gates, then the candidate.
enum class CellPart : uint8_t { lstm, gru, gru_gates, gru_candidate, rnn };

struct CellActivation {
  int kind = 0;  // GateActivation::Kind
  float alpha = 0, beta = 0;
};

void set_activations(const RecurrentSettings& settings, CellActivation (&to)[2][3]);
// Why a recurrent node, or its gradient, has no kernel here; "" when it has.
std::string refuse_recurrent(const CompileContext& c);

// States are in what elements are summed in (float32; float64 for double), [D, B, H]. The others have the elements of X.
struct CellStep {
  int64_t T, B, H, D, t;  // t: which step, counted from 0
  bool first_reversed, batch_first, input_forget;
  float clip;
  CellActivation f[2][3];  // for each direction
  const void* R;           // [D, G * H, H]
  const void* bias;        // [D, 2 * G * H]; null when left out
  const void* peephole;    // [D, 3 * H]; null when left out
  const void* projected;   // X W^T: [D, T * B, G * H], rows in the order of X, in float32 (double of double)
  const int32_t* lengths;  // [B]; null when all are T
  void* h;                 // before the step
  void* next_h;            // after it
  void *c, *z, *reset_h;   // of LSTM; of a GRU in two parts
  void *y, *y_h, *y_c;     // outputs; null when not wanted
};

// The initial states into `h` and `c`; zeros where they are left out. Inputs [D, B, H], or [B, D, H] when batch_first.
void start_states(DType dtype, const CellStep& s, const void* initial_h, const void* initial_c, cudaStream_t stream);
void run_cell(DType dtype, CellPart part, const CellStep& s, cudaStream_t stream);

}  // namespace fretsaw::cuda
