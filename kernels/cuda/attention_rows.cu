// Attention of any sizes: a block takes one query, with all its scores in memory. Also writes the scores where they are asked for.
#include <algorithm>

#include "kernels/cuda/attention_masks.cuh"
#include "kernels/cuda/block_reduce.cuh"

namespace fretsaw::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <typename T>
__device__ void show(const AttentionProblem& p, int mode, int64_t row, int t, float score) {
  if (p.scores && p.scores_mode == mode) static_cast<T*>(p.scores)[row * p.T + t] = narrow<T>(score);
}

// scores [T] of query `i`; true when masks leave it no key.
template <typename T>
__device__ bool score_keys(const AttentionProblem& p, int b, int h, int i, float* scores) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32, g = h / (p.H / p.G);
  const T* q = head_of<T>(p.q, p.q_at, b, h) + i * p.q_at.row;
  const T* k = head_of<T>(p.k, p.k_at, b, g);
  const int64_t row = (int64_t{b} * p.H + h) * p.S + i, mask = mask_row(p, b, h, i);
  const KeyRange keys = keys_of(p, b, i);
  bool any = false;
  for (int t = warp; t < p.T; t += kWarps) {
    float sum = 0;
    for (int d = lane; d < p.D; d += 32) sum += widen(q[d]) * widen(k[t * p.k_at.row + d]);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    const float raw = sum * p.scale, soft = capped(raw, p.softcap);
    const float added = p.restricts() ? added_at<T>(p, keys, mask, t) : 0.0f;
    const float score = added == -INFINITY ? -INFINITY : soft + added;
    any = any || added != -INFINITY;
    if (lane == 0) {
      scores[t] = score;
      show<T>(p, 0, row, t, raw), show<T>(p, 1, row, t, soft), show<T>(p, 2, row, t, score);
    }
  }
  return __syncthreads_or(any) == 0;
}

template <typename T>
__device__ void weigh_keys(const AttentionProblem& p, int64_t row, bool empty, float* scores, float* shared) {
  float largest = -INFINITY, sum = 0;
  for (int t = static_cast<int>(threadIdx.x); t < p.T; t += kThreads) largest = fmaxf(largest, scores[t]);
  largest = largest_of_block(largest, shared);
  for (int t = static_cast<int>(threadIdx.x); t < p.T; t += kThreads) sum += scores[t] = empty ? 0.0f : expf(scores[t] - largest);
  sum = sum_of_block(sum, shared);
  for (int t = static_cast<int>(threadIdx.x); t < p.T; t += kThreads) {
    const float weight = empty ? 0.0f : scores[t] / sum;
    scores[t] = weight;
    show<T>(p, 3, row, t, weight);
  }
}

// `buffers` [blocks, T].
template <typename T>
__global__ void rows_kernel(AttentionProblem p, float* buffers) {
  __shared__ float shared[kWarps];
  float* scores = buffers + int64_t{blockIdx.x} * p.T;
  for (int64_t row = blockIdx.x; row < int64_t{p.B} * p.H * p.S; row += gridDim.x) {
    const int i = static_cast<int>(row % p.S), h = static_cast<int>(row / p.S % p.H), b = static_cast<int>(row / p.S / p.H);
    const bool empty = score_keys<T>(p, b, h, i, scores);
    weigh_keys<T>(p, row, empty, scores, shared);
    __syncthreads();
    const T* v = head_of<T>(p.v, p.v_at, b, h / (p.H / p.G));
    T* y = const_cast<T*>(head_of<T>(p.y, p.y_at, b, h)) + i * p.y_at.row;
    for (int d = static_cast<int>(threadIdx.x); d < p.V; d += kThreads) {
      float sum = 0;
      for (int t = 0; t < p.T; ++t) sum += scores[t] * widen(v[t * p.v_at.row + d]);
      y[d] = narrow<T>(sum);
    }
    __syncthreads();
  }
}

int64_t blocks_of(const AttentionProblem& p, int multiprocessors) {
  return std::min<int64_t>(int64_t{p.B} * p.H * p.S, 8 * multiprocessors);
}

}  // namespace

size_t rows_attention_bytes(const AttentionProblem& p, int multiprocessors) {
  return static_cast<size_t>(blocks_of(p, multiprocessors) * std::max(p.T, 1)) * sizeof(float);
}

void run_rows_attention(const AttentionProblem& p, void* scratch, int multiprocessors, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(blocks_of(p, multiprocessors));
  if (blocks == 0) return;
  with_float_type(p.type, [&]<typename T>(TypeIs<T>) {
    if constexpr (!std::is_same_v<T, double>) rows_kernel<T><<<blocks, kThreads, 0, stream>>>(p, static_cast<float*>(scratch));
  });
  check_launch("rows_kernel");
}

}  // namespace fretsaw::cuda
