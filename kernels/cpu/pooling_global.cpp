// GlobalAveragePool, GlobalMaxPool, GlobalLpPool.
//
// Sums are taken row by row (the last dimension), then over the rows: the same order in every layout.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/pooling.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cpu/through_float.h"

namespace fretsaw {

namespace {

enum class GlobalKind { average, max, lp };

template <typename T>
T fold_plane(GlobalKind kind, T p, const T* x, int64_t rows, int64_t columns) {
  if (kind == GlobalKind::max) {
    T best = -std::numeric_limits<T>::infinity();
    for (int64_t i = 0; i < rows * columns; ++i) best = x[i] > best || x[i] != x[i] ? x[i] : best;
    return best;
  }
  T total = 0;
  for (int64_t i = 0; i < rows; ++i) {
    T sum = 0;
    if (kind == GlobalKind::average) {
      for (int64_t j = 0; j < columns; ++j) sum += x[i * columns + j];
    } else {
      for (int64_t j = 0; j < columns; ++j) sum += std::pow(std::fabs(x[i * columns + j]), p);
    }
    total += sum;
  }
  return kind == GlobalKind::average ? total / static_cast<T>(rows * columns) : std::pow(total, T(1) / p);
}

// Eight planes of a plain image at once: the additions of one plane wait for each other, those of several do not.
void average_eight_planes(const float* x, int64_t rows, int64_t columns, float* y) {
  const int64_t cells = rows * columns;
  float total[8] = {};
  for (int64_t i = 0; i < rows; ++i) {
    float sum[8] = {};
    for (int64_t j = 0; j < columns; ++j) {
      for (int64_t k = 0; k < 8; ++k) sum[k] += x[k * cells + i * columns + j];
    }
    for (int64_t k = 0; k < 8; ++k) total[k] += sum[k];
  }
  for (int64_t k = 0; k < 8; ++k) y[k] = total[k] / static_cast<float>(cells);
}

// One nhwc image [rows, columns, C]; `row` has room for C.
void fold_pixels(GlobalKind kind, const float* x, int64_t rows, int64_t columns, int64_t C, float* y, float* row) {
  run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
    const float start = kind == GlobalKind::max ? -std::numeric_limits<float>::infinity() : 0.0f;
    for (int64_t c = 0; c < C; ++c) y[c] = start;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t c = 0; c < C; ++c) row[c] = start;
      for (int64_t j = 0; j < columns; ++j) {
        const float* from = x + (i * columns + j) * C;
        if (kind == GlobalKind::max) {
#pragma omp simd
          for (int64_t c = 0; c < C; ++c) row[c] = from[c] > row[c] || from[c] != from[c] ? from[c] : row[c];
        } else {
#pragma omp simd
          for (int64_t c = 0; c < C; ++c) row[c] += from[c];
        }
      }
      if (kind == GlobalKind::max) {
#pragma omp simd
        for (int64_t c = 0; c < C; ++c) y[c] = row[c] > y[c] || row[c] != row[c] ? row[c] : y[c];
      } else {
#pragma omp simd
        for (int64_t c = 0; c < C; ++c) y[c] += row[c];
      }
    }
    if (kind == GlobalKind::average) {
      const float cells = static_cast<float>(rows * columns);
#pragma omp simd
      for (int64_t c = 0; c < C; ++c) y[c] /= cells;
    }
  });
}

template <typename T>
void pool_all(RunContext& r, GlobalKind kind, T p, const TensorView& x, TensorView& y) {
  const int64_t columns = x.dims.back(), cells = count_of(spatial_of(x.dims)), rows = columns ? cells / columns : 0;
  parallel_for(y.count(), kGrainElements / (cells + 1) + 1, r.threads(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {
      const T* from = x.as<T>() + i * cells;
      if constexpr (std::is_same_v<T, float>) {
        if (kind == GlobalKind::average && i + 8 <= end) {
          average_eight_planes(from, rows, columns, y.as<float>() + i);
          i += 8;
          continue;
        }
      }
      y.as<T>()[i++] = fold_plane(kind, p, from, rows, columns);
    }
  });
}

void pool_globally(RunContext& r, GlobalKind kind, double p) {
  const TensorView& x = r.input(0);
  if (x.rank() < 3) throw Error("a global pooling of shape " + to_string(x.dims), "give it [N,C,D1,...]");
  Dims y_dims(x.rank(), 1);
  y_dims[0] = x.dims[0], y_dims[1] = x.dims[1];
  TensorView& y = r.output(0, y_dims);
  if (y.count() == 0) return;
  if (x.layout != Layout::nhwc) {
    return dispatch<types::wide_floats>(x.dtype, [&]<typename T>() { pool_all<T>(r, kind, static_cast<T>(p), x, y); });
  }
  const int64_t C = x.dims[1], rows = x.dims[2], columns = x.dims[3];
  float* row = static_cast<float*>(r.scratch(static_cast<size_t>(C) * sizeof(float)));
  for (int64_t n = 0; n < x.dims[0]; ++n)
    fold_pixels(kind, x.as<float>() + n * rows * columns * C, rows, columns, C, y.as<float>() + n * C, row);
}

template <GlobalKind kKind>
CompiledKernel make_global_pool(const CompileContext& c) {
  const int64_t p = c.node().get_int("p", 2);
  if (p < 1) throw Error("GlobalLpPool with p = " + std::to_string(p), "use 1 or more");
  CompiledKernel kernel{[p](RunContext& r) { pool_globally(r, kKind, static_cast<double>(p)); }};
  const std::optional<Dims> dims = c.input_dims(0);
  const bool follows = kKind != GlobalKind::lp && dims && dims->size() == 4 && c.input_dtype(0) == DType::float32;
  if (follows && !c.offered.empty() && c.offered[0] == Layout::nhwc) kernel.input_layouts = {Layout::nhwc};
  return kernel;
}

}  // namespace

void register_global_pooling(KernelRegistry& registry) {
  registry.add({.op = "GlobalAveragePool", .make = any_float<make_global_pool<GlobalKind::average>>});
  registry.add({.op = "GlobalMaxPool", .make = any_float<make_global_pool<GlobalKind::max>>});
  registry.add({.op = "GlobalLpPool", .make = any_float<make_global_pool<GlobalKind::lp>>});
}

}  // namespace fretsaw
