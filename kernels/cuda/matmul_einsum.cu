// Einsum's loops: one thread for each element of the result, or a warp where much is summed.
#include "kernels/cuda/matmul_einsum.h"
#include "kernels/cuda/product_types.cuh"

namespace fretsaw::cuda {
namespace {

constexpr int kThreads = 256;

struct Offsets {
  int64_t a = 0, b = 0;
};

// Where the index-th element of these axes lies in the factors.
__device__ inline Offsets offsets_at(int64_t index, int axes, const int64_t* sizes, const int64_t* a, const int64_t* b) {
  Offsets out;
  for (int i = axes - 1; i >= 0; --i) {
    const int64_t at = index % sizes[i];
    index /= sizes[i];
    out.a += at * a[i], out.b += at * b[i];
  }
  return out;
}

template <typename T>
__device__ inline Sum<T> warp_sum(Sum<T> sum) {
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

// `Lanes` threads share an element: 1 or a warp.
template <typename T, int Lanes>
__global__ void einsum_kernel(EinsumLoops loops, int64_t count, int64_t terms, const T* a, const T* b, T* y) {
  const int lane = Lanes == 1 ? 0 : static_cast<int>(threadIdx.x) % Lanes;
  for (int64_t i = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / Lanes; i < count; i += int64_t{gridDim.x} * blockDim.x / Lanes) {
    const Offsets base = offsets_at(i, loops.kept, loops.kept_size, loops.kept_a, loops.kept_b);
    Sum<T> sum = 0;
    for (int64_t k = lane; k < terms; k += Lanes) {
      const Offsets at = offsets_at(k, loops.summed, loops.summed_size, loops.summed_a, loops.summed_b);
      const Sum<T> left = widen(a[base.a + at.a]);
      sum += b ? left * widen(b[base.b + at.b]) : left;
    }
    if constexpr (Lanes > 1) sum = warp_sum<T>(sum);
    if (lane == 0) y[i] = rounded<T>(sum);
  }
}

template <typename T>
void launch(const EinsumLoops& loops, const void* a, const void* b, void* y, cudaStream_t stream) {
  int64_t count = 1, terms = 1;
  for (int i = 0; i < loops.kept; ++i) count *= loops.kept_size[i];
  for (int i = 0; i < loops.summed; ++i) terms *= loops.summed_size[i];
  if (count == 0) return;
  const auto *left = static_cast<const T*>(a), *right = static_cast<const T*>(b);
  if (terms >= 64)
    einsum_kernel<T, 32><<<blocks_for(count * 32, kThreads), kThreads, 0, stream>>>(loops, count, terms, left, right, static_cast<T*>(y));
  else
    einsum_kernel<T, 1><<<blocks_for(count, kThreads), kThreads, 0, stream>>>(loops, count, terms, left, right, static_cast<T*>(y));
  check_launch("einsum");
}

}  // namespace

void run_einsum_loops(DType type, const EinsumLoops& loops, const void* a, const void* b, void* y, cudaStream_t stream) {
  switch (type) {
    case DType::float32:
      return launch<float>(loops, a, b, y, stream);
    case DType::float64:
      return launch<double>(loops, a, b, y, stream);
    case DType::float16:
      return launch<__half>(loops, a, b, y, stream);
    case DType::bfloat16:
      return launch<__nv_bfloat16>(loops, a, b, y, stream);
    case DType::int32:
      return launch<int32_t>(loops, a, b, y, stream);
    case DType::uint32:
      return launch<uint32_t>(loops, a, b, y, stream);
    case DType::int64:
      return launch<int64_t>(loops, a, b, y, stream);
    case DType::uint64:
      return launch<uint64_t>(loops, a, b, y, stream);
    default:
      throw Error("Einsum of elements of type " + std::string(name_of(type)), "cast them to float32");
  }
}

}  // namespace fretsaw::cuda
