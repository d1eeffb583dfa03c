// What the files of the attention family share: one attention problem on the device, and the ways to compute it.
//
//   Y [B, H, S, V] = softmax(scale * Q [B, H, S, D] K' [B, G, T, D] + masks) V [B, G, T, V];  query head h attends to key head h / (H / G)
#pragma once
#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

// Elements from sample to sample, head to head and row to row; a row's elements are neighbours.
struct HeadStrides {
  int64_t batch = 0, head = 0, row = 0;
};

enum class MaskKind : uint8_t { none, boolean, added };

struct AttentionProblem {
  DType type = DType::float32;
  int B = 0, H = 0, G = 0, S = 0, T = 0, D = 0, V = 0;
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  void* y = nullptr;
  HeadStrides q_at, k_at, v_at, y_at;
  float scale = 1, softcap = 0;
  // Key t is seen by query i where position - left <= t <= position + right (both unbounded when negative), with position = i + offset;
  // `causal` is a right of 0. The offset is `past`, or, without one, valid[b] - S; keys from valid[b] on are not seen.
  bool causal = false;
  int64_t left = -1, right = -1, past = 0;
  const int64_t* valid = nullptr;  // [B] of nonpad_kv_seqlen
  MaskKind mask_kind = MaskKind::none;
  const void* mask = nullptr;  // of q's type when it is added
  int64_t mask_batch = 0, mask_head = 0, mask_row = 0;
  int mask_width = 0;        // columns of the mask: keys beyond it are not seen
  bool mask_spread = false;  // its one column serves all keys
  void* scores = nullptr;    // qk_matmul_output [B, H, S, T], in q's type
  int scores_mode = 0;

  constexpr bool restricts() const { return causal || left >= 0 || right >= 0 || valid || mask_kind != MaskKind::none; }
};

// Any sizes; one block for each query, all scores in memory. Takes scratch memory.
size_t rows_attention_bytes(const AttentionProblem& p, int multiprocessors);
void run_rows_attention(const AttentionProblem& p, void* scratch, int multiprocessors, cudaStream_t stream);

// Tiles of queries and keys in shared memory: heads of up to 256, no scores wanted.
bool takes_tiled_attention(const AttentionProblem& p);
void run_tiled_attention(const AttentionProblem& p, cudaStream_t stream);

// Few queries and many keys: keys are split over blocks whose results a second pass joins. Takes scratch memory.
bool takes_decode_attention(const AttentionProblem& p);
size_t decode_attention_bytes(const AttentionProblem& p, int multiprocessors);
void run_decode_attention(const AttentionProblem& p, void* scratch, int multiprocessors, cudaStream_t stream);

// to [B, G, P + S, D] dense = past [B, G, P, D] dense, then `fresh`. Elements of `element` bytes.
struct JoinedCache {
  int B = 0, G = 0, P = 0, S = 0, D = 0;
  const void *past = nullptr, *fresh = nullptr;
  HeadStrides fresh_at;
  void* to = nullptr;
};
void join_cache(const JoinedCache& cache, size_t element, cudaStream_t stream);

}  // namespace fretsaw::cuda
