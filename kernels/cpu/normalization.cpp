// LayerNormalization, RMSNormalization and LpNormalization: rows that are scaled by their own statistics.
#include "kernels/cpu/normalization.h"

#include <cmath>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/families.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/row_sums.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cpu/through_float.h"

namespace fretsaw {

template <typename T>
std::vector<T> elements_as(RunContext& r, size_t i) {
  const TensorView& x = r.input(i);
  std::vector<T> values(static_cast<size_t>(x.count()));
  load_as<T>(x.dtype, x.data, 0, x.count(), values.data());
  return values;
}
template std::vector<float> elements_as<float>(RunContext&, size_t);
template std::vector<double> elements_as<double>(RunContext&, size_t);

namespace {

// y = (x - mean) * inverse * scale + bias over one row of n.
template <typename T>
FRETSAW_ALWAYS_INLINE inline void layer_norm_row(const T* x, const T* scale, const T* bias, T* y, int64_t n, T epsilon, T& mean,
                                                 T& inverse) {
  mean = sum_row(x, n, [](T v) FRETSAW_ALWAYS_INLINE { return v; }) / static_cast<T>(n);
  const T centre = mean;
  const T square = sum_row(x, n, [centre](T v) FRETSAW_ALWAYS_INLINE { return (v - centre) * (v - centre); }) / static_cast<T>(n);
  inverse = T(1) / std::sqrt(square + epsilon);
  const T factor = inverse;
  if (bias) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - centre) * factor * scale[i] + bias[i];
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - centre) * factor * scale[i];
  }
}

// Input `i` of shape broadcasting to the last dimensions [axis, rank) of x, as one dense row; its own memory where it is one already.
template <typename T>
const T* row_operand(RunContext& r, size_t i, const Dims& dims, size_t axis, std::vector<T>& expanded) {
  const TensorView& x = r.input(i);
  const Dims row(dims.begin() + static_cast<int64_t>(axis), dims.end());
  if (x.dims == row) return x.as<T>();
  require(x.rank() <= row.size(), "a scale or bias has more dimensions than what it scales", "give it the normalised dimensions");
  Dims strides(row.size(), 0);
  const Dims own = strides_of(x.dims);
  for (size_t d = 0; d < x.rank(); ++d) {
    const size_t at = row.size() - x.rank() + d;
    require(x.dims[d] == 1 || x.dims[d] == row[at], "a scale or bias does not broadcast to what it scales",
            "give it the normalised dimensions");
    strides[at] = x.dims[d] == 1 ? 0 : own[d];
  }
  expanded.resize(static_cast<size_t>(count_of(row)) + 1);
  copy_strided(x.dtype, row, expanded.data(), strides_of(row), x.data, strides, 1);
  return expanded.data();
}

struct RowSettings {
  explicit RowSettings(const Node& node) : axis(node.get_int("axis", -1)), epsilon(node.get_float("epsilon", 1e-5f)) {}
  int64_t axis;
  float epsilon;
};

void check_same_type(RunContext& r, size_t i) {
  if (r.has_input(i) && r.input(i).dtype != r.input(0).dtype) throw Error("a scale or bias has another type than X", "cast it");
}

template <typename T>
void layer_norm(RunContext& r, const RowSettings& s, DType statistics) {
  const TensorView& x = r.input(0);
  const size_t axis = normalise_axis(s.axis, x.rank());
  const int64_t rows = product(x.dims, 0, axis), n = product(x.dims, axis, x.rank());
  std::vector<T> scale_row, bias_row;
  const T* scale = row_operand<T>(r, 1, x.dims, axis, scale_row);
  const T* bias = r.has_input(2) ? row_operand<T>(r, 2, x.dims, axis, bias_row) : nullptr;
  TensorView& y = r.output(0, x.dims);
  Dims reduced = x.dims;
  for (size_t d = axis; d < x.rank(); ++d) reduced[d] = 1;
  TensorView* means = r.wants_output(1) ? &r.output(1, reduced, statistics) : nullptr;
  TensorView* inverses = r.wants_output(2) ? &r.output(2, reduced, statistics) : nullptr;
  if (n == 0) return;
  parallel_for(rows, kGrainElements / (n + 1) + 1, r.threads(), [&](int64_t begin, int64_t end) {
    run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
      for (int64_t i = begin; i < end; ++i) {
        T mean, inverse;
        layer_norm_row(x.as<T>() + i * n, scale, bias, y.as<T>() + i * n, n, static_cast<T>(s.epsilon), mean, inverse);
        if (means) store_from<T>(statistics, means->data, i, 1, &mean);
        if (inverses) store_from<T>(statistics, inverses->data, i, 1, &inverse);
      }
    });
  });
}

