// Comparisons: the rows of the table, and Equal on strings.
#include "kernels/cpu/elementwise_loops.h"

namespace fretsaw {

namespace math::comparison {

#define FRETSAW_COMPARISON(name, set, expression) FRETSAW_BINARY_ROW(name, set, "", 0, bool, expression)
#include "graph/operators/elementwise.inc"

}  // namespace math::comparison

namespace {

// The rows compare numbers; strings are compared here, so their loops need not be compiled for every row.
template <typename Row>
struct OfNumbers : Row {
  static constexpr TypeSet kTypes = Row::kTypes & ~types::strings;
};

void equal_strings(RunContext& r) {
  const TensorView &x = r.input(0), &y = r.input(1);
  require_same_type(x, y);
  const Dims shapes[] = {x.dims, y.dims};
  const Dims dims = broadcast_all(shapes);
  bool* z = r.output(0, dims, DType::boolean).as<bool>();
  const auto plan = plan_broadcast<2>(dims, {x.dims, y.dims});
  for_each_run(plan, 0, count_of(dims), [&](int64_t at, const std::array<int64_t, 2>& from, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      z[at + i] = x.as<std::string>()[from[0] + i * plan.strides[0].back()] == y.as<std::string>()[from[1] + i * plan.strides[1].back()];
    }
  });
}

template <typename Row>
CompiledKernel compile_comparison(const CompileContext& c) {
  if (contains(Row::kTypes, DType::string) && c.input_dtype(0) == DType::string) return {equal_strings};
  return compile_binary<OfNumbers<Row>, true>(c);
}

}  // namespace

void register_comparison(KernelRegistry& registry) {
#define FRETSAW_COMPARISON(name, set, expression) \
  registry.add(                                   \
      {.op = #name, .make = compile_comparison<math::comparison::name>, .unsupported = unsupported_binary<math::comparison::name>});
#include "graph/operators/elementwise.inc"
}

}  // namespace fretsaw
