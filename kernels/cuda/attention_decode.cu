// Attention of few queries over many keys, bound by reading keys and values: each is read once for all queries that share it, with
// 16-byte loads; keys are split over blocks, whose results a second pass joins in a fixed order.
#include <algorithm>

#include "kernels/cuda/attention_masks.cuh"
#include "kernels/cuda/dependent_launch.cuh"

namespace fretsaw::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kLanes = 8;                   // that share a key
constexpr int kGroups = kThreads / kLanes;  // keys that a block takes side by side
constexpr int kInFlight = 2;                // keys of a group at a time
constexpr int kStep = kGroups * kInFlight;  // keys of a block at a time
constexpr int kPartExtra = 2;               // a part is [V] sums, then the maximum and the total

// Queries of one key head are its `rows`: query head first, then position. A block takes `Rows` of them.
struct Split {
  int rows, row_groups, splits, keys;  // keys of one split
};

template <typename T, int Depth, int Rows>
struct State {
  static constexpr int pack = Bits16<T>::size, packs = Depth / (kLanes * pack), elements = packs * pack;
  float sums[Rows][elements] = {}, largest[Rows], total[Rows];
};

// Element `e` of lane `lane` of a head.
template <typename T>
__device__ constexpr int element_of(int lane, int e) {
  constexpr int V = Bits16<T>::size;
  return e / V * kLanes * V + lane * V + e % V;
}

template <typename T, int Packs>
__device__ void load_head(Bits16<T> (&to)[Packs], const T* from, int lane, int width) {
#pragma unroll
  for (int c = 0; c < Packs; ++c) {
    const int d = element_of<T>(lane, c * Bits16<T>::size);
    if (d < width) to[c] = load_bits_once(from + d);
  }
}

struct RowOf {
  int h, i;
};
__device__ inline RowOf row_of(const AttentionProblem& p, int g, int row) {
  return {g * (p.H / p.G) + row / p.S, row % p.S};
}

// Takes kInFlight keys from `t` on, kGroups apart, into the state of this group.
template <typename T, int Depth, int Rows>
__device__ void take_keys(const AttentionProblem& p, const float (&q)[Rows][State<T, Depth, Rows>::elements],
                          const KeyRange (&ranges)[Rows], const int64_t (&masks)[Rows], const T* keys, const T* values, int t, int end,
                          int lane, State<T, Depth, Rows>& state) {
  using S = State<T, Depth, Rows>;
  Bits16<T> key[kInFlight][S::packs], value[kInFlight][S::packs];
#pragma unroll
  for (int u = 0; u < kInFlight; ++u) {
    const int at = t + u * kGroups;
    if (at < end) {
      load_head<T, S::packs>(key[u], keys + at * p.k_at.row, lane, p.D);
      load_head<T, S::packs>(value[u], values + at * p.v_at.row, lane, p.V);
    }
  }
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    float scores[kInFlight], now = state.largest[r];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      float sum = 0;
#pragma unroll
      for (int e = 0; e < S::elements; ++e) sum += q[r][e] * key[u][e / S::pack].at(e % S::pack);
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      const int at = t + u * kGroups;
      const float added = at < end ? added_at<T>(p, ranges[r], masks[r], at) : -INFINITY;
      scores[u] = added == -INFINITY ? -INFINITY : capped(sum * p.scale, p.softcap) + added;
      now = fmaxf(now, scores[u]);
    }
    const float base = now == -INFINITY ? 0.0f : now, fade = expf(state.largest[r] - base);
    state.largest[r] = now, state.total[r] *= fade;
#pragma unroll
    for (int e = 0; e < S::elements; ++e) state.sums[r][e] *= fade;
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const float weight = expf(scores[u] - base);
      state.total[r] += weight;
#pragma unroll
      for (int e = 0; e < S::elements; ++e) state.sums[r][e] += weight * value[u][e / S::pack].at(e % S::pack);
    }
  }
}

// Joins the groups of a warp: afterwards all of its lanes have the warp's state.
template <typename T, int Depth, int Rows>
__device__ void join_groups(State<T, Depth, Rows>& state) {
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    float now = state.largest[r];
    for (int step = kLanes; step < 32; step *= 2) now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, step));
    const float factor = expf(state.largest[r] - (now == -INFINITY ? 0.0f : now));
    state.largest[r] = now, state.total[r] *= factor;
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) state.total[r] += __shfl_xor_sync(0xffffffffu, state.total[r], step);
#pragma unroll
    for (int e = 0; e < State<T, Depth, Rows>::elements; ++e) {
      state.sums[r][e] *= factor;
#pragma unroll
      for (int step = kLanes; step < 32; step *= 2) state.sums[r][e] += __shfl_xor_sync(0xffffffffu, state.sums[r][e], step);
    }
  }
}

