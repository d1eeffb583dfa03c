// Gradients of norms. n = (x - mean) * inverse is the normalised tensor, g the gradient of n * scale + bias:
//
//   dx = inverse * (g scale - mean(g scale) - n mean(g scale n)),   dscale = sum(g n),   dbias = sum(g)
//
// RMSNormalization has no mean to subtract, and no mean(g scale) either.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/gradients.h"
#include "kernels/cpu/normalization.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/row_sums.h"
#include "kernels/cpu/scalar_types.h"

namespace fretsaw {

namespace {

struct RowStatistics {
  double mean = 0, inverse = 0;
};

template <typename T>
FRETSAW_ALWAYS_INLINE inline RowStatistics row_statistics(const T* x, int64_t n, bool centred, double epsilon) {
  const auto count = static_cast<double>(n);
  RowStatistics s;
  if (centred) s.mean = sum_terms<double>(n, [x](int64_t i) FRETSAW_ALWAYS_INLINE { return static_cast<double>(x[i]); }) / count;
  const double mean = s.mean;
  const double square = sum_terms<double>(n, [x, mean](int64_t i) FRETSAW_ALWAYS_INLINE {
    const double d = static_cast<double>(x[i]) - mean;
    return d * d;
  });
  s.inverse = 1 / std::sqrt(square / count + epsilon);
  return s;
}

template <typename T>
FRETSAW_ALWAYS_INLINE inline void row_gradient(const T* dy, const T* x, const T* scale, T* dx, int64_t n, bool centred, double epsilon) {
  const RowStatistics s = row_statistics(x, n, centred, epsilon);
  const auto mean = static_cast<T>(s.mean), inverse = static_cast<T>(s.inverse);
  const T average = centred ? sum_terms<T>(n, [=](int64_t i) FRETSAW_ALWAYS_INLINE { return dy[i] * scale[i]; }) / static_cast<T>(n) : T(0);
  const T along =
      sum_terms<T>(n, [=](int64_t i) FRETSAW_ALWAYS_INLINE { return dy[i] * scale[i] * (x[i] - mean); }) * inverse / static_cast<T>(n);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) dx[i] = inverse * (dy[i] * scale[i] - average - (x[i] - mean) * inverse * along);
}

struct RowNorm {
  explicit RowNorm(const Node& node)
      : axis(node.get_int("axis", -1)),
        epsilon(static_cast<double>(node.get_float("epsilon", 1e-5F))),
        centred(node.op == "LayerNormalizationGrad" || node.op == "LayerNormalizationGradScale") {}
  int64_t axis;
  double epsilon;
  bool centred;
};

// The scale, which broadcasts to the rows, for each element of one.
template <typename T>
std::vector<T> scale_row(const TensorView& scale, const Dims& row) {
  require(broadcast_dims(scale.dims, row) == row, "a scale does not broadcast to what it scales", "give it the normalised dimensions");
  std::vector<T> expanded(static_cast<size_t>(count_of(row)) + 1);
  Dims strides(row.size(), 0);
  const Dims own = strides_of(scale.dims);
  for (size_t d = 0; d < scale.rank(); ++d) strides[row.size() - scale.rank() + d] = scale.dims[d] == 1 ? 0 : own[d];
  copy_strided(scale.dtype, row, expanded.data(), strides_of(row), scale.data, strides, 1);
  return expanded;
}

void check_operands(RunContext& r) {
  require(r.input(0).dims == r.input(1).dims && r.input(0).dtype == r.input(1).dtype,
          "the gradient differs from the norm's input in shape or type", "give that of the norm's result");
}

template <typename T>
void of_rows(RunContext& r, const RowNorm& s) {
  const TensorView &dy = r.input(0), &x = r.input(1);
  const size_t axis = normalise_axis(s.axis, x.rank());
  const int64_t rows = product(x.dims, 0, axis), n = product(x.dims, axis, x.rank());
  require(r.input(2).dtype == x.dtype, "a scale has another type than X", "cast it");
  const std::vector<T> scale = scale_row<T>(r.input(2), Dims(x.dims.begin() + static_cast<int64_t>(axis), x.dims.end()));
  TensorView& dx = r.output(0, x.dims, x.dtype);
  if (n == 0) return;
  parallel_for(rows, kGrainElements / (n + 1) + 1, r.threads(), [&](int64_t begin, int64_t end) {
    run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
      for (int64_t i = begin * n; i < end * n; i += n)
        row_gradient(dy.as<T>() + i, x.as<T>() + i, scale.data(), dx.as<T>() + i, n, s.centred, s.epsilon);
    });
  });
}

