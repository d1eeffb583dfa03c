// Operators with any number of operands: Sum, Mean, Min, Max.
#include "kernels/cpu/elementwise_loops.h"

namespace fretsaw {

namespace math::variadic {

// `combine` as a binary row of z and x; `finish` reads the number of operands n from the attribute a.
#define FRETSAW_VARIADIC(name, set, combine, finish)                     \
  struct name##Combine {                                                 \
    template <typename T>                                                \
    FRETSAW_ALWAYS_INLINE static T apply(T z, T x, T) {                  \
      return static_cast<T>(combine);                                    \
    }                                                                    \
  };                                                                     \
  struct name##Finish {                                                  \
    template <typename T>                                                \
    FRETSAW_ALWAYS_INLINE static T apply(T z, T, [[maybe_unused]] T n) { \
      return static_cast<T>(finish);                                     \
    }                                                                    \
  };                                                                     \
  struct name {                                                          \
    static constexpr TypeSet kTypes = types::set;                        \
    using Combine = name##Combine;                                       \
    using Finish = name##Finish;                                         \
    /* for the loops that need no finish */                              \
    static constexpr bool kFinishes = std::string_view(#finish) != "z";  \
  };
#include "graph/operators/elementwise.inc"

// Picks the second operand: copies with broadcasting.
struct Second {
  template <typename T>
  FRETSAW_ALWAYS_INLINE static T apply(T, T x, T) {
    return x;
  }
};

}  // namespace math::variadic

namespace {

template <typename Row>
CompiledKernel compile_variadic(const CompileContext& c) {
  std::vector<size_t> operands(c.inputs.size());
  for (size_t i = 0; i < operands.size(); ++i) operands[i] = i;
  const Layout layout = elementwise_layout(c, operands);
  auto run = [layout](RunContext& r) {
    const size_t n = r.input_count();
    std::vector<Dims> shapes;
    for (size_t i = 0; i < n; ++i) {
      shapes.push_back(r.input(i).dims);
      require_same_type(r.input(0), r.input(i));
    }
    const Dims dims = broadcast_all(shapes), out = physical_dims(dims, layout);
    TensorView& z = r.output(0, dims, r.input(0).dtype, layout);
    dispatch<Row::kTypes>(z.dtype, [&]<typename T>() {
      const TensorView& x = r.input(0);
      const Dims x_dims = physical_operand(x, layout);
      if (n == 1) {
        broadcast_binary<math::variadic::Second, T, T>(x, x_dims, x, x_dims, z, out, 0, r.threads());
        return;
      }
      const TensorView& y = r.input(1);
      broadcast_binary<typename Row::Combine, T, T>(x, x_dims, y, physical_operand(y, layout), z, out, 0, r.threads());
      for (size_t i = 2; i < n; ++i) {
        const TensorView& next = r.input(i);
        broadcast_binary<typename Row::Combine, T, T>(z, out, next, physical_operand(next, layout), z, out, 0, r.threads());
      }
      if constexpr (Row::kFinishes) {
        broadcast_binary<typename Row::Finish, T, T>(z, out, z, out, z, out, static_cast<double>(n), r.threads());
      }
    });
    clear_padding(z);
  };
  return {run, elementwise_input_layouts(c, operands, layout), {layout}};
}

template <typename Row>
std::string unsupported_variadic(const CompileContext& c) {
  return refuse_other_types(c, 0, Row::kTypes);
}

}  // namespace

void register_variadic(KernelRegistry& registry) {
  using namespace math::variadic;
  // Not in place: the output holds the fold of the first operands while later ones are still to be read.
#define FRETSAW_VARIADIC(name, set, combine, finish) \
  registry.add({.op = #name, .make = compile_variadic<name>, .unsupported = unsupported_variadic<name>});
#include "graph/operators/elementwise.inc"
}

}  // namespace fretsaw
