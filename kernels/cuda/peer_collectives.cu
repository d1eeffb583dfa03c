// Collectives through peer memory.
#include <algorithm>
#include <cstring>

#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/element_packs.cuh"
#include "kernels/cuda/peer_collectives.h"

namespace fretsaw::cuda {
namespace {

constexpr uint32_t kSpins = 2048;  // between looks at `stop`

// Small sums: blocks with places of their own, of which a sum uses as many as it needs.
constexpr int kSmallThreads = 256, kSmallBlocks = 32, kMostOfThread = 4;  // words of 8 bytes of a thread
constexpr int kOfSmallBlock = kSmallThreads * kMostOfThread;
constexpr size_t kMostSmallBytes = size_t{kSmallBlocks} * kOfSmallBlock * 8;

// Exchanges: all blocks take part in each.
constexpr int kThreads = 512, kBlocks = 128, kInFlight = 4;

// A rank's memory: rounds of each block, flags and posts of exchanges [from rank][block], places of small sums.
//
// A small sum has places for two rounds. That is enough: a rank that writes in round n + 2 has finished n + 1, for which it needed what the
// others sent when they had finished n. An exchange needs one: a rank ends a round when it knows that the others have read its post.
struct Places {
  size_t small_rounds = 0, rounds, flags, posts, small_words, end;

  __host__ __device__ explicit Places(int ranks) {
    const auto n = static_cast<size_t>(ranks);
    rounds = small_rounds + kSmallBlocks * sizeof(uint32_t), flags = rounds + kBlocks * sizeof(uint32_t);
    posts = flags + n * kBlocks * sizeof(uint32_t), small_words = posts + n * kBlocks * sizeof(uint4);
    end = small_words + 2 * n * kSmallBlocks * kOfSmallBlock * sizeof(uint4);
  }
  __device__ size_t small_word(int ranks, uint32_t round, int from, int block) const {
    const auto place = (static_cast<size_t>(round % 2) * static_cast<size_t>(ranks) + static_cast<size_t>(from)) * kSmallBlocks;
    return small_words + (place + static_cast<size_t>(block)) * kOfSmallBlock * sizeof(uint4);
  }
};
static_assert(kSmallBlocks % 4 == 0 && kBlocks % 4 == 0);  // all places begin at multiples of 16

__device__ inline bool stopped(const PeerGroup& group, uint32_t spins) {
  return spins % kSpins == 0 && *static_cast<const volatile uint32_t*>(group.stop) != 0;
}

// This block's next round, the same for all its threads.
__device__ inline uint32_t next_round(uint32_t* rounds) {
  const uint32_t round = rounds[blockIdx.x] + 1;
  __syncthreads();
  if (threadIdx.x == 0) rounds[blockIdx.x] = round;
  return round;
}

template <typename T, typename Word>
__device__ inline void add(float (&sums)[sizeof(Word) / sizeof(T)], Word word) {
  T elements[sizeof(Word) / sizeof(T)];
  memcpy(elements, &word, sizeof word);
#pragma unroll
  for (size_t i = 0; i < sizeof(Word) / sizeof(T); ++i) sums[i] += widen(elements[i]);
}
template <typename T, typename Word>
__device__ inline Word narrowed(const float (&sums)[sizeof(Word) / sizeof(T)]) {
  T elements[sizeof(Word) / sizeof(T)];
#pragma unroll
  for (size_t i = 0; i < sizeof(Word) / sizeof(T); ++i) elements[i] = narrow<T>(sums[i]);
  Word word;
  memcpy(&word, elements, sizeof word);
  return word;
}

// --- small sums ---

__device__ inline void send_word(void* to, uint2 word, uint32_t flag) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word.x), "r"(flag), "r"(word.y), "r"(flag) : "memory");
}
// False when the ranks were stopped while it waited.
__device__ inline bool receive_word(const void* from, uint32_t flag, const PeerGroup& group, uint2& word) {
  for (uint32_t spins = 1;; ++spins) {
    uint4 got;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w)
                 : "l"(from)
                 : "memory");
    if (got.y == flag && got.w == flag) {
      word = {got.x, got.z};
      return true;
    }
    if (stopped(group, spins)) return false;
  }
}