// Each thread has columns of its own, which it sums in the order of the rows.
template <typename T>
void of_scale(RunContext& r, const RowNorm& s) {
  const TensorView &dy = r.input(0), &x = r.input(1);
  const size_t axis = normalise_axis(s.axis, x.rank());
  const int64_t rows = product(x.dims, 0, axis), n = product(x.dims, axis, x.rank());
  TensorView& out = r.output(0, Dims(x.dims.begin() + static_cast<int64_t>(axis), x.dims.end()), x.dtype);
  std::vector<RowStatistics> statistics(static_cast<size_t>(rows));
  if (n == 0) return;
  parallel_for(rows, kGrainElements / (n + 1) + 1, r.threads(), [&](int64_t begin, int64_t end) {
    run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
      for (int64_t i = begin; i < end; ++i) statistics[static_cast<size_t>(i)] = row_statistics(x.as<T>() + i * n, n, s.centred, s.epsilon);
    });
  });
  parallel_for(n, kGrainElements / (rows + 1) + 1, r.threads(), [&](int64_t begin, int64_t end) {
    std::vector<double> sums(static_cast<size_t>(end - begin));
    for (int64_t i = 0; i < rows; ++i) {
      const RowStatistics row = statistics[static_cast<size_t>(i)];
      const T *g = dy.as<T>() + i * n + begin, *from = x.as<T>() + i * n + begin;
      double* to = sums.data();
      run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
#pragma omp simd
        for (int64_t k = 0; k < end - begin; ++k)
          to[k] += static_cast<double>(g[k]) * ((static_cast<double>(from[k]) - row.mean) * row.inverse);
      });
    }
    for (int64_t k = begin; k < end; ++k) out.as<T>()[k] = static_cast<T>(sums[static_cast<size_t>(k - begin)]);
  });
}

CompiledKernel make_rows_plain(const CompileContext& c) {
  return {[s = RowNorm(c.node())](RunContext& r) {
    check_operands(r);
    dispatch<types::wide_floats>(r.input(1).dtype, [&]<typename T>() { of_rows<T>(r, s); });
  }};
}
CompiledKernel make_scale_plain(const CompileContext& c) {
  return {[s = RowNorm(c.node())](RunContext& r) {
    check_operands(r);
    dispatch<types::wide_floats>(r.input(1).dtype, [&]<typename T>() { of_scale<T>(r, s); });
  }};
}

// X [N, C, D...] by channels: runs of `cells` neighbours, `batch` of them for each channel.
struct Channels {
  explicit Channels(const Dims& dims) : batch(dims[0]), channels(dims[1]), cells(product(dims, 2, dims.size())) {}
  int64_t batch, channels, cells;
};

struct ChannelSums {
  double mean = 0, inverse = 0, g = 0, along = 0;  // of the channel; the sums of g and of g n
};

