// Unary operators and tests: the rows of the table, over tensors in any layout.
#include "kernels/cpu/elementwise.h"

namespace fretsaw {

// The rows as types. They stand in math:: so that their expressions find its functions.
namespace math::unary {

#define FRETSAW_ROW(Name, set, a_name, a_value, b_name, b_value, Result, expression)             \
  struct Name {                                                                                  \
    static constexpr TypeSet kTypes = types::set;                                                \
    static constexpr const char *kA = a_name, *kB = b_name;                                      \
    static constexpr double kAbsentA = a_value, kAbsentB = b_value;                              \
    template <typename T>                                                                        \
    FRETSAW_ALWAYS_INLINE static Result apply(T x, [[maybe_unused]] T a, [[maybe_unused]] T b) { \
      return expression;                                                                         \
    }                                                                                            \
  };
#define FRETSAW_UNARY(name, set, expression) FRETSAW_ROW(name, set, "", 0, "", 0, T, expression)
#define FRETSAW_UNARY_ATTR(name, set, a_name, a_value, b_name, b_value, expression) \
  FRETSAW_ROW(name, set, a_name, a_value, b_name, b_value, T, expression)
#define FRETSAW_UNARY_CHOICE(name, set, attribute, choice1, expression1, choice2, expression2) \
  FRETSAW_ROW(name##First, set, "", 0, "", 0, T, expression1)                                  \
  FRETSAW_ROW(name##Second, set, "", 0, "", 0, T, expression2)
#define FRETSAW_TEST(name, set, a_name, a_value, b_name, b_value, expression) \
  FRETSAW_ROW(name, set, a_name, a_value, b_name, b_value, bool, expression)
#include "graph/operators/elementwise.inc"
#undef FRETSAW_ROW

}  // namespace math::unary

namespace {

// y[i] = f(x[i]) for float32, and types that compute as themselves
template <typename Row, typename T, typename Result>
void unary_loop(const T* x, Result* y, int64_t n, RowAttributes attributes) {
  run_loop<T>([=]() FRETSAW_ALWAYS_INLINE {
    const T a = static_cast<T>(attributes.a), b = static_cast<T>(attributes.b);  // locals: see isa.h
    FRETSAW_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) y[i] = Row::template apply<T>(x[i], a, b);
  });
}

// Half floats go through float32 a chunk at a time.
template <typename Row, typename Half, typename Result>
void unary_half_loop(const Half* x, Result* y, int64_t n, RowAttributes attributes) {
  float in[kChunkElements];
  for (int64_t begin = 0; begin < n; begin += kChunkElements) {
    const int64_t part = std::min(kChunkElements, n - begin);
    load_as<float>(dtype_of<Half>(), x, begin, part, in);
    if constexpr (std::is_same_v<Result, bool>) {
      unary_loop<Row>(in, y + begin, part, attributes);
    } else {
      unary_loop<Row>(in, in, part, attributes);
      store_from<float>(dtype_of<Half>(), y, begin, part, in);
    }
  }
}

template <typename Row>
RowAttributes attributes_of(const Node& node) {
  return {number_attribute(node, Row::kA, Row::kAbsentA), number_attribute(node, Row::kB, Row::kAbsentB)};
}

template <typename Row>
ElementLoop float_loop(const Node& node) {
  if constexpr ((Row::kTypes & set_of(DType::float32)) != 0)
    return [attributes = attributes_of<Row>(node)](const float* x, float* y, int64_t n) { unary_loop<Row>(x, y, n, attributes); };
  else
    return nullptr;
}

template <typename Row, bool kTest>
CompiledKernel compile_unary(const CompileContext& c) {
  const RowAttributes attributes = attributes_of<Row>(c.node());
  const size_t operands[] = {0};
  const Layout layout = elementwise_layout(c, operands);
  auto run = [attributes](RunContext& r) {
    const TensorView& x = r.input(0);  // any shape
    TensorView& y = r.output(0, x.dims, kTest ? DType::boolean : x.dtype, x.layout);
    const auto count = static_cast<int64_t>(x.bytes()) * 8 / bits_of(x.dtype);  // with what the layout pads
    dispatch<Row::kTypes>(x.dtype, [&]<typename T>() {
      using Result = std::conditional_t<kTest, bool, T>;
      parallel_elements(count, r.threads(), [&](int64_t begin, int64_t end) {
        if constexpr (std::is_same_v<ComputeType<T>, T>)
          unary_loop<Row>(x.as<T>() + begin, y.as<Result>() + begin, end - begin, attributes);
        else
          unary_half_loop<Row>(x.as<T>() + begin, y.as<Result>() + begin, end - begin, attributes);
      });
    });
    clear_padding(y);
  };
  return {run, elementwise_input_layouts(c, operands, layout), {layout}};
}

template <typename Row>
std::string unsupported_unary(const CompileContext& c) {
  return refuse_other_types(c, 0, Row::kTypes);
}

}  // namespace

void register_unary(KernelRegistry& registry) {
  using namespace math::unary;
#define FRETSAW_UNARY(name, set, expression) \
  registry.add({.op = #name, .make = compile_unary<name, false>, .unsupported = unsupported_unary<name>, .in_place = true});
#define FRETSAW_UNARY_ATTR(name, set, a_name, a_value, b_name, b_value, expression) FRETSAW_UNARY(name, set, expression)
#define FRETSAW_UNARY_CHOICE(name, set, attribute, choice1, expression1, choice2, expression2)                      \
  registry.add({.op = #name,                                                                                        \
                .make =                                                                                             \
                    [](const CompileContext& c) {                                                                   \
                      const bool second = takes_second_choice(c.node(), attribute, choice1, choice2);               \
                      return second ? compile_unary<name##Second, false>(c) : compile_unary<name##First, false>(c); \
                    },                                                                                              \
                .unsupported = unsupported_unary<name##First>,                                                      \
                .in_place = true});
#define FRETSAW_TEST(name, set, a_name, a_value, b_name, b_value, expression) \
  registry.add({.op = #name, .make = compile_unary<name, true>, .unsupported = unsupported_unary<name>});
#include "graph/operators/elementwise.inc"
}

ElementLoop unary_loop_of(const Node& node) {
  using namespace math::unary;
  if (!node.domain.empty()) return nullptr;
#define FRETSAW_UNARY(name, set, expression) \
  if (node.op == #name) return float_loop<name>(node);
#define FRETSAW_UNARY_ATTR(name, set, a_name, a_value, b_name, b_value, expression) FRETSAW_UNARY(name, set, expression)
#define FRETSAW_UNARY_CHOICE(name, set, attribute, choice1, expression1, choice2, expression2) \
  if (node.op == #name)                                                                        \
    return takes_second_choice(node, attribute, choice1, choice2) ? float_loop<name##Second>(node) : float_loop<name##First>(node);
#include "graph/operators/elementwise.inc"
  return nullptr;
}

}  // namespace fretsaw