template <typename T, int Depth, int Rows>
__global__ void __launch_bounds__(kThreads) decode_kernel(AttentionProblem p, Split split, float* parts) {
  using S = State<T, Depth, Rows>;
  __shared__ float warp_sums[kWarps][Rows][Depth], warp_largest[kWarps][Rows], warp_total[kWarps][Rows];
  const int part = static_cast<int>(blockIdx.x % split.splits);
  const int64_t rest = blockIdx.x / split.splits;
  const int row0 = static_cast<int>(rest % split.row_groups) * Rows, g = static_cast<int>(rest / split.row_groups % p.G);
  const int b = static_cast<int>(rest / split.row_groups / p.G);
  const int lane = static_cast<int>(threadIdx.x) % kLanes, group = static_cast<int>(threadIdx.x) / kLanes;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  S state;
  let_later_begin();
  wait_for_earlier();
  float q[Rows][S::elements];
  KeyRange ranges[Rows];
  int64_t masks[Rows];
  int begin = p.T, end = 0;
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    const RowOf at = row_of(p, g, min(row0 + r, split.rows - 1));
    const T* from = head_of<T>(p.q, p.q_at, b, at.h) + at.i * p.q_at.row;
    ranges[r] = keys_of(p, b, at.i), masks[r] = mask_row(p, b, at.h, at.i);
    state.largest[r] = -INFINITY, state.total[r] = 0;
    begin = min(begin, ranges[r].first), end = max(end, ranges[r].last);
#pragma unroll
    for (int e = 0; e < S::elements; ++e) q[r][e] = element_of<T>(lane, e) < p.D ? widen(from[element_of<T>(lane, e)]) : 0.0f;
  }
  begin = max(begin / kStep * kStep, part * split.keys), end = min(end, min((part + 1) * split.keys, p.T));
  const T *keys = head_of<T>(p.k, p.k_at, b, g), *values = head_of<T>(p.v, p.v_at, b, g);
  for (int t = begin; t < end; t += kStep) take_keys<T, Depth, Rows>(p, q, ranges, masks, keys, values, t + group, end, lane, state);
  join_groups<T, Depth, Rows>(state);
  if (static_cast<int>(threadIdx.x) % 32 < kLanes) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      warp_largest[warp][r] = state.largest[r], warp_total[warp][r] = state.total[r];
#pragma unroll
      for (int e = 0; e < S::elements; ++e) warp_sums[warp][r][element_of<T>(lane, e)] = state.sums[r][e];
    }
  }
  __syncthreads();
  for (int r = 0; r < Rows && row0 + r < split.rows; ++r) {
    float largest = -INFINITY, total = 0, factors[kWarps];
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, warp_largest[w][r]);
    for (int w = 0; w < kWarps; ++w) {
      factors[w] = expf(warp_largest[w][r] - (largest == -INFINITY ? 0.0f : largest));
      total += factors[w] * warp_total[w][r];
    }
    const RowOf at = row_of(p, g, row0 + r);
    float* to = parts + (((int64_t{b} * p.H + at.h) * p.S + at.i) * split.splits + part) * (p.V + kPartExtra);
    T* y = const_cast<T*>(head_of<T>(p.y, p.y_at, b, at.h)) + at.i * p.y_at.row;
    for (int d = static_cast<int>(threadIdx.x); d < p.V; d += kThreads) {
      float sum = 0;
      for (int w = 0; w < kWarps; ++w) sum += factors[w] * warp_sums[w][r][d];
      if (split.splits == 1)
        y[d] = narrow<T>(total == 0.0f ? 0.0f : sum / total);
      else
        to[d] = sum;
    }
    if (split.splits > 1 && threadIdx.x == 0) to[p.V] = largest, to[p.V + 1] = total;
  }
}

