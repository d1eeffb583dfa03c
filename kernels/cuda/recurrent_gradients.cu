// Between the products of the recurrent gradients: a thread takes one hidden unit of one sample and direction.
#include "kernels/cuda/element_packs.cuh"
#include "kernels/cuda/recurrent_activations.cuh"
#include "kernels/cuda/recurrent_gradients.h"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256;

template <typename T>
struct Unit {
  using W = WideOf<T>;
  const CellGradient& g;
  int64_t d, b, k;

  __device__ Unit(const CellGradient& g, int64_t i) : g(g), d(i / g.H / g.B), b(i / g.H % g.B), k(i % g.H) {}
  __device__ int64_t time(int64_t step) const { return d == 1 || g.first_reversed ? g.T - 1 - step : step; }
  __device__ bool active(int64_t t) const { return !g.lengths || t < g.lengths[b]; }
  __device__ int64_t rows() const { return g.T * g.B; }
  __device__ int64_t row(int64_t t) const { return g.batch_first ? b * g.T + t : t * g.B + b; }

  // Where things of this unit stand.
  __device__ int64_t in_state() const { return (d * g.B + b) * g.H + k; }
  __device__ int64_t in_operator_state() const { return (g.batch_first ? b * g.D + d : d * g.B + b) * g.H + k; }
  __device__ int64_t in_y(int64_t t) const { return (g.batch_first ? (b * g.T + t) * g.D + d : (t * g.D + d) * g.B + b) * g.H + k; }
  __device__ int64_t in_states(int64_t t) const { return (row(t) * g.D + d) * g.H + k; }
  __device__ int64_t in_gates(int64_t t, int gate) const { return (row(t) * g.D + d) * g.G * g.H + gate * g.H + k; }
  __device__ int64_t in_slopes(int64_t t, int gate) const { return (d * rows() + row(t)) * g.G * g.H + gate * g.H + k; }
  __device__ int64_t in_recurrent(int64_t t, int gate) const { return (d * rows() + row(t)) * g.K * g.H + gate * g.H + k; }
  __device__ int64_t in_step(int gate) const { return (d * g.B + b) * g.K * g.H + gate * g.H + k; }

  __device__ W& gate(int64_t t, int i) const { return static_cast<W*>(g.gates)[in_gates(t, i)]; }
  __device__ W& slope(int64_t t, int i) const { return static_cast<W*>(g.slopes)[in_slopes(t, i)]; }
  __device__ W& c(int64_t t) const { return static_cast<W*>(g.c)[in_states(t)]; }
  __device__ W& linear(int64_t t) const { return static_cast<W*>(g.linear)[in_states(t)]; }
  __device__ W h(int64_t t) const { return widen(static_cast<const T*>(g.h)[in_states(t)]); }
  __device__ W& dh() const { return static_cast<W*>(g.dh)[in_state()]; }
  __device__ W& dc() const { return static_cast<W*>(g.dc)[in_state()]; }
  __device__ W recurrent(int64_t t, int i) const { return static_cast<const W*>(g.recurrent)[in_recurrent(t, i)]; }
  __device__ W recurrent_inner(int64_t t) const { return static_cast<const W*>(g.recurrent_inner)[(d * rows() + row(t)) * g.H + k]; }
  __device__ W bias(int64_t part, int i) const {  // part 0: of W, 1: of R
    return g.bias ? widen(static_cast<const T*>(g.bias)[((2 * d + part) * g.G + i) * g.H + k]) : W(0);
  }
  __device__ W peephole(int i) const { return g.peephole ? widen(static_cast<const T*>(g.peephole)[(d * 3 + i) * g.H + k]) : W(0); }

  // x becomes the activation's result; returns the derivative, which is zero beyond the clip.
  __device__ W activate(int which, W& x, float clip) const {
    const CellActivation& f = g.f[d][which];
    const W bound = W(clip), before = x;
    const bool beyond = clip > 0 && (x < -bound || x > bound);
    if (beyond) x = x < W(0) ? -bound : bound;
    const W bounded = x;
    x = gate_activation<W>(f, bounded);
    return beyond ? W(0) : gate_slope<W>(f, before, x);
  }
  __device__ void set_gate(int64_t t, int i, int which, W x) const {
    slope(t, i) = activate(which, x, g.clip);
    gate(t, i) = x;
  }
  __device__ void end(int64_t t) const {  // of a step behind the sequence
    for (int i = 0; i < g.G; ++i) gate(t, i) = slope(t, i) = W(0);
  }

