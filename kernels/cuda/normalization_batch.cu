// BatchNormalization with given statistics (normalization_training.cu has those of the batch): each channel is multiplied and shifted.
// Constant parameters become factors when the kernel is made; others become factors on the device before each run.
#include <cmath>
#include <memory>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/channel_pixels.cuh"
#include "kernels/cuda/normalization_batch.h"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256;

// What is done with an element after its factors.
template <typename T>
struct After {
  bool relu;

  // Each node of the step rounds what it gives.
  __device__ T operator()(WideOf<T> value, T residual, bool adds) const {
    T rounded = narrow<T>(value);
    if (adds) rounded = narrow<T>(widen(rounded) + widen(residual));
    return relu && widen(rounded) < 0 ? narrow<T>(0) : rounded;
  }
};

// factors [2, C]: what a channel is multiplied with, and what is added.
template <typename T, int V, bool kAdd>
__global__ void __launch_bounds__(kThreads) scale_planes(const T* x, const T* residual, T* y, int64_t count, WideDivider cells,
                                                         WideDivider channels, const WideOf<T>* factors, After<T> after) {
  const int64_t C = channels.divisor;
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * V; i < count; i += int64_t{gridDim.x} * kThreads * V) {
    const auto from = *reinterpret_cast<const Lanes<T, V>*>(x + i);
    Lanes<T, V> other{}, to;
    if constexpr (kAdd) other = *reinterpret_cast<const Lanes<T, V>*>(residual + i);
    int64_t channel = cells.quotient(i);
    split_off(channels, channel);
    const WideOf<T> factor = factors[channel], shift = factors[C + channel];
#pragma unroll
    for (int k = 0; k < V; ++k) to.at[k] = after(widen(from.at[k]) * factor + shift, other.at[k], kAdd);
    *reinterpret_cast<Lanes<T, V>*>(y + i) = to;
  }
}

constexpr int kScaleBlocks = 3;  // of a multiprocessor

// Channels last: a thread keeps the factors of its V channels. From the last pixel on: sums of the batch have read that one last.
template <typename T, int V, bool kAdd>
__global__ void __launch_bounds__(kChannelThreads, kScaleBlocks)
    scale_pixels(const T* x, const T* residual, T* y, int64_t pixels, int64_t C, const WideOf<T>* factors, After<T> after) {
  let_later_begin();
  wait_for_earlier();
  const int64_t channel = pixel_channel<V>();
  if (channel >= C) return;
  WideOf<T> factor[V], shift[V];
#pragma unroll
  for (int v = 0; v < V; ++v) factor[v] = factors[channel + v], shift[v] = factors[C + channel + v];
  Held<T, V> from[kPixelBatch], other[kPixelBatch] = {};
  x += channel, y += channel;
  if constexpr (kAdd) residual += channel;
  each_pixel<true>(
      pixels, C,
      [&](int b, int64_t at) {
        from[b] = hold_last<T, V>(x + at);
        if constexpr (kAdd) other[b] = hold_last<T, V>(residual + at);
      },
      [&](int b, int64_t at) {
        WideOf<T> values[V];
        unpack<T, V>(from[b], values);
        Lanes<T, V> to, added;
        memcpy(&added, &other[b], sizeof added);
#pragma unroll
        for (int v = 0; v < V; ++v) to.at[v] = after(values[v] * factor[v] + shift[v], added.at[v], kAdd);
        *reinterpret_cast<Lanes<T, V>*>(y + at) = to;
      });
}

template <typename Wide>
__host__ __device__ void make_factor(Wide scale, Wide bias, Wide mean, Wide variance, Wide epsilon, Wide& factor, Wide& shift) {
  factor = scale / sqrt(variance + epsilon);
  shift = bias - mean * factor;
}

