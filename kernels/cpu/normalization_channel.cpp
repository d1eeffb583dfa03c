// BatchNormalization, GroupNormalization, InstanceNormalization and LRN on X [N, C, D...].
#include <algorithm>
#include <cmath>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/normalization.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/row_sums.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cpu/through_float.h"

namespace fretsaw {

namespace {

// y = x * factor[c] + shift[c], in either layout.
template <typename T>
void scale_channels(const TensorView& x, TensorView& y, const std::vector<T>& factor, const std::vector<T>& shift, int threads) {
  const int64_t C = static_cast<int64_t>(factor.size());
  if (x.count() == 0) return;
  if (x.layout == Layout::nhwc) {
    parallel_for(x.count() / C, kGrainElements / C + 1, threads, [&](int64_t begin, int64_t end) {
      run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
        for (int64_t i = begin; i < end; ++i) {
#pragma omp simd
          for (int64_t c = 0; c < C; ++c) {
            y.as<T>()[i * C + c] = x.as<T>()[i * C + c] * factor[static_cast<size_t>(c)] + shift[static_cast<size_t>(c)];
          }
        }
      });
    });
    return;
  }
  const int64_t cells = product(x.dims, 2, x.rank());
  parallel_for(x.count() / cells, kGrainElements / cells + 1, threads, [&](int64_t begin, int64_t end) {
    run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
      for (int64_t i = begin; i < end; ++i) {
        const T a = factor[static_cast<size_t>(i % C)], b = shift[static_cast<size_t>(i % C)];
#pragma omp simd
        for (int64_t k = 0; k < cells; ++k) y.as<T>()[i * cells + k] = x.as<T>()[i * cells + k] * a + b;
      }
    });
  });
}

struct BatchSettings {
  explicit BatchSettings(const Node& node)
      : epsilon(node.get_float("epsilon", 1e-5f)),
        momentum(node.get_float("momentum", 0.9f)),
        training(node.get_int("training_mode", 0) != 0) {}
  float epsilon, momentum;
  bool training;
};

// Mean and population variance of each channel over the batch and space.
template <typename T>
void batch_statistics(const TensorView& x, std::vector<T>& mean, std::vector<T>& variance) {
  const int64_t N = x.dims[0], C = x.dims[1], cells = product(x.dims, 2, x.rank());
  for (int64_t c = 0; c < C; ++c) {
    double sum = 0, square = 0;
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t i = 0; i < cells; ++i) sum += static_cast<double>(x.as<T>()[(n * C + c) * cells + i]);
    }
    const double centre = sum / static_cast<double>(N * cells);
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t i = 0; i < cells; ++i) {
        const double d = static_cast<double>(x.as<T>()[(n * C + c) * cells + i]) - centre;
        square += d * d;
      }
    }
    mean[static_cast<size_t>(c)] = static_cast<T>(centre);
    variance[static_cast<size_t>(c)] = static_cast<T>(square / static_cast<double>(N * cells));
  }
}

template <typename T>
void store_running(RunContext& r, size_t output, size_t input, const std::vector<T>& now, T momentum) {
  if (!r.wants_output(output)) return;
  const std::vector<T> old = elements_as<T>(r, input);
  const TensorView& source = r.input(input);
  TensorView& y = r.output(output, source.dims, source.dtype);
  dispatch<types::wide_floats>(y.dtype, [&]<typename S>() {
    for (size_t c = 0; c < now.size(); ++c) y.as<S>()[c] = static_cast<S>(old[c] * momentum + now[c] * (T(1) - momentum));
  });
}

// Inputs: X, scale [C], B [C], mean [C], variance [C].
template <typename T>
void batch_norm(RunContext& r, const BatchSettings& s) {
  const TensorView& x = r.input(0);
  require(x.rank() >= 1, "BatchNormalization of a scalar", "give it [N,C,D1,...]");
  const size_t C = x.rank() == 1 ? 1 : static_cast<size_t>(x.dims[1]);
  for (size_t i = 1; i < 5; ++i)
    require(static_cast<size_t>(r.input(i).count()) == C, "a parameter of BatchNormalization does not fit the channels", "give it [C]");
  std::vector<T> factor = elements_as<T>(r, 1), shift = elements_as<T>(r, 2), mean = elements_as<T>(r, 3), variance = elements_as<T>(r, 4);
  TensorView view = x;
  if (view.rank() == 1) view.dims = {x.dims[0], 1};
  if (s.training) {
    batch_statistics(view, mean, variance);
    store_running(r, 1, 3, mean, static_cast<T>(s.momentum));
    store_running(r, 2, 4, variance, static_cast<T>(s.momentum));
  }
  for (size_t c = 0; c < C; ++c) {
    factor[c] /= std::sqrt(variance[c] + static_cast<T>(s.epsilon));
    shift[c] -= mean[c] * factor[c];
  }
  TensorView& y = r.output(0, x.dims, x.dtype, x.layout);
  scale_channels(view, y, factor, shift, r.threads());
}

