// Products of few rows with a large matrix, B [K, N] or its transpose: bound by reading B, so B is read once with 16-byte loads, many of
// them in flight, and sums are split over warps and blocks. Every sum is added in the same order each time.
#include <cooperative_groups.h>

#include <algorithm>

#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/matmul_epilogue.cuh"
#include "kernels/cuda/matmul_small.h"

namespace fretsaw::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kThreads = 256, kWarps = kThreads / 32;

// --- B [K, N] with dense rows ---
//
// A block sums a tile of 8 packs of columns over a part of K: 8 lanes take a row, so the block takes 32 rows at a time. The blocks of a
// cluster share a tile, each with its part of K; they give their sums to the first, which adds them up.
//
// Where the product stands in a chain of small kernels, its blocks are there before what they multiply with is: until then they read
// their first rows of B into registers.
constexpr int kLanes = 8, kRowsAtOnce = kThreads / kLanes, kMostParts = 8;

template <typename T>
constexpr int kTileColumns = kLanes* Bits16<T>::size;

// Rows of B that a thread has in flight, and blocks of a multiprocessor that the registers must hold.
template <int M>
constexpr int kInFlight = M == 1   ? 6
                          : M == 2 ? 8
                                   : 4;
template <int M>
constexpr int kResident = M == 1   ? 3
                          : M == 2 ? 2
                                   : 1;

// Rows of B whose factors of A are held in shared memory at a time.
template <int M>
constexpr int kStagedRows = 6144 / M;

template <typename T>
struct SmallArguments {
  int M, a_row;
  int64_t N, K, line;  // of B: elements from line to line
  int64_t part;        // of K, of one block
  bool a_packs;        // whole packs of A stand at multiples of 16 bytes
  const T *a, *b;
};

// What a thread reads of B: every kRowsAtOnce-th row of its block's part, one pack of each.
template <typename T>
class RowReader {
 public:
  __device__ RowReader(const SmallArguments<T>& p, int64_t first, int64_t end, int64_t column)
      : at_(p.b + first * p.line + column), stride_(kRowsAtOnce * p.line), left_(0) {
    if (first < end && column < p.N) left_ = static_cast<int>((end - first + kRowsAtOnce - 1) / kRowsAtOnce);
  }
  // The thread's next row; zeros where there is none.
  __device__ Bits16<T> next() {
    Bits16<T> row;
    asm volatile(
        "{\n\t.reg .pred there;\n\tsetp.gt.s32 there, %5, 0;\n\t"
        "@there ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
        : "+r"(row.bits.x), "+r"(row.bits.y), "+r"(row.bits.z), "+r"(row.bits.w)
        : "l"(at_), "r"(left_));
    at_ += stride_, --left_;
    return row;
  }

 private:
  const T* at_;
  int64_t stride_;  // elements from one row of the thread to its next
  int left_;        // rows of the thread from `at_` on
};

// The first block of a cluster waits in its own shared memory for what the others put there.
class Delivery {
 public:
  // By one thread of each block, before the cluster's barrier.
  __device__ static void open(uint64_t* barrier, unsigned bytes) {
    const unsigned at = address_of(barrier);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
  }
  // To the same place in the first block's memory.
  __device__ static void send(float* place, float value, uint64_t* barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(in_first(address_of(place))),
                 "f"(value), "r"(in_first(address_of(barrier)))
                 : "memory");
  }
  __device__ static void wait(uint64_t* barrier) {
    unsigned done = 0;
    while (!done)
      asm volatile("{\n\t.reg .pred done;\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%1], 0;\n\tselp.u32 %0, 1, 0, done;\n\t}"
                   : "=r"(done)
                   : "r"(address_of(barrier))
                   : "memory");
  }

 private:
  __device__ static unsigned address_of(const void* shared) { return static_cast<unsigned>(__cvta_generic_to_shared(shared)); }
  __device__ static unsigned in_first(unsigned address) {
    unsigned mapped;
    asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(mapped) : "r"(address));
    return mapped;
  }
};