struct Parameter {
  const void* data;
  DType type;
};
__device__ double load_float(const Parameter& p, int64_t i) {
  switch (p.type) {
    case DType::float64:
      return static_cast<const double*>(p.data)[i];
    case DType::float16:
      return static_cast<double>(__half2float(static_cast<const __half*>(p.data)[i]));
    case DType::bfloat16:
      return static_cast<double>(__bfloat162float(static_cast<const __nv_bfloat16*>(p.data)[i]));
    default:
      return static_cast<double>(static_cast<const float*>(p.data)[i]);
  }
}

template <typename Wide>
__global__ void __launch_bounds__(kThreads)
    make_factors(Parameter scale, Parameter bias, Parameter mean, Parameter variance, Wide epsilon, int64_t C, Wide* factors) {
  const int64_t c = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (c >= C) return;
  const auto load = [c](const Parameter& p) { return static_cast<Wide>(load_float(p, c)); };
  make_factor(load(scale), load(bias), load(mean), load(variance), epsilon, factors[c], factors[C + c]);
}

// The factors of constant parameters, in device memory.
template <typename Wide>
std::shared_ptr<void> constant_factors(const CompileContext& c, Wide epsilon) {
  const auto C = static_cast<size_t>(c.constants[1]->count());
  std::vector<Wide> parameters[4], factors(2 * C);
  for (size_t i = 0; i < 4; ++i) {
    const Tensor& tensor = *c.constants[i + 1];
    require(static_cast<size_t>(tensor.count()) == C, "a parameter of BatchNormalization does not fit the channels", "give it [C]");
    parameters[i].resize(C);
    load_as<Wide>(tensor.dtype, tensor.data, 0, tensor.count(), parameters[i].data());
  }
  for (size_t i = 0; i < C; ++i)
    make_factor(parameters[0][i], parameters[1][i], parameters[2][i], parameters[3][i], epsilon, factors[i], factors[C + i]);
  Device& device = *c.device;
  const std::shared_ptr<void> memory(device.allocate(factors.size() * sizeof(Wide)), [&device](void* p) { device.release(p); });
  device.upload(memory.get(), factors.data(), factors.size() * sizeof(Wide));
  return memory;
}

template <typename Wide>
const Wide* factors_of_inputs(RunContext& r, int64_t C, Wide epsilon) {
  auto* factors = static_cast<Wide*>(r.scratch(static_cast<size_t>(2 * C) * sizeof(Wide)));
  const auto parameter = [&](size_t i) {
    require(r.input(i).count() == C, "a parameter of BatchNormalization does not fit the channels", "give it [C]");
    return Parameter{r.input(i).data, r.input(i).dtype};
  };
  make_factors<<<blocks_for(C, kThreads), kThreads, 0, stream_of(r)>>>(parameter(1), parameter(2), parameter(3), parameter(4), epsilon, C,
                                                                       factors);
  check_launch("make_factors");
  return factors;
}

template <typename T, int V, bool kAdd>
void launch_scale(const RunContext& r, const TensorView& x, const T* residual, TensorView& y, const WideOf<T>* factors, bool relu) {
  const int64_t C = x.rank() == 1 ? 1 : x.dims[1], cells = product(x.dims, 2, x.rank());
  const After<T> after{relu};
  if (x.layout == Layout::nhwc) {
    const int64_t pixels = x.dims[0] * cells;
    const PixelGrid grid = pixel_grid(pixels, C, V, int64_t{kScaleBlocks} * gpu(r).multiprocessors());
    launch_dependent(scale_pixels<T, V, kAdd>, grid.blocks, grid.threads, stream_of(r), x.as<const T>(), residual, y.as<T>(), pixels, C,
                     factors, after);
  } else {
    scale_planes<T, V, kAdd><<<blocks_for(x.count(), kThreads, V), kThreads, 0, stream_of(r)>>>(
        x.as<T>(), residual, y.as<T>(), x.count(), WideDivider(cells), WideDivider(C), factors, after);
  }
  check_launch("scale_channels");
}

