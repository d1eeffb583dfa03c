// ConvInteger and QLinearConv: 8-bit operands with zero points, sums in int32.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/convolution.h"
#include "kernels/cpu/convolution_loops.h"

namespace fretsaw {

namespace {

// The elements of an integer tensor as int32, less a zero point for each `row` elements (a single one serves all).
std::vector<int32_t> centred(const TensorView& x, const std::vector<int64_t>& zero_points, int64_t row) {
  std::vector<int64_t> wide(static_cast<size_t>(x.count()));
  load_as<int64_t>(x.dtype, x.data, 0, x.count(), wide.data());
  std::vector<int32_t> out(wide.size());
  for (size_t i = 0; i < wide.size(); ++i) {
    const size_t zero = zero_points.size() > 1 ? i / static_cast<size_t>(row) : 0;
    out[i] = static_cast<int32_t>(wide[i] - (zero_points.empty() ? 0 : zero_points.at(zero)));
  }
  return out;
}

std::vector<int64_t> zero_points(RunContext& r, size_t i, int64_t channels) {
  if (!r.has_input(i)) return {0};
  std::vector<int64_t> values = r.input_ints(i);
  if (values.size() != 1 && static_cast<int64_t>(values.size()) != channels) {
    throw Error("input " + std::to_string(i) + " has " + std::to_string(values.size()) + " entries",
                "give one, or one for each output channel");
  }
  return values;
}

// y(n, o) = put(sums) with X [N, C, D...] and W [O, C/groups, K...] as centred integers.
template <typename Put>
void convolve_integers(RunContext& r, const Node& node, size_t x_input, size_t x_zero, size_t w_input, size_t w_zero, DType type,
                       const Put& put) {
  const TensorView &x = r.input(x_input), &w = r.input(w_input);
  Window window;
  const Dims y_dims = convolution_output(node, x.dims, w.dims, false, window);
  const int64_t filter = w.dims[1] * window.taps(), taps = window.taps();
  const std::vector<int32_t> xs = centred(x, zero_points(r, x_zero, 1), 1), ws = centred(w, zero_points(r, w_zero, w.dims[0]), filter);
  TensorView& y = r.output(0, y_dims, type);
  const ConvolutionShape shape = shape_of_convolution(node, x.dims, y_dims);
  const int64_t in_cells = count_of(shape.in), out_cells = count_of(shape.out);
  convolve_by_loops<int32_t>(
      shape, window, r.threads(), [&](int64_t row, int64_t cell) { return xs[static_cast<size_t>(row * in_cells + cell)]; },
      [&](int64_t o, int64_t c, int64_t t) { return ws[static_cast<size_t>(o * filter + c * taps + t)]; },
      [&](int64_t n, int64_t o, const int32_t* sums) { put(y, (n * y_dims[1] + o) * out_cells, o, sums, out_cells); });
}

CompiledKernel make_conv_integer(const CompileContext& c) {
  return {[node = Node(c.node())](RunContext& r) {
    convolve_integers(r, node, 0, 2, 1, 3, DType::int32, [](TensorView& y, int64_t offset, int64_t, const int32_t* sums, int64_t n) {
      std::copy(sums, sums + n, y.as<int32_t>() + offset);
    });
  }};
}

float scale_at(const TensorView& scale, int64_t channel) {
  const int64_t at = scale.count() > 1 ? channel : 0;
  if (at >= scale.count()) throw Error("a scale of shape " + to_string(scale.dims), "give one, or one for each output channel");
  float value;
  load_as<float>(scale.dtype, scale.data, at, 1, &value);
  return value;
}

// Inputs: x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, bias (int32, of scale x_scale * w_scale).
CompiledKernel make_qlinear_conv(const CompileContext& c) {
  return {[node = Node(c.node())](RunContext& r) {
    const TensorView &x_scale = r.input(1), &w_scale = r.input(4), &y_scale = r.input(6), &y_zero = r.input(7);
    const std::vector<int64_t> bias = r.has_input(8) ? r.input_ints(8) : std::vector<int64_t>{};
    const float zero = static_cast<float>(r.input_ints(7).at(0));
    const bool is_signed = y_zero.dtype == DType::int8;
    const float low = is_signed ? -128.0f : 0.0f, high = is_signed ? 127.0f : 255.0f;
    convolve_integers(r, node, 0, 2, 3, 5, y_zero.dtype, [&](TensorView& y, int64_t offset, int64_t o, const int32_t* sums, int64_t n) {
      const float scale = scale_at(x_scale, 0) * scale_at(w_scale, o) / scale_at(y_scale, 0);
      const int64_t start = bias.empty() ? 0 : bias.at(static_cast<size_t>(o));
      for (int64_t i = 0; i < n; ++i) {
        const float value = std::nearbyint(static_cast<float>(sums[i] + start) * scale) + zero;
        const float clamped = std::min(std::max(value, low), high);
        if (is_signed)
          y.as<int8_t>()[offset + i] = static_cast<int8_t>(clamped);
        else
          y.as<uint8_t>()[offset + i] = static_cast<uint8_t>(clamped);
      }
    });
  }};
}

}  // namespace

void register_quantized_convolution(KernelRegistry& registry) {
  registry.add({.op = "ConvInteger", .make = make_conv_integer});
  registry.add({.op = "QLinearConv", .make = make_qlinear_conv});
}

}  // namespace fretsaw
