// BatchNormalization by the statistics of the batch, and its gradient. With n = (x - mean) inverse and g the gradient of n scale + bias:
//
//   dx = inverse scale (g - mean(g) - n mean(g n)),   dscale = sum(g n),   dbias = sum(g)
#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/channel_sums.cuh"
#include "kernels/cuda/gradients.h"
#include "kernels/cuda/normalization_batch.h"
#include "kernels/cuda/number_types.cuh"

namespace fretsaw::cuda {
namespace {

// One of the small tensors [C] of any float type; null where it is left out.
struct Row {
  void* data = nullptr;
  DType type = DType::undefined;

  Row() = default;
  Row(const TensorView& view) : data(view.data), type(view.dtype) {}
  __device__ double load(int64_t i) const {
    switch (type) {
      case DType::float64:
        return static_cast<const double*>(data)[i];
      case DType::float16:
        return widen(static_cast<const __half*>(data)[i]);
      case DType::bfloat16:
        return widen(static_cast<const __nv_bfloat16*>(data)[i]);
      default:
        return static_cast<const float*>(data)[i];
    }
  }
  __device__ void store(int64_t i, double value) const {
    if (!data) return;
    switch (type) {
      case DType::float64:
        static_cast<double*>(data)[i] = value;
        return;
      case DType::float16:
        static_cast<__half*>(data)[i] = rounded<__half>(value);
        return;
      case DType::bfloat16:
        static_cast<__nv_bfloat16*>(data)[i] = rounded<__nv_bfloat16>(value);
        return;
      default:
        static_cast<float*>(data)[i] = static_cast<float>(value);
    }
  }
};

Row row_input(RunContext& r, size_t i, int64_t C) {
  require(r.input(i).count() == C, "a parameter of BatchNormalization does not fit the channels", "give it [C]");
  return r.input(i);
}

constexpr int kFinishThreads = 128;  // small blocks spread the channels over the device

// --- forward ---

struct RunningRows {
  Row mean, variance, next_mean, next_variance;
  double momentum;
};

// factors [2, C]: what a channel is multiplied with, and what is added.
template <typename T>
__global__ void __launch_bounds__(kFinishThreads)
    finish_forward(const T* x, ChannelShape shape, const ChannelSums<double, false>* parts, int part_count, Row scale, Row bias,
                   RunningRows running, double epsilon, WideOf<T>* factors) {
  let_later_begin();
  wait_for_earlier();
  with_channel_facts(x, shape, parts, part_count, [&](int64_t c, const ChannelFacts& facts) {
    const double factor = scale.load(c) / sqrt(facts.variance + epsilon);
    factors[c] = static_cast<WideOf<T>>(factor);
    factors[shape.C + c] = static_cast<WideOf<T>>(bias.load(c) - facts.mean * factor);
    const double m = running.momentum;
    if (running.next_mean.data) running.next_mean.store(c, running.mean.load(c) * m + facts.mean * (1 - m));
    if (running.next_variance.data) running.next_variance.store(c, running.variance.load(c) * m + facts.variance * (1 - m));
  });
}

struct TrainingSettings {
  double epsilon, momentum;
};

unsigned warps_for(int64_t count) {
  return blocks_for(count * 32, kFinishThreads);
}

void run_training(RunContext& r, const TrainingSettings& s, const NormFollowers& f) {
  const TensorView& x = r.input(0);
  require(x.rank() >= 2, "BatchNormalization of a tensor without channels", "give it [N,C,D1,...]");
  const ChannelShape shape(x);
  const Row scale = row_input(r, 1, shape.C), bias = row_input(r, 2, shape.C);
  RunningRows running{row_input(r, 3, shape.C), row_input(r, 4, shape.C), {}, {}, s.momentum};
  const auto running_output = [&](size_t i) {
    const auto at = static_cast<size_t>(f.outputs[i]);
    return f.outputs[i] >= 0 && r.wants_output(at) ? Row(r.output(at, r.input(i + 2).dims, r.input(i + 2).dtype)) : Row();
  };
  running.next_mean = running_output(1), running.next_variance = running_output(2);
  TensorView& y = r.output(static_cast<size_t>(f.outputs[0]), x.dims, x.dtype, x.layout);
  require(x.count() > 0, "BatchNormalization by the statistics of no elements", "give it samples");
  with_float_type(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const ChannelLaunch launch = channel_launch<false>(shape, kPackOf16<T>, is_16_byte_aligned(x.data), gpu(r).multiprocessors());
    using Sums = ChannelSums<double, false>;
    const size_t part_bytes = static_cast<size_t>(launch.parts * shape.C) * sizeof(Sums);
    auto* parts = static_cast<Sums*>(r.scratch(part_bytes + static_cast<size_t>(2 * shape.C) * sizeof(WideOf<T>)));
    auto* factors = reinterpret_cast<WideOf<T>*>(reinterpret_cast<char*>(parts) + part_bytes);
    sum_channels<false, T>(launch, x.as<T>(), nullptr, shape, parts, stream_of(r));
    launch_dependent(finish_forward<T>, warps_for(shape.C), kFinishThreads, stream_of(r), x.as<T>(), shape, parts, launch.parts, scale,
                     bias, running, s.epsilon, factors);
    check_launch("finish_forward");
    scale_by_factors(r, x, y, factors, f);
  });
}

// --- gradient ---

// dx = a (g - mean_g - (x - mean) along), the four numbers of a channel.
template <typename Wide>
struct alignas(sizeof(Wide) * 4) GradientFactors {
  Wide a, mean_g, mean, along;

