// LSTMGrad, GRUGrad and RNNGrad: backpropagation through time.
//
// The states before all steps stand in Y, so that one product makes the gates of all steps once more. Then, from the last step to the
// first, with a [B, gates * H] what the activations were taken of, H the states before the steps, and dh gaining what flows through Y:
//
//   da = (gradient of the gates) f'(a)     dh = da R + what the cell passes on
//
// and over all steps at once dX = da W, dW = da' X, dR = da' H, dB = sum(da).
#include <algorithm>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/gradients.h"
#include "kernels/cpu/recurrent.h"
#include "kernels/cpu/scalar_types.h"

namespace fretsaw {
namespace {

// One direction of a run.
struct Walk {
  const RecurrentSettings& s;
  const RecurrentShape& shape;
  const std::vector<int64_t>& lengths;
  const std::vector<GateActivation>& f;
  bool backwards;

  int64_t time(int64_t step) const { return backwards ? shape.T - 1 - step : step; }
  bool active(int64_t t, int64_t b) const { return is_active(lengths, t, b); }
};

// What a direction keeps of all its steps, and the gradients of its states. Rows whose sequence has ended hold zeros in h and slopes.
template <typename T>
struct Unrolled {
  const T* x;         // [T, B, I]
  const T* W;         // [gates * H, I]
  const T* R;         // [gates * H, H]
  const T* bias;      // [2 * gates * H], or null
  const T* peephole;  // [3 * H], or null
  T* h;               // [T, B, H]: the states before the steps
  T* c;               // [T, B, H]: the cell states of an LSTM, likewise
  T* gates;           // [T, B, gates * H]
  T* slopes;          // likewise, of their activations; then the gradients of what these were taken of
  T* inner;           // [T, B, H] of a GRU: r h, which R takes; or, with linear_before_reset, h R + b, and then its gradient
  T *dh, *dc;         // [B, H]: after the step at hand, then before it
  T* work;            // [B, H], and room for 2 * H
};

// Makes gates and slopes of all steps from what X gave to the gates.
template <typename T>
using Replay = void (*)(const Walk& walk, const Unrolled<T>& u);
// The step at time t: slopes, dh and dc become gradients. What flows back through R and the gates in columns [0, recurrent) is added after
// it.
template <typename T>
using StepBack = void (*)(const Walk& walk, const Unrolled<T>& u, int64_t t);

template <typename T>
struct BackwardCell {
  Replay<T> replay;
  StepBack<T> back;
  int64_t recurrent;  // so many gates take h R; that of a GRU's candidate is the cell's own affair
};

template <typename T>
void lstm_replay(const Walk& walk, const Unrolled<T>& u) {
  const RecurrentShape& shape = walk.shape;
  const int64_t B = shape.B, H = shape.H, width = 4 * H;
  const GateActivation &gate = walk.f[0], &of_candidate = walk.f[1];
  const float clip = walk.s.clip;
  add_recurrence(shape.T * B, H, u.h, u.R, 0, width, u.gates, width);
  for (int64_t step = 0; step < shape.T; ++step) {
    const int64_t t = walk.time(step);
    for (int64_t b = 0; b < B; ++b) {
      const int64_t row = t * B + b;
      T *i = u.gates + row * width, *o = i + H, *forget = i + 2 * H, *candidate = i + 3 * H, *slopes = u.slopes + row * width;
      T *state = u.work + b * H, *c = u.c + row * H;
      if (!walk.active(t, b)) {
        std::fill_n(slopes, width, T(0));
        continue;
      }
      std::copy_n(state, H, c);
      if (u.peephole) {
        for (int64_t k = 0; k < H; ++k) i[k] += u.peephole[k] * c[k], forget[k] += u.peephole[2 * H + k] * c[k];
      }
      activate_with_slopes(gate, clip, i, slopes, H);
      if (walk.s.input_forget) {  // what flows to the gate flows on to i
        for (int64_t k = 0; k < H; ++k) forget[k] = T(1) - i[k];
        std::fill_n(slopes + 2 * H, H, T(0));
      } else {
        activate_with_slopes(gate, clip, forget, slopes + 2 * H, H);
      }
      activate_with_slopes(of_candidate, clip, candidate, slopes + 3 * H, H);
      for (int64_t k = 0; k < H; ++k) state[k] = forget[k] * c[k] + i[k] * candidate[k];
      if (u.peephole) {
        for (int64_t k = 0; k < H; ++k) o[k] += u.peephole[H + k] * state[k];
      }
      activate_with_slopes(gate, clip, o, slopes + H, H);
    }
  }
}

//   c = f c_before + i g, h = o s(c): do = dh s(c), dc += dh o s'(c) (and what comes through the peephole of o), df = dc c_before,
//   di = dc g, dg = dc i
template <typename T>
void lstm_back(const Walk& walk, const Unrolled<T>& u, int64_t t) {
  const int64_t B = walk.shape.B, H = walk.shape.H, width = 4 * H;
  T *bent = u.work, *bend = u.work + H;  // s(c) and s'(c)
  for (int64_t b = 0; b < B; ++b) {
    if (!walk.active(t, b)) continue;
    const int64_t row = t * B + b;
    const T *i = u.gates + row * width, *o = i + H, *forget = i + 2 * H, *candidate = i + 3 * H, *before = u.c + row * H, *p = u.peephole;
    T *di = u.slopes + row * width, *dout = di + H, *dforget = di + 2 * H, *dcandidate = di + 3 * H;
    T *dh = u.dh + b * H, *dc = u.dc + b * H;
    for (int64_t k = 0; k < H; ++k) bent[k] = forget[k] * before[k] + i[k] * candidate[k];
    activate_with_slopes(walk.f[2], 0, bent, bend, H);
    for (int64_t k = 0; k < H; ++k) {
      dout[k] *= dh[k] * bent[k];
      const T of_cell = dc[k] + dh[k] * o[k] * bend[k] + (p ? p[H + k] * dout[k] : T(0));
      di[k] *= of_cell * (walk.s.input_forget ? candidate[k] - before[k] : candidate[k]);
      dforget[k] *= of_cell * before[k];
      dcandidate[k] *= of_cell * i[k];
      dc[k] = of_cell * forget[k] + (p ? p[k] * di[k] + p[2 * H + k] * dforget[k] : T(0));
      dh[k] = T(0);
    }
  }
}

template <typename T>
void gru_replay(const Walk& walk, const Unrolled<T>& u) {
  const RecurrentShape& shape = walk.shape;
  const int64_t B = shape.B, H = shape.H, width = 3 * H, rows = shape.T * B;
  const bool linear = walk.s.linear_before_reset;
  const float clip = walk.s.clip;
  add_recurrence(rows, H, u.h, u.R, 0, 2 * H, u.gates, width);
  // `inner` has H columns where add_recurrence takes the candidate's, the last of 3 H.
  if (linear) multiply_strided<T>(rows, H, H, {u.h, H, 1}, {u.R + 2 * H * H, 1, H}, u.inner, H);
  for (int64_t row = 0; row < rows; ++row) {
    T *z = u.gates + row * width, *reset = z + H, *candidate = z + 2 * H, *inner = u.inner + row * H;
    activate_with_slopes(walk.f[0], clip, z, u.slopes + row * width, 2 * H);
    for (int64_t k = 0; k < H; ++k) {
      if (linear)
        inner[k] += u.bias ? u.bias[width + 2 * H + k] : T(0), candidate[k] += reset[k] * inner[k];
      else
        inner[k] = reset[k] * u.h[row * H + k];
    }
  }
  if (!linear) add_recurrence(rows, H, u.inner, u.R, 2 * H, H, u.gates, width);
  for (int64_t row = 0; row < rows; ++row) {
    T* slopes = u.slopes + row * width;
    activate_with_slopes(walk.f[1], clip, u.gates + row * width + 2 * H, slopes + 2 * H, H);
    if (walk.active(row / B, row % B)) continue;
    std::fill_n(slopes, width, T(0));
    std::fill_n(u.inner + row * H, H, T(0));
  }
}

//   h = (1 - z) n + z h_before, n = g(x W + (r h_before) R) or g(x W + r (h_before R + b)): dn = dh (1 - z), dz = dh (h_before - n)
template <typename T>
void gru_back(const Walk& walk, const Unrolled<T>& u, int64_t t) {
  const int64_t B = walk.shape.B, H = walk.shape.H, width = 3 * H;
  const bool linear = walk.s.linear_before_reset;
  for (int64_t b = 0; b < B; ++b) {
    if (!walk.active(t, b)) continue;
    const int64_t row = t * B + b;
    const T *z = u.gates + row * width, *reset = z + H, *candidate = z + 2 * H, *before = u.h + row * H;
    T *dz = u.slopes + row * width, *dreset = dz + H, *dcandidate = dz + 2 * H, *inner = u.inner + row * H, *dh = u.dh + b * H;
    for (int64_t k = 0; k < H; ++k) {
      dz[k] *= dh[k] * (before[k] - candidate[k]);
      dcandidate[k] *= dh[k] * (T(1) - z[k]);
      dh[k] *= z[k];
      if (!linear) continue;
      dreset[k] *= dcandidate[k] * inner[k];
      inner[k] = dcandidate[k] * reset[k];
    }
  }
  const T *R = u.R + 2 * H * H, *dcandidate = u.slopes + t * B * width + 2 * H;
  if (linear) return multiply_strided<T>(B, H, H, {u.inner + t * B * H, H, 1}, {R, H, 1}, u.dh, H, T(1), T(1));
  multiply_strided<T>(B, H, H, {dcandidate, width, 1}, {R, H, 1}, u.work, H);  // the gradients of r h_before
  for (int64_t b = 0; b < B; ++b) {
    if (!walk.active(t, b)) continue;
    const int64_t row = t * B + b;
    for (int64_t k = 0; k < H; ++k) {
      const T of_product = u.work[b * H + k];
      u.slopes[row * width + H + k] *= of_product * u.h[row * H + k];
      u.dh[b * H + k] += of_product * u.gates[row * width + H + k];
    }
  }
}

template <typename T>
void rnn_replay(const Walk& walk, const Unrolled<T>& u) {
  const int64_t B = walk.shape.B, H = walk.shape.H, rows = walk.shape.T * B;
  add_recurrence(rows, H, u.h, u.R, 0, H, u.gates, H);
  activate_with_slopes(walk.f[0], walk.s.clip, u.gates, u.slopes, rows * H);
  for (int64_t row = 0; row < rows; ++row) {
    if (!walk.active(row / B, row % B)) std::fill_n(u.slopes + row * H, H, T(0));
  }
}

template <typename T>
void rnn_back(const Walk& walk, const Unrolled<T>& u, int64_t t) {
  const int64_t B = walk.shape.B, H = walk.shape.H;
  for (int64_t b = 0; b < B; ++b) {
    if (!walk.active(t, b)) continue;
    T *da = u.slopes + (t * B + b) * H, *dh = u.dh + b * H;
    for (int64_t k = 0; k < H; ++k) da[k] *= dh[k], dh[k] = T(0);
  }
}

// X with time in front, zeros where the sequences have ended: whatever stands there is multiplied by gradients that are zero.
template <typename T>
void unrolled_input(const TensorView& x, const RecurrentShape& shape, bool batch_first, const std::vector<int64_t>& lengths, T* to) {
  const int64_t B = shape.B, I = shape.I;
  const Dims strides = batch_first ? Dims{I, shape.T * I, 1} : Dims{B * I, I, 1};
  copy_strided(x.dtype, {shape.T, B, I}, to, {B * I, I, 1}, x.data, strides, 1);
  for (int64_t t = 0; t < shape.T; ++t) {
    for (int64_t b = 0; b < B; ++b) {
      if (!is_active(lengths, t, b)) std::fill_n(to + (t * B + b) * I, I, T(0));
    }
  }
}

// The states before all steps, from the rows of Y and the initial state (in dh).
template <typename T>
void states_before(const Walk& walk, const StateRows& rows, int64_t direction, const T* y, const Unrolled<T>& u) {
  const int64_t B = walk.shape.B, H = walk.shape.H;
  for (int64_t step = 0; step < walk.shape.T; ++step) {
    const int64_t t = walk.time(step);
    for (int64_t b = 0; b < B; ++b) {
      T* to = u.h + (t * B + b) * H;
      const int64_t previous = step == 0 ? -1 : walk.time(step - 1);
      if (!walk.active(t, b))
        std::fill_n(to, H, T(0));
      else
        std::copy_n(previous >= 0 && walk.active(previous, b) ? y + rows.output(previous, direction, b) : u.dh + b * H, H, to);
    }
  }
}

// The columns of x [rows, width] that stand in [0, count), added up.
template <typename T>
void sum_columns(const T* x, int64_t rows, int64_t width, int64_t count, T* to) {
  std::vector<double> sums(static_cast<size_t>(count));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t k = 0; k < count; ++k) sums[static_cast<size_t>(k)] += static_cast<double>(x[row * width + k]);
  }
  for (int64_t k = 0; k < count; ++k) to[k] = static_cast<T>(sums[static_cast<size_t>(k)]);
}

