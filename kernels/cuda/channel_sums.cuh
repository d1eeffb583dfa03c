// Sums over the elements of each channel of an image, read once: for BatchNormalization by the batch's statistics, and its gradient.
//
// Sums are of differences from a number near the channel's mean, so that squares lose nothing; those of a thread are taken in float32, and
// joined in double in an order that the shape alone decides.
#pragma once
#include <algorithm>

#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/element_packs.cuh"
#include "kernels/cuda/fold_plan.h"

namespace fretsaw::cuda {

constexpr int kChannelThreads = 256;

// X [N, C, cells], or [N, cells, C] where `last`.
struct ChannelShape {
  int64_t N = 1, C = 1;
  WideDivider cells;
  bool last = false;

  ChannelShape(const TensorView& x) : N(x.dims[0]), C(x.dims[1]), cells(product_from_2(x.dims)), last(x.layout == Layout::nhwc) {}
  __host__ __device__ int64_t count() const { return N * cells.divisor; }  // elements of a channel
  // Element e of the channel.
  __device__ int64_t place(int64_t channel, int64_t e) const {
    if (last) return e * C + channel;
    const int64_t n = cells.quotient(e);
    return (n * C + channel) * cells.divisor + (e - n * cells.divisor);
  }

 private:
  static int64_t product_from_2(const Dims& dims) {
    int64_t cells = 1;
    for (size_t d = 2; d < dims.size(); ++d) cells *= dims[d];
    return cells;
  }
};

// With d = x - origin: the sums of d and d d; of the gradient's elements g, and of g d.
template <typename Number>
struct ChannelSums {
  Number d, dd, g, gd;
};
struct AddSums {
  __device__ void operator()(ChannelSums<double>& a, const ChannelSums<double>& b) const {
    a.d += b.d, a.dd += b.dd, a.g += b.g, a.gd += b.gd;
  }
};

// The mean of some of the channel's elements.
template <typename T>
__device__ WideOf<T> channel_origin(const T* x, const ChannelShape& shape, int64_t channel) {
  constexpr int kSamples = 8;
  const int64_t count = shape.count(), step = (count + kSamples - 1) / kSamples;
  WideOf<T> sum = 0;
  int taken = 0;
#pragma unroll
  for (int i = 0; i < kSamples; ++i) {
    if (i * step >= count) continue;
    sum += widen(x[shape.place(channel, i * step)]);
    ++taken;
  }
  return sum / static_cast<WideOf<T>>(taken);
}

template <bool kGradient, typename T>
__device__ __forceinline__ void add_element(ChannelSums<WideOf<T>>& sums, WideOf<T> d, T g) {
  sums.d += d, sums.dd += d * d;
  if constexpr (kGradient) sums.g += widen(g), sums.gd += widen(g) * d;
}
template <typename Wide>
__device__ ChannelSums<double> doubled(const ChannelSums<Wide>& s) {
  return {static_cast<double>(s.d), static_cast<double>(s.dd), static_cast<double>(s.g), static_cast<double>(s.gd)};
}

// A block takes the part blockIdx.y of channel blockIdx.x, whose rows of cells are read in packs of V. dy: null without kGradient.
template <typename T, int V, bool kGradient>
__global__ void __launch_bounds__(kChannelThreads)
    sum_planes(const T* x, const T* dy, ChannelShape shape, int64_t part, ChannelSums<double>* parts) {
  __shared__ ChannelSums<double> shared[kChannelThreads / 32];
  const int64_t channel = blockIdx.x, end = min(shape.count(), (int64_t{blockIdx.y} + 1) * part);
  const WideOf<T> origin = channel_origin(x, shape, channel);
  ChannelSums<WideOf<T>> sums{};
#pragma unroll 4
  for (int64_t e = int64_t{blockIdx.y} * part + int64_t{threadIdx.x} * V; e < end; e += kChannelThreads * V) {
    const int64_t at = shape.place(channel, e);
    const auto from = *reinterpret_cast<const Lanes<T, V>*>(x + at);
    Lanes<T, V> g;
    if constexpr (kGradient) g = *reinterpret_cast<const Lanes<T, V>*>(dy + at);
#pragma unroll
    for (int v = 0; v < V; ++v) add_element<kGradient, T>(sums, widen(from.at[v]) - origin, g.at[v]);
  }
  const ChannelSums<double> all = join_group(doubled(sums), ChannelSums<double>{}, shared, AddSums{});
  if (threadIdx.x == 0) parts[int64_t{blockIdx.y} * shape.C + channel] = all;
}

// Channels last: threadIdx.x takes V neighbouring channels, threadIdx.y the pixels of part blockIdx.y.
template <typename T, int V, bool kGradient>
__global__ void __launch_bounds__(kChannelThreads)
    sum_pixels(const T* x, const T* dy, ChannelShape shape, int64_t part, ChannelSums<double>* parts) {
  __shared__ ChannelSums<double> shared[kChannelThreads];
  const int64_t channel = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * V;
  const bool real = channel < shape.C;
  WideOf<T> origins[V];
  ChannelSums<WideOf<T>> sums[V] = {};
  if (real) {
#pragma unroll
    for (int v = 0; v < V; ++v) origins[v] = channel_origin(x, shape, channel + v);
    const int64_t end = min(shape.count(), (int64_t{blockIdx.y} + 1) * part);
#pragma unroll 4
    for (int64_t e = int64_t{blockIdx.y} * part + threadIdx.y; e < end; e += blockDim.y) {
      const int64_t at = e * shape.C + channel;
      const auto from = *reinterpret_cast<const Lanes<T, V>*>(x + at);
      Lanes<T, V> g;
      if constexpr (kGradient) g = *reinterpret_cast<const Lanes<T, V>*>(dy + at);
#pragma unroll
      for (int v = 0; v < V; ++v) add_element<kGradient, T>(sums[v], widen(from.at[v]) - origins[v], g.at[v]);
    }
  }
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const ChannelSums<double> all = join_column(doubled(sums[v]), shared, AddSums{});
    if (real && threadIdx.y == 0) parts[int64_t{blockIdx.y} * shape.C + channel + v] = all;
  }
}