  // --- forward once more ---

  __device__ void replay_lstm() const {
    W state = g.initial_c ? widen(static_cast<const T*>(g.initial_c)[in_operator_state()]) : W(0);
    for (int64_t step = 0; step < g.T; ++step) {
      const int64_t t = time(step);
      c(t) = active(t) ? state : W(0);
      if (!active(t)) {
        end(t);
        continue;
      }
      const auto taken = [&](int i) { return gate(t, i) + bias(0, i) + bias(1, i) + recurrent(t, i); };
      W in = taken(0) + peephole(0) * state, candidate = taken(3), forget = taken(2) + peephole(2) * state, out = taken(1);
      slope(t, 0) = activate(0, in, g.clip);
      slope(t, 3) = activate(1, candidate, g.clip);
      if (g.input_forget)
        forget = W(1) - in, slope(t, 2) = W(0);  // what flows to the gate flows on to the input's
      else
        slope(t, 2) = activate(0, forget, g.clip);
      state = forget * state + in * candidate;
      out += peephole(1) * state;
      slope(t, 1) = activate(0, out, g.clip);
      gate(t, 0) = in, gate(t, 1) = out, gate(t, 2) = forget, gate(t, 3) = candidate;
    }
  }
  __device__ void replay_gru_gates(int64_t t) const {
    for (int i = 0; i < 2; ++i) set_gate(t, i, 0, gate(t, i) + bias(0, i) + bias(1, i) + recurrent(t, i));
  }
  // The reset gate is applied to the product and its bias.
  __device__ void replay_gru(int64_t t) const {
    if (!active(t)) {
      linear(t) = W(0);
      return end(t);
    }
    replay_gru_gates(t);
    linear(t) = recurrent(t, 2) + bias(1, 2);
    set_gate(t, 2, 1, gate(t, 2) + bias(0, 2) + gate(t, 1) * linear(t));
  }
  // It is applied to the state before the product.
  __device__ void replay_gru_before(int64_t t) const {
    if (active(t)) replay_gru_gates(t);
    static_cast<T*>(g.inner)[in_states(t)] = narrow<T>(active(t) ? gate(t, 1) * h(t) : W(0));
  }
  __device__ void replay_gru_candidate(int64_t t) const {
    if (!active(t)) return end(t);
    set_gate(t, 2, 1, gate(t, 2) + bias(0, 2) + bias(1, 2) + recurrent_inner(t));
  }
  __device__ void replay_rnn(int64_t t) const {
    if (!active(t)) return end(t);
    set_gate(t, 0, 0, gate(t, 0) + bias(0, 0) + bias(1, 0) + recurrent(t, 0));
  }

  // --- backward ---

  __device__ void give(int64_t t, int i, W x) const {
    slope(t, i) = x;
    static_cast<T*>(g.da)[in_gates(t, i)] = narrow<T>(x);
  }
  __device__ void give_to_step(int i, W x) const { static_cast<T*>(g.step_da)[in_step(i)] = narrow<T>(x); }
  __device__ void give_nothing(int64_t t) const {
    for (int i = 0; i < g.G; ++i) give(t, i, W(0));
    for (int i = 0; i < g.K; ++i) give_to_step(i, W(0));
    if (g.inner && g.linear) static_cast<T*>(g.inner)[in_states(t)] = narrow<T>(W(0));
    if (g.step_inner) static_cast<T*>(g.step_inner)[in_state()] = narrow<T>(W(0));
  }
  __device__ W gained(int64_t t) const { return dh() + (g.dy ? widen(static_cast<const T*>(g.dy)[in_y(t)]) : W(0)); }