// c' += a' b over `rows` rows: [count, columns], of a's first `count` columns. Zeros where there are no rows.
template <typename T>
void weight_product(const T* a, int64_t a_row, int64_t count, const T* b, int64_t columns, int64_t rows, T* to) {
  if (rows == 0) return static_cast<void>(std::fill_n(to, count * columns, T(0)));
  multiply_strided<T>(count, columns, rows, {a, 1, a_row}, {b, columns, 1}, to, columns);
}

template <typename T>
void peephole_gradients(const Walk& walk, const Unrolled<T>& u, T* to) {
  const int64_t B = walk.shape.B, H = walk.shape.H, width = 4 * H;
  std::vector<double> sums(static_cast<size_t>(3 * H));
  for (int64_t row = 0; row < walk.shape.T * B; ++row) {
    if (!walk.active(row / B, row % B)) continue;
    const T *i = u.gates + row * width, *da = u.slopes + row * width, *before = u.c + row * H;
    for (int64_t k = 0; k < H; ++k) {
      const T after = i[2 * H + k] * before[k] + i[k] * i[3 * H + k];
      double* sum = sums.data() + k;
      sum[0] += static_cast<double>(da[k] * before[k]);
      sum[H] += static_cast<double>(da[H + k] * after);
      sum[2 * H] += static_cast<double>(da[2 * H + k] * before[k]);
    }
  }
  for (size_t k = 0; k < sums.size(); ++k) to[k] = static_cast<T>(sums[k]);
}

