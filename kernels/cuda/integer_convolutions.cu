// ConvInteger and QLinearConv: products of the filters [O, C * taps] and the cells under each tap [C * taps, cells], read where they lie.
#include "kernels/cpu/convolution.h"
#include "kernels/cuda/integer_products.h"

namespace fretsaw::cuda {
namespace {

constexpr size_t kMaxSpatial = 3;

// X [N, C, D...], W [O, C / groups, K...], Y [N, O, E...].
struct ByteConvolution {
  int64_t M, N, K;  // filters of a group, output cells, channels of a group * taps
  int64_t groups;
  const void *x, *w;
  bool x_signed, w_signed;
  LineParameter x_zeros, w_zeros;
  int rank;
  int64_t taps, in_cells;
  int64_t in[kMaxSpatial], out[kMaxSpatial], kernel[kMaxSpatial], strides[kMaxSpatial], dilations[kMaxSpatial], pads[kMaxSpatial];

  ByteConvolution(RunContext& r, const Window& window, const Dims& y_dims, int64_t groups, size_t w_input, size_t x_zero, size_t w_zero)
      : groups(groups),
        x(r.input(0).data),
        w(r.input(w_input).data),
        x_signed(r.input(0).dtype == DType::int8),
        w_signed(r.input(w_input).dtype == DType::int8),
        x_zeros(r, x_zero, 1),
        w_zeros(r, w_zero, y_dims[1]),
        rank(static_cast<int>(window.rank())),
        taps(window.taps()) {
    require(window.rank() <= kMaxSpatial, "a convolution over more than 3 axes");
    const Dims& x_dims = r.input(0).dims;
    in_cells = product(x_dims, 2, x_dims.size());
    M = y_dims[1] / groups, N = product(y_dims, 2, y_dims.size()), K = x_dims[1] / groups * taps;
    for (size_t i = 0; i < window.rank(); ++i) {
      in[i] = x_dims[i + 2], out[i] = y_dims[i + 2];
      kernel[i] = window.kernel[i], strides[i] = window.strides[i], dilations[i] = window.dilations[i], pads[i] = window.pads_begin[i];
    }
  }

  // One product for each group of each sample, which it is the number of in X and Y.
  __device__ ProductAt matrices_of(int64_t index) const { return {index % groups, index, index}; }
  __device__ int64_t filter(const ProductAt& at, int64_t m) const { return at.a * M + m; }
  __device__ int8_t a(const ProductAt& at, int64_t m, int64_t k) const { return byte_at(w, w_signed, filter(at, m) * K + k); }
  // The cell of X that lies under a tap of an output cell; outside X what stands for zero.
  __device__ int8_t b(const ProductAt& at, int64_t k, int64_t n) const {
    int64_t tap = k % taps, cell = 0, stride = 1;
    for (int i = rank - 1; i >= 0; --i) {
      const int64_t position = n % out[i] * strides[i] - pads[i] + tap % kernel[i] * dilations[i];
      if (position < 0 || position >= in[i]) return static_cast<int8_t>(b_zero(at, n));
      cell += position * stride;
      n /= out[i], tap /= kernel[i], stride *= in[i];
    }
    return byte_at(x, x_signed, (at.b * (K / taps) + k / taps) * in_cells + cell);
  }
  __device__ int a_zero(const ProductAt& at, int64_t m) const {
    return w_zeros.data ? w_zeros.zero(0, filter(at, m)) : w_signed ? 0 : -128;
  }
  __device__ int b_zero(const ProductAt&, int64_t) const { return x_zeros.data ? x_zeros.zero(0, 0) : x_signed ? 0 : -128; }
  // Y seen as [N * groups, M, cells].
  __device__ int64_t place(const ProductAt& at, int64_t m, int64_t n) const { return (at.y * M + m) * N + n; }
};

struct IntegerConvolution : ByteConvolution {
  int32_t* y;
  __device__ void put(const ProductAt& at, int64_t m, int64_t n, int32_t sum) const { y[place(at, m, n)] = sum; }
};

struct QuantizedConvolution : ByteConvolution {
  LineParameter x_scale, w_scale, y_scale, y_zero;
  const int32_t* bias;
  uint8_t* y;
  bool y_signed;

