// Gradients of attention of any sizes. First a block takes one query: its probabilities, their gradients, dQ. Then a block takes one key
// and adds up what all queries say of it, in their order.
#include <algorithm>

#include "kernels/cuda/attention_gradient.h"
#include "kernels/cuda/attention_masks.cuh"
#include "kernels/cuda/block_reduce.cuh"

namespace fretsaw::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int64_t kMostBytes = int64_t{256} << 20;

// Key heads [first, first + count) of all samples, one after another; [count, H / G, S, T] floats each.
struct Part {
  int64_t first = 0, count = 0;
  float *weights = nullptr, *gradients = nullptr;
};

// The sum of the products of two rows, in all lanes of the warp.
template <typename T>
__device__ float dot(const T* a, const T* b, int n) {
  float sum = 0;
  for (int d = static_cast<int>(threadIdx.x) % 32; d < n; d += 32) sum += widen(a[d]) * widen(b[d]);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

// One query among those of a part.
struct Query {
  int b, g, h, i;
};
__device__ inline Query query_of(const AttentionProblem& p, const Part& part, int64_t row) {
  const int shared = p.H / p.G;
  const int64_t group = part.first + row / p.S / shared;
  const int g = static_cast<int>(group % p.G);
  return {static_cast<int>(group / p.G), g, g * shared + static_cast<int>(row / p.S % shared), static_cast<int>(row % p.S)};
}

// weights [T] become the scores, gradients [T] those of the probabilities.
template <typename T>
__device__ void score_keys(const AttentionGradient& a, const Query& at, float* weights, float* gradients) {
  const AttentionProblem& p = a.p;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const T* q = head_of<T>(p.q, p.q_at, at.b, at.h) + at.i * p.q_at.row;
  const T* dy = head_of<T>(a.dy, p.y_at, at.b, at.h) + at.i * p.y_at.row;
  const T *k = head_of<T>(p.k, p.k_at, at.b, at.g), *v = head_of<T>(p.v, p.v_at, at.b, at.g);
  const KeyRange keys = keys_of(p, at.b, at.i);
  const int64_t mask = mask_row(p, at.b, at.h, at.i);
  for (int t = warp; t < p.T; t += kWarps) {
    const float added = p.restricts() ? added_at<T>(p, keys, mask, t) : 0.0f;
    const bool seen = added != -INFINITY;
    const float score = seen ? dot(q, k + t * p.k_at.row, p.D) : 0.0f, gradient = seen ? dot(dy, v + t * p.v_at.row, p.V) : 0.0f;
    if (threadIdx.x % 32 != 0) continue;
    weights[t] = seen ? capped(score * p.scale, p.softcap) + added : -INFINITY;
    gradients[t] = gradient;
  }
  __syncthreads();
}

// weights become probabilities, gradients those of the products of queries and keys.
template <typename T>
__device__ void through_softmax(const AttentionProblem& p, const Query& at, float* weights, float* gradients, float* shared) {
  const int thread = static_cast<int>(threadIdx.x);
  float largest = -INFINITY, sum = 0, mean = 0;
  for (int t = thread; t < p.T; t += kThreads) largest = fmaxf(largest, weights[t]);
  largest = largest_of_block(largest, shared);
  const bool empty = largest == -INFINITY;
  for (int t = thread; t < p.T; t += kThreads) sum += empty ? 0.0f : expf(weights[t] - largest);
  sum = sum_of_block(sum, shared);
  const auto weight = [&](int t) { return empty ? 0.0f : expf(weights[t] - largest) / sum; };
  for (int t = thread; t < p.T; t += kThreads) mean += weight(t) * gradients[t];
  mean = sum_of_block(mean, shared);
  const KeyRange keys = keys_of(p, at.b, at.i);
  const int64_t mask = mask_row(p, at.b, at.h, at.i);
  for (int t = thread; t < p.T; t += kThreads) {
    const float own = weight(t);
    float slope = 1;
    if (p.softcap != 0.0f && own != 0.0f) {
      const float bent = (weights[t] - (p.restricts() ? added_at<T>(p, keys, mask, t) : 0.0f)) / p.softcap;
      slope = 1 - bent * bent;
    }
    gradients[t] = own * (gradients[t] - mean) * slope;
    weights[t] = own;
  }
  __syncthreads();
}

template <typename T>
__global__ void queries_kernel(AttentionGradient a, Part part) {
  __shared__ float shared[kWarps];
  const AttentionProblem& p = a.p;
  const int64_t rows = part.count * (p.H / p.G) * p.S;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const Query at = query_of(p, part, row);
    float *weights = part.weights + row * p.T, *gradients = part.gradients + row * p.T;
    score_keys<T>(a, at, weights, gradients);
    through_softmax<T>(p, at, weights, gradients, shared);
    if (!a.dq) continue;
    const T* k = head_of<T>(p.k, p.k_at, at.b, at.g);
    T* dq = const_cast<T*>(head_of<T>(a.dq, p.q_at, at.b, at.h)) + at.i * p.q_at.row;
    for (int d = static_cast<int>(threadIdx.x); d < p.D; d += kThreads) {
      float sum = 0;
      for (int t = 0; t < p.T; ++t) sum += gradients[t] * widen(k[t * p.k_at.row + d]);
      dq[d] = narrow<T>(sum * p.scale);
    }
  }
}

