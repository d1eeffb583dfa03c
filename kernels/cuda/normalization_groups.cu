// GroupNormalization, InstanceNormalization and MeanVarianceNormalization: the statistics of each group by a fold, then all elements.
//
// The fold adds up differences from the group's first element, and their squares, in double: no digits are lost to a large mean, and the
// parts of a group that different blocks fold can simply be added.
#include <algorithm>

#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/fold.cuh"
#include "kernels/cuda/normalization.h"

namespace fretsaw::cuda {

namespace {

struct Differences {
  double sum, square;
};

// How the inverse deviation is made of the variance.
enum class EpsilonPlace : uint8_t { under_root, after_root };

template <typename Stat>
struct Moments {
  static constexpr bool kFromOrigin = true;
  using State = Differences;
  Stat *means, *inverses;  // [groups]
  double epsilon;
  EpsilonPlace place;

  __device__ State start() const { return {0, 0}; }
  template <typename Value>
  __device__ void take(State& state, Value x, int64_t, Value origin) const {
    const double difference = static_cast<double>(x) - static_cast<double>(origin);
    state.sum += difference;
    state.square += difference * difference;
  }
  __device__ void operator()(State& into, const State& other) const { into.sum += other.sum, into.square += other.square; }
  template <typename Value>
  __device__ void store(int64_t result, const State& state, int64_t n, Value origin) const {
    const double mean = state.sum / static_cast<double>(n), square = state.square / static_cast<double>(n) - mean * mean;
    const double variance = square < 0 ? 0 : square;  // NaN stays
    means[result] = static_cast<Stat>(mean + static_cast<double>(origin));
    inverses[result] = static_cast<Stat>(1 / (place == EpsilonPlace::under_root ? sqrt(variance + epsilon) : sqrt(variance) + epsilon));
  }
};

constexpr int kThreads = 256;

// y = (x - mean) * inverse * scale + bias; V neighbours at a time. Planes of other lengths than multiples of V take V = 1.
template <typename T, int V, bool kLast>
__global__ void __launch_bounds__(kThreads)
    normalise_groups(const T* x, T* y, int64_t count, const __grid_constant__ ChannelPlace place, const WideOf<T>* means,
                     const WideOf<T>* inverses, const T* scale, const T* bias) {
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * V; i < count; i += int64_t{gridDim.x} * kThreads * V) {
    const auto from = *reinterpret_cast<const Lanes<T, V>*>(x + i);
    Lanes<T, V> to;
    ChannelPlace::Found at = place.find<kLast>(i);
    WideOf<T> mean = means[at.group], factor = widen(scale[at.channel]) * inverses[at.group], shift = widen(bias[at.channel]);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (kLast && k > 0) {
        at = place.find<kLast>(i + k);
        mean = means[at.group], factor = widen(scale[at.channel]) * inverses[at.group], shift = widen(bias[at.channel]);
      }
      to.at[k] = narrow<T>((widen(from.at[k]) - mean) * factor + shift);
    }
    *reinterpret_cast<Lanes<T, V>*>(y + i) = to;
  }
}

template <typename T>
struct GroupArguments {
  const T *x, *scale, *bias;
  T* y;
  const WideOf<T>*means, *inverses;
  int64_t count;
};

template <typename T, bool kLast>
void launch_groups(const GroupArguments<T>& a, const ChannelPlace& place, cudaStream_t stream) {
  constexpr int V = kPackOf16<T>;
  const int64_t run = kLast ? place.channels.divisor : place.cells.divisor;
  const auto launch = [&]<int kWidth>() {
    normalise_groups<T, kWidth, kLast>
        <<<blocks_for(a.count, kThreads, kWidth), kThreads, 0, stream>>>(a.x, a.y, a.count, place, a.means, a.inverses, a.scale, a.bias);
  };
  if (run % V == 0 && is_16_byte_aligned(a.x) && is_16_byte_aligned(a.y))
    launch.template operator()<V>();
  else
    launch.template operator()<1>();
  check_launch("normalise_groups");
}

// Scratch memory: means, inverse deviations, what the fold needs.
template <typename Stat>
struct StatisticsMemory {
  StatisticsMemory(RunContext& r, int64_t groups, size_t fold_bytes) {
    const size_t bytes = (static_cast<size_t>(groups) * sizeof(Stat) + 255) / 256 * 256;
    auto* memory = static_cast<char*>(r.scratch(2 * bytes + fold_bytes));
    means = reinterpret_cast<Stat*>(memory);
    inverses = reinterpret_cast<Stat*>(memory + bytes);
    fold = memory + 2 * bytes;
  }
  Stat *means, *inverses;
  void* fold;
};

template <typename T>
StatisticsMemory<WideOf<T>> find_statistics(RunContext& r, const ReductionPlan& shape, double epsilon, EpsilonPlace place) {
  using Stat = WideOf<T>;
  const FloatReader<T> reader{r.input(0).as<T>()};
  const FoldLaunch launch = plan_fold_of<Moments<Stat>>(shape, reader, gpu(r).multiprocessors());
  const StatisticsMemory<Stat> memory(r, shape.results, launch.scratch_bytes);
  launch_fold(launch, reader, Moments<Stat>{memory.means, memory.inverses, epsilon, place}, memory.fold, stream_of(r));
  return memory;
}

