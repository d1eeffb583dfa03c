// CumSum and CumProd.
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/reductions.h"

namespace fretsaw {

namespace {

struct CumulativeOptions {
  bool exclusive = false, reverse = false, product = false;
};

// x [n, inner] -> y [n, inner]; `state` holds `inner` numbers.
template <typename T>
void accumulate_rows(const T* x, int64_t n, int64_t inner, T* y, ComputeType<T>* state, const CumulativeOptions& options) {
  using C = ComputeType<T>;
  std::fill_n(state, inner, options.product ? C(1) : C(0));
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = (options.reverse ? n - 1 - i : i) * inner;
    for (int64_t j = 0; j < inner; ++j) {
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
      parallel_for(outer, kGrainElements / (n * inner) + 1, r.threads(), [&](int64_t begin, int64_t end) {
        std::vector<ComputeType<T>> state(static_cast<size_t>(inner));
        for (int64_t i = begin; i < end; ++i) {
          accumulate_rows(x.as<T>() + i * n * inner, n, inner, y.as<T>() + i * n * inner, state.data(), options);
        }
      });
    });
  }};
}

std::string unsupported_cumulative(const CompileContext& c) { return refuse_other_types(c, 0, types::numbers); }

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