CompiledKernel make_layer_norm_plain(const CompileContext& c) {
  const DType statistics = static_cast<DType>(c.node().get_int("stash_type", 1));
  require(is_float(statistics), "stash_type is no floating point type", "use 1 (float32)");
  return {[s = RowSettings(c.node()), statistics](RunContext& r) {
    check_same_type(r, 1), check_same_type(r, 2);
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() { layer_norm<T>(r, s, statistics); });
  }};
}

template <typename T>
void rms_norm(RunContext& r, const RowSettings& s) {
  const TensorView& x = r.input(0);
  const size_t axis = normalise_axis(s.axis, x.rank());
  const int64_t rows = product(x.dims, 0, axis), n = product(x.dims, axis, x.rank());
  std::vector<T> scale_row;
  const T* scale = row_operand<T>(r, 1, x.dims, axis, scale_row);
  TensorView& y = r.output(0, x.dims);
  if (n == 0) return;
  parallel_for(rows, kGrainElements / (n + 1) + 1, r.threads(), [&](int64_t begin, int64_t end) {
    run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
      for (int64_t row = begin; row < end; ++row) {
        const T* from = x.as<T>() + row * n;
        T* to = y.as<T>() + row * n;
        const T square = sum_row(from, n, [](T v) FRETSAW_ALWAYS_INLINE { return v * v; }) / static_cast<T>(n);
        const T factor = T(1) / std::sqrt(square + static_cast<T>(s.epsilon));
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) to[i] = from[i] * factor * scale[i];
      }
    });
  });
}

CompiledKernel make_rms_norm_plain(const CompileContext& c) {
  return {[s = RowSettings(c.node())](RunContext& r) {
    check_same_type(r, 1);
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() { rms_norm<T>(r, s); });
  }};
}

// x [outer, n, inner] over n: each column divided by its p-norm; a norm of 0 gives 0.
template <typename T>
void lp_norm(const T* x, T* y, int64_t outer, int64_t n, int64_t inner, int64_t p, int threads) {
  parallel_for(outer * inner, kGrainElements / (n + 1) + 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t base = i / inner * n * inner + i % inner;
      T sum = 0;
      for (int64_t k = 0; k < n; ++k) {
        const T v = x[base + k * inner];
        sum += p == 1 ? std::fabs(v) : v * v;
      }
      const T norm = p == 1 ? sum : std::sqrt(sum);
      for (int64_t k = 0; k < n; ++k) y[base + k * inner] = norm == T(0) ? T(0) : x[base + k * inner] / norm;
    }
  });
}

CompiledKernel make_lp_norm_plain(const CompileContext& c) {
  const int64_t p = c.node().get_int("p", 2);
  require(p == 1 || p == 2, "LpNormalization with a p that is neither 1 nor 2", "use 1 or 2");
  return {[p, axis_attribute = c.node().get_int("axis", -1)](RunContext& r) {
    const TensorView& x = r.input(0);
    const size_t axis = normalise_axis(axis_attribute, x.rank());
    TensorView& y = r.output(0, x.dims);
    dispatch<types::wide_floats>(x.dtype, [&]<typename T>() {
      lp_norm(x.as<T>(), y.as<T>(), product(x.dims, 0, axis), x.dims[axis], product(x.dims, axis + 1, x.rank()), p, r.threads());
    });
  }};
}

}  // namespace

void register_row_normalization(KernelRegistry& registry) {
  registry.add({.op = "LayerNormalization", .make = any_float<make_layer_norm_plain>});
  registry.add({.op = "RMSNormalization", .make = any_float<make_rms_norm_plain>});
  registry.add({.op = "LpNormalization", .make = any_float<make_lp_norm_plain>});
}

void register_normalization(KernelRegistry& registry) {
  register_row_normalization(registry);
  register_channel_normalization(registry);
  register_mean_variance(registry);
}

}  // namespace fretsaw
