// The gradient of a convolution's weights by definition, one block for each weight: for what no faster way does (float64, odd padding).
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/convolution.h"
#include "kernels/cuda/element_packs.cuh"

namespace fretsaw::cuda {
namespace {

constexpr int kThreads = 256;

// With three spatial dimensions, the first ones 1. Strides of memory are in elements: batch or first, channel or second, three spatial.
struct Geometry {
  int64_t samples, in[3], out[3], kernel[3], stride[3], dilation[3], begin[3];
  int64_t group_in, group_out;  // channels of a group
  int64_t x_stride[5], dy_stride[5], dw_stride[5];

  __device__ int64_t out_cells() const { return out[0] * out[1] * out[2]; }
};

// dw[o, c, tap] = the sum over samples and outputs of dy[n, o, at] x[n, c, input of the tap at `at`], in an order that the shape decides.
template <typename T>
__global__ void __launch_bounds__(kThreads) weight_gradient(Geometry g, const T* x, const T* dy, T* dw) {
  using Wide = WideOf<T>;
  __shared__ Wide shared[kThreads / 32];
  int64_t rest = blockIdx.x, tap[3];
  for (int d = 2; d >= 0; --d) tap[d] = rest % g.kernel[d], rest /= g.kernel[d];
  const int64_t second = rest % g.group_in, o = rest / g.group_in, channel = o / g.group_out * g.group_in + second;
  const T *from = x + channel * g.x_stride[1], *gradient = dy + o * g.dy_stride[1];
  const int64_t cells = g.out_cells();
  Wide sum = 0;
  for (int64_t i = threadIdx.x; i < g.samples * cells; i += kThreads) {
    const int64_t n = i / cells;
    int64_t cell = i - n * cells, x_at = n * g.x_stride[0], dy_at = n * g.dy_stride[0];
    bool inside = true;
#pragma unroll
    for (int d = 2; d >= 0; --d) {
      const int64_t out = cell % g.out[d], in = out * g.stride[d] - g.begin[d] + tap[d] * g.dilation[d];
      cell /= g.out[d];
      inside = inside && in >= 0 && in < g.in[d];
      x_at += in * g.x_stride[2 + d], dy_at += out * g.dy_stride[2 + d];
    }
    if (inside) sum += widen(gradient[dy_at]) * widen(from[x_at]);
  }
  sum = join_group(sum, Wide(0), shared, AddJoin{});
  if (threadIdx.x != 0) return;
  int64_t at = o * g.dw_stride[0] + second * g.dw_stride[1];
  for (int d = 0; d < 3; ++d) at += tap[d] * g.dw_stride[2 + d];
  dw[at] = narrow<T>(sum);
}

// Of [first, second, D...] with three spatial dimensions.
void set_strides(const Dims& dims, bool channels_last, int64_t (&strides)[5]) {
  const size_t rank = dims.size() - 2;
  int64_t step = channels_last ? dims[1] : 1;
  for (int64_t& stride : strides) stride = 0;
  for (size_t i = rank; i-- > 0;) strides[5 - rank + i] = step, step *= dims[i + 2];
  strides[1] = channels_last ? 1 : step;
  strides[0] = channels_last ? step : step * dims[1];
}

}  // namespace

void run_direct_weight_gradient(const Convolution& c, const ConvolutionAddresses& at, cudaStream_t stream) {
  Geometry g{};
  g.samples = c.x[0];
  for (int d = 0; d < 3; ++d) g.in[d] = g.out[d] = g.kernel[d] = g.stride[d] = g.dilation[d] = 1;
  const size_t rank = c.spatial_rank();
  for (size_t i = 0; i < rank; ++i) {
    const size_t d = 3 - rank + i;
    g.in[d] = c.x[i + 2], g.out[d] = c.w[i + 2], g.kernel[d] = c.y[i + 2];
    g.stride[d] = c.strides[i], g.dilation[d] = c.dilations[i], g.begin[d] = c.pads_begin[i];
  }
  g.group_in = c.y[1], g.group_out = c.y[0] / c.groups;
  set_strides(c.x, c.channels_last, g.x_stride);
  set_strides(c.w, c.channels_last, g.dy_stride);
  set_strides(c.y, c.channels_last, g.dw_stride);
  const int64_t weights = count_of(c.y);
  if (weights == 0) return;
  with_float_type(c.dtype, [&]<typename Tag>(Tag) {
    using T = typename Tag::type;
    weight_gradient<T><<<static_cast<unsigned>(weights), kThreads, 0, stream>>>(g, static_cast<const T*>(at.x), static_cast<const T*>(at.w),
                                                                                static_cast<T*>(at.y));
    check_launch("weight_gradient");
  });
}

}  // namespace fretsaw::cuda
