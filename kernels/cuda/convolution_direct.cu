// Convolutions by definition, one thread for each output: for what no faster way does (float64, transposes with odd padding).
#include "kernels/cuda/convolution.h"
#include "kernels/cuda/convolution_activation.cuh"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256;

// With three spatial dimensions, the first ones 1. Strides of memory are in elements: batch, channel, three spatial.
struct Geometry {
  int64_t outputs, in[3], out[3], kernel[3], stride[3], dilation[3], begin[3];
  int64_t group_in, group_out;       // channels of a group
  int64_t x_stride[5], w_stride[5];  // of W: first, second, three taps
  bool channels_last, transposed;
};

struct Output {
  int64_t n, o, at[3];
};

// Neighbouring threads take outputs that are neighbours in memory.
__host__ __device__ inline Output output_of(const Geometry& g, int64_t channels, int64_t i) {
  Output out;
  if (g.channels_last) out.o = i % channels, i /= channels;
  for (int d = 2; d >= 0; --d) out.at[d] = i % g.out[d], i /= g.out[d];
  if (!g.channels_last) out.o = i % channels, i /= channels;
  out.n = i;
  return out;
}

// The input position that a tap reads for an output position; negative when there is none.
__host__ __device__ inline int64_t input_of(const Geometry& g, int d, int64_t out, int64_t tap) {
  if (!g.transposed) {
    const int64_t at = out * g.stride[d] - g.begin[d] + tap * g.dilation[d];
    return at < g.in[d] ? at : -1;
  }
  const int64_t scaled = out + g.begin[d] - tap * g.dilation[d];
  if (scaled < 0 || scaled % g.stride[d] != 0) return -1;
  return scaled / g.stride[d] < g.in[d] ? scaled / g.stride[d] : -1;
}

template <typename T>
__device__ WideOf<T> sum_of_taps(const Geometry& g, const Output& out, const T* x, const T* w) {
  const int64_t first = out.o / g.group_out * g.group_in;  // channel of X
  const T* from = x + out.n * g.x_stride[0] + first * g.x_stride[1];
  const T* filter = g.transposed ? w + first * g.w_stride[0] + out.o % g.group_out * g.w_stride[1] : w + out.o * g.w_stride[0];
  const int64_t filter_step = g.transposed ? g.w_stride[0] : g.w_stride[1];
  WideOf<T> sum = 0;
  for (int64_t i = 0; i < g.kernel[0]; ++i) {
    const int64_t a = input_of(g, 0, out.at[0], i);
    if (a < 0) continue;
    for (int64_t j = 0; j < g.kernel[1]; ++j) {
      const int64_t b = input_of(g, 1, out.at[1], j);
      if (b < 0) continue;
      for (int64_t k = 0; k < g.kernel[2]; ++k) {
        const int64_t c = input_of(g, 2, out.at[2], k);
        if (c < 0) continue;
        const T* cell = from + a * g.x_stride[2] + b * g.x_stride[3] + c * g.x_stride[4];
        const T* tap = filter + i * g.w_stride[2] + j * g.w_stride[3] + k * g.w_stride[4];
        for (int64_t channel = 0; channel < g.group_in; ++channel)
          sum += widen(cell[channel * g.x_stride[1]]) * widen(tap[channel * filter_step]);
      }
    }
  }
  return sum;
}

template <typename T>
__global__ void convolve(Geometry g, int64_t channels, const T* x, const T* w, const T* bias, const T* residual, FusedActivation f, T* y) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < g.outputs; i += int64_t{gridDim.x} * blockDim.x) {
    const Output out = output_of(g, channels, i);
    WideOf<T> value = sum_of_taps(g, out, x, w);
    if (bias) value += widen(bias[out.o]);
    if (residual) value += widen(residual[i]);
    y[i] = narrow<T>(fused_activation(f, value));
  }
}

// Of [first, second, D...] with three spatial dimensions.
void set_strides(const Dims& dims, bool channels_last, int64_t (&strides)[5]) {
  const size_t rank = dims.size() - 2;
  int64_t step = channels_last ? dims[1] : 1;
  for (size_t i = 0; i < 5; ++i) strides[i] = 0;
  for (size_t i = rank; i-- > 0;) strides[5 - rank + i] = step, step *= dims[i + 2];
  strides[1] = channels_last ? 1 : step;
  strides[0] = channels_last ? step : step * dims[1];
}

Geometry geometry_of(const Convolution& c) {
  Geometry g{};
  g.outputs = count_of(c.y);
  for (int d = 0; d < 3; ++d) g.in[d] = g.out[d] = g.kernel[d] = g.stride[d] = g.dilation[d] = 1;
  const size_t rank = c.spatial_rank();
  for (size_t i = 0; i < rank; ++i) {
    const size_t d = 3 - rank + i;
    g.in[d] = c.x[i + 2], g.out[d] = c.y[i + 2], g.kernel[d] = c.w[i + 2];
    g.stride[d] = c.strides[i], g.dilation[d] = c.dilations[i], g.begin[d] = c.pads_begin[i];
  }
  g.group_in = c.x[1] / c.groups, g.group_out = c.y[1] / c.groups;
  g.channels_last = c.channels_last, g.transposed = c.transposed;
  set_strides(c.x, c.channels_last, g.x_stride);
  set_strides(c.w, c.channels_last, g.w_stride);
  return g;
}

}  // namespace

void run_direct(const Convolution& c, const ConvolutionAddresses& at, cudaStream_t stream) {
  const Geometry g = geometry_of(c);
  if (g.outputs == 0) return;
  with_float_type(c.dtype, [&]<typename Tag>(Tag) {
    using T = typename Tag::type;
    convolve<T><<<blocks_for(g.outputs, kThreads), kThreads, 0, stream>>>(
        g, c.y[1], static_cast<const T*>(at.x), static_cast<const T*>(at.w), c.bias ? static_cast<const T*>(at.bias) : nullptr,
        c.residual ? static_cast<const T*>(at.residual) : nullptr, c.activation, static_cast<T*>(at.y));
    check_launch("convolve");
  });
}

}  // namespace fretsaw::cuda
