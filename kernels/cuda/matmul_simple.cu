// Products by plain loops over tiles, and the small kernels around products.
#include <algorithm>

#include "kernels/cuda/matmul_epilogue.cuh"
#include "kernels/cuda/matmul_simple.h"

namespace fretsaw::cuda {
namespace {

constexpr int kTile = 32, kThreads = 256, kRows = 4;  // each thread sums 4 rows of one column

struct Strides {
  int64_t M, N, K, a_row, a_column, b_row, b_column;
  int64_t a_batch, b_batch, d_batch;
  int64_t tiles_m, tiles_n;
};

template <typename T>
__global__ void multiply_tiles(Strides s, const T* a, const T* b, Epilogue<T> epilogue) {
  __shared__ Sum<T> left[kTile][kTile + 1], right[kTile][kTile + 1];
  const int64_t tile = blockIdx.x, batch = tile / (s.tiles_m * s.tiles_n);
  const int64_t row0 = tile / s.tiles_n % s.tiles_m * kTile, column0 = tile % s.tiles_n * kTile;
  const int x = static_cast<int>(threadIdx.x) % kTile, y = static_cast<int>(threadIdx.x) / kTile * kRows;
  a += batch * s.a_batch, b += batch * s.b_batch;
  Sum<T> sums[kRows] = {};
  for (int64_t k0 = 0; k0 < s.K; k0 += kTile) {
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = row0 + y + i, k = k0 + y + i;
      left[y + i][x] = row < s.M && k0 + x < s.K ? widen(a[row * s.a_row + (k0 + x) * s.a_column]) : Sum<T>(0);
      right[y + i][x] = k < s.K && column0 + x < s.N ? widen(b[k * s.b_row + (column0 + x) * s.b_column]) : Sum<T>(0);
    }
    __syncthreads();
    const int depth = static_cast<int>(s.K - k0 < kTile ? s.K - k0 : kTile);
    for (int k = 0; k < depth; ++k) {
      for (int i = 0; i < kRows; ++i) sums[i] += left[y + i][k] * right[k][x];
    }
    __syncthreads();
  }
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = row0 + y + i, column = column0 + x;
    if (row < s.M && column < s.N) epilogue.store(batch * s.d_batch + row * s.N + column, column, sums[i]);
  }
}

template <typename T>
__global__ void epilogue_kernel(int64_t count, int64_t N, const T* bias, T* d, ProductActivation activation) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    Sum<T> value = widen(d[i]);
    if (bias) value += widen(bias[i % N]);
    d[i] = rounded<T>(activate(value, activation));
  }
}

template <typename T>
__global__ void expand_kernel(const T* from, int64_t row, int64_t column, T* to, int64_t count, int64_t N) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x)
    to[i] = from[i / N * row + i % N * column];
}

// Rows of N elements that begin anywhere, from rows of whole packs. What is written goes in packs of 16 bytes where the row's own beginning
// allows: its first pack begins up to one pack before it.
template <typename T, typename Out>
__global__ void copy_staged_kernel(const T* __restrict__ from, int64_t row, Out* __restrict__ to, int64_t M, int64_t N) {
  constexpr int V = kPackOf16<Out>;
  for (int64_t m = blockIdx.y; m < M; m += gridDim.y) {
    const T* in = from + m * row;
    Out* out = to + m * N;
    const auto before = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out) % 16 / sizeof(Out));
    const int64_t packs = (before + N + V - 1) / V;
    for (int64_t p = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; p < packs; p += int64_t{gridDim.x} * blockDim.x) {
      const int64_t first = p * V - before;
      if (first >= 0 && first + V <= N) {
        Lanes<Out, V> lanes;
#pragma unroll
        for (int v = 0; v < V; ++v) lanes.at[v] = static_cast<Out>(in[first + v]);
        *reinterpret_cast<Lanes<Out, V>*>(out + first) = lanes;
      } else {
        for (int64_t n = first < 0 ? 0 : first; n < first + V && n < N; ++n) out[n] = static_cast<Out>(in[n]);
      }
    }
  }
}

template <typename T>
__global__ void noise_kernel(T* to, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + 12345u;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    to[i] = rounded<T>(static_cast<Sum<T>>(static_cast<float>(x) * (2.0f / 4294967296.0f) - 1.0f));
  }
}