void run_batch_norm(RunContext& r, float epsilon, const void* known_factors, int64_t known_channels, const NormFollowers& f) {
  const TensorView& x = r.input(0);
  require(x.rank() >= 1, "BatchNormalization of a scalar", "give it [N,C,D1,...]");
  const int64_t C = x.rank() == 1 ? 1 : x.dims[1];
  require(!known_factors || known_channels == C, "a parameter of BatchNormalization does not fit the channels", "give it [C]");
  TensorView& y = r.output(static_cast<size_t>(f.outputs[0]), x.dims, x.dtype, x.layout);
  if (x.count() == 0) return;
  with_float_type(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Wide = WideOf<T>;
    const void* factors = known_factors;
    if (!factors) factors = factors_of_inputs<Wide>(r, C, static_cast<Wide>(epsilon));
    scale_by_factors(r, x, y, factors, f);
  });
}

CompiledKernel make_batch_norm(const CompileContext& c) {
  NormFollowers f;
  read_norm_followers(c, f);  // `unsupported_batch_norm` has seen that there is no reason against them
  if (c.node().get_int("training_mode", 0) != 0) return make_training_batch_norm(c, f);
  const float epsilon = c.node().get_float("epsilon", 1e-5f);
  bool known = c.input_dtype(0) != DType::undefined;
  for (size_t i = 1; i < 5; ++i) known = known && c.constants[i] && c.constants[i]->data;
  std::shared_ptr<void> factors;
  int64_t channels = 0;
  if (known) {
    channels = c.constants[1]->count();
    factors = c.input_dtype(0) == DType::float64 ? constant_factors<double>(c, static_cast<double>(epsilon))
                                                 : constant_factors<float>(c, epsilon);
  }
  CompiledKernel kernel{[=](RunContext& r) { run_batch_norm(r, epsilon, factors.get(), channels, f); }};
  if (known) kernel.packed_inputs = {1, 2, 3, 4};
  take_norm_layouts(c, f, kernel);
  return kernel;
}

std::string unsupported_batch_norm(const CompileContext& c) {
  NormFollowers f;
  if (const std::string reason = refuse_other_float_inputs(c); !reason.empty()) return reason;
  const auto x = c.input_dims(0);
  if (c.node().get_int("training_mode", 0) != 0 && x && count_of(*x) == 0) return "no samples";
  return read_norm_followers(c, f);
}

}  // namespace

void scale_by_factors(const RunContext& r, const TensorView& x, TensorView& y, const void* factors, const NormFollowers& f) {
  const TensorView* residual = f.residual < 0 ? nullptr : &r.input(static_cast<size_t>(f.residual));
  require(!residual || (residual->dims == x.dims && residual->layout == x.layout), "a residual of another shape than the norm's result",
          "report this as a fault");
  const bool aligned = is_16_byte_aligned(x.data) && is_16_byte_aligned(y.data) && is_16_byte_aligned(residual ? residual->data : nullptr);
  const int64_t neighbours = x.layout == Layout::nhwc ? x.dims[1] : product(x.dims, 2, x.rank());
  with_float_type(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int V = kPackOf16<T>;
    const auto* numbers = static_cast<const WideOf<T>*>(factors);
    const T* other = residual ? residual->as<const T>() : nullptr;
    if (aligned && neighbours % V == 0)
      residual ? launch_scale<T, V, true>(r, x, other, y, numbers, f.relu) : launch_scale<T, V, false>(r, x, other, y, numbers, f.relu);
    else
      residual ? launch_scale<T, 1, true>(r, x, other, y, numbers, f.relu) : launch_scale<T, 1, false>(r, x, other, y, numbers, f.relu);
  });
}

void register_batch_normalization(KernelRegistry& registry) {
  registry.add({.op = "BatchNormalization", .make = make_batch_norm, .unsupported = unsupported_batch_norm, .leads = true});
}

}  // namespace fretsaw::cuda