template <typename T>
ChannelSums channel_sums(const T* dy, const T* x, const Channels& s, int64_t c, double epsilon) {
  ChannelSums sums;
  const auto count = static_cast<double>(std::max<int64_t>(s.batch * s.cells, 1));  // of nothing the sums are 0
  const auto total = [&](auto term) {
    double sum = 0;
    for (int64_t i = 0; i < s.batch; ++i) {
      const int64_t at = (i * s.channels + c) * s.cells;
      run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
        sum += sum_terms<double>(s.cells, [&](int64_t k) FRETSAW_ALWAYS_INLINE { return term(at + k); });
      });
    }
    return sum;
  };
  sums.mean = total([x](int64_t k) FRETSAW_ALWAYS_INLINE { return static_cast<double>(x[k]); }) / count;
  const double mean = sums.mean;
  const double square = total([x, mean](int64_t k) FRETSAW_ALWAYS_INLINE {
    const double d = static_cast<double>(x[k]) - mean;
    return d * d;
  });
  sums.inverse = 1 / std::sqrt(square / count + epsilon);
  sums.g = total([dy](int64_t k) FRETSAW_ALWAYS_INLINE { return static_cast<double>(dy[k]); });
  sums.along = sums.inverse * total([x, dy, mean](int64_t k)
                                        FRETSAW_ALWAYS_INLINE { return static_cast<double>(dy[k]) * (static_cast<double>(x[k]) - mean); });
  return sums;
}

template <typename T>
void channel_gradient(const T* dy, const T* x, T* dx, const Channels& s, int64_t c, const ChannelSums& sums, double scale) {
  const auto count = static_cast<double>(s.batch * s.cells);
  const auto mean = static_cast<T>(sums.mean), factor = static_cast<T>(sums.inverse * scale), average = static_cast<T>(sums.g / count),
             along = static_cast<T>(sums.along / count * sums.inverse);
  for (int64_t i = 0; i < s.batch; ++i) {
    const int64_t at = (i * s.channels + c) * s.cells;
    run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
#pragma omp simd
      for (int64_t k = at; k < at + s.cells; ++k) dx[k] = factor * (dy[k] - average - (x[k] - mean) * along);
    });
  }
}

void store_channels(RunContext& r, size_t output, const std::vector<double>& values) {
  if (!r.wants_output(output)) return;
  TensorView& y = r.output(output, r.input(2).dims, r.input(2).dtype);
  store_from<double>(y.dtype, y.data, 0, y.count(), values.data());
}

template <typename T>
void of_batch(RunContext& r, double epsilon) {
  const TensorView &dy = r.input(0), &x = r.input(1);
  require(x.rank() >= 2, "BatchNormalization of a tensor without channels", "give it [N,C,D1,...]");
  const Channels s(x.dims);
  require(r.input(2).count() == s.channels, "a scale does not fit the channels", "give it [C]");
  const std::vector<double> scale = elements_as<double>(r, 2);
  T* dx = r.wants_output(0) ? r.output(0, x.dims, x.dtype).as<T>() : nullptr;
  std::vector<double> of_scale(scale.size()), of_shift(scale.size());
  parallel_for(s.channels, kGrainElements / (s.batch * s.cells + 1) + 1, r.threads(), [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const auto at = static_cast<size_t>(c);
      const ChannelSums sums = channel_sums(dy.as<T>(), x.as<T>(), s, c, epsilon);
      of_scale[at] = sums.along, of_shift[at] = sums.g;
      if (dx) channel_gradient(dy.as<T>(), x.as<T>(), dx, s, c, sums, scale[at]);
    }
  });
  store_channels(r, 1, of_scale);
  store_channels(r, 2, of_shift);
}

CompiledKernel make_batch_plain(const CompileContext& c) {
  return {[epsilon = static_cast<double>(c.node().get_float("epsilon", 1e-5F))](RunContext& r) {
    check_operands(r);
    dispatch<types::wide_floats>(r.input(1).dtype, [&]<typename T>() { of_batch<T>(r, epsilon); });
  }};
}

}  // namespace

void register_normalization_gradients(KernelRegistry& registry) {
  add_gradient(registry, "BatchNormalizationGrad", any_float<make_batch_plain>);
  for (const char* op : {"LayerNormalizationGrad", "RMSNormalizationGrad"}) add_gradient(registry, op, any_float<make_rows_plain>);
  for (const char* op : {"LayerNormalizationGradScale", "RMSNormalizationGradScale"})
    add_gradient(registry, op, any_float<make_scale_plain>);
}

}  // namespace fretsaw
