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
// cluster share a tile, each with its part of K; the first adds their sums up.
constexpr int kLanes = 8, kRowsAtOnce = kThreads / kLanes;

template <typename T>
constexpr int kTileColumns = kLanes* Bits16<T>::size;

// Rows of B that a thread has in flight.
template <int M>
constexpr int kInFlight = M <= 2 ? 8 : 4;

// Rows of B whose factors of A are held in shared memory at a time.
template <int M>
constexpr int kStagedRows = 8192 / M;

template <typename T>
struct SmallArguments {
  int M, a_row;
  int64_t N, K, line;  // of B: elements from line to line
  int64_t part;        // of K, of one block
  const T *a, *b;
};

template <typename T, int M>
__device__ void load_rows(Bits16<T> (&rows)[kInFlight<M>], const SmallArguments<T>& p, int64_t first, int64_t end, int64_t column) {
#pragma unroll
  for (int u = 0; u < kInFlight<M>; ++u) {
    const int64_t k = first + u * kRowsAtOnce;
    rows[u] = k < end && column < p.N ? load_constant_bits_once(p.b + k * p.line + column) : Bits16<T>();
  }
}

// Adds up the sums of the lanes and warps that have the same columns, into totals [M][columns].
template <typename T, int M>
__device__ void reduce_block(float (&sums)[M][Bits16<T>::size], float* partial, float* totals) {
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
    for (int w = 0; w < kWarps; ++w) total += partial[w * M * kColumns + i];
    totals[i] = total;
  }
}

template <typename T, int M>
__global__ void __launch_bounds__(kThreads) multiply_rows(SmallArguments<T> p, Epilogue<T> epilogue) {
  constexpr int V = Bits16<T>::size, kColumns = kTileColumns<T>, U = kInFlight<M>, kStaged = kStagedRows<M>, kBatch = U * kRowsAtOnce;
  static_assert(kStaged % kBatch == 0);
  __shared__ float factors[kStaged * M];  // [rows][M]; after the products the partial sums of the warps [warps][M][columns]
  __shared__ float totals[M * kColumns];
  static_assert(kWarps * M * kColumns <= kStaged * M);
  cg::cluster_group cluster = cg::this_cluster();
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t column = blockIdx.y * int64_t{kColumns} + static_cast<int>(threadIdx.x) % kLanes * V;
  const int64_t begin = cluster.block_rank() * p.part, end = begin + p.part < p.K ? begin + p.part : p.K;
  float sums[M][V] = {};
  Bits16<T> next[U];
  let_later_begin();
  load_rows<T, M>(next, p, begin + group, end, column);
  wait_for_earlier();
  for (int64_t chunk = begin; chunk < end; chunk += kStaged) {
    const int rows = static_cast<int>(end - chunk < kStaged ? end - chunk : kStaged), padded = (rows + kBatch - 1) / kBatch * kBatch;
    __syncthreads();
    for (int m = 0; m < M; ++m) {
      for (int k = static_cast<int>(threadIdx.x); k < padded; k += kThreads)
        factors[k * M + m] = m < p.M && k < rows ? static_cast<float>(widen(p.a[int64_t{m} * p.a_row + chunk + k])) : 0.0f;
    }
    __syncthreads();
    for (int k0 = group; k0 < padded; k0 += kBatch) {
      Bits16<T> rows_now[U];
#pragma unroll
      for (int u = 0; u < U; ++u) rows_now[u].bits = next[u].bits;
      load_rows<T, M>(next, p, chunk + k0 + kBatch, end, column);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        float factor[M];
#pragma unroll
        for (int m = 0; m < M; ++m) factor[m] = factors[(k0 + u * kRowsAtOnce) * M + m];
#pragma unroll
        for (int v = 0; v < V; ++v) {
          const float weight = rows_now[u].at(v);
#pragma unroll
          for (int m = 0; m < M; ++m) sums[m][v] += factor[m] * weight;
        }
      }
    }
  }
  __syncthreads();
  reduce_block<T, M>(sums, factors, totals);
  cluster.sync();
  if (cluster.block_rank() == 0) {
    for (int i = static_cast<int>(threadIdx.x); i < M * kColumns; i += kThreads) {
      const int m = i / kColumns;
      const int64_t n = blockIdx.y * int64_t{kColumns} + i % kColumns;
      float total = totals[i];
      for (unsigned rank = 1; rank < cluster.num_blocks(); ++rank) total += cluster.map_shared_rank(totals, rank)[i];
      if (m < p.M && n < p.N) epilogue.store(m * p.N + n, n, total);
    }
  }
  cluster.sync();  // the others' shared memory stays until it has been read
}

template <typename T, int M>
void launch_rows(SmallArguments<T> p, const Epilogue<T>& epilogue, int multiprocessors, cudaStream_t stream) {
  const int64_t tiles = (p.N + kTileColumns<T> - 1) / kTileColumns<T>;
  // About 4 blocks for each multiprocessor, each with enough of K to be worth its start.
  int parts = 1;
  while (parts < 8 && tiles * parts < 4 * multiprocessors && p.K / (2 * parts) >= 4 * kRowsAtOnce) parts *= 2;
  p.part = (p.K + parts - 1) / parts;
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
  const SmallArguments<T> p{
      static_cast<int>(spec.M),   static_cast<int>(spec.a_row), spec.N, spec.K, rows ? spec.b_row : spec.b_column, spec.K,
      static_cast<const T*>(o.a), static_cast<const T*>(o.b)};
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