// What is known of a channel when all of it was read.
struct ChannelFacts {
  double mean, variance;  // the population's
  double g, along;        // the sums of g and of g (x - mean)
};

// A warp joins the parts of one channel; f(channel, facts) in its first lane.
template <typename T, typename F>
__device__ void with_channel_facts(const T* x, const ChannelShape& shape, const ChannelSums<double>* parts, int part_count, const F& f) {
  const int64_t channel = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  if (channel >= shape.C) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  ChannelSums<double> sums{};
  for (int p = lane; p < part_count; p += 32) AddSums{}(sums, parts[p * shape.C + channel]);
  sums = join_lanes(sums, 32, AddSums{});
  if (lane != 0) return;
  const auto count = static_cast<double>(shape.count());
  const double shift = sums.d / count, variance = sums.dd / count - shift * shift;
  const double mean = static_cast<double>(channel_origin(x, shape, channel)) + shift;
  f(channel, ChannelFacts{mean, variance < 0 ? 0 : variance, sums.g, sums.gd - shift * sums.g});
}

// How the sums of x are spread: `parts` for each channel.
struct ChannelLaunch {
  dim3 grid, threads;
  int64_t part = 1;  // elements of a channel
  int parts = 1;
  bool packed = false;
};
inline ChannelLaunch channel_launch(const ChannelShape& shape, int pack, bool aligned, int multiprocessors) {
  ChannelLaunch launch;
  launch.packed = aligned && (shape.last ? shape.C : shape.cells.divisor) % pack == 0;
  const int64_t v = launch.packed ? pack : 1, count = shape.count();
  int64_t x = kChannelThreads, y = 1, across = shape.C, step = kChannelThreads * v;
  if (shape.last) {
    x = std::min<int64_t>(32, power_of_two_from((shape.C + v - 1) / v));
    y = kChannelThreads / x;
    across = (shape.C + x * v - 1) / (x * v);
    step = y;
  }
  const int64_t wanted = std::max<int64_t>(int64_t{8} * multiprocessors / across, 1), most = std::max<int64_t>(count / (step * 8), 1);
  const int64_t even = (count + std::min({wanted, most, int64_t{1024}}) - 1) / std::min({wanted, most, int64_t{1024}});
  launch.part = (even + step - 1) / step * step;
  launch.parts = static_cast<int>((count + launch.part - 1) / launch.part);
  launch.grid = dim3(static_cast<unsigned>(across), static_cast<unsigned>(launch.parts));
  launch.threads = dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
  return launch;
}

template <bool kGradient, typename T>
void sum_channels(const ChannelLaunch& launch, const T* x, const T* dy, const ChannelShape& shape, ChannelSums<double>* parts,
                  cudaStream_t stream) {
  constexpr int V = kPackOf16<T>;
  const auto start = [&](auto kernel) { kernel<<<launch.grid, launch.threads, 0, stream>>>(x, dy, shape, launch.part, parts); };
  if (shape.last)
    launch.packed ? start(sum_pixels<T, V, kGradient>) : start(sum_pixels<T, 1, kGradient>);
  else
    launch.packed ? start(sum_planes<T, V, kGradient>) : start(sum_planes<T, 1, kGradient>);
  check_launch("sum_channels");
}

}  // namespace fretsaw::cuda
