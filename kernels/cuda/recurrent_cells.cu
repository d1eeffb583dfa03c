// One step of a recurrent cell: the product of the state with R and what follows it, in one launch.
//
// A warp computes one hidden unit for up to kRows samples: its lanes run along the rows of R, which are read once for all samples. The
// sums are folded across lanes always in the same order; then lane b finishes sample b.
#include "kernels/cuda/element_packs.cuh"
#include "kernels/cuda/recurrent.h"
#include "kernels/cuda/recurrent_activations.cuh"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256, kWarp = 32, kUnits = kThreads / kWarp;  // hidden units of a block

// Which rows of R a part multiplies with: kGates blocks of H rows from kFirst on, of kAll.
template <CellPart kPart>
struct Rows {
  static constexpr int kAll = kPart == CellPart::lstm ? 4 : kPart == CellPart::rnn ? 1 : 3;
  static constexpr int kFirst = kPart == CellPart::gru_candidate ? 2 : 0;
  static constexpr int kGates = kPart == CellPart::lstm ? 4 : kPart == CellPart::gru ? 3 : kPart == CellPart::gru_gates ? 2 : 1;
};

// What one sample of one hidden unit needs to finish.
template <typename T, CellPart kPart>
struct Unit {
  using W = WideOf<T>;
  using R = Rows<kPart>;
  const CellStep& s;
  int64_t d, b, j, t;

  __device__ int64_t state() const { return (d * s.B + b) * s.H + j; }
  __device__ W& wide(void* of) const { return static_cast<W*>(of)[state()]; }
  __device__ W clipped(W x) const {
    const W bound = W(s.clip);
    return s.clip <= 0 ? x : x > bound ? bound : x < -bound ? -bound : x;
  }
  __device__ W activated(int which, W x) const { return gate_activation<W>(s.f[d][which], x); }
  // X W^T of a gate, with both biases or only that of W.
  __device__ W projected(int gate, bool both_biases) const {
    const int64_t row = s.batch_first ? b * s.T + t : t * s.B + b, width = R::kAll * s.H;
    W x = static_cast<const W*>(s.projected)[(d * s.T * s.B + row) * width + gate * s.H + j];
    if (!s.bias) return x;
    x += widen(static_cast<const T*>(s.bias)[d * 2 * width + gate * s.H + j]);
    return both_biases ? x + recurrent_bias(gate) : x;
  }
  __device__ W recurrent_bias(int gate) const {
    const int64_t width = R::kAll * s.H;
    return s.bias ? widen(static_cast<const T*>(s.bias)[d * 2 * width + width + gate * s.H + j]) : W(0);
  }
  __device__ W peephole(int gate, W c) const {
    return s.peephole ? widen(static_cast<const T*>(s.peephole)[(d * 3 + gate) * s.H + j]) * c : W(0);
  }
  __device__ bool active() const { return !s.lengths || t < s.lengths[b]; }

  // The state after the step, and the outputs that depend on it.
  __device__ void store(W h) const {
    const W kept = active() ? h : wide(s.h);
    wide(s.next_h) = kept;
    if (s.y) {
      const int64_t at = s.batch_first ? (b * s.T + t) * s.D + d : (t * s.D + d) * s.B + b;
      static_cast<T*>(s.y)[at * s.H + j] = narrow<T>(active() ? h : W(0));
    }
    if (s.t != s.T - 1) return;
    const int64_t last = (s.batch_first ? b * s.D + d : d * s.B + b) * s.H + j;
    if (s.y_h) static_cast<T*>(s.y_h)[last] = narrow<T>(kept);
    if (s.y_c) static_cast<T*>(s.y_c)[last] = narrow<T>(wide(s.c));
  }

