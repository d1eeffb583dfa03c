// The cells of LSTM, GRU and RNN: one step for a batch.
#include <algorithm>
#include <memory>

#include "kernels/cpu/families.h"
#include "kernels/cpu/recurrent.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cpu/through_float.h"

namespace fretsaw {

namespace {

template <typename T>
void clip(const RecurrentSettings& s, T* x, int64_t n) {
  if (s.clip <= 0) return;
  const T bound = static_cast<T>(s.clip);
  for (int64_t i = 0; i < n; ++i) x[i] = std::clamp(x[i], -bound, bound);
}

//   i, o, f = f(x W + h R + p c), c~ = g(x W + h R); c = f c + i c~; h = o h(c). The output gate's peephole sees the new c.
template <typename T>
void lstm_cell(const RecurrentSettings& s, const RecurrentShape& shape, const std::vector<GateActivation>& f, const Direction<T>& d,
               T* gates_t, const bool* active) {
  const int64_t H = shape.H, width = 4 * H;
  add_recurrence(shape.B, shape.H, d.h, d.R, 0, width, gates_t, width);
  for (int64_t b = 0; b < shape.B; ++b) {
    if (!active[b]) continue;
    T *i = gates_t + b * width, *o = i + H, *forget = i + 2 * H, *candidate = i + 3 * H, *c = d.c + b * H, *h = d.fresh + b * H;
    if (d.peephole) {
      for (int64_t k = 0; k < H; ++k) i[k] += d.peephole[k] * c[k], forget[k] += d.peephole[2 * H + k] * c[k];
    }
    clip(s, i, H), clip(s, forget, 2 * H);
    activate(f[0], i, H);
    if (s.input_forget) {
      for (int64_t k = 0; k < H; ++k) forget[k] = T(1) - i[k];
    } else {
      activate(f[0], forget, H);
    }
    activate(f[1], candidate, H);
    for (int64_t k = 0; k < H; ++k) c[k] = forget[k] * c[k] + i[k] * candidate[k];
    if (d.peephole) {
      for (int64_t k = 0; k < H; ++k) o[k] += d.peephole[H + k] * c[k];
    }
    clip(s, o, H);
    activate(f[0], o, H);
    std::copy_n(c, H, h);
    activate(f[2], h, H);
    for (int64_t k = 0; k < H; ++k) h[k] *= o[k];
  }
}

//   z, r = f(x W + h R); h~ = g(x W + (r h) R), or g(x W + r (h R + b)) with linear_before_reset; h = (1 - z) h~ + z h
template <typename T>
void gru_cell(const RecurrentSettings& s, const RecurrentShape& shape, const std::vector<GateActivation>& f, const Direction<T>& d,
              T* gates_t, const bool*) {
  const int64_t H = shape.H, width = 3 * H;
  add_recurrence(shape.B, shape.H, d.h, d.R, 0, 2 * H, gates_t, width);
  if (s.linear_before_reset) add_recurrence(shape.B, shape.H, d.h, d.R, 2 * H, H, d.work, width, T(0));
  for (int64_t b = 0; b < shape.B; ++b) {
    T *z = gates_t + b * width, *reset = z + H, *candidate = z + 2 * H, *linear = d.work + b * width + 2 * H;
    clip(s, z, 2 * H);
    activate(f[0], z, 2 * H);
    for (int64_t k = 0; k < H; ++k) {
      if (s.linear_before_reset)
        candidate[k] += reset[k] * (linear[k] + (d.bias ? d.bias[width + 2 * H + k] : T(0)));
      else
        d.fresh[b * H + k] = reset[k] * d.h[b * H + k];
    }
  }
  if (!s.linear_before_reset) add_recurrence(shape.B, shape.H, d.fresh, d.R, 2 * H, H, gates_t, width);
  for (int64_t b = 0; b < shape.B; ++b) {
    T *z = gates_t + b * width, *candidate = z + 2 * H;
    clip(s, candidate, H);
    activate(f[1], candidate, H);
    for (int64_t k = 0; k < H; ++k) d.fresh[b * H + k] = (T(1) - z[k]) * candidate[k] + z[k] * d.h[b * H + k];
  }
}

//   h = f(x W + h R)
template <typename T>
void rnn_cell(const RecurrentSettings& s, const RecurrentShape& shape, const std::vector<GateActivation>& f, const Direction<T>& d,
              T* gates_t, const bool*) {
  add_recurrence(shape.B, shape.H, d.h, d.R, 0, shape.H, gates_t, shape.H);
  const int64_t n = shape.B * shape.H;
  clip(s, gates_t, n);
  activate(f[0], gates_t, n);
  std::copy_n(gates_t, n, d.fresh);
}

CompiledKernel make_lstm_plain(const CompileContext& c) {
  return {[s = read_recurrent(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() { run_recurrent<T>(r, s, lstm_cell<T>, true); });
  }};
}

CompiledKernel make_gru_plain(const CompileContext& c) {
  return {[s = read_recurrent(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() { run_recurrent<T>(r, s, gru_cell<T>, false); });
  }};
}

CompiledKernel make_rnn_plain(const CompileContext& c) {
  return {[s = read_recurrent(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() { run_recurrent<T>(r, s, rnn_cell<T>, false); });
  }};
}

}  // namespace

void register_recurrent(KernelRegistry& registry) {
  registry.add({.op = "LSTM", .make = any_float<make_lstm_plain>});
  registry.add({.op = "GRU", .make = any_float<make_gru_plain>});
  registry.add({.op = "RNN", .make = any_float<make_rnn_plain>});
}

}  // namespace fretsaw
