// Collectives through peer memory.
#include <algorithm>
#include <cstring>

#include "kernels/cuda/block_reduce.cuh"
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

// Small sums with a norm: a block takes a row.
constexpr int kRowThreads = 512, kMostRowWords = 4;  // of a thread

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

// --- small sums with the addition and the norm that follow ---

template <typename T>
struct RowTail {
  const T *residual, *scale;
  T *sum, *y;
  float epsilon;
};

template <typename T>
struct WordOf {
  static constexpr int size = sizeof(uint2) / sizeof(T);
  T at[size];

  __device__ WordOf() = default;
  __device__ explicit WordOf(const uint2& word) { memcpy(at, &word, sizeof word); }
  __device__ uint2 bits() const {
    uint2 word;
    memcpy(&word, at, sizeof word);
    return word;
  }
};

// What a thread sends and receives of its block's row, word k at k * kRowThreads + threadIdx.x. The words travel by the places, and in the
// rounds, in which small_sum would send them: ranks may mix the two.
template <typename T, int kWords>
struct RowWords {
  const PeerGroup& group;
  const Places places;
  uint32_t row_words, of_block;
  uint32_t* const rounds;
  uint2 own[kWords] = {}, residual[kWords] = {};
  uint32_t round[kWords] = {};

  __device__ RowWords(const PeerGroup& g, uint32_t words, uint32_t of_block)
      : group(g),
        places(g.ranks),
        row_words(words),
        of_block(of_block),
        rounds(reinterpret_cast<uint32_t*>(g.memory[g.rank] + places.small_rounds)) {}

  __device__ static uint32_t in_row(int k) { return k * kRowThreads + threadIdx.x; }
  __device__ uint32_t in_all(int k) const { return blockIdx.x * row_words + in_row(k); }
  __device__ bool is_there(int k) const { return in_row(k) < row_words; }

  __device__ void load(const uint2* in, const uint2* from_residual) {
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      if (!is_there(k)) break;
      own[k] = in[in_all(k)], residual[k] = from_residual[in_all(k)];
      round[k] = rounds[in_all(k) / of_block] + 1;
    }
  }
  __device__ void send() const {
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      if (!is_there(k)) break;
      for (int peer = 0; peer < group.ranks; ++peer) {
        if (peer != group.rank) send_word(place(k, peer, group.rank), own[k], round[k]);
      }
    }
  }
  // The ranks' sum and the residual, each rounded to T. Of no meaning once the ranks were stopped.
  __device__ WordOf<T> sum(int k) const {
    float sums[WordOf<T>::size] = {};
    for (int from = 0; from < group.ranks; ++from) {
      uint2 word = own[k];
      if (from != group.rank && !receive_word(place(k, group.rank, from), round[k], group, word)) break;
      add<T>(sums, word);
    }
    const WordOf<T> all(narrowed<T, uint2>(sums)), other(residual[k]);
    WordOf<T> out;
#pragma unroll
    for (int i = 0; i < WordOf<T>::size; ++i) out.at[i] = narrow<T>(widen(all.at[i]) + widen(other.at[i]));
    return out;
  }
  // After all threads of the block have loaded.
  __device__ void end_rounds() const {
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      if (is_there(k) && in_all(k) % of_block == 0) rounds[in_all(k) / of_block] = round[k];
    }
  }

 private:
  __device__ uint4* place(int k, int at, int from) const {
    const uint32_t block = in_all(k) / of_block;
    return reinterpret_cast<uint4*>(group.memory[at] + places.small_word(group.ranks, round[k], from, static_cast<int>(block))) +
           in_all(k) % of_block;
  }
};