// The factors of A for `rows` rows of B from `first` on, [rows][M]; zeros up to `padded` rows and M.
template <typename T, int M>
__device__ void stage_factors(float* factors, const SmallArguments<T>& p, int64_t first, int rows, int padded) {
  constexpr int V = Bits16<T>::size;
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const T* line = p.a + int64_t{m} * p.a_row + first;
    const int there = m < p.M ? rows : 0, packed = p.a_packs ? there / V * V : 0;
    for (int k = static_cast<int>(threadIdx.x) * V; k < packed; k += kThreads * V) {
      const Bits16<T> pack = load_bits(line + k);
#pragma unroll
      for (int v = 0; v < V; ++v) factors[(k + v) * M + m] = pack.at(v);
    }
    for (int k = packed + static_cast<int>(threadIdx.x); k < padded; k += kThreads)
      factors[k * M + m] = k < there ? static_cast<float>(widen(line[k])) : 0.0f;
  }
}

// Adds up the sums of the lanes and warps that have the same columns: give(i, total) for each of [M][columns].
template <typename T, int M, typename Give>
__device__ void reduce_block(float (&sums)[M][Bits16<T>::size], float* partial, const Give& give) {
  constexpr int V = Bits16<T>::size, kColumns = kTileColumns<T>;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      sums[m][v] += __shfl_xor_sync(0xffffffffu, sums[m][v], 8);
      sums[m][v] += __shfl_xor_sync(0xffffffffu, sums[m][v], 16);
      if (lane < kLanes) partial[(warp * M + m) * kColumns + lane * V + v] = sums[m][v];
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < M * kColumns; i += kThreads) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += partial[w * M * kColumns + i];
    give(i, total);
  }
}

template <typename T, int M>
__global__ void __launch_bounds__(kThreads, kResident<M>) multiply_rows(SmallArguments<T> p, Epilogue<T> epilogue) {
  constexpr int V = Bits16<T>::size, kColumns = kTileColumns<T>, U = kInFlight<M>, kStaged = kStagedRows<M>, kBatch = U * kRowsAtOnce;
  static_assert(kStaged % kBatch == 0);
  __shared__ float factors[kStaged * M];              // [rows][M]; after the products the partial sums of the warps [warps][M][columns]
  __shared__ float totals[kMostParts][M * kColumns];  // of the first block: those of all blocks of the cluster
  static_assert(kWarps * M * kColumns <= kStaged * M);
  __shared__ alignas(8) uint64_t delivered;
  const cg::cluster_group cluster = cg::this_cluster();
  const unsigned parts = cluster.num_blocks(), part = cluster.block_rank();
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t column = blockIdx.y * int64_t{kColumns} + static_cast<int>(threadIdx.x) % kLanes * V;
  const int64_t begin = part * p.part, end = begin + p.part < p.K ? begin + p.part : p.K;
  let_later_begin();
  if (threadIdx.x == 0) Delivery::open(&delivered, (parts - 1) * M * kColumns * sizeof(float));
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  RowReader<T> reader(p, begin + group, end, column);
  Bits16<T> next[U];
#pragma unroll
  for (int u = 0; u < U; ++u) next[u] = reader.next();
  float sums[M][V] = {};
  wait_for_earlier();
  for (int64_t chunk = begin; chunk < end; chunk += kStaged) {
    const int rows = static_cast<int>(end - chunk < kStaged ? end - chunk : kStaged), padded = (rows + kBatch - 1) / kBatch * kBatch;
    __syncthreads();
    stage_factors<T, M>(factors, p, chunk, rows, padded);
    __syncthreads();
    for (int k0 = group; k0 < padded; k0 += kBatch) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const Bits16<T> row = next[u];
        next[u] = reader.next();
        float factor[M];
#pragma unroll
        for (int m = 0; m < M; ++m) factor[m] = factors[(k0 + u * kRowsAtOnce) * M + m];
#pragma unroll
        for (int v = 0; v < V; ++v) {
          const float weight = row.at(v);
#pragma unroll
          for (int m = 0; m < M; ++m) sums[m][v] += factor[m] * weight;
        }
      }
    }
  }
  __syncthreads();
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // the first block's memory is there
  reduce_block<T, M>(sums, factors, [&](int i, float total) {
    if (part == 0)
      totals[0][i] = total;
    else
      Delivery::send(&totals[part][i], total, &delivered);
  });
  if (part > 0) return;
  // Each thread reads of totals[0] what it has put there itself.
  if (parts > 1) Delivery::wait(&delivered);
  for (int i = static_cast<int>(threadIdx.x); i < M * kColumns; i += kThreads) {
    const int m = i / kColumns;
    const int64_t n = blockIdx.y * int64_t{kColumns} + i % kColumns;
    float total = totals[0][i];
    for (unsigned other = 1; other < parts; ++other) total += totals[other][i];
    if (m < p.M && n < p.N) epilogue.store(m * p.N + n, n, total);
  }
}