  __device__ Wide operator()(Wide g, Wide x) const { return a * (g - mean_g - (x - mean) * along); }
};

template <typename T>
__global__ void __launch_bounds__(kFinishThreads)
    finish_backward(const T* x, ChannelShape shape, const ChannelSums<double, true>* parts, int part_count, Row scale, Row of_scale,
                    Row of_bias, double epsilon, GradientFactors<WideOf<T>>* factors) {
  let_later_begin();
  wait_for_earlier();
  using Wide = WideOf<T>;
  with_channel_facts(x, shape, parts, part_count, [&](int64_t c, const ChannelFacts& facts) {
    const double inverse = 1 / sqrt(facts.variance + epsilon), count = static_cast<double>(shape.count());
    of_scale.store(c, facts.along * inverse);
    of_bias.store(c, facts.g);
    factors[c] = {static_cast<Wide>(inverse * scale.load(c)), static_cast<Wide>(facts.g / count), static_cast<Wide>(facts.mean),
                  static_cast<Wide>(facts.along * inverse * inverse / count)};
  });
}

template <typename T, int V>
__global__ void __launch_bounds__(kChannelThreads) gradient_of_planes(const T* dy, const T* x, T* dx, int64_t count, WideDivider cells,
                                                                      WideDivider channels, const GradientFactors<WideOf<T>>* factors) {
  for (int64_t i = (int64_t{blockIdx.x} * kChannelThreads + threadIdx.x) * V; i < count; i += int64_t{gridDim.x} * kChannelThreads * V) {
    int64_t channel = cells.quotient(i);
    split_off(channels, channel);
    const GradientFactors<WideOf<T>> f = factors[channel];
    const auto g = *reinterpret_cast<const Lanes<T, V>*>(dy + i), from = *reinterpret_cast<const Lanes<T, V>*>(x + i);
    Lanes<T, V> to;
#pragma unroll
    for (int v = 0; v < V; ++v) to.at[v] = narrow<T>(f(widen(g.at[v]), widen(from.at[v])));
    *reinterpret_cast<Lanes<T, V>*>(dx + i) = to;
  }
}

constexpr int kGradientBlocks = 2;  // of a multiprocessor

// Channels last: a thread keeps the factors of its V channels and goes over pixels, from the last one on, which the sums read last.
template <typename T, int V>
__global__ void __launch_bounds__(kChannelThreads, kGradientBlocks)
    gradient_of_pixels(const T* dy, const T* x, T* dx, int64_t pixels, int64_t C, const GradientFactors<WideOf<T>>* factors) {
  let_later_begin();
  wait_for_earlier();
  const int64_t channel = pixel_channel<V>();
  if (channel >= C) return;
  GradientFactors<WideOf<T>> f[V];
#pragma unroll
  for (int v = 0; v < V; ++v) f[v] = factors[channel + v];
  Held<T, V> g[kPixelBatch], from[kPixelBatch];
  dy += channel, x += channel, dx += channel;
  each_pixel<true>(
      pixels, C, [&](int b, int64_t at) { g[b] = hold_last<T, V>(dy + at), from[b] = hold_last<T, V>(x + at); },
      [&](int b, int64_t at) {
        WideOf<T> gradients[V], values[V];
        unpack<T, V>(g[b], gradients), unpack<T, V>(from[b], values);
        Lanes<T, V> to;
#pragma unroll
        for (int v = 0; v < V; ++v) to.at[v] = narrow<T>(f[v](gradients[v], values[v]));
        *reinterpret_cast<Lanes<T, V>*>(dx + at) = to;
      });
}

template <typename T, int V>
void launch_gradient(const TensorView& dy, const TensorView& x, TensorView& dx, const ChannelShape& shape,
                     const GradientFactors<WideOf<T>>* factors, int multiprocessors, cudaStream_t stream) {
  if (shape.last) {
    const PixelGrid grid = pixel_grid(shape.count(), shape.C, V, int64_t{kGradientBlocks} * multiprocessors);
    launch_dependent(gradient_of_pixels<T, V>, grid.blocks, grid.threads, stream, dy.as<const T>(), x.as<const T>(), dx.as<T>(),
                     shape.count(), shape.C, factors);
  } else {
    gradient_of_planes<T, V><<<blocks_for(x.count(), kChannelThreads, V), kChannelThreads, 0, stream>>>(
        dy.as<const T>(), x.as<const T>(), dx.as<T>(), x.count(), shape.cells, WideDivider(shape.C), factors);
  }
  check_launch("batch normalization's gradient");
}

void run_gradient(RunContext& r, double epsilon) {
  const TensorView &dy = r.input(0), &x = r.input(1);
  require(x.rank() >= 2, "BatchNormalization of a tensor without channels", "give it [N,C,D1,...]");
  require(dy.dims == x.dims && dy.layout == x.layout, "the gradient differs from the norm's input in shape",
          "give that of the norm's result");
  const ChannelShape shape(x);
  const Row scale = row_input(r, 2, shape.C);
  Row of_scale, of_bias;
  if (r.wants_output(1)) of_scale = r.output(1, r.input(2).dims, r.input(2).dtype);
  if (r.wants_output(2)) of_bias = r.output(2, r.input(2).dims, r.input(2).dtype);
  TensorView* dx = r.wants_output(0) ? &r.output(0, x.dims, x.dtype, x.layout) : nullptr;
  require(x.count() > 0, "BatchNormalization by the statistics of no elements", "give it samples");
  with_float_type(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int V = kPackOf16<T>;
    const bool aligned = is_16_byte_aligned(x.data) && is_16_byte_aligned(dy.data) && (!dx || is_16_byte_aligned(dx->data));
    const int multiprocessors = gpu(r).multiprocessors();
    const ChannelLaunch launch = channel_launch<true>(shape, V, aligned, multiprocessors);
    using Sums = ChannelSums<double, true>;
    using Factors = GradientFactors<WideOf<T>>;
    const size_t part_bytes = static_cast<size_t>(launch.parts * shape.C) * sizeof(Sums);
    auto* parts = static_cast<Sums*>(r.scratch(part_bytes + static_cast<size_t>(shape.C) * sizeof(Factors)));
    auto* factors = reinterpret_cast<Factors*>(reinterpret_cast<char*>(parts) + part_bytes);
    sum_channels<true, T>(launch, x.as<T>(), dy.as<T>(), shape, parts, stream_of(r));
    launch_dependent(finish_backward<T>, warps_for(shape.C), kFinishThreads, stream_of(r), x.as<T>(), shape, parts, launch.parts, scale,
                     of_scale, of_bias, epsilon, factors);
    check_launch("finish_backward");
    if (!dx) return;
    if (launch.packed)
      launch_gradient<T, V>(dy, x, *dx, shape, factors, multiprocessors, stream_of(r));
    else
      launch_gradient<T, 1>(dy, x, *dx, shape, factors, multiprocessors, stream_of(r));
  });
}

CompiledKernel make_gradient(const CompileContext& c) {
  CompiledKernel kernel{[epsilon = static_cast<double>(c.node().get_float("epsilon", 1e-5f))](RunContext& r) { run_gradient(r, epsilon); }};
  take_images(c, {0, 1}, kernel);
  return kernel;
}

std::string unsupported_gradient(const CompileContext& c) {
  const std::string reason = refuse_mixed_floats(c, {0, 1});
  return reason.empty() ? refuse_mixed_floats(c, {2}) : reason;
}

}  // namespace

CompiledKernel make_training_batch_norm(const CompileContext& c, const NormFollowers& f) {
  const TrainingSettings s{static_cast<double>(c.node().get_float("epsilon", 1e-5f)),
                           static_cast<double>(c.node().get_float("momentum", 0.9f))};
  CompiledKernel kernel{[s, f](RunContext& r) { run_training(r, s, f); }};
  take_norm_layouts(c, f, kernel);
  return kernel;
}

void register_batch_normalization_gradient(KernelRegistry& registry) {
  registry.add(
      {.op = "BatchNormalizationGrad", .domain = kCommunicationDomain, .make = make_gradient, .unsupported = unsupported_gradient});
}

}  // namespace fretsaw::cuda
