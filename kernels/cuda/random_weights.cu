// Made-up weights at memory speed: each thread makes the four neighbouring numbers of one counter.
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/element_packs.cuh"
#include "kernels/cuda/random.cuh"
#include "kernels/cuda/random_weights.h"

namespace fretsaw::cuda {
namespace {

constexpr int kThreads = 256;

// Elements of each block that follow each other in the tensor and in its source.
struct Runs {
  int64_t blocks, block, source_block;
  int64_t here, in_source, count;
};

// The product is rounded before the sum, as on the host.
template <typename T>
struct MakeReal {
  float low, span;
  __device__ T operator()(uint32_t word) const {
    const float x = __fadd_rn(low, __fmul_rn(span, static_cast<float>(word >> 8) * 0x1p-24f));
    return narrow<T>(x);
  }
};
struct MakeByte {
  __device__ uint8_t operator()(uint32_t word) const { return static_cast<uint8_t>(word >> 24); }
};

template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T at[4];
};

// Counters from the one that holds a run's first element to the one that holds its last, for each block.
__host__ __device__ inline int64_t counters_of(const Runs& r) {
  return r.count / 4 + 2;  // a run that begins within a counter may end within another
}

template <typename T, typename Make>
__global__ void __launch_bounds__(kThreads) make_weights(T* to, Runs r, Philox random, Make make) {
  const int64_t counters = counters_of(r), total = r.blocks * counters, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += step) {
    const int64_t block = i / counters;
    const int64_t source = block * r.source_block + r.in_source, first = source / 4 * 4 + 4 * (i % counters);
    if (first >= source + r.count) continue;
    const uint4 words = random.block(static_cast<uint64_t>(first / 4));
    const Four<T> made = {make(words.x), make(words.y), make(words.z), make(words.w)};
    T* out = to + block * r.block + r.here + (first - source);  // before the run where it begins within the counter
    if (first >= source && first + 4 <= source + r.count && reinterpret_cast<uintptr_t>(out) % sizeof(made) == 0) {
      *reinterpret_cast<Four<T>*>(out) = made;
      continue;
    }
    for (int k = 0; k < 4; ++k)
      if (first + k >= source && first + k < source + r.count) out[k] = made.at[k];
  }
}

template <typename T, typename Make>
void launch(void* to, const RandomWeights& weights, const Make& make, cudaStream_t stream) {
  for (const RandomWeights::Run& run : weights.runs()) {
    if (run.count == 0) continue;
    const Runs runs = {weights.blocks(), weights.block(), weights.source_block(), run.here, run.in_source, run.count};
    const int64_t threads = runs.blocks * counters_of(runs);
    if (threads == 0) continue;
    make_weights<<<blocks_for(threads, kThreads), kThreads, 0, stream>>>(static_cast<T*>(to), runs, Philox(weights.key()), make);
    check_launch("make_weights");
  }
}

template <typename T>
void launch_real(void* to, const RandomWeights& weights, cudaStream_t stream) {
  launch<T>(to, weights, MakeReal<T>{weights.low(), weights.span()}, stream);
}

}  // namespace

void make_random(void* to, const RandomWeights& weights, cudaStream_t stream) {
  switch (weights.dtype()) {
    case DType::float32:
      return launch_real<float>(to, weights, stream);
    case DType::float64:
      return launch_real<double>(to, weights, stream);
    case DType::float16:
      return launch_real<__half>(to, weights, stream);
    case DType::bfloat16:
      return launch_real<__nv_bfloat16>(to, weights, stream);
    case DType::int8:
    case DType::uint8:
      return launch<uint8_t>(to, weights, MakeByte{}, stream);
    default:
      const size_t bytes = bytes_of(weights.dtype(), weights.blocks() * weights.block());
      if (bytes) FRETSAW_CUDA_CHECK(cudaMemsetAsync(to, 0, bytes, stream));
  }
}

}  // namespace fretsaw::cuda