// In how many parts K is summed. Of one or two rows so that blocks take equal turns on the multiprocessors: one turn, where that many fit;
// of a single row an eighth of the places is left to the kernels that come next, which wait there with what they have read. More rows
// compute more for each byte: about 4 blocks for each multiprocessor, in powers of two, were faster for them.
template <int M>
int parts_of(int64_t tiles, int64_t K, int multiprocessors) {
  if constexpr (M > 2) {
    int parts = 1;
    while (parts < kMostParts && tiles * parts < 4 * multiprocessors && K / (2 * parts) >= 4 * kRowsAtOnce) parts *= 2;
    return parts;
  }
  constexpr int64_t kStart = 64;  // rows that a block could read while it starts and ends
  const int64_t at_once = int64_t{kResident<M>} * multiprocessors * (M == 1 ? 7 : 8) / 8;
  int best = 1;
  int64_t least = 0;
  for (int parts = 1; parts <= kMostParts && (parts == 1 || K / parts >= 4 * kRowsAtOnce); ++parts) {
    const int64_t turns = (tiles * parts + at_once - 1) / at_once, time = turns * ((K + parts - 1) / parts + kStart);
    if (parts == 1 || time < least) best = parts, least = time;
  }
  return best;
}

template <typename T, int M>
void launch_rows(SmallArguments<T> p, const Epilogue<T>& epilogue, int multiprocessors, cudaStream_t stream) {
  const int64_t tiles = (p.N + kTileColumns<T> - 1) / kTileColumns<T>;
  const int parts = parts_of<M>(tiles, p.K, multiprocessors);
  p.part = ((p.K + parts - 1) / parts + kRowsAtOnce - 1) / kRowsAtOnce * kRowsAtOnce;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(parts), static_cast<unsigned>(tiles), 1);
  config.blockDim = dim3(kThreads, 1, 1);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {{}, dependent_attribute()};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = static_cast<unsigned>(parts);
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  config.attrs = attributes;
  config.numAttrs = 2;
  FRETSAW_CUDA_CHECK(cudaLaunchKernelEx(&config, multiply_rows<T, M>, p, epilogue));
}

// --- B as its transpose [N, K] with dense rows ---
//
// A group of warps sums two columns of the product, its lanes side by side along K.
constexpr int kColumnsOfGroup = 2;

template <typename T, int M>
__global__ void __launch_bounds__(kThreads) multiply_columns(SmallArguments<T> p, int warps_of_group, Epilogue<T> epilogue) {
  constexpr int V = Bits16<T>::size, C = kColumnsOfGroup, U = 4;
  __shared__ float partial[kWarps][C * M];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int groups = kWarps / warps_of_group, group = warp / warps_of_group, part = warp % warps_of_group;
  const int64_t n0 = (blockIdx.x * int64_t{groups} + group) * C;
  float sums[C][M] = {};
  const int64_t step = warps_of_group * 32 * V;
  let_later_begin();
  for (int64_t k0 = (part * 32 + lane) * V; k0 < p.K; k0 += step * U) {
    Bits16<T> weights[U][C];
#pragma unroll
    for (int i = 0; i < U * C; ++i) {
      const int64_t k = k0 + i / C * step, n = n0 + i % C;
      if (k < p.K && n < p.N) weights[i / C][i % C] = load_constant_bits_once(p.b + n * p.line + k);
    }
    wait_for_earlier();  // costs nothing after the first time
#pragma unroll
    for (int i = 0; i < U * M; ++i) {
      const int64_t k = k0 + i / M * step;
      if (k >= p.K || i % M >= p.M) continue;
      const Bits16<T> factor = load_bits(p.a + int64_t{i % M} * p.a_row + k);
#pragma unroll
      for (int j = 0; j < V * C; ++j) sums[j % C][i % M] += factor.at(j / C) * weights[i / M][j % C].at(j / C);
    }
  }
  wait_for_earlier();  // threads without a part of K
#pragma unroll
  for (int i = 0; i < C * M; ++i) {
    float sum = sums[i / M][i % M];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) partial[warp][i] = sum;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < groups * C * M; i += kThreads) {
    const int of = i / (C * M), c = i / M % C, m = i % M;
    const int64_t n = (blockIdx.x * int64_t{groups} + of) * C + c;
    float total = 0;
    for (int w = 0; w < warps_of_group; ++w) total += partial[of * warps_of_group + w][c * M + m];
    if (m < p.M && n < p.N) epilogue.store(m * p.N + n, n, total);
  }
}

