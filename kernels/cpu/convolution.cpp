// Conv, ConvTranspose; registers the other convolutions too.
#include "kernels/cpu/convolution.h"

#include <algorithm>
#include <limits>

#include "kernels/cpu/convolution_loops.h"
#include "kernels/cpu/convolution_onednn.h"
#include "kernels/cpu/families.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cpu/through_float.h"

namespace fretsaw {

Dims transposed_output_spatial(const Node& node, Window& window, const Dims& spatial) {
  const size_t rank = window.rank();
  Dims extra = node.get_ints("output_padding"), asked = node.get_ints("output_shape");
  if (extra.empty()) extra.assign(rank, 0);
  if (asked.size() == rank + 2) asked.erase(asked.begin(), asked.begin() + 2);  // with batch and channels, as some write it
  if (extra.size() != rank || (!asked.empty() && asked.size() != rank)) {
    throw Error("output_padding or output_shape has the wrong number of entries", "give one for each spatial dimension");
  }
  for (int64_t extent : asked) {
    if (extent < 0 || extent > std::numeric_limits<int32_t>::max())
      throw Error("output_shape is " + to_string(asked), "use extents from 0 up");
  }
  Dims out(rank);
  for (size_t i = 0; i < rank; ++i) {
    if (extra[i] < 0 || extra[i] > 1 << 30) throw Error("output_padding is " + to_string(extra), "use small numbers from 0 up");
    const int64_t full = (spatial[i] - 1) * window.strides[i] + extra[i] + window.extent(i);
    const bool same = window.auto_pad == "SAME_UPPER" || window.auto_pad == "SAME_LOWER";
    if (!asked.empty() || same) {
      out[i] = asked.empty() ? spatial[i] * window.strides[i] : asked[i];
      const int64_t total = full - out[i], less = total / 2;
      window.pads_begin[i] = window.auto_pad == "SAME_UPPER" ? less : total - less;
      if (window.pads_begin[i] < 0) window.pads_begin[i] = 0;
      window.pads_end[i] = total - window.pads_begin[i];
    } else {
      if (window.auto_pad == "VALID") window.pads_begin[i] = window.pads_end[i] = 0;
      out[i] = full - window.pads_begin[i] - window.pads_end[i];
    }
    if (out[i] < 0 || spatial[i] < 1) {
      throw Error("a transposed convolution of " + to_string(spatial) + " has the output extent " + std::to_string(out[i]),
                  "use less padding");
    }
  }
  return out;
}

Dims convolution_output(const Node& node, const Dims& x, const Dims& w, bool transposed, Window& window) {
  const int64_t groups = node.get_int("group", 1);
  if (x.size() < 3 || w.size() != x.size()) {
    throw Error("a convolution of " + to_string(x) + " by weights " + to_string(w), "X is [N,C,D1,...], W has the same rank");
  }
  if (groups < 1 || groups > std::max<int64_t>(w[0], 1)) {
    throw Error("group is " + std::to_string(groups) + " for weights " + to_string(w), "use at most as many groups as there are channels");
  }
  const int64_t channels = x[1], weight_channels = transposed ? w[0] : w[1] * groups;
  if (groups < 1 || channels != weight_channels || w[0] % groups != 0) {
    throw Error("weights " + to_string(w) + " with group " + std::to_string(groups) + " for " + std::to_string(channels) + " channels",
                "the channels must be those of the weights, and a multiple of group");
  }
  for (size_t i = 2; i < w.size(); ++i) {
    if (w[i] < 1) throw Error("weights of shape " + to_string(w), "no dimension of the kernel may be zero");
  }
  window = read_window(node, x.size() - 2, spatial_of(w));
  Dims y = {x[0], transposed ? w[1] * groups : w[0]};
  Dims spatial;
  if (transposed) {
    spatial = transposed_output_spatial(node, window, spatial_of(x));
  } else {
    resolve_padding(window, spatial_of(x));
    spatial = output_spatial(window, spatial_of(x));
  }
  y.insert(y.end(), spatial.begin(), spatial.end());
  return y;
}

ConvolutionShape shape_of_convolution(const Node& node, const Dims& x, const Dims& y) {
  return {x[0], x[1], y[1], node.get_int("group", 1), spatial_of(x), spatial_of(y)};
}

namespace {

void convolve_double(RunContext& r, const Node& node, bool transposed) {
  const TensorView &x = r.input(0), &w = r.input(1);
  Window window;
  const Dims y_dims = convolution_output(node, x.dims, w.dims, transposed, window);
  const double* bias = r.has_input(2) ? r.input(2).as<double>() : nullptr;
  if (bias && r.input(2).count() != y_dims[1]) throw Error("a bias of the wrong size", "give one entry for each output channel");
  TensorView& y = r.output(0, y_dims);
  const ConvolutionShape shape = shape_of_convolution(node, x.dims, y_dims);
  const int64_t in_cells = count_of(shape.in), out_cells = count_of(shape.out), taps = window.taps(), second = w.dims[1];
  const auto get_x = [&](int64_t row, int64_t cell) { return x.as<double>()[row * in_cells + cell]; };
  const auto get_w = [&](int64_t a, int64_t b, int64_t t) { return w.as<double>()[(a * second + b) * taps + t]; };
  const auto put = [&](int64_t n, int64_t o, const double* sums) {
    double* out = y.as<double>() + (n * y_dims[1] + o) * out_cells;
    for (int64_t i = 0; i < out_cells; ++i) out[i] = sums[i] + (bias ? bias[o] : 0.0);
  };
  if (transposed)
    convolve_transposed_by_loops<double>(shape, window, r.threads(), get_x, get_w, put);
  else
    convolve_by_loops<double>(shape, window, r.threads(), get_x, get_w, put);
}

template <bool kTransposed>
CompiledKernel make_float(const CompileContext& c) {
  auto convolution = std::make_shared<OneDnnConvolution>(c, kTransposed);
  CompiledKernel kernel{[convolution](RunContext& r) { convolution->run(r); }};
  convolution->set_layouts(kernel, c);
  return kernel;
}

template <bool kTransposed>
CompiledKernel make_convolution(const CompileContext& c) {
  if (!c.has_input(0) || !c.has_input(1)) throw Error("a convolution needs an input and weights", "give both");
  const DType type = c.input_dtype(0);
  if (type == DType::float64) {
    return {[node = Node(c.node())](RunContext& r) { convolve_double(r, node, kTransposed); }};
  }
  if (type != DType::float32 && !is_half_float(type)) throw Error(not_supported(type), "cast the tensor to float32");
  return make_any_float(c, make_float<kTransposed>);
}

}  // namespace

void register_convolution(KernelRegistry& registry) {
  registry.add({.op = "Conv", .make = make_convolution<false>});
  registry.add({.op = "ConvTranspose", .make = make_convolution<true>});
  register_quantized_convolution(registry);
  register_deformable_convolution(registry);
}

}  // namespace fretsaw