  //   c = f c_before + i g, h = o s(c): do = dh s(c), dc += dh o s'(c) (and what comes through the peephole of o), df = dc c_before,
  //   di = dc g, dg = dc i
  __device__ void back_lstm(int64_t t) const {
    const W gain = gained(t), before = c(t), in = gate(t, 0), out = gate(t, 1), forget = gate(t, 2), candidate = gate(t, 3);
    W bent = forget * before + in * candidate;
    const W bend = activate(2, bent, 0);
    const W of_out = slope(t, 1) * gain * bent;
    const W of_cell = dc() + gain * out * bend + peephole(1) * of_out;
    const W of_in = slope(t, 0) * of_cell * (g.input_forget ? candidate - before : candidate);
    const W of_forget = slope(t, 2) * of_cell * before, of_candidate = slope(t, 3) * of_cell * in;
    give(t, 0, of_in), give(t, 1, of_out), give(t, 2, of_forget), give(t, 3, of_candidate);
    give_to_step(0, of_in), give_to_step(1, of_out), give_to_step(2, of_forget), give_to_step(3, of_candidate);
    dc() = of_cell * forget + peephole(0) * of_in + peephole(2) * of_forget;
    dh() = W(0);
  }
  //   h = (1 - z) n + z h_before: dn = dh (1 - z), dz = dh (h_before - n)
  __device__ W back_gru_candidate(int64_t t) const {
    const W gain = gained(t), z = gate(t, 0);
    give(t, 0, slope(t, 0) * gain * (h(t) - gate(t, 2)));
    const W of_candidate = slope(t, 2) * gain * (W(1) - z);
    give(t, 2, of_candidate);
    dh() = gain * z;
    return of_candidate;
  }
  __device__ void back_gru(int64_t t) const {
    const W of_candidate = back_gru_candidate(t);
    give(t, 1, slope(t, 1) * of_candidate * linear(t));
    linear(t) = of_candidate * gate(t, 1);
    static_cast<T*>(g.inner)[in_states(t)] = narrow<T>(linear(t));
    give_to_step(0, slope(t, 0)), give_to_step(1, slope(t, 1)), give_to_step(2, linear(t));
  }
  __device__ void back_gru_gates(int64_t t) const {
    const W of_product = static_cast<const W*>(g.through_reset)[in_state()];
    give(t, 1, slope(t, 1) * of_product * h(t));
    dh() += of_product * gate(t, 1);
    give_to_step(0, slope(t, 0)), give_to_step(1, slope(t, 1));
  }
  __device__ void back_rnn(int64_t t) const {
    const W of_sum = slope(t, 0) * gained(t);
    give(t, 0, of_sum), give_to_step(0, of_sum);
    dh() = W(0);
  }
};

__device__ __forceinline__ int64_t first_of_thread() {
  return blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
}

template <typename T>
__global__ void mask_rows(CellGradient g, const T* x, int64_t width, T* to) {
  for (int64_t i = first_of_thread(); i < g.T * g.B * width; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / width, b = g.batch_first ? row / g.T : row % g.B, t = g.batch_first ? row % g.T : row / g.B;
    to[i] = t < g.lengths[b] ? x[i] : narrow<T>(WideOf<T>(0));
  }
}

template <typename T>
__global__ void states_before(CellGradient g) {
  for (int64_t i = first_of_thread(); i < g.T * g.D * g.B * g.H; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t units = g.D * g.B * g.H, step = i / units;
    const Unit<T> unit(g, i % units);
    const int64_t t = unit.time(step), previous = step == 0 ? -1 : unit.time(step - 1);
    T state = narrow<T>(WideOf<T>(0));
    if (unit.active(t)) {
      if (previous >= 0 && unit.active(previous))
        state = static_cast<const T*>(g.y)[unit.in_y(previous)];
      else if (g.initial_h)
        state = static_cast<const T*>(g.initial_h)[unit.in_operator_state()];
    }
    static_cast<T*>(g.h)[unit.in_states(t)] = state;
  }
}

