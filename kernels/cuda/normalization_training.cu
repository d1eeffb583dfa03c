// BatchNormalization by the statistics of the batch, and its gradient. With n = (x - mean) inverse and g the gradient of n scale + bias:
//
//   dx = inverse scale (g - mean(g) - n mean(g n)),   dscale = sum(g n),   dbias = sum(g)

#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/channel_sums.cuh"
#include "kernels/cuda/gradients.h"
#include "kernels/cuda/normalization_batch.h"
#include "kernels/cuda/number_types.cuh"
#include "kernels/scratch_pieces.h"

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
    sum_channels<false, T>(launch, x.as<T>(), nullptr, {}, shape, parts, stream_of(r));
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
// kPart: bits has a byte for each pack, which says of what channels dy counts.
template <typename T, int V, bool kPart>
__global__ void __launch_bounds__(kChannelThreads, kGradientBlocks)
    gradient_of_pixels(const T* dy, const uint8_t* bits, const T* x, T* dx, int64_t pixels, int64_t C,
                       const GradientFactors<WideOf<T>>* factors) {
  let_later_begin();
  wait_for_earlier();
  const int64_t channel = pixel_channel<V>();
  if (channel >= C) return;
  GradientFactors<WideOf<T>> f[V];
#pragma unroll
  for (int v = 0; v < V; ++v) f[v] = factors[channel + v];
  Held<T, V> g[kPixelBatch], from[kPixelBatch];
  uint32_t counts[kPixelBatch];
  dy += channel, x += channel, dx += channel;
  each_pixel<true>(
      pixels, C,
      [&](int b, int64_t at) {
        g[b] = hold_last<T, V>(dy + at), from[b] = hold_last<T, V>(x + at);
        if constexpr (kPart) counts[b] = bits[(at + channel) / V];
      },
      [&](int b, int64_t at) {
        WideOf<T> gradients[V], values[V];
        unpack<T, V>(g[b], gradients), unpack<T, V>(from[b], values);
        if constexpr (kPart) {
#pragma unroll
          for (int v = 0; v < V; ++v) gradients[v] = counts[b] >> v & 1 ? gradients[v] : 0;
        }
        Lanes<T, V> to;
#pragma unroll
        for (int v = 0; v < V; ++v) to.at[v] = narrow<T>(f[v](gradients[v], values[v]));
        *reinterpret_cast<Lanes<T, V>*>(dx + at) = to;
      });
}

template <typename T, int V>
void launch_gradient(const TensorView& dy, const uint8_t* bits, const TensorView& x, TensorView& dx, const ChannelShape& shape,
                     const GradientFactors<WideOf<T>>* factors, int multiprocessors, cudaStream_t stream) {
  if (shape.last) {
    const PixelGrid grid = pixel_grid(shape.count(), shape.C, V, int64_t{kGradientBlocks} * multiprocessors);
    const auto start = [&](auto kernel) {
      launch_dependent(kernel, grid.blocks, grid.threads, stream, dy.as<const T>(), bits, x.as<const T>(), dx.as<T>(), shape.count(),
                       shape.C, factors);
    };
    bits ? start(gradient_of_pixels<T, V, true>) : start(gradient_of_pixels<T, V, false>);
  } else {
    gradient_of_planes<T, V><<<blocks_for(x.count(), kChannelThreads, V), kChannelThreads, 0, stream>>>(
        dy.as<const T>(), x.as<const T>(), dx.as<T>(), x.count(), shape.cells, WideDivider(shape.C), factors);
  }
  check_launch("batch normalization's gradient");
}

// The part of dy that counts, for launches that can't take it as they read.
template <typename T, int V>
__global__ void __launch_bounds__(kChannelThreads) keep_positive(const T* dy, const T* y, T* kept, int64_t count) {
  for (int64_t i = (int64_t{blockIdx.x} * kChannelThreads + threadIdx.x) * V; i < count; i += int64_t{gridDim.x} * kChannelThreads * V) {
    const auto result = *reinterpret_cast<const Lanes<T, V>*>(y + i);
    auto g = *reinterpret_cast<const Lanes<T, V>*>(dy + i);
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (!(widen(result.at[v]) > 0)) g.at[v] = narrow<T>(0);
    *reinterpret_cast<Lanes<T, V>*>(kept + i) = g;
  }
}
template <typename T>
void launch_keep_positive(const T* dy, const T* y, T* kept, int64_t count, bool aligned, cudaStream_t stream) {
  constexpr int V = kPackOf16<T>;
  if (aligned && count % V == 0)
    keep_positive<T, V><<<blocks_for(count, kChannelThreads, V), kChannelThreads, 0, stream>>>(dy, y, kept, count);
  else
    keep_positive<T, 1><<<blocks_for(count, kChannelThreads), kChannelThreads, 0, stream>>>(dy, y, kept, count);
  check_launch("keep_positive");
}

