// ArgMax and ArgMin.
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/reductions.h"

namespace fretsaw {

namespace {

struct ArgOptions {
  int64_t axis = 0;
  bool keep = true, last = false, largest = true;
};

// Whether x takes the place of the best so far. The first NaN wins over every number.
template <typename T>
bool replaces(T x, T best, const ArgOptions& options) {
  if (x != x || best != best) return best == best || (options.last && x != x);
  if (x == best) return options.last;
  return options.largest ? x > best : x < best;
}

constexpr int64_t kColumns = 256;  // looked at together

// Columns [0, width) of x [n, inner] -> y [width]: the index of each column's best.
template <typename T>
void arg_columns(const T* x, int64_t n, int64_t inner, int64_t width, int64_t* y, const ArgOptions& options) {
  ComputeType<T> best[kColumns];
  for (int64_t j = 0; j < width; ++j) {
    best[j] = static_cast<ComputeType<T>>(x[j]);
    y[j] = 0;
  }
  for (int64_t i = 1; i < n; ++i) {
    const T* row = x + i * inner;
    for (int64_t j = 0; j < width; ++j) {
      const auto value = static_cast<ComputeType<T>>(row[j]);
      if (!replaces(value, best[j], options)) continue;
      best[j] = value;
      y[j] = i;
    }
  }
}

CompiledKernel compile_arg(const CompileContext& c, bool largest) {
  const Node& node = c.node();
  const ArgOptions options{node.get_int("axis", 0), node.get_int("keepdims", 1) != 0, node.get_int("select_last_index", 0) != 0, largest};
  return {[options](RunContext& r) {
    const TensorView& x = r.input(0);
    const size_t axis = normalise_axis(options.axis, x.rank());
    Dims dims = x.dims;
    if (options.keep)
      dims[axis] = 1;
    else
      dims.erase(dims.begin() + static_cast<std::ptrdiff_t>(axis));
    TensorView& y = r.output(0, dims, DType::int64);
    const int64_t outer = product(x.dims, 0, axis), n = x.dims[axis], inner = product(x.dims, axis + 1, x.rank());
    if (outer * inner == 0) return;
    if (n == 0) throw Error("the best of no elements along axis " + std::to_string(axis), "give the axis a size");
    dispatch<types::numbers>(x.dtype, [&]<typename T>() {
      const int64_t blocks = (inner + kColumns - 1) / kColumns;
      parallel_for(outer * blocks, kGrainElements / (n * std::min(inner, kColumns)) + 1, r.threads(), [&](int64_t begin, int64_t end) {
        for (int64_t unit = begin; unit < end; ++unit) {
          const int64_t i = unit / blocks, first = unit % blocks * kColumns, width = std::min(kColumns, inner - first);
          arg_columns(x.as<T>() + i * n * inner + first, n, inner, width, y.as<int64_t>() + i * inner + first, options);
        }
      });
    });
  }};
}

std::string unsupported_arg(const CompileContext& c) {
  return refuse_other_types(c, 0, types::numbers);
}

}  // namespace

void register_arg_reductions(KernelRegistry& registry) {
  registry.add({.op = "ArgMax", .make = [](const CompileContext& c) { return compile_arg(c, true); }, .unsupported = unsupported_arg});
  registry.add({.op = "ArgMin", .make = [](const CompileContext& c) { return compile_arg(c, false); }, .unsupported = unsupported_arg});
}

}  // namespace fretsaw