// sum = the ranks' sum of `in` + residual; y = sum / sqrt(mean of its squares + epsilon) * scale, row by row.
template <typename T, int kWords>
__global__ void __launch_bounds__(kRowThreads, kWords <= 2 ? 3 : 2)
    small_sum_norm(const __grid_constant__ PeerGroup group, uint32_t row_words, uint32_t of_block, const T* in, RowTail<T> tail) {
  __shared__ float shared[kRowThreads / 32];
  let_later_begin();
  RowWords<T, kWords> words(group, row_words, of_block);
  WordOf<T> scale[kWords];
#pragma unroll
  for (int k = 0; k < kWords; ++k) {  // a constant
    if (words.is_there(k)) scale[k] = WordOf<T>(reinterpret_cast<const uint2*>(tail.scale)[words.in_row(k)]);
  }
  wait_for_earlier();
  words.load(reinterpret_cast<const uint2*>(in), reinterpret_cast<const uint2*>(tail.residual));
  words.send();
  WordOf<T> sums[kWords];
  float square = 0;
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    if (!words.is_there(k)) break;
    sums[k] = words.sum(k);
    if (tail.sum) reinterpret_cast<uint2*>(tail.sum)[words.in_all(k)] = sums[k].bits();
#pragma unroll
    for (int i = 0; i < WordOf<T>::size; ++i) square += widen(sums[k].at[i]) * widen(sums[k].at[i]);
  }
  square = join_group(square, 0.0f, shared, AddJoin{});
  const auto n = static_cast<float>(row_words * static_cast<uint32_t>(WordOf<T>::size));
  const float inverse = 1.0f / sqrtf(square / n + tail.epsilon);
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    if (!words.is_there(k)) break;
    WordOf<T> y;
#pragma unroll
    for (int i = 0; i < WordOf<T>::size; ++i) y.at[i] = narrow<T>(widen(sums[k].at[i]) * inverse * widen(scale[k].at[i]));
    reinterpret_cast<uint2*>(tail.y)[words.in_all(k)] = y.bits();
  }
  words.end_rounds();
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
      __threadfence_system();  // what earlier kernels wrote is there for who reads the word
      send_word(post(peer, group.rank), word, round);
      goes_on = receive_word(post(group.rank, peer), round, group, word);
      __threadfence_system();
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

// Words of 8 bytes of each thread of a small sum.
uint32_t words_of_thread(uint32_t words) {
  return (words + kSmallThreads * kSmallBlocks - 1) / (kSmallThreads * kSmallBlocks);
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
bool takes_small_sum_norm(int ranks, int64_t rows, int64_t n, DType dtype) {
  if (rows < 1 || n < 1 || !sums_here(dtype) || n * bits_of(dtype) % 64) return false;
  const int64_t row_words = n * bits_of(dtype) / 64;
  if (row_words > int64_t{kRowThreads} * kMostRowWords || rows > static_cast<int64_t>(kMostSmallBytes) / 8 / row_words) return false;
  if (!takes_small_sum(ranks, static_cast<size_t>(rows * row_words) * 8, dtype, nullptr, nullptr)) return false;
  // A place's words are of one row: one block counts its rounds.
  return rows == 1 || row_words % (kSmallThreads * words_of_thread(static_cast<uint32_t>(rows * row_words))) == 0;
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
  const uint32_t of_thread = words_of_thread(words), of_block = kSmallThreads * of_thread;
  with_summed_type(dtype, [&]<typename Tag>(Tag) {
    launch_dependent(small_sum<typename Tag::type>, (words + of_block - 1) / of_block, kSmallThreads, stream, group,
                     static_cast<int>(of_thread), words, static_cast<const uint2*>(in), static_cast<uint2*>(out));
  });
}

void run_small_sum_norm(const PeerGroup& group, const SumNorm& s, cudaStream_t stream) {
  const bool aligned = stands_at(8, s.in, s.residual) && stands_at(8, s.scale, s.sum) && stands_at(8, s.y, s.y);
  if (!aligned) throw Error("a sum with a norm was given odd addresses", "report this as a fault", ErrorCode::device);
  const auto row_words = static_cast<uint32_t>(s.n * bits_of(s.dtype) / 64);
  const uint32_t of_block = kSmallThreads * words_of_thread(static_cast<uint32_t>(s.rows) * row_words);
  with_summed_type(s.dtype, [&]<typename Tag>(Tag) {
    using T = typename Tag::type;
    const RowTail<T> tail{static_cast<const T*>(s.residual), static_cast<const T*>(s.scale), static_cast<T*>(s.sum), static_cast<T*>(s.y),
                          s.epsilon};
    const auto launch = [&]<int kWords>() {
      launch_dependent(small_sum_norm<T, kWords>, static_cast<unsigned>(s.rows), kRowThreads, stream, group, row_words, of_block,
                       static_cast<const T*>(s.in), tail);
    };
    if (row_words <= kRowThreads) return launch.template operator()<1>();
    if (row_words <= 2 * kRowThreads) return launch.template operator()<2>();
    launch.template operator()<kMostRowWords>();
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
