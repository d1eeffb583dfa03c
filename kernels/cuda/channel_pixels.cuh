// Walks over images that lie channels last, as [pixels, C]: a thread keeps V neighbouring channels and goes over pixels, several loads of
// 16 bytes under way at a time. All blocks run at once, so that they pass over memory together, from its start or from its end.
#pragma once
#include <algorithm>
#include <cstring>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/element_packs.cuh"
#include "kernels/cuda/fold_plan.h"

namespace fretsaw::cuda {

constexpr int kChannelThreads = 256;
constexpr int kPixelBatch = 4;  // pixels of a thread that are loaded together

// threads.x times V channels a block, and the pixels threadIdx.y + blockIdx.y threads.y, then each gridDim.y threads.y further.
struct PixelGrid {
  dim3 blocks, threads;
};
// `resident`: how many blocks the device runs at once.
inline PixelGrid pixel_grid(int64_t pixels, int64_t C, int V, int64_t resident) {
  const int64_t packs = (C + V - 1) / V, width = std::min<int64_t>(32, power_of_two_from(packs)), height = kChannelThreads / width;
  const int64_t across = (packs + width - 1) / width, most = std::max<int64_t>(pixels / (height * kPixelBatch), 1);
  const int64_t down = std::clamp<int64_t>(resident / across, 1, std::min<int64_t>(most, 65535));
  return {dim3(static_cast<unsigned>(across), static_cast<unsigned>(down)),
          dim3(static_cast<unsigned>(width), static_cast<unsigned>(height))};
}

// The first of this thread's V channels.
template <int V>
__device__ __forceinline__ int64_t pixel_channel() {
  return (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * V;
}
__device__ __forceinline__ int64_t first_pixel() {
  return int64_t{blockIdx.y} * blockDim.y + threadIdx.y;
}
__device__ __forceinline__ int64_t pixel_step() {
  return int64_t{gridDim.y} * blockDim.y;
}

// load(b, place) for a batch of the thread's pixels, then use(b, place) for each of them: b counts within the batch, and the pixel begins
// at element `place`. kBackwards: the pixels are counted from the last one.
template <bool kBackwards, int kBatch = kPixelBatch, typename Load, typename Use>
__device__ __forceinline__ void each_pixel(int64_t pixels, int64_t C, const Load& load, const Use& use) {
  const int64_t first = first_pixel(), step = pixel_step(), stride = kBackwards ? -step * C : step * C;
  int64_t place = (kBackwards ? pixels - 1 - first : first) * C;
  for (int64_t left = (pixels - first + step - 1) / step; left > 0; left -= kBatch, place += kBatch * stride) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (b < left) load(b, place + b * stride);
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (b < left) use(b, place + b * stride);
  }
}

// A pack as it is held until it is used: in whole words, which take half the registers of 16-bit numbers.
template <typename T, int V>
using Held = std::conditional_t<sizeof(Lanes<T, V>) == 16, uint4, Lanes<T, V>>;

template <typename T, int V>
__device__ __forceinline__ Held<T, V> hold(const T* from) {
  return *reinterpret_cast<const Held<T, V>*>(from);
}
// One that is not read again soon: the cache lets it go first.
template <typename T, int V>
__device__ __forceinline__ Held<T, V> hold_last(const T* from) {
  if constexpr (sizeof(Lanes<T, V>) == 16)
    return __ldcs(reinterpret_cast<const uint4*>(from));
  else
    return hold<T, V>(from);
}
template <typename T, int V>
__device__ __forceinline__ void unpack(const Held<T, V>& pack, WideOf<T> (&to)[V]) {
  if constexpr (sizeof pack == 16 && std::is_same_v<T, __nv_bfloat16>) {
    const uint32_t words[4] = {pack.x, pack.y, pack.z, pack.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) to[2 * k] = __uint_as_float(words[k] << 16), to[2 * k + 1] = __uint_as_float(words[k] & 0xffff0000u);
  } else {
    Lanes<T, V> lanes;
    memcpy(&lanes, &pack, sizeof lanes);
#pragma unroll
    for (int v = 0; v < V; ++v) to[v] = widen(lanes.at[v]);
  }
}

}  // namespace fretsaw::cuda