// Where the operands beside the forward node's and the results stand.
struct Places {
  explicit Places(const RecurrentSettings& s) : has_cell(s.gates == 4), y(has_cell ? 8 : 6) {}
  bool has_cell;
  size_t y;  // then the gradients of Y, Y_h and an LSTM's Y_c
  size_t dy() const { return y + 1; }
  size_t dy_h() const { return y + 2; }
  size_t dy_c() const { return y + 3; }
};
enum Result : size_t { kX, kW, kR, kB, kInitialH, kInitialC, kPeephole };

void check_gradients(RunContext& r, const RecurrentShape& shape, const Places& at) {
  const auto check = [&](size_t i, int64_t count) {
    require(!r.has_input(i) || r.input(i).count() == count, "a gradient of a recurrent node does not fit", "give those of its results");
  };
  const int64_t states = shape.D * shape.B * shape.H;
  require(r.has_input(at.y), "Y of a recurrent node is missing", "give what the forward node gave");
  for (size_t i : {at.y, at.dy()}) check(i, states * shape.T);
  for (size_t i : {at.dy_h(), at.dy_c()}) check(i, states);
}

// The results that are wanted, of all directions.
template <typename T>
struct Results {
  TensorView* views[7] = {};
  explicit Results(RunContext& r) {
    for (size_t o = 0; o < 7; ++o) {
      const size_t input = o < kInitialH ? o : o + 1;  // no gradient of sequence_lens
      if (r.wants_output(o)) views[o] = &r.output(o, r.input(input).dims);
    }
  }
  // Of one direction, of which each has `size` elements; null where it is not wanted.
  T* of(Result o, int64_t direction, int64_t size) const { return views[o] ? views[o]->as<T>() + direction * size : nullptr; }
};