template <typename T, CellPart kPart>
__global__ void __launch_bounds__(kThreads) replay(CellGradient g) {
  const int64_t units = g.D * g.B * g.H, count = kPart == CellPart::lstm ? units : units * g.T;
  for (int64_t i = first_of_thread(); i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const Unit<T> unit(g, i % units);
    if constexpr (kPart == CellPart::lstm) unit.replay_lstm();
    if constexpr (kPart == CellPart::gru) unit.replay_gru(i / units);
    if constexpr (kPart == CellPart::gru_gates) unit.replay_gru_before(i / units);
    if constexpr (kPart == CellPart::gru_candidate) unit.replay_gru_candidate(i / units);
    if constexpr (kPart == CellPart::rnn) unit.replay_rnn(i / units);
  }
}

template <typename T, CellPart kPart>
__global__ void __launch_bounds__(kThreads) back(CellGradient g, int64_t step) {
  for (int64_t i = first_of_thread(); i < g.D * g.B * g.H; i += int64_t{gridDim.x} * blockDim.x) {
    const Unit<T> unit(g, i);
    const int64_t t = unit.time(step);
    if (!unit.active(t)) {
      unit.give_nothing(t);
      continue;
    }
    if constexpr (kPart == CellPart::lstm) unit.back_lstm(t);
    if constexpr (kPart == CellPart::gru) unit.back_gru(t);
    if constexpr (kPart == CellPart::gru_gates) unit.back_gru_gates(t);
    if constexpr (kPart == CellPart::gru_candidate) static_cast<T*>(g.step_inner)[unit.in_state()] = narrow<T>(unit.back_gru_candidate(t));
    if constexpr (kPart == CellPart::rnn) unit.back_rnn(t);
  }
}

// A block takes 32 columns of a direction; its 8 warps share the rows, and are added up in order.
constexpr int kColumns = 32, kWarps = 8;

// The sum over all warps of the column's part, in the first warp.
__device__ inline double join_warps(double sum) {
  __shared__ double parts[kWarps][kColumns];
  __syncthreads();
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  double total = 0;
  for (int w = 0; w < kWarps; ++w) total += parts[w][threadIdx.x];
  return total;
}

template <typename T>
__global__ void __launch_bounds__(kColumns* kWarps) column_sums(ColumnSums s) {
  const int64_t column = blockIdx.x * int64_t{kColumns} + threadIdx.x, d = blockIdx.y;
  double sum = 0;
  if (column < s.columns) {
    const auto* x = static_cast<const WideOf<T>*>(s.x) + d * s.direction_stride + column;
    for (int64_t row = threadIdx.y; row < s.rows; row += kWarps) sum += static_cast<double>(x[row * s.row_stride]);
  }
  const auto total = static_cast<WideOf<T>>(join_warps(sum));
  if (threadIdx.y > 0 || column >= s.columns) return;
  static_cast<T*>(s.to)[d * s.to_stride + column] = narrow<T>(total);
  if (s.again) static_cast<T*>(s.again)[d * s.to_stride + column] = narrow<T>(total);
}

template <typename T>
__global__ void __launch_bounds__(kColumns* kWarps) peephole_sums(CellGradient g, T* to) {
  const int64_t k = blockIdx.x * int64_t{kColumns} + threadIdx.x, d = blockIdx.y;
  double sums[3] = {};
  for (int64_t i = threadIdx.y; k < g.H && i < g.T * g.B; i += kWarps) {
    const Unit<T> unit(g, (d * g.B + i % g.B) * g.H + k);
    const int64_t t = i / g.B;
    const auto before = unit.c(t), after = unit.gate(t, 2) * before + unit.gate(t, 0) * unit.gate(t, 3);
    sums[0] += static_cast<double>(unit.slope(t, 0) * before);
    sums[1] += static_cast<double>(unit.slope(t, 1) * after);
    sums[2] += static_cast<double>(unit.slope(t, 2) * before);
  }
  for (int i = 0; i < 3; ++i) {
    const auto total = static_cast<WideOf<T>>(join_warps(sums[i]));
    if (threadIdx.y == 0 && k < g.H) to[(d * 3 + i) * g.H + k] = narrow<T>(total);
  }
}

