// GlobalAveragePool, GlobalMaxPool, GlobalLpPool. Each sum is split the same way whenever the shape is the same.
#include <algorithm>

#include "kernels/cuda/pooling_fold.cuh"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kRows = 16;          // partial sums of a chunk: number r takes cells r, r + 16, ...
constexpr int kPacksOfBlock = 16;  // with channels last
constexpr int64_t kCellsOfChunk = 256, kMostChunks = 64;

// The cells of a plane are cut into chunks. The order of the sums is the same in both layouts: the rows of a chunk, then the chunks.
int64_t chunks_of(int64_t cells) {
  return std::clamp<int64_t>(cells / kCellsOfChunk, 1, kMostChunks);
}

// x [planes, cells]: kGroups groups of 16 threads to a plane, each taking chunks in turn. One group where there is one chunk.
template <PoolKind kKind, typename T, int kGroups>
__global__ void pool_planes(int64_t planes, int64_t cells, int64_t chunks, int p, const T* x, T* y) {
  using W = WideOf<T>;
  constexpr int kPlanes = kThreads / kRows / kGroups;  // of a block
  __shared__ W of_chunk[kMostChunks];
  const int group = threadIdx.x / kRows, row = threadIdx.x % kRows;
  const unsigned mask = 0xffffu << (group % 2 * kRows);  // this group's half of the warp
  const int64_t plane = blockIdx.x * int64_t{kPlanes} + group / kGroups, chunk = (cells + chunks - 1) / chunks;
  if (plane >= planes) return;
  W total = 0;
  for (int64_t c = group % kGroups; c < chunks; c += kGroups) {
    W sum = fold_start<kKind, T>();
    const int64_t end = min(cells, (c + 1) * chunk);
    for (int64_t i = c * chunk + row; i < end; i += kRows) sum = fold_one<kKind, W>(sum, widen(x[plane * cells + i]), p);
    total = __shfl_sync(mask, sum, 0, kRows);
    for (int r = 1; r < kRows; ++r) total = fold_two<kKind>(total, __shfl_sync(mask, sum, r, kRows));
    if (kGroups > 1 && row == 0) of_chunk[c] = total;
  }
  if (kGroups > 1) {
    __syncthreads();  // the block has one plane: none of its threads has returned
    total = fold_start<kKind, T>();
    for (int64_t c = 0; c < chunks; ++c) total = fold_two<kKind>(total, of_chunk[c]);
  }
  if (threadIdx.x % (kRows * kGroups) == 0) y[plane] = narrow<T>(fold_end<kKind, W>(total, W(cells), p));
}

// x [N, cells, packs of V]. Block (packs / 16, chunk, n): its rows of threads take the chunk's cells in turn. Writes the result to y [N,
// packs] where there is one chunk, otherwise the sums to parts [N, chunks, packs].
template <PoolKind kKind, typename T, int V>
__global__ void pool_pixels(int64_t cells, int64_t packs, int64_t chunk, int p, const Lanes<T, V>* x, Lanes<T, V>* y,
                            Lanes<WideOf<T>, V>* parts) {
  using W = WideOf<T>;
  __shared__ W rows[kRows][kPacksOfBlock * V];
  const int64_t pack = blockIdx.x * int64_t{kPacksOfBlock} + threadIdx.x, n = blockIdx.z;
  const int64_t begin = blockIdx.y * chunk, end = min(cells, begin + chunk);
  W sums[V];
#pragma unroll
  for (int v = 0; v < V; ++v) sums[v] = fold_start<kKind, T>();
  if (pack < packs) {
    for (int64_t cell = begin + threadIdx.y; cell < end; cell += kRows) {
      const Lanes<T, V> values = x[(n * cells + cell) * packs + pack];
#pragma unroll
      for (int v = 0; v < V; ++v) sums[v] = fold_one<kKind, W>(sums[v], widen(values.at[v]), p);
    }
  }
#pragma unroll
  for (int v = 0; v < V; ++v) rows[threadIdx.y][threadIdx.x * V + v] = sums[v];
  __syncthreads();
  if (threadIdx.y != 0 || pack >= packs) return;
  Lanes<T, V> result;
  Lanes<W, V> part;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    for (int row = 1; row < kRows; ++row) sums[v] = fold_two<kKind>(sums[v], rows[row][threadIdx.x * V + v]);
    part.at[v] = sums[v];
    result.at[v] = narrow<T>(fold_end<kKind, W>(sums[v], W(cells), p));
  }
  if (parts)
    parts[(n * gridDim.y + blockIdx.y) * packs + pack] = part;
  else
    y[n * packs + pack] = result;
}

// parts [N, chunks, C] to y [N, C].
template <PoolKind kKind, typename T>
__global__ void pool_parts(int64_t N, int64_t chunks, int64_t C, int64_t cells, int p, const WideOf<T>* parts, T* y) {
  using W = WideOf<T>;
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= N * C) return;
  W sum = fold_start<kKind, T>();
  for (int64_t k = 0; k < chunks; ++k) sum = fold_two<kKind>(sum, parts[(i / C * chunks + k) * C + i % C]);
  y[i] = narrow<T>(fold_end<kKind, W>(sum, W(cells), p));
}