  // Gates in the order i, o, f, candidate. The output gate's peephole sees the new cell state.
  __device__ void lstm(const W (&sums)[4]) const {
    const W old = wide(s.c);
    const W i = activated(0, clipped(projected(0, true) + sums[0] + peephole(0, old)));
    const W candidate = activated(1, clipped(projected(3, true) + sums[3]));
    const W forget = s.input_forget ? W(1) - i : activated(0, clipped(projected(2, true) + sums[2] + peephole(2, old)));
    const W c = forget * old + i * candidate;
    const W o = activated(0, clipped(projected(1, true) + sums[1] + peephole(1, c)));
    if (active()) wide(s.c) = c;
    store(o * activated(2, c));
  }
  // Gates in the order z, r, candidate; here r applies to the product with its bias.
  __device__ void gru(const W (&sums)[3]) const {
    const W z = activated(0, clipped(projected(0, true) + sums[0])), r = activated(0, clipped(projected(1, true) + sums[1]));
    const W candidate = activated(1, clipped(projected(2, false) + r * (sums[2] + recurrent_bias(2))));
    store((W(1) - z) * candidate + z * wide(s.h));
  }
  __device__ void gru_gates(const W (&sums)[2]) const {
    wide(s.z) = activated(0, clipped(projected(0, true) + sums[0]));
    wide(s.reset_h) = activated(0, clipped(projected(1, true) + sums[1])) * wide(s.h);
  }
  __device__ void gru_candidate(const W (&sums)[1]) const {
    const W z = wide(s.z), candidate = activated(1, clipped(projected(2, true) + sums[0]));
    store((W(1) - z) * candidate + z * wide(s.h));
  }
  __device__ void rnn(const W (&sums)[1]) const { store(activated(0, clipped(projected(0, true) + sums[0]))); }

  __device__ void finish(const W (&sums)[R::kGates]) const {
    if constexpr (kPart == CellPart::lstm) lstm(sums);
    if constexpr (kPart == CellPart::gru) gru(sums);
    if constexpr (kPart == CellPart::gru_gates) gru_gates(sums);
    if constexpr (kPart == CellPart::gru_candidate) gru_candidate(sums);
    if constexpr (kPart == CellPart::rnn) rnn(sums);
  }
};

// V neighbouring states, 16 bytes at a time where there are as many.
template <typename W, int V>
__device__ inline void load_states(const W* from, W (&to)[V]) {
  constexpr int kPack = V == 1 ? 1 : kPackOf16<W>;
#pragma unroll
  for (int v = 0; v < V; v += kPack) {
    const auto pack = *reinterpret_cast<const Lanes<W, kPack>*>(from + v);
#pragma unroll
    for (int i = 0; i < kPack; ++i) to[v + i] = pack.at[i];
  }
}

// sums[g][b] of this lane: its part of the rows (g, j) of R times the states of samples first + b.
template <typename T, int V, CellPart kPart, int kSamples, typename W>
__device__ void multiply(const CellStep& s, int64_t d, int64_t j, int64_t first, int lane, W (&sums)[Rows<kPart>::kGates][kSamples]) {
  using R = Rows<kPart>;
  const T* rows = static_cast<const T*>(s.R) + ((d * R::kAll + R::kFirst) * s.H + j) * s.H;
  const W* states = static_cast<const W*>(kPart == CellPart::gru_candidate ? s.reset_h : s.h) + (d * s.B + first) * s.H;
  for (int64_t k = int64_t{lane} * V; k < s.H; k += kWarp * V) {
    Lanes<T, V> weights[R::kGates];
#pragma unroll
    for (int g = 0; g < R::kGates; ++g) weights[g] = *reinterpret_cast<const Lanes<T, V>*>(rows + g * s.H * s.H + k);
#pragma unroll
    for (int b = 0; b < kSamples; ++b) {
      if (first + b >= s.B) break;
      W state[V];
      load_states<W, V>(states + b * s.H + k, state);
#pragma unroll
      for (int g = 0; g < R::kGates; ++g) {
#pragma unroll
        for (int v = 0; v < V; ++v) sums[g][b] += state[v] * widen(weights[g].at[v]);
      }
    }
  }
}