template <typename T>
__global__ void store(CellGradient g, const WideOf<T>* states, T* to) {
  for (int64_t i = first_of_thread(); i < g.D * g.B * g.H; i += int64_t{gridDim.x} * blockDim.x)
    to[Unit<T>(g, i).in_operator_state()] = narrow<T>(states[i]);
}

// f(PartIs<kPart>{}) for the part.
template <CellPart kPart>
struct PartIs {
  static constexpr CellPart part = kPart;
};
template <typename F>
void with_part(CellPart part, F&& f) {
  switch (part) {
    case CellPart::lstm:
      return f(PartIs<CellPart::lstm>{});
    case CellPart::gru:
      return f(PartIs<CellPart::gru>{});
    case CellPart::gru_gates:
      return f(PartIs<CellPart::gru_gates>{});
    case CellPart::gru_candidate:
      return f(PartIs<CellPart::gru_candidate>{});
    case CellPart::rnn:
      return f(PartIs<CellPart::rnn>{});
  }
}
dim3 column_blocks(int64_t columns, int64_t directions) {
  return {static_cast<unsigned>((columns + kColumns - 1) / kColumns), static_cast<unsigned>(directions)};
}

}  // namespace

void mask_ended_rows(DType dtype, const CellGradient& g, const void* x, int64_t width, void* to, cudaStream_t stream) {
  with_float_type(dtype, [&]<typename Tag>(Tag) {
    using T = typename Tag::type;
    mask_rows<T><<<blocks_for(g.rows() * width, kThreads), kThreads, 0, stream>>>(g, static_cast<const T*>(x), width, static_cast<T*>(to));
    check_launch("mask_rows");
  });
}

void find_states_before(DType dtype, const CellGradient& g, cudaStream_t stream) {
  with_float_type(dtype, [&]<typename Tag>(Tag) {
    states_before<typename Tag::type><<<blocks_for(g.rows() * g.D * g.H, kThreads), kThreads, 0, stream>>>(g);
    check_launch("states_before");
  });
}

void replay_cells(DType dtype, CellPart part, const CellGradient& g, cudaStream_t stream) {
  with_float_type(dtype, [&]<typename Tag>(Tag) {
    with_part(part, [&]<typename Part>(Part) {
      const int64_t count = g.D * g.B * g.H * (part == CellPart::lstm ? 1 : g.T);
      replay<typename Tag::type, Part::part><<<blocks_for(count, kThreads), kThreads, 0, stream>>>(g);
      check_launch("replay");
    });
  });
}

void step_back(DType dtype, CellPart part, const CellGradient& g, int64_t step, cudaStream_t stream) {
  with_float_type(dtype, [&]<typename Tag>(Tag) {
    with_part(part, [&]<typename Part>(Part) {
      back<typename Tag::type, Part::part><<<blocks_for(g.D * g.B * g.H, kThreads), kThreads, 0, stream>>>(g, step);
      check_launch("back");
    });
  });
}

void sum_columns(DType dtype, const ColumnSums& sums, cudaStream_t stream) {
  with_float_type(dtype, [&]<typename Tag>(Tag) {
    column_sums<typename Tag::type><<<column_blocks(sums.columns, sums.D), dim3(kColumns, kWarps), 0, stream>>>(sums);
    check_launch("column_sums");
  });
}

void sum_peepholes(DType dtype, const CellGradient& g, void* to, cudaStream_t stream) {
  with_float_type(dtype, [&]<typename Tag>(Tag) {
    using T = typename Tag::type;
    peephole_sums<T><<<column_blocks(g.H, g.D), dim3(kColumns, kWarps), 0, stream>>>(g, static_cast<T*>(to));
    check_launch("peephole_sums");
  });
}

void store_states(DType dtype, const CellGradient& g, const void* states, void* to, cudaStream_t stream) {
  with_float_type(dtype, [&]<typename Tag>(Tag) {
    using T = typename Tag::type;
    store<T><<<blocks_for(g.D * g.B * g.H, kThreads), kThreads, 0, stream>>>(g, static_cast<const WideOf<T>*>(states), static_cast<T*>(to));
    check_launch("store");
  });
}

}  // namespace fretsaw::cuda
