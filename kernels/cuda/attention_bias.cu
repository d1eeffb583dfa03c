// Masks, windows and lengths as the one bias that cuDNN's attention takes, and what it does not know: queries that see no key.
#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/attention_masks.cuh"

namespace fretsaw::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// So low that a key counts nothing beside any other, and not so low that sums with it overflow.
template <typename T>
constexpr float kHidden = std::is_same_v<T, __half> ? -65504.0f : -1e30f;

// A warp for each row [bias_row].
template <typename T>
__global__ void bias_kernel(AttentionProblem p, FusedAttentionMasks m, T* bias, int* hidden) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t rows = int64_t{m.bias_batches} * m.bias_heads * p.S;
  for (int64_t row = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32; row < rows; row += int64_t{gridDim.x} * kWarps) {
    const int i = static_cast<int>(row % p.S), h = static_cast<int>(row / p.S % m.bias_heads);
    const int b = static_cast<int>(row / p.S / m.bias_heads);
    const KeyRange keys = keys_of(p, b, i);
    const int64_t mask = mask_row(p, b, h, i);
    bool any = false;
    for (int t = lane; t < m.bias_row; t += 32) {
      const float added = t < p.T ? added_at<T>(p, keys, mask, t) : -INFINITY;
      any = any || added != -INFINITY;
      bias[row * m.bias_row + t] = narrow<T>(added < kHidden<T> ? kHidden<T> : added);
    }
    any = __any_sync(0xffffffffu, any);
    if (lane == 0) hidden[row] = any ? 0 : 1;
  }
}

// A warp for each query.
template <typename T>
__global__ void clear_kernel(AttentionProblem p, FusedAttentionMasks m, const int* hidden) {
  for (int64_t row = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32; row < int64_t{p.B} * p.H * p.S; row += int64_t{gridDim.x} * kWarps) {
    const int i = static_cast<int>(row % p.S), h = static_cast<int>(row / p.S % p.H), b = static_cast<int>(row / p.S / p.H);
    if (!hidden[(int64_t{m.bias_batches == 1 ? 0 : b} * m.bias_heads + (m.bias_heads == 1 ? 0 : h)) * p.S + i]) continue;
    T* y = const_cast<T*>(head_of<T>(p.y, p.y_at, b, h)) + i * p.y_at.row;
    for (int d = static_cast<int>(threadIdx.x) % 32; d < p.V; d += 32) y[d] = narrow<T>(0.0f);
  }
}

}  // namespace

void run_attention_bias(const AttentionProblem& p, const FusedAttentionMasks& m, void* bias, int* hidden, cudaStream_t stream) {
  const unsigned blocks = blocks_for(int64_t{m.bias_batches} * m.bias_heads * p.S, kWarps);
  if (p.type == DType::float16)
    bias_kernel<__half><<<blocks, kThreads, 0, stream>>>(p, m, static_cast<__half*>(bias), hidden);
  else
    bias_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(p, m, static_cast<__nv_bfloat16*>(bias), hidden);
  check_launch("attention bias");
}

void clear_hidden(const AttentionProblem& p, const FusedAttentionMasks& m, const int* hidden, cudaStream_t stream) {
  const unsigned blocks = blocks_for(int64_t{p.B} * p.H * p.S, kWarps, 4);
  if (p.type == DType::float16)
    clear_kernel<__half><<<blocks, kThreads, 0, stream>>>(p, m, hidden);
  else
    clear_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(p, m, hidden);
  check_launch("clear_hidden");
}

}  // namespace fretsaw::cuda