  __device__ void put(const ProductAt& at, int64_t m, int64_t n, int32_t sum) const {
    const int64_t o = filter(at, m);
    const float scale = __fdiv_rn(__fmul_rn(x_scale.number(0, 0), w_scale.number(0, o)), y_scale.number(0, 0));
    const int32_t biased = bias ? static_cast<int32_t>(static_cast<uint32_t>(sum) + static_cast<uint32_t>(bias[o])) : sum;
    y[place(at, m, n)] = quantized(biased, scale, y_zero.number(0, 0), y_signed);
  }
};

CompiledKernel make_conv_integer(const CompileContext& c) {
  CompiledKernel kernel;
  kernel.run = [node = Node(c.node())](RunContext& r) {
    Window window;
    const Dims dims = convolution_output(node, r.input(0).dims, r.input(1).dims, false, window);
    const int64_t groups = node.get_int("group", 1);
    const TensorView& y = r.output(0, dims, DType::int32);
    launch_products(r, IntegerConvolution{ByteConvolution(r, window, dims, groups, 1, 2, 3), y.as<int32_t>()}, dims[0] * groups);
  };
  return kernel;
}

// Inputs: x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, bias (int32, of scale x_scale * w_scale).
CompiledKernel make_qlinear_conv(const CompileContext& c) {
  CompiledKernel kernel;
  kernel.run = [node = Node(c.node())](RunContext& r) {
    Window window;
    const Dims dims = convolution_output(node, r.input(0).dims, r.input(3).dims, false, window);
    const int64_t groups = node.get_int("group", 1);
    const DType type = r.input(7).dtype;
    const int32_t* bias = r.has_input(8) ? r.input(8).as<const int32_t>() : nullptr;
    require(!bias || r.input(8).count() == dims[1], "a bias of the wrong size", "give one entry for each output channel");
    const TensorView& y = r.output(0, dims, type);
    const QuantizedConvolution convolution{ByteConvolution(r, window, dims, groups, 3, 2, 5),
                                           LineParameter(r, 1, 1),
                                           LineParameter(r, 4, dims[1]),
                                           LineParameter(r, 6, 1),
                                           LineParameter(r, 7, 1),
                                           bias,
                                           y.as<uint8_t>(),
                                           type == DType::int8};
    launch_products(r, convolution, dims[0] * groups);
  };
  return kernel;
}

std::string refuse_convolution(const CompileContext& c, std::initializer_list<size_t> bytes, std::initializer_list<size_t> scales) {
  for (size_t i : bytes) {
    if (const std::string reason = refuse_other_types(c, i, {DType::int8, DType::uint8}); !reason.empty()) return reason;
  }
  for (size_t i : scales) {
    const std::string reason = refuse_other_types(c, i, {DType::float32, DType::float16, DType::bfloat16});
    if (!reason.empty()) return reason;
  }
  const Type& x = c.input_types[0];
  if (!x.is_tensor() || !x.shape) return "a number of dimensions that depends on data";
  return x.shape->size() > kMaxSpatial + 2 ? "more than 3 spatial axes" : "";
}

std::string unsupported_conv_integer(const CompileContext& c) {
  return refuse_convolution(c, {0, 1, 2, 3}, {});
}
std::string unsupported_qlinear_conv(const CompileContext& c) {
  const std::string reason = refuse_other_types(c, 8, {DType::int32});
  return reason.empty() ? refuse_convolution(c, {0, 2, 3, 5, 7}, {1, 4, 6}) : reason;
}

}  // namespace

void register_integer_convolutions(KernelRegistry& registry) {
  registry.add({.op = "ConvInteger", .make = make_conv_integer, .unsupported = unsupported_conv_integer});
  registry.add({.op = "QLinearConv", .make = make_qlinear_conv, .unsupported = unsupported_qlinear_conv});
}

}  // namespace fretsaw::cuda
