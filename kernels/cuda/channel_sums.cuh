// Sums over the elements of each channel of an image, read once: for BatchNormalization by the batch's statistics, and its gradient.
//
// A thread sums differences from the first element that it meets, so that squares lose nothing: of 16-bit images in float32, whose 24 bits
// hold such differences, of others in double, so that the layout, which decides the order, does not show in the rounded result. They are
// joined in double as differences from the channel's first element, in an order that the shape and the number of multiprocessors alone
// decide.
#pragma once
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/channel_pixels.cuh"

namespace fretsaw::cuda {

// X [N, C, cells], or [N, cells, C] where `last`.
struct ChannelShape {
  int64_t N = 1, C = 1;
  WideDivider cells;
  bool last = false;

  ChannelShape(const TensorView& x)
      : N(x.dims[0]), C(x.dims[1]), cells(product_from_2(x.dims)), last(x.layout == Layout::nhwc || cells.divisor == 1) {}
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

// With d = x - origin: the sums of d and d d; with kGradient also those of the gradient's elements g, and of g d.
template <typename T>
using SumNumber = std::conditional_t<sizeof(T) == 2, float, double>;
enum SumOf { kOfD, kOfDD, kOfG, kOfGD };
template <typename Number, bool kGradient>
struct alignas(2 * sizeof(Number)) ChannelSums {
  static constexpr int kCount = kGradient ? 4 : 2;
  Number of[kCount];
};
struct AddSums {
  template <typename Sums>
  __device__ void operator()(Sums& a, const Sums& b) const {
#pragma unroll
    for (int k = 0; k < Sums::kCount; ++k) a.of[k] += b.of[k];
  }
};

template <bool kGradient, typename Number>
__device__ __forceinline__ void add_element(ChannelSums<Number, kGradient>& sums, Number x, Number origin, Number g) {
  const Number d = x - origin;
  sums.of[kOfD] += d, sums.of[kOfDD] += d * d;
  if constexpr (kGradient) sums.of[kOfG] += g, sums.of[kOfGD] += g * d;
}
// The sums of n elements, whose differences were from base + shift, as of differences from base.
template <typename Number, bool kGradient>
__device__ ChannelSums<double, kGradient> shifted(const ChannelSums<Number, kGradient>& sums, double n, double shift) {
  ChannelSums<double, kGradient> out;
#pragma unroll
  for (int k = 0; k < out.kCount; ++k) out.of[k] = static_cast<double>(sums.of[k]);
  out.of[kOfDD] += shift * (2 * out.of[kOfD] + n * shift);
  out.of[kOfD] += n * shift;
  if constexpr (kGradient) out.of[kOfGD] += shift * out.of[kOfG];
  return out;
}

// A block takes the part blockIdx.y of channel blockIdx.x, whose rows of cells are read in packs of V. dy: null without kGradient.
// parts [C, gridDim.y].
template <typename T, int V, bool kGradient>
__global__ void __launch_bounds__(kChannelThreads)
    sum_planes(const T* x, const T* dy, ChannelShape shape, int64_t part, ChannelSums<double, kGradient>* parts) {
  let_later_begin();
  wait_for_earlier();
  using Sums = ChannelSums<double, kGradient>;
  using Number = SumNumber<T>;
  __shared__ Sums shared[kChannelThreads / 32];
  const int64_t channel = blockIdx.x, end = min(shape.count(), (int64_t{blockIdx.y} + 1) * part);
  const int64_t first = int64_t{blockIdx.y} * part + int64_t{threadIdx.x} * V;
  const Number base = widen(x[shape.place(channel, 0)]),
               origin = first < end ? static_cast<Number>(widen(x[shape.place(channel, first)])) : base;
  ChannelSums<Number, kGradient> sums{};
  int taken = 0;
#pragma unroll 4
  for (int64_t e = first; e < end; e += kChannelThreads * V, taken += V) {
    const int64_t at = shape.place(channel, e);
    const auto from = *reinterpret_cast<const Lanes<T, V>*>(x + at);
    Lanes<T, V> g{};
    if constexpr (kGradient) g = *reinterpret_cast<const Lanes<T, V>*>(dy + at);
#pragma unroll
    for (int v = 0; v < V; ++v) add_element<kGradient, Number>(sums, widen(from.at[v]), origin, widen(g.at[v]));
  }
  const double shift = static_cast<double>(origin) - static_cast<double>(base);
  const Sums all = join_group(shifted(sums, taken, shift), Sums{}, shared, AddSums{});
  if (threadIdx.x == 0) parts[channel * gridDim.y + blockIdx.y] = all;
}

// Writes what a block of a pixel grid has summed: of(v) gives this thread's sums of the v-th of its channels.
template <int V, bool kGradient, typename Of>
__device__ __forceinline__ void write_pixel_sums(int64_t C, ChannelSums<double, kGradient>* parts, const Of& of) {
  using Sums = ChannelSums<double, kGradient>;
  constexpr int kTogether = V > 1 ? 2 : 1, kRows = kTogether * Sums::kCount, kWarps = kChannelThreads / 32;
  __shared__ double shared[kRows][kWarps][32];
  const int width = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.y) * width + static_cast<int>(threadIdx.x);
#pragma unroll
  for (int from = 0; from < V; from += kTogether) {
    if (from > 0) __syncthreads();
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      Sums sums = of(from + k);
      for (int mask = width; mask < 32; mask *= 2) AddSums{}(sums, shuffle_xor(sums, mask));
      if (thread % 32 >= width) continue;
#pragma unroll
      for (int q = 0; q < Sums::kCount; ++q) shared[k * Sums::kCount + q][thread / 32][thread % 32] = sums.of[q];
    }
    __syncthreads();
    // A thread adds up one number of one channel over the warps.
    const int row = thread / width, column = thread % width;
    const int64_t channel = (int64_t{blockIdx.x} * width + column) * V + from + row / Sums::kCount;
    if (row >= kRows || channel >= C) continue;
    double total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += shared[row][w][column];
    parts[channel * gridDim.y + blockIdx.y].of[row % Sums::kCount] = total;
  }
}

