// DeformConv: each tap of each output cell reads its input where an offset moves it, between cells by bilinear interpolation.
#include <cmath>

#include "kernels/cpu/convolution.h"
#include "kernels/cpu/convolution_loops.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cpu/through_float.h"

namespace fretsaw {

namespace {

// x [H, W] at (h, w); zero outside.
template <typename T>
T bilinear(const T* x, int64_t H, int64_t W, T h, T w) {
  if (!(h > T(-1) && w > T(-1) && h < static_cast<T>(H) && w < static_cast<T>(W))) return T(0);
  const T h0 = std::floor(h), w0 = std::floor(w), dh = h - h0, dw = w - w0;
  const auto at = [&](T row, T column) {
    const auto i = static_cast<int64_t>(row), j = static_cast<int64_t>(column);
    return i < 0 || j < 0 || i >= H || j >= W ? T(0) : x[i * W + j];
  };
  return (T(1) - dh) * ((T(1) - dw) * at(h0, w0) + dw * at(h0, w0 + 1)) + dh * ((T(1) - dw) * at(h0 + 1, w0) + dw * at(h0 + 1, w0 + 1));
}

struct Deformation {
  int64_t C, H, W, O, groups, offset_groups, OH, OW;
  Window window;
};

// One image. columns [C, taps, OH*OW] = X sampled; then Y = W * columns for each group.
template <typename T>
void sample(const Deformation& d, const T* x, const T* offset, const T* mask, T* columns, int threads) {
  const int64_t taps = d.window.taps(), kernel_w = d.window.kernel[1], cells = d.OH * d.OW;
  parallel_for(d.C * taps, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t c = row / taps, tap = row % taps, group = c / (d.C / d.offset_groups);
      const T* dy = offset + (group * taps + tap) * 2 * cells;
      const T* weight = mask ? mask + (group * taps + tap) * cells : nullptr;
      for (int64_t cell = 0; cell < cells; ++cell) {
        const int64_t h = cell / d.OW * d.window.strides[0] - d.window.pads_begin[0] + tap / kernel_w * d.window.dilations[0];
        const int64_t w = cell % d.OW * d.window.strides[1] - d.window.pads_begin[1] + tap % kernel_w * d.window.dilations[1];
        const T value = bilinear(x + c * d.H * d.W, d.H, d.W, static_cast<T>(h) + dy[cell], static_cast<T>(w) + dy[cells + cell]);
        columns[row * cells + cell] = weight ? value * weight[cell] : value;
      }
    }
  });
}

template <typename T>
void multiply(const Deformation& d, const T* w, const T* bias, const T* columns, T* y, int threads) {
  const int64_t cells = d.OH * d.OW, group_in = d.C / d.groups * d.window.taps(), group_out = d.O / d.groups;
  parallel_for(d.O, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o) {
      T* out = y + o * cells;
      std::fill(out, out + cells, bias ? bias[o] : T(0));
      for (int64_t k = 0; k < group_in; ++k) {
        const T factor = w[o * group_in + k];
        const T* row = columns + (o / group_out * group_in + k) * cells;
        for (int64_t i = 0; i < cells; ++i) out[i] += factor * row[i];
      }
    }
  });
}

// Inputs: X [N, C, H, W], W [O, C/groups, kH, kW], offset [N, offset_groups * taps * 2, OH, OW], B [O], mask [N, offset_groups * taps, OH,
// OW].
template <typename T>
void deform(RunContext& r, const Node& node) {
  const TensorView &x = r.input(0), &w = r.input(1), &offset = r.input(2);
  if (x.rank() != 4) throw Error("DeformConv of shape " + to_string(x.dims), "give it [N,C,H,W]");
  Deformation d;
  const Dims y_dims = convolution_output(node, x.dims, w.dims, false, d.window);
  d.C = x.dims[1], d.H = x.dims[2], d.W = x.dims[3], d.O = y_dims[1], d.OH = y_dims[2], d.OW = y_dims[3];
  d.groups = node.get_int("group", 1), d.offset_groups = node.get_int("offset_group", 1);
  const int64_t taps = d.window.taps();
  if (d.offset_groups < 1 || d.C % d.offset_groups != 0 || offset.dims != Dims{y_dims[0], d.offset_groups * taps * 2, d.OH, d.OW} ||
      (r.has_input(3) && r.input(3).count() != d.O) ||
      (r.has_input(4) && r.input(4).dims != Dims{y_dims[0], d.offset_groups * taps, d.OH, d.OW})) {
    throw Error("the offsets, bias or mask do not fit the convolution", "check their shapes and offset_group");
  }
  TensorView& y = r.output(0, y_dims);
  if (y.count() == 0) return;
  const int64_t cells = d.OH * d.OW;
  T* columns = static_cast<T*>(r.scratch(static_cast<size_t>(d.C * taps * cells + 1) * sizeof(T)));
  for (int64_t n = 0; n < y_dims[0]; ++n) {
    const T* mask = r.has_input(4) ? r.input(4).as<T>() + n * d.offset_groups * taps * cells : nullptr;
    sample(d, x.as<T>() + n * d.C * d.H * d.W, offset.as<T>() + n * d.offset_groups * taps * 2 * cells, mask, columns, r.threads());
    multiply(d, w.as<T>(), r.has_input(3) ? r.input(3).as<T>() : nullptr, columns, y.as<T>() + n * d.O * cells, r.threads());
  }
}

CompiledKernel make_deform_float(const CompileContext& c) {
  return {[node = Node(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() { deform<T>(r, node); });
  }};
}

CompiledKernel make_deform(const CompileContext& c) {
  return make_any_float(c, make_deform_float);
}

}  // namespace

void register_deformable_convolution(KernelRegistry& registry) {
  registry.add({.op = "DeformConv", .make = make_deform});
}

}  // namespace fretsaw