template <typename T>
__global__ void __launch_bounds__(kSmallThreads)
    small_sum(const __grid_constant__ PeerGroup group, int of_thread, uint32_t words, const uint2* in, uint2* out) {
  let_later_begin();
  wait_for_earlier();
  const Places places(group.ranks);
  const int block = static_cast<int>(blockIdx.x);
  const uint32_t round = next_round(reinterpret_cast<uint32_t*>(group.memory[group.rank] + places.small_rounds));
  const uint32_t first = blockIdx.x * static_cast<uint32_t>(kSmallThreads * of_thread) + threadIdx.x;
  uint2 own[kMostOfThread];
#pragma unroll
  for (int k = 0; k < kMostOfThread; ++k) {
    if (k >= of_thread || first + k * kSmallThreads >= words) break;
    own[k] = in[first + k * kSmallThreads];
    for (int peer = 0; peer < group.ranks; ++peer) {
      if (peer == group.rank) continue;
      uint4* to = reinterpret_cast<uint4*>(group.memory[peer] + places.small_word(group.ranks, round, group.rank, block));
      send_word(to + threadIdx.x + k * kSmallThreads, own[k], round);
    }
  }
#pragma unroll
  for (int k = 0; k < kMostOfThread; ++k) {
    if (k >= of_thread || first + k * kSmallThreads >= words) break;
    float sums[sizeof(uint2) / sizeof(T)] = {};
    for (int from = 0; from < group.ranks; ++from) {
      uint2 word = own[k];
      const auto* place = reinterpret_cast<const uint4*>(group.memory[group.rank] + places.small_word(group.ranks, round, from, block));
      if (from != group.rank && !receive_word(place + threadIdx.x + k * kSmallThreads, round, group, word)) return;
      add<T>(sums, word);
    }
    out[first + k * kSmallThreads] = narrowed<T, uint2>(sums);
  }
}

// --- exchanges of pieces ---

// The packs of a piece that this block moves.
struct Part {
  size_t begin, end;
};
__device__ inline Part part_of(size_t packs) {
  const size_t each = (packs + kBlocks - 1) / kBlocks, begin = each * blockIdx.x;
  return {begin < packs ? begin : packs, begin + each < packs ? begin + each : packs};
}

// What the same block of the other ranks and this one have to tell each other in a round.
struct Meeting {
  const PeerGroup& group;
  Places places;
  uint32_t round;

  __device__ explicit Meeting(const PeerGroup& g)
      : group(g), places(g.ranks), round(next_round(reinterpret_cast<uint32_t*>(g.memory[g.rank] + places.rounds))) {}

  // Every rank's tensor, into shared memory, once the rank is there. False when the ranks were stopped.
  __device__ bool exchange(const void* own, char* (&tensors)[kMostPeers]) const {
    const int peer = static_cast<int>(threadIdx.x);
    bool goes_on = true;
    if (peer == group.rank) tensors[peer] = static_cast<char*>(const_cast<void*>(own));
    if (peer < group.ranks && peer != group.rank) {
      const auto address = reinterpret_cast<uint64_t>(own);
      uint2 word{static_cast<uint32_t>(address), static_cast<uint32_t>(address >> 32)};
      send_word(post(peer, group.rank), word, round);
      goes_on = receive_word(post(group.rank, peer), round, group, word);
      tensors[peer] = reinterpret_cast<char*>(static_cast<uint64_t>(word.y) << 32 | word.x);
    }
    return __syncthreads_and(goes_on);
  }
  // Until the others are done with this rank's tensor, and what they wrote to it is there.
  __device__ void end() const {
    __syncthreads();  // all of the block has read and written
    const int peer = static_cast<int>(threadIdx.x);
    if (peer >= group.ranks || peer == group.rank) return;
    __threadfence_system();
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag(peer, group.rank)), "r"(round) : "memory");
    uint32_t seen = 0;
    for (uint32_t spins = 1; seen != round && !stopped(group, spins); ++spins)
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag(group.rank, peer)) : "memory");
  }

 private:
  __device__ uint32_t* flag(int at, int from) const {
    return reinterpret_cast<uint32_t*>(group.memory[at] + places.flags) + from * kBlocks + blockIdx.x;
  }
  __device__ uint4* post(int at, int from) const {
    return reinterpret_cast<uint4*>(group.memory[at] + places.posts) + from * kBlocks + blockIdx.x;
  }
};

// Not through the first-level cache, which does not see what other GPUs write.
__device__ inline uint4 load_shared_tensor(const uint4* from) {
  return __ldcg(from);
}