// f(T*) with the element type of a product.
template <typename F>
void with_type(DType type, const F& f) {
  switch (type) {
    case DType::float32:
      return f(static_cast<float*>(nullptr));
    case DType::float64:
      return f(static_cast<double*>(nullptr));
    case DType::float16:
      return f(static_cast<__half*>(nullptr));
    case DType::bfloat16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
    case DType::int32:
      return f(static_cast<int32_t*>(nullptr));
    case DType::uint32:
      return f(static_cast<uint32_t*>(nullptr));
    case DType::int64:
      return f(static_cast<int64_t*>(nullptr));
    case DType::uint64:
      return f(static_cast<uint64_t*>(nullptr));
    default:
      throw Error("a product of elements of type " + std::string(name_of(type)), "cast them to float32");
  }
}

}  // namespace

void run_simple_product(const ProductSpec& p, const ProductOperands& o, cudaStream_t stream) {
  const ProductBatch batch = p.batches.empty() ? ProductBatch{} : p.batches.front();
  const int64_t tiles_m = (p.M + kTile - 1) / kTile, tiles_n = (p.N + kTile - 1) / kTile;
  const Strides s{p.M, p.N, p.K, p.a_row, p.a_column, p.b_row, p.b_column, batch.a, batch.b, batch.d, tiles_m, tiles_n};
  const int64_t blocks = batch.count * tiles_m * tiles_n;
  if (blocks == 0) return;
  if (blocks > INT32_MAX) throw Error("a product of too many matrices for the GPU", "use fewer or larger ones", ErrorCode::device);
  with_type(p.type, [&]<typename T>(T*) {
    multiply_tiles<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(s, static_cast<const T*>(o.a), static_cast<const T*>(o.b),
                                                                              epilogue_of<T>(p, o));
  });
  check_launch("multiply_tiles");
}

void run_epilogue(const ProductSpec& spec, const void* bias, void* d, int64_t rows, cudaStream_t stream) {
  const int64_t count = rows * spec.N;
  if (count == 0) return;
  with_type(spec.type, [&]<typename T>(T*) {
    epilogue_kernel<T><<<blocks_for(count, kThreads), kThreads, 0, stream>>>(count, spec.N, static_cast<const T*>(bias), static_cast<T*>(d),
                                                                             spec.activation);
  });
  check_launch("product epilogue");
}

void expand_matrix(DType type, const void* from, int64_t row, int64_t column, void* to, int64_t M, int64_t N, cudaStream_t stream) {
  const int64_t count = M * N;
  if (count == 0) return;
  with_type(type, [&]<typename T>(T*) {
    expand_kernel<T>
        <<<blocks_for(count, kThreads), kThreads, 0, stream>>>(static_cast<const T*>(from), row, column, static_cast<T*>(to), count, N);
  });
  check_launch("expand_matrix");
}

void copy_staged(const ProductSpec& spec, int64_t rows, const void* from, int64_t row, void* d, cudaStream_t stream) {
  const auto M = static_cast<unsigned>(std::min<int64_t>(rows, 65535));
  const int64_t packs = spec.N / (16 / static_cast<int64_t>(bytes_of(output_type(spec), 1))) + 1;
  const auto columns =
      static_cast<unsigned>(std::min<int64_t>((packs + kThreads - 1) / kThreads, std::max(1, 65536 / static_cast<int>(M))));
  with_float_type(spec.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* x = static_cast<const T*>(from);
    if (output_type(spec) == spec.type)
      copy_staged_kernel<<<dim3(columns, M), kThreads, 0, stream>>>(x, row, static_cast<T*>(d), rows, spec.N);
    else
      copy_staged_kernel<<<dim3(columns, M), kThreads, 0, stream>>>(x, row, static_cast<float*>(d), rows, spec.N);
  });
  check_launch("copy_staged");
}

void fill_noise(DType type, void* to, int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  with_type(type,
            [&]<typename T>(T*) { noise_kernel<T><<<blocks_for(count, kThreads, 4), kThreads, 0, stream>>>(static_cast<T*>(to), count); });
  check_launch("fill_noise");
}

}  // namespace fretsaw::cuda