template <typename T>
void compute_gradient(RunContext& r, TensorView dy, const TensorView* y, const TensorView& x, TensorView* dx, Row scale, Row of_scale,
                      Row of_bias, double epsilon) {
  constexpr int V = kPackOf16<T>;
  using Sums = ChannelSums<double, true>;
  using Factors = GradientFactors<WideOf<T>>;
  const ChannelShape shape(x);
  const int multiprocessors = gpu(r).multiprocessors();
  const bool aligned = is_16_byte_aligned(x.data) && is_16_byte_aligned(dy.data) && is_16_byte_aligned(dx ? dx->data : nullptr) &&
                       is_16_byte_aligned(y ? y->data : nullptr);
  const ChannelLaunch launch = channel_launch<true>(shape, V, aligned, multiprocessors);
  const bool by_bits = y && launch.packed && shape.last;
  const auto count = static_cast<size_t>(x.count());
  ScratchPieces pieces;
  const size_t parts_at = pieces.add(static_cast<size_t>(launch.parts * shape.C) * sizeof(Sums));
  const size_t factors_at = pieces.add(static_cast<size_t>(shape.C) * sizeof(Factors));
  const size_t part_at = pieces.add(by_bits ? count / V : y ? count * sizeof(T) : 0);
  auto* scratch = static_cast<char*>(r.scratch(pieces.total()));
  auto* parts = reinterpret_cast<Sums*>(scratch + parts_at);
  auto* factors = reinterpret_cast<Factors*>(scratch + factors_at);
  auto* bits = by_bits ? reinterpret_cast<uint8_t*>(scratch + part_at) : nullptr;
  if (y && !by_bits) {
    auto* kept = reinterpret_cast<T*>(scratch + part_at);
    launch_keep_positive(dy.as<const T>(), y->as<const T>(), kept, x.count(), aligned, stream_of(r));
    dy.data = kept;
  }
  const PositivePart<T> positive{by_bits ? y->as<const T>() : nullptr, bits};
  sum_channels<true, T>(launch, x.as<const T>(), dy.as<const T>(), positive, shape, parts, stream_of(r));
  launch_dependent(finish_backward<T>, warps_for(shape.C), kFinishThreads, stream_of(r), x.as<const T>(), shape, parts, launch.parts, scale,
                   of_scale, of_bias, epsilon, factors);
  check_launch("finish_backward");
  if (!dx) return;
  if (launch.packed)
    launch_gradient<T, V>(dy, bits, x, *dx, shape, factors, multiprocessors, stream_of(r));
  else
    launch_gradient<T, 1>(dy, nullptr, x, *dx, shape, factors, multiprocessors, stream_of(r));
}

void run_gradient(RunContext& r, double epsilon, const NormGradientOperands& at) {
  const TensorView &dy = r.input(at.dy), &x = r.input(at.x);
  const TensorView* y = at.y < 0 ? nullptr : &r.input(static_cast<size_t>(at.y));
  require(x.rank() >= 2, "BatchNormalization of a tensor without channels", "give it [N,C,D1,...]");
  require(dy.dims == x.dims && dy.layout == x.layout && (!y || (y->dims == x.dims && y->layout == x.layout)),
          "the gradient differs from the norm's input in shape", "give that of the norm's result");
  const Dims row = r.input(at.scale).dims;
  const DType row_type = r.input(at.scale).dtype;
  const auto output = [&](size_t i, const Dims& dims, DType dtype, Layout layout) {
    const auto place = static_cast<size_t>(at.outputs[i]);
    return at.outputs[i] >= 0 && r.wants_output(place) ? &r.output(place, dims, dtype, layout) : nullptr;
  };
  const Row scale = row_input(r, at.scale, x.dims[1]);
  TensorView* of_scale = output(1, row, row_type, Layout::plain);
  TensorView* of_bias = output(2, row, row_type, Layout::plain);
  TensorView* dx = output(0, x.dims, x.dtype, x.layout);
  require(x.count() > 0, "BatchNormalization by the statistics of no elements", "give it samples");
  with_float_type(x.dtype, [&](auto tag) {
    compute_gradient<typename decltype(tag)::type>(r, dy, y, x, dx, scale, of_scale ? Row(*of_scale) : Row(),
                                                   of_bias ? Row(*of_bias) : Row(), epsilon);
  });
}

}  // namespace

CompiledKernel make_norm_gradient(const CompileContext& c) {
  NormGradientOperands at;
  read_norm_gradient(c, at);  // `unsupported_norm_gradient` has seen that there is no reason against it
  const auto epsilon = static_cast<double>(c.nodes.back()->get_float("epsilon", 1e-5f));
  CompiledKernel kernel{[epsilon, at](RunContext& r) { run_gradient(r, epsilon, at); }};
  take_gradient_layouts(c, at, kernel);
  return kernel;
}

std::string unsupported_norm_gradient(const CompileContext& c) {
  NormGradientOperands at;
  if (std::string reason = read_norm_gradient(c, at); !reason.empty()) return reason;
  if (const auto x = c.input_dims(at.x); x && count_of(*x) == 0) return "no samples";
  std::string reason = at.y < 0 ? refuse_mixed_floats(c, {at.dy, at.x}) : refuse_mixed_floats(c, {at.dy, at.x, static_cast<size_t>(at.y)});
  return reason.empty() ? refuse_mixed_floats(c, {at.scale}) : reason;
}

CompiledKernel make_training_batch_norm(const CompileContext& c, const NormFollowers& f) {
  const TrainingSettings s{static_cast<double>(c.node().get_float("epsilon", 1e-5f)),
                           static_cast<double>(c.node().get_float("momentum", 0.9f))};
  CompiledKernel kernel{[s, f](RunContext& r) { run_training(r, s, f); }};
  take_norm_layouts(c, f, kernel);
  return kernel;
}

void register_batch_normalization_gradient(KernelRegistry& registry) {
  registry.add({.op = "BatchNormalizationGrad",
                .domain = kCommunicationDomain,
                .make = make_norm_gradient,
                .unsupported = unsupported_norm_gradient,
                .follows = true});
}

}  // namespace fretsaw::cuda