template <typename T>
void of_weights(const Walk& walk, const Unrolled<T>& u, const Results<T>& results, int64_t direction) {
  const int64_t H = walk.shape.H, I = walk.shape.I, width = walk.s.gates * H, rows = walk.shape.T * walk.shape.B;
  const bool gru = walk.s.gates == 3, linear = gru && walk.s.linear_before_reset;
  const int64_t plain = gru ? 2 * H : width;
  if (T* to = results.of(kW, direction, width * I)) weight_product(u.slopes, width, width, u.x, I, rows, to);
  if (T* to = results.of(kR, direction, width * H)) {
    weight_product(u.slopes, width, plain, u.h, H, rows, to);
    if (linear)
      weight_product(u.inner, H, H, u.h, H, rows, to + plain * H);
    else if (gru)
      weight_product(u.slopes + plain, width, H, u.inner, H, rows, to + plain * H);
  }
  if (T* to = results.of(kB, direction, 2 * width)) {
    sum_columns(u.slopes, rows, width, width, to);
    std::copy_n(to, width, to + width);
    if (linear) sum_columns(u.inner, rows, H, H, to + width + plain);
  }
  if (T* to = results.of(kPeephole, direction, 3 * H)) peephole_gradients(walk, u, to);
}

template <typename T>
void run_gradient(RunContext& r, const RecurrentSettings& s, const BackwardCell<T>& cell) {
  const RecurrentShape shape = recurrent_shape(r, s);
  const Places at(s);
  check_gradients(r, shape, at);
  const std::vector<int64_t> lengths = sequence_lengths(r, shape);
  const StateRows rows{shape, s.layout == 1};
  const int64_t B = shape.B, I = shape.I, H = shape.H, width = s.gates * H, steps = shape.T * B;
  const Results<T> results(r);
  const bool copies = s.layout == 1 || !lengths.empty(), turns = s.layout == 1 && results.views[kX];
  const auto [x, dx, h, c, gates, slopes, inner, dh, dc, work] =
      scratch_arrays<T, 10>(r, {copies ? steps * I : 0, turns ? steps * I : 0, steps * H, at.has_cell ? steps * H : 0, steps * width,
                                steps * width, s.gates == 3 ? steps * H : 0, B * H, B * H, std::max<int64_t>(B, 2) * H});
  if (copies) unrolled_input(r.input(0), shape, s.layout == 1, lengths, x);
  T* of_x = turns ? dx : results.of(kX, 0, 0);
  for (int64_t i = 0; i < shape.D; ++i) {
    const Walk walk{s, shape, lengths, s.activations[static_cast<size_t>(i)], i == 1 || s.first_reversed};
    Unrolled<T> u{};
    u.x = copies ? x : r.input(0).as<T>(), u.W = r.input(1).as<T>() + i * width * I, u.R = r.input(2).as<T>() + i * width * H;
    u.bias = r.has_input(3) ? r.input(3).as<T>() + i * 2 * width : nullptr;
    u.peephole = at.has_cell && r.has_input(7) ? r.input(7).as<T>() + i * 3 * H : nullptr;
    u.h = h, u.c = c, u.gates = gates, u.slopes = slopes, u.inner = inner, u.dh = dh, u.dc = dc, u.work = work;
    load_state(r, 5, rows, i, dh);
    states_before(walk, rows, i, r.input(at.y).as<T>(), u);
    if (at.has_cell) load_state(r, 6, rows, i, work);
    project_input(s, shape, u.x, u.W, u.bias, gates);
    cell.replay(walk, u);
    load_state(r, at.dy_h(), rows, i, dh);
    if (at.has_cell) load_state(r, at.dy_c(), rows, i, dc);
    for (int64_t step = shape.T; step-- > 0;) {
      const int64_t t = walk.time(step);
      for (int64_t b = 0; b < B && r.has_input(at.dy()); ++b) {
        const T* from = r.input(at.dy()).as<T>() + rows.output(t, i, b);
        for (int64_t k = 0; k < H && walk.active(t, b); ++k) dh[b * H + k] += from[k];
      }
      cell.back(walk, u, t);
      multiply_strided<T>(B, H, cell.recurrent * H, {slopes + t * B * width, width, 1}, {u.R, H, 1}, dh, H, T(1), T(1));
    }
    store_state(results.views[kInitialH], rows, i, dh);
    if (at.has_cell) store_state(results.views[kInitialC], rows, i, dc);
    if (of_x) multiply_strided<T>(steps, I, width, {slopes, width, 1}, {u.W, I, 1}, of_x, I, T(1), i == 0 ? T(0) : T(1));
    of_weights(walk, u, results, i);
  }
  if (turns) copy_strided(r.input(0).dtype, {shape.T, B, I}, results.views[kX]->data, {I, shape.T * I, 1}, dx, {B * I, I, 1}, 1);
}

CompiledKernel make_lstm_plain(const CompileContext& c) {
  return {[s = read_recurrent(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() { run_gradient<T>(r, s, {lstm_replay<T>, lstm_back<T>, 4}); });
  }};
}
CompiledKernel make_gru_plain(const CompileContext& c) {
  return {[s = read_recurrent(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() { run_gradient<T>(r, s, {gru_replay<T>, gru_back<T>, 2}); });
  }};
}
CompiledKernel make_rnn_plain(const CompileContext& c) {
  return {[s = read_recurrent(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() { run_gradient<T>(r, s, {rnn_replay<T>, rnn_back<T>, 1}); });
  }};
}

}  // namespace

void register_recurrent_gradients(KernelRegistry& registry) {
  add_gradient(registry, "LSTMGrad", any_float<make_lstm_plain>);
  add_gradient(registry, "GRUGrad", any_float<make_gru_plain>);
  add_gradient(registry, "RNNGrad", any_float<make_rnn_plain>);
}

}  // namespace fretsaw