// How many blocks of sum_pixels run at once on a multiprocessor.
template <bool kGradient>
constexpr int kSumBlocks = kGradient ? 2 : 3;

// Where only a part of a gradient counts: that of the elements where y is above 0 (the gradient of y = max(0, ...)).
template <typename T>
struct PositivePart {
  const T* y = nullptr;     // as the gradient lies; null: all of it counts
  uint8_t* bits = nullptr;  // filled by sum_pixels: a byte for each pack of channels, bit v is that of channel v
};

// Channels last. parts [C, gridDim.y]. kPart: only a part of dy counts.
template <typename T, int V, bool kGradient, bool kPart>
__global__ void __launch_bounds__(kChannelThreads, kSumBlocks<kGradient>)
    sum_pixels(const T* x, const T* dy, PositivePart<T> part, ChannelShape shape, ChannelSums<double, kGradient>* parts) {
  let_later_begin();
  wait_for_earlier();
  const int64_t channel = pixel_channel<V>(), pixels = shape.count(), first = first_pixel(), step = pixel_step();
  using Wide = WideOf<T>;
  using Number = SumNumber<T>;
  constexpr int kBatch = kPart ? kPixelBatch - 1 : kPixelBatch;
  Wide origins[V] = {};
  ChannelSums<Number, kGradient> sums[V] = {};
  double taken = 0;
  if (channel < shape.C && first < pixels) {
    const T *own_x = x + channel, *own_dy = dy + channel, *own_y = part.y + channel;
    taken = static_cast<double>((pixels - first + step - 1) / step);
    unpack<T, V>(hold<T, V>(own_x + first * shape.C), origins);
    Held<T, V> from[kBatch], g[kBatch], y[kBatch];
    each_pixel<false, kBatch>(
        pixels, shape.C,
        [&](int b, int64_t at) {
          from[b] = hold<T, V>(own_x + at);
          if constexpr (kGradient) g[b] = hold<T, V>(own_dy + at);
          if constexpr (kPart) y[b] = hold_last<T, V>(own_y + at);
        },
        [&](int b, int64_t at) {
          Wide values[V], gradients[V] = {};
          unpack<T, V>(from[b], values);
          if constexpr (kGradient) unpack<T, V>(g[b], gradients);
          if constexpr (kPart) {
            Wide results[V];
            unpack<T, V>(y[b], results);
            uint32_t bits = 0;
#pragma unroll
            for (int v = 0; v < V; ++v) {
              if (results[v] > 0)
                bits |= 1u << v;
              else
                gradients[v] = 0;
            }
            part.bits[(at + channel) / V] = static_cast<uint8_t>(bits);
          }
#pragma unroll
          for (int v = 0; v < V; ++v) add_element<kGradient, Number>(sums[v], values[v], origins[v], gradients[v]);
        });
  }
  Wide base[V] = {};
  if (taken > 0) unpack<T, V>(hold<T, V>(x + channel), base);
  write_pixel_sums<V>(shape.C, parts,
                      [&](int v) { return shifted(sums[v], taken, static_cast<double>(origins[v]) - static_cast<double>(base[v])); });
}

