// Which keys a query sees, and what a mask adds to its scores.
#pragma once
#include "kernels/cuda/attention.h"
#include "kernels/cuda/product_types.cuh"

namespace fretsaw::cuda {

// Keys [first, last) that windows, lengths and causality leave to query `i` of sample `b`.
struct KeyRange {
  int first, last;
};
__device__ inline KeyRange keys_of(const AttentionProblem& p, int b, int i) {
  const int64_t valid = p.valid ? min(max(p.valid[b], int64_t{0}), int64_t{p.T}) : p.T;
  const int64_t position = i + (p.past > 0 || !p.valid ? p.past : valid - p.S);
  int64_t first = 0, last = valid;
  if (p.causal) last = min(last, position + 1);
  if (p.left >= 0) first = max(first, position - p.left);
  if (p.right >= 0) last = min(last, position + p.right + 1);
  return {static_cast<int>(min(first, int64_t{p.T})), static_cast<int>(max(last, int64_t{0}))};
}

// What the mask alone adds for key `t`; -infinity where it hides it.
template <typename T>
__device__ inline float mask_at(const AttentionProblem& p, int64_t row, int t) {
  if (p.mask_kind == MaskKind::none) return 0.0f;
  if (t >= p.mask_width && !p.mask_spread) return -INFINITY;
  const int64_t at = row + (p.mask_spread ? 0 : t);
  if (p.mask_kind == MaskKind::boolean) return static_cast<const bool*>(p.mask)[at] ? 0.0f : -INFINITY;
  return widen(static_cast<const T*>(p.mask)[at]);
}
__device__ inline int64_t mask_row(const AttentionProblem& p, int b, int h, int i) {
  return b * p.mask_batch + h * p.mask_head + i * p.mask_row;
}

// All of it for one score.
template <typename T>
__device__ inline float added_at(const AttentionProblem& p, const KeyRange& keys, int64_t row, int t) {
  return t >= keys.first && t < keys.last ? mask_at<T>(p, row, t) : -INFINITY;
}

__device__ inline float capped(float score, float softcap) {
  return softcap == 0.0f ? score : softcap * tanhf(score / softcap);
}

template <typename T>
__device__ inline const T* head_of(const void* base, const HeadStrides& at, int b, int h) {
  return static_cast<const T*>(base) + b * at.batch + h * at.head;
}

}  // namespace fretsaw::cuda