// Grid (H / kUnits, B / kSamples, D).
template <typename T, int V, CellPart kPart, int kSamples>
__global__ void __launch_bounds__(kThreads) cell(CellStep s) {
  using W = WideOf<T>;
  constexpr int kGates = Rows<kPart>::kGates;
  const int lane = threadIdx.x % kWarp;
  const int64_t j = blockIdx.x * int64_t{kUnits} + threadIdx.x / kWarp, first = blockIdx.y * int64_t{kSamples}, d = blockIdx.z;
  if (j >= s.H) return;
  W sums[kGates][kSamples] = {};
  multiply<T, V, kPart, kSamples>(s, d, j, first, lane, sums);
  W own[kGates] = {};
#pragma unroll
  for (int b = 0; b < kSamples; ++b) {
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      W sum = sums[g][b];
#pragma unroll
      for (int offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      if (lane == b) own[g] = sum;
    }
  }
  if (lane >= kSamples || first + lane >= s.B) return;
  const bool backwards = d == 1 || s.first_reversed;
  const Unit<T, kPart> unit{s, d, first + lane, j, backwards ? s.T - 1 - s.t : s.t};
  unit.finish(own);
}

template <typename T, int V, CellPart kPart, int kSamples>
void launch(const CellStep& s, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((s.H + kUnits - 1) / kUnits), static_cast<unsigned>((s.B + kSamples - 1) / kSamples),
                  static_cast<unsigned>(s.D));
  cell<T, V, kPart, kSamples><<<grid, kThreads, 0, stream>>>(s);
  check_launch("recurrent cell");
}

template <typename T, CellPart kPart>
void launch_part(const CellStep& s, cudaStream_t stream) {
  constexpr int V = kPackOf16<T>;
  if (s.H % V != 0 || !is_16_byte_aligned(s.R)) return launch<T, 1, kPart, 8>(s, stream);
  if (s.B == 1) return launch<T, V, kPart, 1>(s, stream);
  launch<T, V, kPart, 8>(s, stream);
}

template <typename T>
void launch_type(CellPart part, const CellStep& s, cudaStream_t stream) {
  switch (part) {
    case CellPart::lstm:
      return launch_part<T, CellPart::lstm>(s, stream);
    case CellPart::gru:
      return launch_part<T, CellPart::gru>(s, stream);
    case CellPart::gru_gates:
      return launch_part<T, CellPart::gru_gates>(s, stream);
    case CellPart::gru_candidate:
      return launch_part<T, CellPart::gru_candidate>(s, stream);
    case CellPart::rnn:
      return launch_part<T, CellPart::rnn>(s, stream);
  }
}

template <typename T>
__global__ void load_state(int64_t D, int64_t B, int64_t H, bool batch_first, const T* from, WideOf<T>* to) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < D * B * H; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t j = i % H, b = i / H % B, d = i / H / B;
    to[i] = from ? widen(from[(batch_first ? b * D + d : d * B + b) * H + j]) : WideOf<T>(0);
  }
}

}  // namespace

void start_states(DType dtype, const CellStep& s, const void* initial_h, const void* initial_c, cudaStream_t stream) {
  with_float_type(dtype, [&]<typename Tag>(Tag) {
    using T = typename Tag::type;
    const unsigned blocks = blocks_for(s.D * s.B * s.H, kThreads);
    const auto load = [&](const void* from, void* to) {
      load_state<T>
          <<<blocks, kThreads, 0, stream>>>(s.D, s.B, s.H, s.batch_first, static_cast<const T*>(from), static_cast<WideOf<T>*>(to));
      check_launch("load_state");
    };
    load(initial_h, s.h);
    if (s.c) load(initial_c, s.c);
  });
}

void run_cell(DType dtype, CellPart part, const CellStep& s, cudaStream_t stream) {
  with_float_type(dtype, [&]<typename Tag>(Tag) { launch_type<typename Tag::type>(part, s, stream); });
}

}  // namespace fretsaw::cuda
