// Softmax, LogSoftmax, Hardmax along one axis.
#include "kernels/cpu/softmax.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/families.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cpu/through_float.h"

namespace fretsaw {

namespace {

enum class SoftmaxKind { softmax, log_softmax, hardmax };

template <typename T>
void hardmax_row(const T* x, T* y, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 1; i < n; ++i) {
    if (x[i] > x[best]) best = i;
  }
  for (int64_t i = 0; i < n; ++i) y[i] = i == best ? T(1) : T(0);
}

template <SoftmaxKind kKind, typename T>
FRETSAW_ALWAYS_INLINE inline void one_row(const T* x, T* y, int64_t n) {
  if constexpr (kKind == SoftmaxKind::softmax)
    softmax_row(x, y, n);
  else if constexpr (kKind == SoftmaxKind::log_softmax)
    log_softmax_row(x, y, n);
  else
    hardmax_row(x, y, n);
}

// x [outer, n, inner], over n. Rows that are not contiguous are gathered, a few neighbours at a time.
template <SoftmaxKind kKind, typename T>
void along_axis(const T* x, T* y, int64_t outer, int64_t n, int64_t inner, int threads) {
  if (inner == 1) {
    parallel_for(outer, kGrainElements / (4 * n + 1) + 1, threads, [&](int64_t begin, int64_t end) {
      run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
        for (int64_t i = begin; i < end; ++i) one_row<kKind>(x + i * n, y + i * n, n);
      });
    });
    return;
  }
  constexpr int64_t kTogether = 16;
  const int64_t strips = (inner + kTogether - 1) / kTogether;
  parallel_for(outer * strips, kGrainElements / (4 * n * kTogether + 1) + 1, threads, [&](int64_t begin, int64_t end) {
    std::vector<T> rows(static_cast<size_t>(kTogether * n));
    for (int64_t strip = begin; strip < end; ++strip) {
      const int64_t base = strip / strips * n * inner + strip % strips * kTogether;
      const int64_t width = std::min(kTogether, inner - strip % strips * kTogether);
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t k = 0; k < width; ++k) rows[static_cast<size_t>(k * n + i)] = x[base + i * inner + k];
      }
      run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
        for (int64_t k = 0; k < width; ++k) one_row<kKind>(rows.data() + k * n, rows.data() + k * n, n);
      });
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t k = 0; k < width; ++k) y[base + i * inner + k] = rows[static_cast<size_t>(k * n + i)];
      }
    }
  });
}

template <SoftmaxKind kKind>
CompiledKernel make_plain(const CompileContext& c) {
  return {[axis_attribute = c.node().get_int("axis", -1)](RunContext& r) {
    const TensorView& x = r.input(0);
    TensorView& y = r.output(0, x.dims);
    if (x.rank() == 0) {
      dispatch<types::wide_floats>(x.dtype, [&]<typename T>() { y.as<T>()[0] = kKind == SoftmaxKind::log_softmax ? T(0) : T(1); });
      return;
    }
    const size_t axis = normalise_axis(axis_attribute, x.rank());
    if (x.count() == 0) return;
    dispatch<types::wide_floats>(x.dtype, [&]<typename T>() {
      along_axis<kKind>(x.as<T>(), y.as<T>(), product(x.dims, 0, axis), x.dims[axis], product(x.dims, axis + 1, x.rank()), r.threads());
    });
  }};
}

}  // namespace

void register_softmax(KernelRegistry& registry) {
  registry.add({.op = "Softmax", .make = any_float<make_plain<SoftmaxKind::softmax>>});
  registry.add({.op = "LogSoftmax", .make = any_float<make_plain<SoftmaxKind::log_softmax>>});
  registry.add({.op = "Hardmax", .make = any_float<make_plain<SoftmaxKind::hardmax>>});
  register_losses(registry);
}

}  // namespace fretsaw
