// DeformConv: each tap of each output reads its input where an offset moves it, between cells by bilinear interpolation.
#include "kernels/cuda/convolution.h"
#include "kernels/cuda/convolution_deformation.cuh"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256;

// x [H, W] at a point; zero outside.
template <typename T>
__device__ WideOf<T> bilinear(const T* x, int64_t H, int64_t W, Spot<WideOf<T>> spot) {
  using F = WideOf<T>;
  const auto [h, w] = spot;
  if (!(h > F(-1) && w > F(-1) && h < F(H) && w < F(W))) return F(0);
  const F h0 = floor(h), w0 = floor(w), dh = h - h0, dw = w - w0;
  const auto i = static_cast<int64_t>(h0), j = static_cast<int64_t>(w0);
  const auto at = [&](int64_t row, int64_t column) {
    return row < 0 || column < 0 || row >= H || column >= W ? F(0) : widen(x[row * W + column]);
  };
  return (F(1) - dh) * ((F(1) - dw) * at(i, j) + dw * at(i, j + 1)) + dh * ((F(1) - dw) * at(i + 1, j) + dw * at(i + 1, j + 1));
}

// One thread for each output.
template <typename T>
__global__ void deform(Deformation d, const T* x, const T* w, const T* offset, const T* bias, const T* mask, T* y) {
  using F = WideOf<T>;
  const int64_t cells = d.cells(), outputs = d.N * d.O * cells;
  const int taps = d.taps();
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < outputs; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t cell = i % cells, o = i / cells % d.O, n = i / cells / d.O, first = o / d.group_out * d.group_in;
    const Spot<F> corner = first_spot<F>(d, cell);
    F sum = 0;
    for (int64_t k = 0; k < d.group_in; ++k) {
      const int64_t c = first + k, group = c / d.sharing;
      const T* plane = x + (n * d.C + c) * d.H * d.W;
      for (int tap = 0; tap < taps; ++tap) {
        const int64_t moved = (n * d.offset_groups + group) * taps + tap;
        const F weight = widen(w[(o * d.group_in + k) * taps + tap]) * (mask ? F(widen(mask[moved * cells + cell])) : F(1));
        sum += weight * bilinear(plane, d.H, d.W, moved_spot(d, corner, tap, cell, offset + 2 * moved * cells));
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

CompiledKernel make_deform(const CompileContext& c) {
  return {[node = Node(c.node())](RunContext& r) {
    Dims y_dims;
    const Deformation d = read_deformation(node, r.input(0).dims, r.input(1).dims, r.input(2).dims,
                                           r.has_input(3) ? std::optional<int64_t>(r.input(3).count()) : std::nullopt,
                                           r.has_input(4) ? std::optional<Dims>(r.input(4).dims) : std::nullopt, y_dims);
    TensorView& y = r.output(0, y_dims);
    const int64_t outputs = y.count();
    if (outputs == 0) return;
    with_float_type(y.dtype, [&]<typename Tag>(Tag) {
      using T = typename Tag::type;
      const auto at = [&](size_t i) { return r.has_input(i) ? r.input(i).as<const T>() : nullptr; };
      deform<T><<<blocks_for(outputs, kThreads), kThreads, 0, stream_of(r)>>>(d, at(0), at(1), at(2), at(3), at(4), y.as<T>());
      check_launch("deform");
    });
  }};
}

}  // namespace

void register_deformable_convolution(KernelRegistry& registry) {
  registry.add({.op = "DeformConv", .make = make_deform, .unsupported = why_not});
}

}  // namespace fretsaw::cuda