// The sum over all queries of a key head: factors [queries] at steps of T, times their rows.
template <typename T>
__device__ float over_queries(const AttentionProblem& p, const float* factors, const void* rows, const HeadStrides& at, int b, int g,
                              int d) {
  const int shared = p.H / p.G;
  float sum = 0;
  for (int r = 0; r < shared; ++r) {
    const T* from = head_of<T>(rows, at, b, g * shared + r) + d;
    for (int i = 0; i < p.S; ++i) sum += factors[(int64_t{r} * p.S + i) * p.T] * widen(from[i * at.row]);
  }
  return sum;
}

template <typename T>
__global__ void keys_kernel(AttentionGradient a, Part part) {
  const AttentionProblem& p = a.p;
  for (int64_t row = blockIdx.x; row < part.count * p.T; row += gridDim.x) {
    const int t = static_cast<int>(row % p.T);
    const int64_t group = row / p.T, first = group * (p.H / p.G) * p.S * p.T + t;
    const int b = static_cast<int>((part.first + group) / p.G), g = static_cast<int>((part.first + group) % p.G);
    if (a.dk) {
      T* dk = const_cast<T*>(head_of<T>(a.dk, p.k_at, b, g)) + t * p.k_at.row;
      for (int d = static_cast<int>(threadIdx.x); d < p.D; d += kThreads)
        dk[d] = narrow<T>(p.scale * over_queries<T>(p, part.gradients + first, p.q, p.q_at, b, g, d));
    }
    if (a.dv) {
      T* dv = const_cast<T*>(head_of<T>(a.dv, p.v_at, b, g)) + t * p.v_at.row;
      for (int d = static_cast<int>(threadIdx.x); d < p.V; d += kThreads)
        dv[d] = narrow<T>(over_queries<T>(p, part.weights + first, a.dy, p.y_at, b, g, d));
    }
  }
}

int64_t group_elements(const AttentionProblem& p) {
  return int64_t{p.H / p.G} * p.S * p.T;
}
int64_t groups_at_once(const AttentionProblem& p) {
  const int64_t bytes = std::max<int64_t>(group_elements(p) * 2 * static_cast<int64_t>(sizeof(float)), 1);
  return std::clamp<int64_t>(kMostBytes / bytes, 1, std::max<int64_t>(int64_t{p.B} * p.G, 1));
}

}  // namespace

size_t rows_attention_gradient_bytes(const AttentionProblem& p) {
  return static_cast<size_t>(groups_at_once(p) * group_elements(p)) * 2 * sizeof(float);
}

void run_rows_attention_gradient(const AttentionGradient& gradient, void* scratch, cudaStream_t stream) {
  const AttentionProblem& p = gradient.p;
  const int64_t groups = int64_t{p.B} * p.G, most = groups_at_once(p);
  for (int64_t first = 0; first < groups; first += most) {
    Part part{first, std::min(most, groups - first), static_cast<float*>(scratch)};
    part.gradients = part.weights + part.count * group_elements(p);
    with_float_type(p.type, [&]<typename T>(TypeIs<T>) {
      if constexpr (!std::is_same_v<T, double>) {
        queries_kernel<T><<<blocks_for(part.count * (p.H / p.G) * p.S, 1), kThreads, 0, stream>>>(gradient, part);
        if (gradient.dk || gradient.dv) keys_kernel<T><<<blocks_for(part.count * p.T, 1), kThreads, 0, stream>>>(gradient, part);
      }
    });
    check_launch("attention gradient");
  }
}

}  // namespace fretsaw::cuda
