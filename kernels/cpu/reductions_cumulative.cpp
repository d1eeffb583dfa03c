// CumSum and CumProd.
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/reductions.h"

namespace fretsaw {

namespace {

struct CumulativeOptions {
  bool exclusive = false, reverse = false, product = false;
};

constexpr int64_t kColumns = 256;  // that run together

// Columns [0, width) of x [n, inner] -> those of y [n, inner].
template <typename T>
void accumulate_columns(const T* x, int64_t n, int64_t inner, int64_t width, T* y, const CumulativeOptions& options) {
  using C = ComputeType<T>;
  C state[kColumns];
  std::fill_n(state, width, options.product ? C(1) : C(0));
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = (options.reverse ? n - 1 - i : i) * inner;
    for (int64_t j = 0; j < width; ++j) {
      const C before = state[j], value = static_cast<C>(x[row + j]);
      state[j] = static_cast<C>(options.product ? before * value : before + value);
      y[row + j] = static_cast<T>(options.exclusive ? before : state[j]);
    }
  }
}

CompiledKernel compile_cumulative(const CompileContext& c, bool product_of) {
  const CumulativeOptions options{c.node().get_int("exclusive", 0) != 0, c.node().get_int("reverse", 0) != 0, product_of};
  return {[options](RunContext& r) {
    const TensorView& x = r.input(0);
    const size_t axis = normalise_axis(input_int(r, 1), x.rank());
    TensorView& y = r.output(0, x.dims);
    const int64_t outer = product(x.dims, 0, axis), n = x.dims[axis], inner = product(x.dims, axis + 1, x.rank());
    if (outer * n * inner == 0) return;
    dispatch<types::numbers>(x.dtype, [&]<typename T>() {
      const int64_t blocks = (inner + kColumns - 1) / kColumns;
      parallel_for(outer * blocks, kGrainElements / (n * std::min(inner, kColumns)) + 1, r.threads(), [&](int64_t begin, int64_t end) {
        for (int64_t unit = begin; unit < end; ++unit) {
          const int64_t from = unit / blocks * n * inner + unit % blocks * kColumns,
                        width = std::min(kColumns, inner - unit % blocks * kColumns);
          accumulate_columns(x.as<T>() + from, n, inner, width, y.as<T>() + from, options);
        }
      });
    });
  }};
}

std::string unsupported_cumulative(const CompileContext& c) {
  return refuse_other_types(c, 0, types::numbers);
}

}  // namespace

void register_cumulative(KernelRegistry& registry) {
  registry.add({.op = "CumSum",
                .make = [](const CompileContext& c) { return compile_cumulative(c, false); },
                .unsupported = unsupported_cumulative});
  registry.add({.op = "CumProd",
                .make = [](const CompileContext& c) { return compile_cumulative(c, true); },
                .unsupported = unsupported_cumulative});
}

}  // namespace fretsaw
