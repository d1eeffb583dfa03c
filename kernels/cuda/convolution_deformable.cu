// DeformConv: each tap of each output reads its input where an offset moves it, between cells by bilinear interpolation.
#include "kernels/cpu/convolution.h"
#include "kernels/cuda/convolution.h"
#include "kernels/cuda/element_packs.cuh"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256;

struct Deformation {
  int64_t outputs, C, H, W, O, OH, OW, group_in, group_out, offset_group, offset_groups;  // offset_group: channels of one
  int kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w, top, left;
};

// x [H, W] at (h, w); zero outside.
template <typename T>
__device__ WideOf<T> bilinear(const T* x, int64_t H, int64_t W, WideOf<T> h, WideOf<T> w) {
  using F = WideOf<T>;
  if (!(h > F(-1) && w > F(-1) && h < F(H) && w < F(W))) return F(0);
  const F h0 = floor(h), w0 = floor(w), dh = h - h0, dw = w - w0;
  const auto i = static_cast<int64_t>(h0), j = static_cast<int64_t>(w0);
  const auto at = [&](int64_t row, int64_t column) {
    return row < 0 || column < 0 || row >= H || column >= W ? F(0) : widen(x[row * W + column]);
  };
  return (F(1) - dh) * ((F(1) - dw) * at(i, j) + dw * at(i, j + 1)) + dh * ((F(1) - dw) * at(i + 1, j) + dw * at(i + 1, j + 1));
}

// x [N, C, H, W], w [O, C/groups, kH, kW], offset [N, offset_groups * taps * 2, OH, OW], mask [N, offset_groups * taps, OH, OW],
// y [N, O, OH, OW]; one thread for each output.
template <typename T>
__global__ void deform(Deformation d, const T* x, const T* w, const T* offset, const T* bias, const T* mask, T* y) {
  using F = WideOf<T>;
  const int64_t cells = d.OH * d.OW;
  const int taps = d.kernel_h * d.kernel_w;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < d.outputs; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t cell = i % cells, o = i / cells % d.O, n = i / cells / d.O, first = o / d.group_out * d.group_in;
    const F top = F(cell / d.OW * d.stride_h - d.top), left = F(cell % d.OW * d.stride_w - d.left);
    F sum = 0;
    for (int64_t k = 0; k < d.group_in; ++k) {
      const int64_t c = first + k, group = c / d.offset_group;
      const T* plane = x + (n * d.C + c) * d.H * d.W;
      for (int tap = 0; tap < taps; ++tap) {
        const int64_t moved = (n * d.offset_groups + group) * taps + tap;
        const F h = top + F(tap / d.kernel_w * d.dilation_h) + widen(offset[2 * moved * cells + cell]);
        const F v = left + F(tap % d.kernel_w * d.dilation_w) + widen(offset[(2 * moved + 1) * cells + cell]);
        const F weight = widen(w[(o * d.group_in + k) * taps + tap]) * (mask ? F(widen(mask[moved * cells + cell])) : F(1));
        sum += weight * bilinear(plane, d.H, d.W, h, v);
      }
    }
    y[i] = narrow<T>(sum + (bias ? F(widen(bias[o])) : F(0)));
  }
}

std::string why_not(const CompileContext& c) {
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    const auto types = {DType::float32, DType::float16, DType::bfloat16, DType::float64};
    if (std::string reason = refuse_other_types(c, i, types); !reason.empty()) return reason;
    if (c.has_input(i) && c.input_dtype(i) != c.input_dtype(0)) return "inputs of different types";
  }
  return "";
}

// Checks the shapes as the CPU's kernel does.
Deformation read_deformation(RunContext& r, const Node& node, Dims& y) {
  const TensorView &x = r.input(0), &w = r.input(1), &offset = r.input(2);
  if (x.rank() != 4) throw Error("DeformConv of shape " + to_string(x.dims), "give it [N,C,H,W]");
  Window window;
  y = convolution_output(node, x.dims, w.dims, false, window);
  const int64_t groups = node.get_int("group", 1), offset_groups = node.get_int("offset_group", 1), taps = window.taps();
  if (offset_groups < 1 || x.dims[1] % offset_groups != 0 || offset.dims != Dims{y[0], offset_groups * taps * 2, y[2], y[3]} ||
      (r.has_input(3) && r.input(3).count() != y[1]) ||
      (r.has_input(4) && r.input(4).dims != Dims{y[0], offset_groups * taps, y[2], y[3]})) {
    throw Error("the offsets, bias or mask do not fit the convolution", "check their shapes and offset_group");
  }
  const auto small = [](int64_t n) { return static_cast<int>(n); };
  return {count_of(y),
          x.dims[1],
          x.dims[2],
          x.dims[3],
          y[1],
          y[2],
          y[3],
          x.dims[1] / groups,
          y[1] / groups,
          x.dims[1] / offset_groups,
          offset_groups,
          small(window.kernel[0]),
          small(window.kernel[1]),
          small(window.strides[0]),
          small(window.strides[1]),
          small(window.dilations[0]),
          small(window.dilations[1]),
          small(window.pads_begin[0]),
          small(window.pads_begin[1])};
}

CompiledKernel make_deform(const CompileContext& c) {
  return {[node = Node(c.node())](RunContext& r) {
    Dims y_dims;
    const Deformation d = read_deformation(r, node, y_dims);
    TensorView& y = r.output(0, y_dims);
    if (d.outputs == 0) return;
    with_float_type(y.dtype, [&]<typename Tag>(Tag) {
      using T = typename Tag::type;
      const auto at = [&](size_t i) { return r.has_input(i) ? r.input(i).as<const T>() : nullptr; };
      deform<T><<<blocks_for(d.outputs, kThreads), kThreads, 0, stream_of(r)>>>(d, at(0), at(1), at(2), at(3), at(4), y.as<T>());
      check_launch("deform");
    });
  }};
}

}  // namespace

void register_deformable_convolution(KernelRegistry& registry) {
  registry.add({.op = "DeformConv", .make = make_deform, .unsupported = why_not});
}

}  // namespace fretsaw::cuda
