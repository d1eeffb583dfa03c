// Loops over two broadcast operands, for the files that register binary, comparison and variadic operators.
#pragma once
#include "kernels/cpu/elementwise.h"

namespace fretsaw {

// z[i] = f(x[i * x_step], y[i * y_step]); steps are 0 or 1. z may be x or y.
template <typename Row, typename T, typename Result>
void binary_loop(const T* x, int64_t x_step, const T* y, int64_t y_step, Result* z, int64_t n, T attribute) {
  run_loop<T>([=]() FRETSAW_ALWAYS_INLINE {
    const T a = attribute;  // a local: see isa.h
    if (x_step && y_step) {
      FRETSAW_INDEPENDENT
      for (int64_t i = 0; i < n; ++i) z[i] = Row::template apply<T>(x[i], y[i], a);
    } else if (x_step) {
      const T fixed = *y;
      FRETSAW_INDEPENDENT
      for (int64_t i = 0; i < n; ++i) z[i] = Row::template apply<T>(x[i], fixed, a);
    } else {
      const T fixed = *x;
      FRETSAW_INDEPENDENT
      for (int64_t i = 0; i < n; ++i) z[i] = Row::template apply<T>(fixed, y[i * y_step], a);
    }
  });
}

// Half floats go through float32 a chunk at a time.
template <typename Row, typename Half, typename Result>
void binary_half_loop(const Half* x, int64_t x_step, const Half* y, int64_t y_step, Result* z, int64_t n, float a) {
  float left[kChunkElements], right[kChunkElements];
  for (int64_t begin = 0; begin < n; begin += kChunkElements) {
    const int64_t part = std::min(kChunkElements, n - begin);
    load_as<float>(dtype_of<Half>(), x, begin * x_step, x_step ? part : 1, left);
    load_as<float>(dtype_of<Half>(), y, begin * y_step, y_step ? part : 1, right);
    if constexpr (std::is_same_v<Result, bool>) {
      binary_loop<Row>(left, x_step, right, y_step, z + begin, part, a);
    } else {
      float out[kChunkElements];
      binary_loop<Row>(left, x_step, right, y_step, out, part, a);
      store_from<float>(dtype_of<Half>(), z, begin, part, out);
    }
  }
}

// z = f(x, y) over whole tensors; `out` is the shape of z in memory, x_dims and y_dims those of the operands.
template <typename Row, typename T, typename Result>
void broadcast_binary(const TensorView& x, const Dims& x_dims, const TensorView& y, const Dims& y_dims, TensorView& z, const Dims& out,
                      double a, int threads) {
  const auto plan = plan_broadcast<2>(out, {x_dims, y_dims});
  const int64_t x_step = plan.strides[0].back(), y_step = plan.strides[1].back();
  parallel_elements(count_of(out), threads, [&](int64_t begin, int64_t end) {
    for_each_run(plan, begin, end, [&](int64_t at, const std::array<int64_t, 2>& from, int64_t n) {
      const T *left = x.as<T>() + from[0], *right = y.as<T>() + from[1];
      Result* result = z.as<Result>() + at;
      if constexpr (std::is_same_v<ComputeType<T>, T>)
        binary_loop<Row>(left, x_step, right, y_step, result, n, static_cast<T>(a));
      else
        binary_half_loop<Row>(left, x_step, right, y_step, result, n, static_cast<float>(a));
    });
  });
}

inline void require_same_type(const TensorView& x, const TensorView& y) {
  if (x.dtype != y.dtype) {
    throw Error("operands of types " + std::string(name_of(x.dtype)) + " and " + std::string(name_of(y.dtype)), "cast one of them");
  }
}

// The kernel of a row with two operands.
template <typename Row, bool kComparison>
CompiledKernel compile_binary(const CompileContext& c) {
  const double a = number_attribute(c.node(), Row::kA, Row::kAbsentA);
  const size_t operands[] = {0, 1};
  const Layout layout = elementwise_layout(c, operands);
  auto run = [a, layout](RunContext& r) {
    const TensorView &x = r.input(0), &y = r.input(1);
    require_same_type(x, y);
    const Dims shapes[] = {x.dims, y.dims};
    const Dims dims = broadcast_all(shapes);
    TensorView& z = r.output(0, dims, kComparison ? DType::boolean : x.dtype, layout);
    dispatch<Row::kTypes>(x.dtype, [&]<typename T>() {
      using Result = std::conditional_t<kComparison, bool, T>;
      broadcast_binary<Row, T, Result>(x, physical_operand(x, layout), y, physical_operand(y, layout), z, physical_dims(dims, layout), a,
                                       r.threads());
    });
    clear_padding(z);
  };
  return {run, elementwise_input_layouts(c, operands, layout), {layout}};
}

template <typename Row>
std::string unsupported_binary(const CompileContext& c) {
  return refuse_other_types(c, 0, Row::kTypes);
}

// A row as a type, to be used in namespace math.
#define FRETSAW_BINARY_ROW(Name, set, a_name, a_value, Result, expression)      \
  struct Name {                                                                 \
    static constexpr TypeSet kTypes = types::set;                               \
    static constexpr const char* kA = a_name;                                   \
    static constexpr double kAbsentA = a_value;                                 \
    template <typename T>                                                       \
    FRETSAW_ALWAYS_INLINE static Result apply(T x, T y, [[maybe_unused]] T a) { \
      return expression;                                                        \
    }                                                                           \
  };

}  // namespace fretsaw
