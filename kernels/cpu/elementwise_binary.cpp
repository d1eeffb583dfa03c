// Binary arithmetic, logical and bitwise operators: the rows of the table.
#include "kernels/cpu/elementwise_loops.h"

namespace fretsaw {

namespace math::binary {

#define FRETSAW_BINARY(name, set, expression) FRETSAW_BINARY_ROW(name, set, "", 0, T, expression)
#define FRETSAW_BINARY_ATTR(name, set, a_name, a_value, expression) FRETSAW_BINARY_ROW(name, set, a_name, a_value, T, expression)
#define FRETSAW_BINARY_CHOICE(name, set, attribute, choice1, expression1, choice2, expression2) \
  FRETSAW_BINARY_ROW(name##First, set, "", 0, T, expression1)                                   \
  FRETSAW_BINARY_ROW(name##Second, set, "", 0, T, expression2)
#include "graph/operators/elementwise.inc"

}  // namespace math::binary

void register_binary(KernelRegistry& registry) {
  using namespace math::binary;
#define FRETSAW_BINARY(name, set, expression) \
  registry.add({.op = #name, .make = compile_binary<name, false>, .unsupported = unsupported_binary<name>, .in_place = true});
#define FRETSAW_BINARY_ATTR(name, set, a_name, a_value, expression) FRETSAW_BINARY(name, set, expression)
#define FRETSAW_BINARY_CHOICE(name, set, attribute, choice1, expression1, choice2, expression2)                       \
  registry.add({.op = #name,                                                                                          \
                .make =                                                                                               \
                    [](const CompileContext& c) {                                                                     \
                      const bool second = takes_second_choice(c.node(), attribute, choice1, choice2);                 \
                      return second ? compile_binary<name##Second, false>(c) : compile_binary<name##First, false>(c); \
                    },                                                                                                \
                .unsupported = unsupported_binary<name##First>,                                                       \
                .in_place = true});
#include "graph/operators/elementwise.inc"
}

}  // namespace fretsaw