CompiledKernel make_batch_norm_plain(const CompileContext& c) {
  const BatchSettings s(c.node());
  CompiledKernel kernel{[s](RunContext& r) { dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() { batch_norm<T>(r, s); }); }};
  const std::optional<Dims> dims = c.input_dims(0);
  if (!s.training && dims && dims->size() == 4 && c.input_dtype(0) == DType::float32 && !c.offered.empty() &&
      c.offered[0] == Layout::nhwc) {
    kernel.input_layouts.assign(c.inputs.size(), Layout::plain);
    kernel.input_layouts[0] = Layout::nhwc;
    kernel.output_layouts.assign(std::max<size_t>(c.outputs.size(), 1), Layout::plain);
    kernel.output_layouts[0] = Layout::nhwc;
  }
  return kernel;
}

// Each of `groups` runs of channels of an image is brought to mean 0 and variance 1, then each channel is scaled and shifted.
template <typename T>
void group_norm(RunContext& r, int64_t groups, float epsilon) {
  const TensorView& x = r.input(0);
  require(x.rank() >= 2, "a normalization by groups needs [N,C,D1,...]", "give it channels");
  const int64_t C = x.dims[1], cells = product(x.dims, 2, x.rank());
  if (groups == 0) groups = std::max<int64_t>(C, 1);  // InstanceNormalization
  require(groups > 0 && C % groups == 0, "the channels are no multiple of num_groups", "choose another number of groups");
  const std::vector<T> scale = elements_as<T>(r, 1), bias = elements_as<T>(r, 2);
  require(static_cast<int64_t>(scale.size()) == C && static_cast<int64_t>(bias.size()) == C, "scale or bias do not fit the channels",
          "give each [C]");
  TensorView& y = r.output(0, x.dims);
  const int64_t channels = C / groups, n = channels * cells;
  if (x.count() == 0) return;
  parallel_for(x.dims[0] * groups, kGrainElements / (n + 1) + 1, r.threads(), [&](int64_t begin, int64_t end) {
    run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
      for (int64_t g = begin; g < end; ++g) {
        const T* from = x.as<T>() + g * n;
        T* to = y.as<T>() + g * n;
        const T mean = sum_row(from, n, [](T v) FRETSAW_ALWAYS_INLINE { return v; }) / static_cast<T>(n);
        const T square = sum_row(from, n, [mean](T v) FRETSAW_ALWAYS_INLINE { return (v - mean) * (v - mean); }) / static_cast<T>(n);
        const T inverse = T(1) / std::sqrt(square + static_cast<T>(epsilon));
        for (int64_t k = 0; k < channels; ++k) {
          const size_t channel = static_cast<size_t>(g % groups * channels + k);
          const T a = scale[channel] * inverse, b = bias[channel];
#pragma omp simd
          for (int64_t i = k * cells; i < (k + 1) * cells; ++i) to[i] = (from[i] - mean) * a + b;
        }
      }
    });
  });
}

CompiledKernel make_group_norm_plain(const CompileContext& c) {
  const int64_t groups = c.node().op == "InstanceNormalization" ? 0 : c.node().get_int("num_groups", -1);
  require(groups >= 0 && (groups > 0 || c.node().op == "InstanceNormalization"), "attribute num_groups is missing or not positive",
          "give it");
  return {[groups, epsilon = c.node().get_float("epsilon", 1e-5f)](RunContext& r) {
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() { group_norm<T>(r, groups, epsilon); });
  }};
}

struct ResponseSettings {
  explicit ResponseSettings(const Node& node)
      : size(node.get_int("size", 0)),
        alpha(node.get_float("alpha", 1e-4f)),
        beta(node.get_float("beta", 0.75f)),
        bias(node.get_float("bias", 1.0f)) {
    require(size >= 1, "attribute size of LRN is missing or not positive", "give it");
  }
  int64_t size;
  float alpha, beta, bias;
};

// y = x / (bias + alpha / size * sum of the squares of `size` neighbouring channels)^beta
template <typename T>
void local_response(RunContext& r, const ResponseSettings& s) {
  const TensorView& x = r.input(0);
  require(x.rank() >= 2, "LRN needs [N,C,D1,...]", "give it channels");
  const int64_t C = x.dims[1], cells = product(x.dims, 2, x.rank());
  TensorView& y = r.output(0, x.dims);
  parallel_for(x.dims[0] * C, kGrainElements / (cells + 1) / 8 + 1, r.threads(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t n = i / C, c = i % C;
      const int64_t first = std::max<int64_t>(0, c - (s.size - 1) / 2), last = std::min<int64_t>(C - 1, c + s.size / 2);
      for (int64_t k = 0; k < cells; ++k) {
        T sum = 0;
        for (int64_t near = first; near <= last; ++near) {
          const T v = x.as<T>()[(n * C + near) * cells + k];
          sum += v * v;
        }
        const T base = static_cast<T>(s.bias) + static_cast<T>(s.alpha) / static_cast<T>(s.size) * sum;
        y.as<T>()[i * cells + k] = x.as<T>()[i * cells + k] / std::pow(base, static_cast<T>(s.beta));
      }
    }
  });
}

CompiledKernel make_response_plain(const CompileContext& c) {
  return {[s = ResponseSettings(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() { local_response<T>(r, s); });
  }};
}

}  // namespace

void register_channel_normalization(KernelRegistry& registry) {
  registry.add({.op = "BatchNormalization", .make = any_float<make_batch_norm_plain>});
  registry.add({.op = "GroupNormalization", .make = any_float<make_group_norm_plain>});
  registry.add({.op = "InstanceNormalization", .make = any_float<make_group_norm_plain>});
  registry.add({.op = "LRN", .make = any_float<make_response_plain>});
}

}  // namespace fretsaw