template <PoolKind kKind, typename T>
void pool_plain(int64_t planes, int64_t cells, int p, const T* x, T* y, cudaStream_t stream) {
  constexpr int kGroups = kThreads / kRows;
  const int64_t chunks = chunks_of(cells);
  if (chunks == 1)
    pool_planes<kKind, T, 1><<<static_cast<unsigned>((planes + kGroups - 1) / kGroups), kThreads, 0, stream>>>(planes, cells, 1, p, x, y);
  else
    pool_planes<kKind, T, kGroups><<<static_cast<unsigned>(planes), kThreads, 0, stream>>>(planes, cells, chunks, p, x, y);
  check_launch("pool_planes");
}

template <PoolKind kKind, typename T, int V>
void pool_last(RunContext& r, int64_t N, int64_t cells, int64_t C, int p, const T* x, T* y) {
  using W = WideOf<T>;
  const int64_t packs = C / V, chunks = chunks_of(cells), chunk = (cells + chunks - 1) / chunks;
  W* parts = chunks > 1 ? static_cast<W*>(r.scratch(static_cast<size_t>(N * chunks * C) * sizeof(W))) : nullptr;
  for (int64_t n = 0; n < N; n += 65535) {  // the most that the grid's last dimension takes
    const int64_t images = std::min<int64_t>(N - n, 65535);
    const dim3 grid(static_cast<unsigned>((packs + kPacksOfBlock - 1) / kPacksOfBlock), static_cast<unsigned>(chunks),
                    static_cast<unsigned>(images));
    pool_pixels<kKind, T, V><<<grid, dim3(kPacksOfBlock, kRows), 0, stream_of(r)>>>(
        cells, packs, chunk, p, reinterpret_cast<const Lanes<T, V>*>(x + n * cells * C), reinterpret_cast<Lanes<T, V>*>(y + n * C),
        parts ? reinterpret_cast<Lanes<W, V>*>(parts + n * chunks * C) : nullptr);
    check_launch("pool_pixels");
  }
  if (!parts) return;
  pool_parts<kKind, T>
      <<<static_cast<unsigned>((N * C + kThreads - 1) / kThreads), kThreads, 0, stream_of(r)>>>(N, chunks, C, cells, p, parts, y);
  check_launch("pool_parts");
}

template <PoolKind kKind>
void pool_globally(RunContext& r, int p, Layout layout) {
  const TensorView& x = r.input(0);
  if (x.rank() < 3) throw Error("a global pooling of shape " + to_string(x.dims), "give it [N,C,D1,...]");
  Dims y_dims(x.rank(), 1);
  y_dims[0] = x.dims[0], y_dims[1] = x.dims[1];
  TensorView& y = r.output(0, y_dims, x.dtype, layout);
  if (y.count() == 0) return;
  const int64_t N = x.dims[0], C = x.dims[1], cells = count_of(Dims(x.dims.begin() + 2, x.dims.end()));
  with_float_type(x.dtype, [&]<typename Tag>(Tag) {
    using T = typename Tag::type;
    constexpr int V = kPackOf16<T>;
    const T* from = x.as<const T>();
    if (x.layout != Layout::nhwc) return pool_plain<kKind, T>(N * C, cells, p, from, y.as<T>(), stream_of(r));
    if (C % V == 0 && is_16_byte_aligned(x.data) && is_16_byte_aligned(y.data))
      return pool_last<kKind, T, V>(r, N, cells, C, p, from, y.as<T>());
    pool_last<kKind, T, 1>(r, N, cells, C, p, from, y.as<T>());
  });
}

template <PoolKind kKind>
CompiledKernel make_global_pool(const CompileContext& c) {
  const int64_t p = c.node().get_int("p", 2);
  if (p < 1) throw Error("GlobalLpPool with p = " + std::to_string(p), "use 1 or more");
  const Layout layout = offered_layout(c);
  CompiledKernel kernel{[p, layout](RunContext& r) { pool_globally<kKind>(r, static_cast<int>(p), layout); }};
  // With one cell the two layouts are the same bytes; nhwc spares the convolutions that often follow a reorder.
  kernel.input_layouts = {layout};
  kernel.output_layouts = {layout};
  return kernel;
}

std::string why_not(const CompileContext& c) {
  return refuse_other_types(c, 0, {DType::float32, DType::float16, DType::bfloat16, DType::float64});
}

}  // namespace

void register_global_pooling(KernelRegistry& registry) {
  registry.add({.op = "GlobalAveragePool", .make = make_global_pool<PoolKind::average>, .unsupported = why_not});
  registry.add({.op = "GlobalMaxPool", .make = make_global_pool<PoolKind::max>, .unsupported = why_not});
  registry.add({.op = "GlobalLpPool", .make = make_global_pool<PoolKind::lp>, .unsupported = why_not});
}

}  // namespace fretsaw::cuda
