// Det: determinants of square matrices by Gaussian elimination.
#include <cmath>

#include "kernels/cpu/matmul.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cpu/through_float.h"

namespace fretsaw {

namespace {

// Overwrites m [n, n].
double eliminate(std::vector<double>& m, int64_t n) {
  double result = 1;
  const auto at = [&](int64_t i, int64_t j) -> double& { return m[static_cast<size_t>(i * n + j)]; };
  for (int64_t k = 0; k < n; ++k) {
    int64_t pivot = k;
    for (int64_t i = k + 1; i < n; ++i) {
      if (std::fabs(at(i, k)) > std::fabs(at(pivot, k))) pivot = i;
    }
    if (at(pivot, k) == 0) return 0;
    if (pivot != k) {
      for (int64_t j = k; j < n; ++j) std::swap(at(k, j), at(pivot, j));
      result = -result;
    }
    result *= at(k, k);
    for (int64_t i = k + 1; i < n; ++i) {
      const double factor = at(i, k) / at(k, k);
      for (int64_t j = k; j < n; ++j) at(i, j) -= factor * at(k, j);
    }
  }
  return result;
}

void determinants(RunContext& r) {
  const TensorView& x = r.input(0);
  if (x.rank() < 2 || x.dims[x.rank() - 1] != x.dims[x.rank() - 2])
    throw Error("Det of shape " + to_string(x.dims), "give it square matrices [...,M,M]");
  const int64_t n = x.dims.back();
  TensorView& y = r.output(0, Dims(x.dims.begin(), x.dims.end() - 2));
  dispatch<types::wide_floats>(x.dtype, [&]<typename T>() {
    parallel_for(y.count(), 1, r.threads(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* from = x.as<T>() + i * n * n;
        std::vector<double> matrix(from, from + n * n);
        y.as<T>()[i] = static_cast<T>(eliminate(matrix, n));
      }
    });
  });
}

CompiledKernel make_plain(const CompileContext&) {
  return {determinants};
}

}  // namespace

void register_determinant(KernelRegistry& registry) {
  registry.add({.op = "Det", .make = any_float<make_plain>});
}

}  // namespace fretsaw
