// Joining what the threads of a group have found. A group is the blockDim.x threads of one threadIdx.y; blockDim.x is a power of two, so
// that a group is a part of a warp or whole warps.
#pragma once
#include <cstdint>
#include <cstring>

namespace fretsaw::cuda {

// Any trivially copyable value of whole words.
template <typename S>
__device__ __forceinline__ S shuffle_xor(const S& value, int mask) {
  static_assert(sizeof(S) % 4 == 0);
  uint32_t words[sizeof(S) / 4];
  memcpy(words, &value, sizeof(S));
#pragma unroll
  for (uint32_t& word : words) word = __shfl_xor_sync(0xffffffffu, word, mask);
  S other;
  memcpy(&other, words, sizeof(S));
  return other;
}

// The join of the first `lanes` (a power of two up to 32) lanes' values, in all of them. All lanes of the warp must call it.
template <typename S, typename Join>
__device__ __forceinline__ S join_lanes(S value, int lanes, const Join& join) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) join(value, shuffle_xor(value, mask));
  return value;
}

// The join of a group's values, in all of its threads, in an order that depends on blockDim alone. All threads of the block must call it.
// `shared` has room for a value of each warp; `start` changes nothing when joined.
template <typename S, typename Join>
__device__ __forceinline__ S join_group(S value, const S& start, S* shared, const Join& join) {
  const int width = static_cast<int>(blockDim.x);
  value = join_lanes(value, width < 32 ? width : 32, join);
  if (width <= 32) return value;
  const int thread = static_cast<int>(threadIdx.y) * width + static_cast<int>(threadIdx.x);
  const int lane = thread % 32, warps = width / 32, first = static_cast<int>(threadIdx.y) * warps;
  __syncthreads();  // an earlier call may still read `shared`
  if (lane == 0) shared[thread / 32] = value;
  __syncthreads();
  return join_lanes(lane < warps ? shared[first + lane] : start, 32, join);
}

// Joins of plain numbers. Of NaN and a number, the larger is NaN.
struct AddJoin {
  template <typename S>
  __device__ void operator()(S& into, const S& other) const {
    into += other;
  }
};
struct LargerJoin {
  template <typename S>
  __device__ void operator()(S& into, const S& other) const {
    if (other > into || other != other) into = other;
  }
};

// The sum or the maximum over a block of one row of threads, in all of them.
__device__ __forceinline__ float sum_of_block(float value, float* shared) {
  return join_group(value, 0.0f, shared, AddJoin{});
}
__device__ __forceinline__ float largest_of_block(float value, float* shared) {
  return join_group(value, -INFINITY, shared, LargerJoin{});
}

// The join of the values of one threadIdx.x over all threadIdx.y (blockDim.y is a power of two), in all of them. `shared` has room for a
// value of each thread.
template <typename S, typename Join>
__device__ __forceinline__ S join_column(const S& value, S* shared, const Join& join) {
  const int width = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.y) * width + static_cast<int>(threadIdx.x);
  __syncthreads();
  shared[thread] = value;
  for (int half = static_cast<int>(blockDim.y) / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.y) < half) join(shared[thread], shared[thread + half * width]);
  }
  __syncthreads();
  return shared[threadIdx.x];
}

}  // namespace fretsaw::cuda