// `groups` 0: as many as channels.
void run_groups(RunContext& r, int64_t groups, float epsilon) {
  const TensorView& x = r.input(0);
  require(x.rank() >= 2, "a normalization by groups needs [N,C,D1,...]", "give it channels");
  const int64_t N = x.dims[0], C = x.dims[1], cells = product(x.dims, 2, x.rank());
  if (groups == 0) groups = std::max<int64_t>(C, 1);
  require(C % groups == 0, "the channels are no multiple of num_groups", "choose another number of groups");
  require(r.input(1).count() == C && r.input(2).count() == C, "scale or bias do not fit the channels", "give each [C]");
  TensorView& y = r.output(0, x.dims, x.dtype, x.layout);
  if (x.count() == 0) return;
  const bool last = x.layout == Layout::nhwc;
  const ReductionPlan shape = last ? plan_reduction({N, cells, groups, C / groups}, {false, true, false, true})
                                   : plan_reduction({N * groups, C / groups * cells}, {false, true});
  const ChannelPlace place(C, cells, groups);
  with_float_type(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto statistics = find_statistics<T>(r, shape, static_cast<double>(epsilon), EpsilonPlace::under_root);
    const GroupArguments<T> a{x.as<T>(),        r.input(1).as<T>(),  r.input(2).as<T>(), y.as<T>(),
                              statistics.means, statistics.inverses, x.count()};
    if (last)
      launch_groups<T, true>(a, place, stream_of(r));
    else
      launch_groups<T, false>(a, place, stream_of(r));
  });
}

CompiledKernel make_groups(const CompileContext& c) {
  const bool instances = c.node().op == "InstanceNormalization";
  const int64_t groups = instances ? 0 : c.node().get_int("num_groups", -1);
  require(instances || groups > 0, "attribute num_groups is missing or not positive", "give it");
  CompiledKernel kernel{[groups, epsilon = c.node().get_float("epsilon", 1e-5f)](RunContext& r) { run_groups(r, groups, epsilon); }};
  follow_layout(c, kernel);
  return kernel;
}

// Statistics over any axes: `groups` finds the statistics of an element.
template <typename T>
__global__ void __launch_bounds__(kThreads) normalise_axes_kernel(const T* x, T* y, int64_t count, const __grid_constant__ Walk groups,
                                                                  const WideOf<T>* means, const WideOf<T>* inverses) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    const int64_t group = groups.offset(i);
    y[i] = narrow<T>((widen(x[i]) - means[group]) * inverses[group]);
  }
}

// The dimensions, neighbours of one kind merged, with the strides of the results: 0 where elements are reduced.
Walk result_walk(const Dims& dims, const std::vector<bool>& reduce) {
  Dims sizes, strides;
  int64_t results = 1;
  bool last_reduced = false;
  for (size_t i = dims.size(); i-- > 0;) {
    if (dims[i] == 1) continue;
    if (!sizes.empty() && reduce[i] == last_reduced) {
      sizes.front() *= dims[i];
    } else {
      sizes.insert(sizes.begin(), dims[i]);
      strides.insert(strides.begin(), reduce[i] ? 0 : results);
    }
    last_reduced = reduce[i];
    if (!reduce[i]) results *= dims[i];
  }
  return Walk(sizes, strides);
}

CompiledKernel make_mean_variance(const CompileContext& c) {
  return {[axes = c.node().get_ints("axes", {0, 2, 3})](RunContext& r) {
    const TensorView& x = r.input(0);
    std::vector<bool> reduce(x.rank(), false);
    for (size_t axis : normalise_axes(axes, x.rank())) reduce[axis] = true;
    TensorView& y = r.output(0, x.dims);
    if (x.count() == 0) return;
    const Walk groups = result_walk(x.dims, reduce);
    with_float_type(x.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const auto statistics = find_statistics<T>(r, plan_reduction(x.dims, reduce), 1e-9, EpsilonPlace::after_root);
      normalise_axes_kernel<<<blocks_for(x.count(), kThreads), kThreads, 0, stream_of(r)>>>(x.as<T>(), y.as<T>(), x.count(), groups,
                                                                                            statistics.means, statistics.inverses);
      check_launch("normalise_axes");
    });
  }};
}

}  // namespace

void register_group_normalization(KernelRegistry& registry) {
  registry.add({.op = "GroupNormalization", .make = make_groups, .unsupported = refuse_other_norm_types});
  registry.add({.op = "InstanceNormalization", .make = make_groups, .unsupported = refuse_other_norm_types});
  registry.add({.op = "MeanVarianceNormalization", .make = make_mean_variance, .unsupported = refuse_other_norm_types});
}

}  // namespace fretsaw::cuda
