// Where and Clip.
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/elementwise.h"

namespace fretsaw {

namespace math::ternary {

#define FRETSAW_TERNARY(Name, set, expression)            \
  struct Name {                                           \
    static constexpr TypeSet kTypes = types::set;         \
    template <typename X, typename T>                     \
    FRETSAW_ALWAYS_INLINE static T apply(X x, T y, T z) { \
      return expression;                                  \
    }                                                     \
  };
#include "graph/operators/elementwise.inc"

}  // namespace math::ternary

namespace {

using math::ternary::Clip;
using math::ternary::Where;

// result[i] = condition[i] ? x[i] : y[i], each advancing by its step of 0 or 1. T is opaque.
template <typename T>
void where_loop(const bool* condition, int64_t condition_step, const T* x, int64_t x_step, const T* y, int64_t y_step, T* result,
                int64_t n) {
  if (!condition_step) {
    const bool chosen = *condition;
    const T* from = chosen ? x : y;
    const int64_t step = chosen ? x_step : y_step;
    for (int64_t i = 0; i < n; ++i) result[i] = from[i * step];
  } else if constexpr (std::is_integral_v<T>) {
    run_vectorised([=]() FRETSAW_ALWAYS_INLINE {
      if (x_step && y_step) {
        FRETSAW_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) result[i] = Where::apply(condition[i], x[i], y[i]);
      } else if (x_step) {
        const T fixed = *y;
        FRETSAW_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) result[i] = Where::apply(condition[i], x[i], fixed);
      } else {
        const T fixed = *x;
        FRETSAW_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) result[i] = Where::apply(condition[i], fixed, y[i * y_step]);
      }
    });
  } else {
    for (int64_t i = 0; i < n; ++i) result[i] = condition[i] ? x[i * x_step] : y[i * y_step];  // strings: copied once
  }
}

CompiledKernel compile_where(const CompileContext& c) {
  const size_t operands[] = {0, 1, 2};
  const Layout layout = elementwise_layout(c, operands);
  auto run = [layout](RunContext& r) {
    const TensorView &condition = r.input(0), &x = r.input(1), &y = r.input(2);
    if (x.dtype != y.dtype) throw Error("branches of different types", "cast one of them");
    const Dims shapes[] = {condition.dims, x.dims, y.dims};
    const Dims dims = broadcast_all(shapes), out = physical_dims(dims, layout);
    TensorView& result = r.output(0, dims, x.dtype, layout);
    const auto plan =
        plan_broadcast<3>(out, {physical_operand(condition, layout), physical_operand(x, layout), physical_operand(y, layout)});
    with_element_type(x.dtype, [&]<typename T>(std::type_identity<T>) {
      parallel_elements(count_of(out), r.threads(), [&](int64_t begin, int64_t end) {
        for_each_run(plan, begin, end, [&](int64_t at, const std::array<int64_t, 3>& from, int64_t n) {
          where_loop(condition.as<bool>() + from[0], plan.strides[0].back(), x.as<T>() + from[1], plan.strides[1].back(),
                     y.as<T>() + from[2], plan.strides[2].back(), result.as<T>() + at, n);
        });
      });
    });
    clear_padding(result);
  };
  return {run, elementwise_input_layouts(c, operands, layout), {layout}};
}

std::string unsupported_where(const CompileContext& c) {
  const DType type = c.input_dtype(1);
  return type != DType::undefined && type != DType::string && bits_of(type) < 8 ? not_supported(type) : "";
}

// The bound in input `i`, or `absent`; read before the output is written, which may lie on it.
template <typename T>
ComputeType<T> bound(RunContext& r, size_t i, ComputeType<T> absent) {
  if (!r.has_input(i)) return absent;
  const TensorView& x = r.input(i);
  if (x.dtype != dtype_of<T>() || x.count() != 1) throw Error("a bound that is not one number of the input's type", "give it as a scalar");
  return static_cast<ComputeType<T>>(*x.as<T>());
}

template <typename T>
void clip_loop(const T* x, T low, T high, T* y, int64_t n) {
  run_loop<T>([=]() FRETSAW_ALWAYS_INLINE {
    const T least = low, most = high;  // locals: see isa.h
    FRETSAW_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) y[i] = Clip::apply(x[i], least, most);
  });
}

template <typename T>
void clip_range(const TensorView& x, ComputeType<T> low, ComputeType<T> high, TensorView& y, int64_t begin, int64_t end) {
  if constexpr (std::is_same_v<ComputeType<T>, T>) {
    clip_loop(x.as<T>() + begin, low, high, y.as<T>() + begin, end - begin);
  } else {
    float chunk[kChunkElements];
    for (; begin < end; begin += kChunkElements) {
      const int64_t part = std::min(kChunkElements, end - begin);
      load_as<float>(x.dtype, x.data, begin, part, chunk);
      clip_loop(chunk, low, high, chunk, part);
      store_from<float>(y.dtype, y.data, begin, part, chunk);
    }
  }
}

CompiledKernel compile_clip(const CompileContext& c) {
  const size_t operands[] = {0};
  const Layout layout = elementwise_layout(c, operands);
  auto run = [](RunContext& r) {
    const TensorView& x = r.input(0);  // any shape
    dispatch<Clip::kTypes>(x.dtype, [&]<typename T>() {
      const auto low = bound<T>(r, 1, math::lowest<ComputeType<T>>()), high = bound<T>(r, 2, math::highest<ComputeType<T>>());
      TensorView& y = r.output(0, x.dims, x.dtype, x.layout);
      const auto count = static_cast<int64_t>(x.bytes() / sizeof(T));  // with what the layout pads
      parallel_elements(count, r.threads(), [&](int64_t begin, int64_t end) { clip_range<T>(x, low, high, y, begin, end); });
      clear_padding(y);
    });
  };
  return {run, elementwise_input_layouts(c, operands, layout), {layout}};
}

std::string unsupported_clip(const CompileContext& c) {
  return refuse_other_types(c, 0, Clip::kTypes);
}

}  // namespace

void register_ternary(KernelRegistry& registry) {
  registry.add({.op = "Where", .make = compile_where, .unsupported = unsupported_where, .in_place = true});
  registry.add({.op = "Clip", .make = compile_clip, .unsupported = unsupported_clip, .in_place = true});
}

}  // namespace fretsaw