// A block joins the parts of one query.
template <typename T>
__global__ void join_parts(AttentionProblem p, int splits, const float* parts) {
  const int64_t row = blockIdx.x;
  const int i = static_cast<int>(row % p.S), h = static_cast<int>(row / p.S % p.H), b = static_cast<int>(row / p.S / p.H);
  const int line = p.V + kPartExtra;
  let_later_begin();
  wait_for_earlier();
  parts += row * splits * line;
  float largest = -INFINITY, total = 0;
  for (int s = 0; s < splits; ++s) largest = fmaxf(largest, parts[s * line + p.V]);
  const float base = largest == -INFINITY ? 0.0f : largest;
  for (int s = 0; s < splits; ++s) total += expf(parts[s * line + p.V] - base) * parts[s * line + p.V + 1];
  T* y = const_cast<T*>(head_of<T>(p.y, p.y_at, b, h)) + i * p.y_at.row;
  for (int d = static_cast<int>(threadIdx.x); d < p.V; d += static_cast<int>(blockDim.x)) {
    float sum = 0;
    for (int s = 0; s < splits; ++s) sum += expf(parts[s * line + p.V] - base) * parts[s * line + d];
    y[d] = narrow<T>(total == 0.0f ? 0.0f : sum / total);
  }
}

int depth_of(const AttentionProblem& p) {
  const int depth = std::max(p.D, p.V);
  return depth <= 64 ? 64 : depth <= 128 ? 128 : 256;
}

Split split_of(const AttentionProblem& p, int multiprocessors) {
  Split s;
  s.rows = p.H / p.G * p.S;
  const int at_once = s.rows == 1 ? 1 : depth_of(p) == 256 || s.rows == 2 ? 2 : 4;
  s.row_groups = (s.rows + at_once - 1) / at_once;
  const int64_t blocks = std::max<int64_t>(int64_t{p.B} * p.G * s.row_groups, 1);
  const int64_t wanted = (4 * multiprocessors + blocks - 1) / blocks, most = std::clamp(p.T / (4 * kStep), 1, 64);
  s.splits = static_cast<int>(std::clamp<int64_t>(wanted, 1, most));
  s.keys = ((p.T + s.splits - 1) / s.splits + kStep - 1) / kStep * kStep;
  s.splits = (p.T + s.keys - 1) / s.keys;
  return s;
}

template <typename T, int Depth>
void launch(const AttentionProblem& p, const Split& s, float* parts, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(int64_t{p.B} * p.G * s.row_groups * s.splits);
  if (s.rows == 1)
    launch_dependent(decode_kernel<T, Depth, 1>, blocks, kThreads, stream, p, s, parts);
  else if (Depth == 256 || s.rows == 2)
    launch_dependent(decode_kernel<T, Depth, 2>, blocks, kThreads, stream, p, s, parts);
  else
    launch_dependent(decode_kernel < T, Depth, Depth == 256 ? 2 : 4 >, blocks, kThreads, stream, p, s, parts);
  if (s.splits == 1) return;
  launch_dependent(join_parts<T>, static_cast<unsigned>(int64_t{p.B} * p.H * p.S), 128, stream, p, s.splits, parts);
}

}  // namespace

bool takes_decode_attention(const AttentionProblem& p) {
  const int pack = p.type == DType::float32 ? 4 : 8;
  if (p.S < 1 || p.S > 4 || p.T < 1 || p.scores || std::max(p.D, p.V) > 256 || p.D % pack || p.V % pack) return false;
  if (p.k_at.batch % pack || p.k_at.head % pack || p.k_at.row % pack) return false;
  if (p.v_at.batch % pack || p.v_at.head % pack || p.v_at.row % pack) return false;
  return is_16_byte_aligned(p.k) && is_16_byte_aligned(p.v) && int64_t{p.B} * p.H * p.S * 64 <= INT32_MAX;
}

size_t decode_attention_bytes(const AttentionProblem& p, int multiprocessors) {
  const Split s = split_of(p, multiprocessors);
  return s.splits == 1 ? 0 : sizeof(float) * static_cast<size_t>(int64_t{p.B} * p.H * p.S * s.splits * (p.V + kPartExtra));
}

void run_decode_attention(const AttentionProblem& p, void* scratch, int multiprocessors, cudaStream_t stream) {
  if (int64_t{p.B} * p.H * p.S == 0) return;
  const Split s = split_of(p, multiprocessors);
  with_float_type(p.type, [&]<typename T>(TypeIs<T>) {
    if constexpr (!std::is_same_v<T, double>) {
      const int depth = depth_of(p);
      if (depth == 64) return launch<T, 64>(p, s, static_cast<float*>(scratch), stream);
      if (depth == 128) return launch<T, 128>(p, s, static_cast<float*>(scratch), stream);
      launch<T, 256>(p, s, static_cast<float*>(scratch), stream);
    }
  });
}

}  // namespace fretsaw::cuda
