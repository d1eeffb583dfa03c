// CumProdGrad: each element gets the product before it times the gradients of the products behind it, each without the element itself.
// Nothing is divided.
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/gradients.h"

namespace fretsaw {
namespace {

struct ProductOptions {
  bool exclusive = false, reverse = false;
};

constexpr int64_t kColumns = 256;  // that run together

// Columns [0, width) of x, dy and dx, all [n, inner].
//
// With p the product before x[i], and r = dy[i] + x[i + 1] (dy[i + 1] + x[i + 2] (...)): dx[i] = p r. Exclusive: the same without the first
// dy.
template <typename T>
void differentiate_columns(const T* dy, const T* x, int64_t n, int64_t inner, int64_t width, T* dx, const ProductOptions& options) {
  T state[kColumns];
  const auto row = [&](int64_t i) { return (options.reverse ? n - 1 - i : i) * inner; };
  std::fill_n(state, width, T(1));
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0, at = row(i); j < width; ++j, ++at) {
      dx[at] = state[j];
      state[j] *= x[at];
    }
  }
  std::fill_n(state, width, T(0));
  for (int64_t i = n; i-- > 0;) {
    for (int64_t j = 0, at = row(i); j < width; ++j, ++at) {
      const T behind = state[j], with_own = dy[at] + (options.exclusive ? x[at] * behind : behind);
      dx[at] *= options.exclusive ? behind : with_own;
      state[j] = options.exclusive ? with_own : x[at] * with_own;
    }
  }
}

CompiledKernel make_plain(const CompileContext& c) {
  const ProductOptions options{c.node().get_int("exclusive", 0) != 0, c.node().get_int("reverse", 0) != 0};
  return {[options](RunContext& r) {
    const TensorView &dy = r.input(0), &x = r.input(1);
    require(dy.dims == x.dims, "the gradient has another shape than CumProd's result", "give that of the forward node's output");
    const size_t axis = normalise_axis(input_int(r, 2), x.rank());
    TensorView& dx = r.output(0, x.dims);
    const int64_t outer = product(x.dims, 0, axis), n = x.dims[axis], inner = product(x.dims, axis + 1, x.rank());
    if (outer * n * inner == 0) return;
    dispatch<types::wide_floats>(x.dtype, [&]<typename T>() {
      const int64_t blocks = (inner + kColumns - 1) / kColumns;
      parallel_for(outer * blocks, kGrainElements / (n * std::min(inner, kColumns)) + 1, r.threads(), [&](int64_t begin, int64_t end) {
        for (int64_t unit = begin; unit < end; ++unit) {
          const int64_t first = unit % blocks * kColumns, from = unit / blocks * n * inner + first;
          differentiate_columns(dy.as<T>() + from, x.as<T>() + from, n, inner, std::min(kColumns, inner - first), dx.as<T>() + from,
                                options);
        }
      });
    });
  }};
}

}  // namespace

void register_cumulative_gradient(KernelRegistry& registry) {
  add_gradient(registry, "CumProdGrad", any_float<make_plain>);
}

}  // namespace fretsaw