template <typename T, int M>
void launch_columns(const SmallArguments<T>& p, const Epilogue<T>& epilogue, int multiprocessors, cudaStream_t stream) {
  const int64_t groups = (p.N + kColumnsOfGroup - 1) / kColumnsOfGroup;
  int warps = 1;
  while (warps < kWarps && groups * warps < 4 * multiprocessors * kWarps && p.K >= int64_t{64} * warps * Bits16<T>::size) warps *= 2;
  const int64_t blocks = (groups * warps + kWarps - 1) / kWarps;
  launch_dependent(multiply_columns<T, M>, static_cast<unsigned>(blocks), kThreads, stream, p, warps, epilogue);
}

template <typename T, int M>
void launch(const ProductSpec& spec, const ProductOperands& o, int multiprocessors, cudaStream_t stream) {
  const bool rows = spec.b_column == 1;
  SmallArguments<T> p = {};
  p.M = static_cast<int>(spec.M), p.a_row = static_cast<int>(spec.a_row);
  p.N = spec.N, p.K = p.part = spec.K, p.line = rows ? spec.b_row : spec.b_column;
  p.a_packs = is_16_byte_aligned(o.a) && (spec.M == 1 || spec.a_row % Bits16<T>::size == 0);
  p.a = static_cast<const T*>(o.a), p.b = static_cast<const T*>(o.b);
  if (rows)
    launch_rows<T, M>(p, epilogue_of<T>(spec, o), multiprocessors, stream);
  else
    launch_columns<T, M>(p, epilogue_of<T>(spec, o), multiprocessors, stream);
}

template <typename T>
void launch_for_rows(const ProductSpec& spec, const ProductOperands& o, int multiprocessors, cudaStream_t stream) {
  if (spec.M == 1) return launch<T, 1>(spec, o, multiprocessors, stream);
  if (spec.M == 2) return launch<T, 2>(spec, o, multiprocessors, stream);
  if (spec.M <= 4) return launch<T, 4>(spec, o, multiprocessors, stream);
  launch<T, 8>(spec, o, multiprocessors, stream);
}

}  // namespace

bool takes_small_product(const ProductSpec& s) {
  if (s.type != DType::float32 && s.type != DType::float16 && s.type != DType::bfloat16) return false;
  if (!s.constant_b || s.M < 1 || s.M > kSmallRows || !s.batches.empty() || s.a_column != 1 || s.K < 1 || s.N < 1 || s.a_row > INT32_MAX)
    return false;
  const int64_t pack = s.type == DType::float32 ? 4 : 8;
  if (s.b_column == 1) return std::max(s.N, s.b_columns) % pack == 0 && s.b_row % pack == 0 && s.N / (kLanes * pack) < 65535;
  return s.K % pack == 0 && s.b_column % pack == 0 && (s.M == 1 || s.a_row % pack == 0);
}

void run_small_product(const ProductSpec& spec, const ProductOperands& o, int multiprocessors, cudaStream_t stream) {
  if (spec.type == DType::float32) return launch_for_rows<float>(spec, o, multiprocessors, stream);
  if (spec.type == DType::float16) return launch_for_rows<__half>(spec, o, multiprocessors, stream);
  launch_for_rows<__nv_bfloat16>(spec, o, multiprocessors, stream);
}

}  // namespace fretsaw::cuda