// What is known of a channel when all of it was read.
struct ChannelFacts {
  double mean, variance;  // the population's
  double g, along;        // with the gradient: the sums of g and of g (x - mean)
};

// A warp joins the parts of one channel; f(channel, facts) in its first lane.
template <bool kGradient, typename T, typename F>
__device__ void with_channel_facts(const T* x, const ChannelShape& shape, const ChannelSums<double, kGradient>* parts, int part_count,
                                   const F& f) {
  const int64_t channel = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  if (channel >= shape.C) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const double base = static_cast<double>(widen(x[shape.place(channel, 0)]));
  ChannelSums<double, kGradient> sums{};
#pragma unroll 8
  for (int p = lane; p < part_count; p += 32) AddSums{}(sums, parts[channel * part_count + p]);
  sums = join_lanes(sums, 32, AddSums{});
  if (lane != 0) return;
  const auto count = static_cast<double>(shape.count());
  const double shift = sums.of[kOfD] / count, variance = sums.of[kOfDD] / count - shift * shift;
  ChannelFacts facts{base + shift, variance < 0 ? 0 : variance, 0, 0};
  if constexpr (kGradient) facts.g = sums.of[kOfG], facts.along = sums.of[kOfGD] - shift * sums.of[kOfG];
  f(channel, facts);
}

// How the sums of x are spread: `parts` for each channel.
struct ChannelLaunch {
  PixelGrid grid;
  int64_t part = 1;  // elements of a channel; unused where the channels are last
  int parts = 1;
  bool packed = false;
};
template <bool kGradient>
ChannelLaunch channel_launch(const ChannelShape& shape, int pack, bool aligned, int multiprocessors) {
  ChannelLaunch launch;
  launch.packed = aligned && (shape.last ? shape.C : shape.cells.divisor) % pack == 0;
  const int v = launch.packed ? pack : 1;
  const int64_t count = shape.count();
  if (shape.last) {
    launch.grid = pixel_grid(count, shape.C, v, int64_t{kSumBlocks<kGradient>} * multiprocessors);
    launch.parts = static_cast<int>(launch.grid.blocks.y);
    return launch;
  }
  const int64_t step = int64_t{kChannelThreads} * v, wanted = std::max<int64_t>(int64_t{8} * multiprocessors / shape.C, 1);
  const int64_t pieces = std::min({wanted, std::max<int64_t>(count / (step * 8), 1), int64_t{1024}}), even = (count + pieces - 1) / pieces;
  launch.part = (even + step - 1) / step * step;
  launch.parts = static_cast<int>((count + launch.part - 1) / launch.part);
  launch.grid = {dim3(static_cast<unsigned>(shape.C), static_cast<unsigned>(launch.parts)), dim3(kChannelThreads)};
  return launch;
}

// positive: of a packed launch over channels that are last only.
template <bool kGradient, typename T>
void sum_channels(const ChannelLaunch& launch, const T* x, const T* dy, PositivePart<T> positive, const ChannelShape& shape,
                  ChannelSums<double, kGradient>* parts, cudaStream_t stream) {
  constexpr int V = kPackOf16<T>;
  const auto pixels = [&](auto kernel) {
    launch_dependent(kernel, launch.grid.blocks, launch.grid.threads, stream, x, dy, positive, shape, parts);
  };
  const auto planes = [&](auto kernel) {
    launch_dependent(kernel, launch.grid.blocks, launch.grid.threads, stream, x, dy, shape, launch.part, parts);
  };
  if (!shape.last)
    launch.packed ? planes(sum_planes<T, V, kGradient>) : planes(sum_planes<T, 1, kGradient>);
  else if (!launch.packed)
    pixels(sum_pixels<T, 1, kGradient, false>);
  else if (kGradient && positive.y)
    pixels(sum_pixels<T, V, kGradient, kGradient>);
  else
    pixels(sum_pixels<T, V, kGradient, false>);
  check_launch("sum_channels");
}

}  // namespace fretsaw::cuda
