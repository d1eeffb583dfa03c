// MeanVarianceNormalization: statistics over any axes.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/convolution_loops.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/normalization.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cpu/through_float.h"

namespace fretsaw {

namespace {

template <typename T>
void normalise(RunContext& r, const std::vector<int64_t>& axes) {
  const TensorView& x = r.input(0);
  const std::vector<size_t> over = normalise_axes(axes, x.rank());
  const Dims strides = strides_of(x.dims);
  Dims kept, kept_strides, inner, inner_strides;
  for (size_t d = 0; d < x.rank(); ++d) {
    const bool summed = std::find(over.begin(), over.end(), d) != over.end();
    (summed ? inner : kept).push_back(x.dims[d]);
    (summed ? inner_strides : kept_strides).push_back(strides[d]);
  }
  TensorView& y = r.output(0, x.dims);
  if (x.count() == 0) return;
  const auto offset = [](const Dims& index, const Dims& steps) {
    int64_t sum = 0;
    for (size_t i = 0; i < index.size(); ++i) sum += index[i] * steps[i];
    return sum;
  };
  std::vector<int64_t> offsets;
  Dims index(inner.size(), 0);
  do offsets.push_back(offset(index, inner_strides));
  while (next_index(index, inner));
  Dims outer(kept.size(), 0);
  do {
    const int64_t base = offset(outer, kept_strides);
    double sum = 0, square = 0;
    for (int64_t at : offsets) sum += static_cast<double>(x.as<T>()[base + at]);
    const double mean = sum / static_cast<double>(offsets.size());
    for (int64_t at : offsets)
      square += (static_cast<double>(x.as<T>()[base + at]) - mean) * (static_cast<double>(x.as<T>()[base + at]) - mean);
    const double deviation = std::sqrt(square / static_cast<double>(offsets.size())) + 1e-9;
    for (int64_t at : offsets) y.as<T>()[base + at] = static_cast<T>((static_cast<double>(x.as<T>()[base + at]) - mean) / deviation);
  } while (next_index(outer, kept));
}

CompiledKernel make_plain(const CompileContext& c) {
  return {[axes = c.node().get_ints("axes", {0, 2, 3})](RunContext& r) {
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() { normalise<T>(r, axes); });
  }};
}

}  // namespace

void register_mean_variance(KernelRegistry& registry) {
  registry.add({.op = "MeanVarianceNormalization", .make = any_float<make_plain>});
}

}  // namespace fretsaw
