// Collectives among the GPUs of one process that reach each other's memory, without a library's protocol in between. Sums add the ranks in
// the order 0, 1, 2, ..., in float32, so that all ranks get the same bits.
//
// - A small sum: each 8 bytes travel as two words with a flag beside each, into a buffer of every other rank. One crossing of the link, no
//   fences.
// - A small sum with the addition and the norm that follow it: the same, a block for each row.
// - Exchanges of pieces: each block tells the same block of the other ranks where its tensor lies, then reads their tensors (a sum) or
//   writes to them (a gather), and in the end waits until they are done too.
#pragma once
#include <vector>

#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

inline constexpr int kMostPeers = 8;

// What a rank's kernels work with. Pointers are to the memory of all ranks, in their own order, zeros at first: each rank has
// `peer_memory_bytes`. `stop` lies in host memory: once it is not 0, kernels end without a result.
struct PeerGroup {
  int rank = 0, ranks = 0;
  char* memory[kMostPeers] = {};
  const uint32_t* stop = nullptr;
};
size_t peer_memory_bytes(int ranks);

// Whether they are among those that are done here. Sums: of float32, float16 and bfloat16. All: whole packs of 16 bytes at addresses that
// are multiples of 16 (of 8 for a small sum). `bytes` are those of `in`.
bool takes_small_sum(int ranks, size_t bytes, DType dtype, const void* in, const void* out);
// [rows, n], all addresses multiples of 8.
bool takes_small_sum_norm(int ranks, int64_t rows, int64_t n, DType dtype);
bool takes_reduce_scatter(int ranks, size_t bytes, DType dtype, const void* in, const void* out);
bool takes_all_gather(size_t bytes, const void* in, const void* out);

// sum = the ranks' sum of `in` + residual; y = sum / sqrt(mean of a row's squares + epsilon) * scale. The ranks' sum, `sum` and y are
// rounded to the type, as by steps of their own; everything else is float32. RMSNormalization: arXiv 1910.07467.
struct SumNorm {
  int64_t rows = 0, n = 0;
  DType dtype = DType::float32;
  float epsilon = 0;
  const void *in = nullptr, *residual = nullptr;  // [rows, n]
  const void* scale = nullptr;                    // [n], there since before the step
  void* sum = nullptr;                            // [rows, n], or null where nobody asks for it; may be `in`
  void* y = nullptr;                              // [rows, n]; may be `in`
};

// Each rank calls with the same sizes in the same order; where one runs small_sum, another may run small_sum_norm. `in` and `out` may be
// the same memory, and for all_gather `in` the rank's own place in `out`.
void run_small_sum(const PeerGroup& group, const void* in, void* out, size_t bytes, DType dtype, cudaStream_t stream);
void run_small_sum_norm(const PeerGroup& group, const SumNorm& sum, cudaStream_t stream);
void run_reduce_scatter(const PeerGroup& group, const void* in, void* out, size_t bytes, DType dtype, cudaStream_t stream);
void run_all_gather(const PeerGroup& group, const void* in, void* out, size_t bytes, cudaStream_t stream);

// Lets the calling thread's device reach these devices' memory; false where one of them is out of its reach.
bool reach_peers(int device, const std::vector<int>& peers);

}  // namespace fretsaw::cuda