// out = the sum of all ranks' pieces of this rank, `packs` packs each; in [ranks][packs].
template <typename T>
__global__ void __launch_bounds__(kThreads)
    reduce_scatter(const __grid_constant__ PeerGroup group, size_t packs, const uint4* in, uint4* out) {
  __shared__ char* tensors[kMostPeers];
  let_later_begin();
  wait_for_earlier();
  const Meeting meeting(group);
  if (!meeting.exchange(in, tensors)) return;
  const Part part = part_of(packs);
  const size_t own_piece = static_cast<size_t>(group.rank) * packs;
  for (size_t i = part.begin + threadIdx.x; i < part.end; i += kThreads * kInFlight) {
    float sums[kInFlight][sizeof(uint4) / sizeof(T)] = {};
    for (int from = 0; from < group.ranks; ++from) {
      const uint4* piece = reinterpret_cast<const uint4*>(tensors[from]) + own_piece;
      uint4 held[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        if (i + k * kThreads < part.end) held[k] = load_shared_tensor(piece + i + k * kThreads);
      }
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        if (i + k * kThreads < part.end) add<T>(sums[k], held[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (i + k * kThreads < part.end) out[i + k * kThreads] = narrowed<T, uint4>(sums[k]);
    }
  }
  meeting.end();
}

// out [ranks][packs] = all ranks' in [packs].
__global__ void __launch_bounds__(kThreads) all_gather(const __grid_constant__ PeerGroup group, size_t packs, const uint4* in, uint4* out) {
  __shared__ char* tensors[kMostPeers];
  let_later_begin();
  wait_for_earlier();
  const Meeting meeting(group);
  if (!meeting.exchange(out, tensors)) return;
  const Part part = part_of(packs);
  const size_t own_piece = static_cast<size_t>(group.rank) * packs;
  const bool in_place = in == out + own_piece;
  for (size_t i = part.begin + threadIdx.x; i < part.end; i += kThreads * kInFlight) {
    uint4 held[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (i + k * kThreads < part.end) held[k] = in[i + k * kThreads];
    }
    for (int step = in_place ? 1 : 0; step < group.ranks; ++step) {  // each rank begins with another one
      uint4* piece = reinterpret_cast<uint4*>(tensors[(group.rank + step) % group.ranks]) + own_piece;
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        if (i + k * kThreads < part.end) piece[i + k * kThreads] = held[k];
      }
    }
  }
  meeting.end();
}

bool sums_here(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16;
}
bool stands_at(size_t multiple, const void* in, const void* out) {
  return reinterpret_cast<uintptr_t>(in) % multiple == 0 && reinterpret_cast<uintptr_t>(out) % multiple == 0;
}
bool has_packs(size_t piece_bytes, const void* in, const void* out) {
  return piece_bytes > 0 && piece_bytes % 16 == 0 && stands_at(16, in, out);
}

template <typename F>
void with_summed_type(DType dtype, const F& f) {
  with_float_type(dtype, [&]<typename Tag>(Tag) {
    if constexpr (sizeof(typename Tag::type) <= 4) f(Tag{});
  });
}

}  // namespace

size_t peer_memory_bytes(int ranks) {
  return Places(ranks).end;
}

bool takes_small_sum(int ranks, size_t bytes, DType dtype, const void* in, const void* out) {
  // Each rank sends all of it to each other one: beyond this, pieces of it take less time.
  return sums_here(dtype) && bytes > 0 && bytes % 8 == 0 && stands_at(8, in, out) &&
         bytes * static_cast<size_t>(ranks - 1) <= kMostSmallBytes;
}
bool takes_reduce_scatter(int ranks, size_t bytes, DType dtype, const void* in, const void* out) {
  const auto n = static_cast<size_t>(ranks);
  return sums_here(dtype) && bytes % n == 0 && has_packs(bytes / n, in, out);
}
bool takes_all_gather(size_t bytes, const void* in, const void* out) {
  return has_packs(bytes, in, out);
}

void run_small_sum(const PeerGroup& group, const void* in, void* out, size_t bytes, DType dtype, cudaStream_t stream) {
  const auto words = static_cast<uint32_t>(bytes / 8);
  const int of_thread = static_cast<int>((words + kSmallThreads * kSmallBlocks - 1) / (kSmallThreads * kSmallBlocks));
  const auto of_block = static_cast<uint32_t>(kSmallThreads * of_thread);
  with_summed_type(dtype, [&]<typename Tag>(Tag) {
    launch_dependent(small_sum<typename Tag::type>, (words + of_block - 1) / of_block, kSmallThreads, stream, group, of_thread, words,
                     static_cast<const uint2*>(in), static_cast<uint2*>(out));
  });
}

void run_reduce_scatter(const PeerGroup& group, const void* in, void* out, size_t bytes, DType dtype, cudaStream_t stream) {
  const size_t packs = bytes / static_cast<size_t>(group.ranks) / sizeof(uint4);
  with_summed_type(dtype, [&]<typename Tag>(Tag) {
    launch_dependent(reduce_scatter<typename Tag::type>, kBlocks, kThreads, stream, group, packs, static_cast<const uint4*>(in),
                     static_cast<uint4*>(out));
  });
}

void run_all_gather(const PeerGroup& group, const void* in, void* out, size_t bytes, cudaStream_t stream) {
  launch_dependent(all_gather, kBlocks, kThreads, stream, group, bytes / sizeof(uint4), static_cast<const uint4*>(in),
                   static_cast<uint4*>(out));
}

bool reach_peers(int device, const std::vector<int>& peers) {
  for (int peer : peers) {
    if (peer == device) continue;
    int can = 0;
    FRETSAW_CUDA_CHECK(cudaDeviceCanAccessPeer(&can, device, peer));
    if (!can) return false;
    const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
    cudaGetLastError();
    if (status != cudaErrorPeerAccessAlreadyEnabled) FRETSAW_CUDA_CHECK(status);
  }
  return true;
}

}  // namespace fretsaw::cuda
