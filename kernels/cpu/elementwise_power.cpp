// Pow, whose exponent may be of another type than its base.
#include "kernels/cpu/elementwise.h"

namespace fretsaw {

namespace math::mixed {

#define FRETSAW_BINARY_MIXED(Name, set, expression) \
  struct Name {                                     \
    static constexpr TypeSet kTypes = types::set;   \
    template <typename T>                           \
    static T apply(T x, T y) {                      \
      return expression;                            \
    }                                               \
  };
#include "graph/operators/elementwise.inc"

}  // namespace math::mixed

namespace {

// The exponents that models are full of, without pow: z = x^2, x^3, sqrt x, 1 / sqrt x. False for others.
template <typename W>
bool common_power(const W* x, double exponent, W* z, int64_t n) {
  const int which = exponent == 2 ? 0 : exponent == 3 ? 1 : exponent == 0.5 ? 2 : exponent == -0.5 ? 3 : -1;
  if (which < 0 || (which > 1 && !std::is_floating_point_v<W>)) return false;
  run_loop<W>([=]() FRETSAW_ALWAYS_INLINE {
    if (which == 0) {
      for (int64_t i = 0; i < n; ++i) z[i] = x[i] * x[i];
    } else if (which == 1) {
      for (int64_t i = 0; i < n; ++i) z[i] = x[i] * x[i] * x[i];
    } else if constexpr (std::is_floating_point_v<W>) {
      for (int64_t i = 0; i < n; ++i) z[i] = which == 2 ? math::sqrt(x[i]) : W(1) / math::sqrt(x[i]);
    }
  });
  return true;
}

// Computes as W, which holds both operands, a chunk at a time.
template <typename W>
void run_power(RunContext& r, const Dims& dims, Layout layout) {
  const TensorView &x = r.input(0), &y = r.input(1);
  const Dims out = physical_dims(dims, layout);
  const auto plan = plan_broadcast<2>(out, {physical_operand(x, layout), physical_operand(y, layout)});
  const int64_t x_step = plan.strides[0].back(), y_step = plan.strides[1].back();
  double exponent = 0;
  const bool fixed_exponent = y.count() == 1;  // read before the output is written, which may lie on it
  if (fixed_exponent) load_as<double>(y.dtype, y.data, 0, 1, &exponent);
  TensorView& z = r.output(0, dims, x.dtype, layout);
  parallel_elements(count_of(out), r.threads(), [&](int64_t begin, int64_t end) {
    W base[kChunkElements], exponents[kChunkElements];
    for_each_run(plan, begin, end, [&](int64_t at, const std::array<int64_t, 2>& from, int64_t n) {
      for (int64_t i = 0; i < n; i += kChunkElements) {
        const int64_t part = std::min(kChunkElements, n - i);
        load_as<W>(x.dtype, x.data, from[0] + i * x_step, x_step ? part : 1, base);
        if (!(fixed_exponent && x_step && common_power(base, exponent, base, part))) {
          if (fixed_exponent)
            exponents[0] = static_cast<W>(exponent);
          else
            load_as<W>(y.dtype, y.data, from[1] + i * y_step, y_step ? part : 1, exponents);
          const W fixed_base = base[0];
          for (int64_t k = 0; k < part; ++k) base[k] = math::mixed::Pow::apply(x_step ? base[k] : fixed_base, exponents[k * y_step]);
        }
        store_from<W>(z.dtype, z.data, at + i, part, base);
      }
    });
  });
  clear_padding(z);
}

CompiledKernel compile_power(const CompileContext& c) {
  const size_t operands[] = {0, 1};
  const Layout layout = elementwise_layout(c, operands);
  auto run = [layout](RunContext& r) {
    const TensorView &x = r.input(0), &y = r.input(1);
    const Dims shapes[] = {x.dims, y.dims};
    const Dims dims = broadcast_all(shapes);
    if (wide_type(x.dtype) == DType::float32)
      run_power<float>(r, dims, layout);
    else if (is_float(x.dtype) || is_float(y.dtype))
      run_power<double>(r, dims, layout);
    else
      run_power<int64_t>(r, dims, layout);
  };
  return {run, elementwise_input_layouts(c, operands, layout), {layout}};
}

std::string unsupported_power(const CompileContext& c) {
  const std::string reason = refuse_other_types(c, 0, math::mixed::Pow::kTypes);
  return reason.empty() ? refuse_other_types(c, 1, math::mixed::Pow::kTypes) : reason;
}

}  // namespace

void register_power(KernelRegistry& registry) {
  // Not in place: the exponents may be smaller elements than the results, and be read after them.
  registry.add({.op = "Pow", .make = compile_power, .unsupported = unsupported_power});
}

}  // namespace fretsaw
