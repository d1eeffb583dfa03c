// The k first of short slices: each warp holds a slice in its registers and takes the best element k times.
#include "kernels/cuda/sorting.h"

namespace fretsaw::cuda {
namespace {

constexpr int kLongest = 512, kMost = 32;  // elements of a slice, results
constexpr int kWarps = 8;
constexpr int kNone = 0x7fffffff;  // an index after all others

template <typename Key>
struct Candidate {
  Key key = static_cast<Key>(~Key{0});
  int index = kNone;

  __device__ void take_first(const Candidate& other) {
    if (other.key < key || (other.key == key && other.index < index)) *this = other;
  }
};

// Lane l holds the elements l, l + 32, ... of the slice.
template <typename Key, int kItems>
__global__ void __launch_bounds__(32 * kWarps) top_k_of_warp(Slices s, int64_t slices, TopKOutputs out, int element_bytes) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t slice = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; slice < slices; slice += step) {
    Key keys[kItems];
    unsigned left = 0;  // one bit for each element that is not taken yet
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int i = lane + 32 * item;
      keys[item] = i < s.extent ? key_at<Key>(s, s.at(slice, i)) : Key{0};
      left |= static_cast<unsigned>(i < s.extent) << item;
    }
    for (int64_t rank = 0; rank < s.k; ++rank) {
      Candidate<Key> best;
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        if (left >> item & 1) best.take_first({keys[item], lane + 32 * item});
      }
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        best.take_first({__shfl_xor_sync(~0u, best.key, distance), __shfl_xor_sync(~0u, best.index, distance)});
      }
      if (best.index % 32 == lane) left &= ~(1u << (best.index / 32));
      if (lane == 0) out.put(s, slice, rank, best.index, element_bytes);
    }
  }
}

}  // namespace

bool fits_warp(const Slices& s) {
  return s.extent <= kLongest && s.k <= kMost;
}

void top_k_by_warps(RunContext& r, const Slices& s, int64_t slices, const TopKOutputs& out) {
  const int element_bytes = bits_of(s.type) / 8;
  const unsigned blocks = blocks_for(slices, kWarps);
  with_key_type(s.type, [&]<typename Key>() {
    const auto launch = [&](auto kernel) { kernel<<<blocks, 32 * kWarps, 0, stream_of(r)>>>(s, slices, out, element_bytes); };
    if (s.extent <= 32) return launch(top_k_of_warp<Key, 1>);
    if (s.extent <= 64) return launch(top_k_of_warp<Key, 2>);
    if (s.extent <= 128) return launch(top_k_of_warp<Key, 4>);
    if (s.extent <= 256) return launch(top_k_of_warp<Key, 8>);
    launch(top_k_of_warp<Key, kLongest / 32>);
  });
  check_launch("top_k_of_warp");
}

}  // namespace fretsaw::cuda
