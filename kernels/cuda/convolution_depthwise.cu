// Depthwise convolutions with channels last: 3x3, 5x5 and 7x7 windows of stride 1 or 2. They read far more than they multiply, so each
// thread keeps 16 bytes of channels for a few neighbouring outputs and reads each input once for all of them.
#include <cstring>

#include "kernels/cuda/convolution.h"
#include "kernels/cuda/convolution_activation.cuh"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 128;

struct Shape {
  int64_t threads;                            // N * OH * ceil(OW / tile) * channel packs
  int H, W, OH, OW, tiles, packs, top, left;  // packs of channels; padding before
};

// Reads them as one in any case: a plain copy is taken apart by the compiler where it suits what follows.
template <typename T, int V>
__device__ inline Lanes<T, V> load_pack(const Lanes<T, V>* from) {
  static_assert(sizeof(Lanes<T, V>) == 16);
  const uint4 bits = *reinterpret_cast<const uint4*>(from);
  Lanes<T, V> out;
  memcpy(&out, &bits, sizeof out);
  return out;
}
template <typename T, int V>
__device__ inline void widen_pack(const Lanes<T, V>& from, float (&to)[V]) {
#pragma unroll
  for (int v = 0; v < V; ++v) to[v] = widen(from.at[v]);
}

// Adds one row of the window to `kTile` outputs. row: X at (n, h, 0, pack); filter: W at (k, 0, pack).
template <typename T, int V, int K, int kStride, int kTile>
__device__ inline void add_row(const Shape& s, const Lanes<T, V>* row, const Lanes<T, V>* filter, int left, float (&sums)[kTile][V]) {
  Lanes<T, V> taps[K];
#pragma unroll
  for (int k = 0; k < K; ++k) taps[k] = load_pack(filter + k * s.packs);
#pragma unroll
  for (int column = 0; column < (kTile - 1) * kStride + K; ++column) {
    const int w = left + column;
    if (w < 0 || w >= s.W) continue;
    float x[V];
    widen_pack(load_pack(row + static_cast<int64_t>(w) * s.packs), x);
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
      const int k = column - t * kStride;
      if (k < 0 || k >= K) continue;
#pragma unroll
      for (int v = 0; v < V; ++v) sums[t][v] += x[v] * widen(taps[k].at[v]);
    }
  }
}

template <typename T, int V, int K, int kStride, int kTile>
__global__ void __launch_bounds__(kThreads) depthwise(Shape s, const Lanes<T, V>* x, const Lanes<T, V>* w, const Lanes<T, V>* bias,
                                                      const Lanes<T, V>* residual, FusedActivation f, Lanes<T, V>* y) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= s.threads) return;
  const int pack = static_cast<int>(i % s.packs), tile = static_cast<int>(i / s.packs % s.tiles);
  const int64_t line = i / s.packs / s.tiles, n = line / s.OH;  // line: of Y
  const int top = static_cast<int>(line % s.OH) * kStride - s.top, first = tile * kTile, left = first * kStride - s.left;
  float sums[kTile][V] = {};
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int h = top + k;
    if (h < 0 || h >= s.H) continue;
    add_row<T, V, K, kStride, kTile>(s, x + (n * s.H + h) * s.W * s.packs + pack, w + k * K * s.packs + pack, left, sums);
  }
  float start[V] = {};
  if (bias) widen_pack(load_pack(bias + pack), start);
#pragma unroll
  for (int t = 0; t < kTile; ++t) {
    if (first + t >= s.OW) break;
    const int64_t at = (line * s.OW + first + t) * s.packs + pack;
    float other[V] = {};
    if (residual) widen_pack(load_pack(residual + at), other);
    Lanes<T, V> out;
#pragma unroll
    for (int v = 0; v < V; ++v) out.at[v] = narrow<T>(fused_activation(f, sums[t][v] + start[v] + other[v]));
    y[at] = out;
  }
}

template <typename T, int K, int kStride>
void launch(const Convolution& c, const ConvolutionAddresses& at, cudaStream_t stream) {
  constexpr int V = kPackOf16<T>, kTile = kStride == 1 ? 4 : 2;
  using P = Lanes<T, V>;
  Shape s;
  s.H = static_cast<int>(c.x[2]), s.W = static_cast<int>(c.x[3]), s.OH = static_cast<int>(c.y[2]), s.OW = static_cast<int>(c.y[3]);
  s.tiles = (s.OW + kTile - 1) / kTile, s.packs = static_cast<int>(c.x[1]) / V;
  s.top = static_cast<int>(c.pads_begin[0]), s.left = static_cast<int>(c.pads_begin[1]);
  s.threads = c.x[0] * s.OH * s.tiles * s.packs;
  const unsigned blocks = static_cast<unsigned>((s.threads + kThreads - 1) / kThreads);
  depthwise<T, V, K, kStride, kTile><<<blocks, kThreads, 0, stream>>>(
      s, static_cast<const P*>(at.x), static_cast<const P*>(at.w), c.bias ? static_cast<const P*>(at.bias) : nullptr,
      c.residual ? static_cast<const P*>(at.residual) : nullptr, c.activation, static_cast<P*>(at.y));
  check_launch("depthwise");
}

template <typename T, int K>
void launch_stride(const Convolution& c, const ConvolutionAddresses& at, cudaStream_t stream) {
  if (c.strides[0] == 1)
    launch<T, K, 1>(c, at, stream);
  else
    launch<T, K, 2>(c, at, stream);
}

template <typename T>
void launch_window(const Convolution& c, const ConvolutionAddresses& at, cudaStream_t stream) {
  if (c.w[2] == 3)
    launch_stride<T, 3>(c, at, stream);
  else if (c.w[2] == 5)
    launch_stride<T, 5>(c, at, stream);
  else
    launch_stride<T, 7>(c, at, stream);
}

}  // namespace

bool has_depthwise(const Convolution& c) {
  if (!c.is_depthwise() || !c.channels_last || c.spatial_rank() != 2 || c.dtype == DType::float64) return false;
  const int64_t k = c.w[2], s = c.strides[0], packs = 16 / static_cast<int64_t>(bytes_of(c.dtype, 1));
  return (k == 3 || k == 5 || k == 7) && c.w[3] == k && (s == 1 || s == 2) && c.strides[1] == s && c.dilations == Dims{1, 1} &&
         c.x[1] % packs == 0 && count_of(c.y) < int64_t{1} << 36 && c.x[2] < 1 << 24 && c.x[3] < 1 << 24;
}

void run_depthwise(const Convolution& c, const ConvolutionAddresses& at, cudaStream_t stream) {
  if (count_of(c.y) == 0) return;
  if (c.dtype == DType::float16) return launch_window<__half>(c, at, stream);
  if (c.dtype == DType::bfloat16) return launch_window<__nv_bfloat16>(c, at, stream);
  launch_window<float>(c, at, stream);
}

}  // namespace fretsaw::cuda
