// What the files of the elementwise family share: the table's rows as types, and attributes as numbers.
#pragma once
#include "kernels/cpu/broadcast.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/fused_chain.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/kernel.h"

namespace fretsaw {

void register_unary(KernelRegistry& registry);
void register_binary(KernelRegistry& registry);
void register_comparison(KernelRegistry& registry);
void register_power(KernelRegistry& registry);     // Pow
void register_variadic(KernelRegistry& registry);  // Sum, Mean, Min, Max
void register_ternary(KernelRegistry& registry);   // Where, Clip

// The float32 loop of a unary operator, for kernels that fuse it; null for other operators.
ElementLoop unary_loop_of(const Node& node);

// The attributes a and b of a row.
struct RowAttributes {
  double a = 0, b = 0;
};
// An int or float attribute as a number; `absent` when it is not there or has no name.
double number_attribute(const Node& node, const char* name, double absent);
// Whether a string attribute has the second of its two values; throws Error for a value that is neither.
bool takes_second_choice(const Node& node, const char* attribute, const char* first, const char* second);
// The reason to refuse input `i` when its type is known and not in the set.
std::string refuse_other_types(const CompileContext& c, size_t i, TypeSet types);

// Half floats are computed as float32.
template <typename T>
struct ComputeTypeOf {
  using type = T;
};
template <>
struct ComputeTypeOf<Float16> {
  using type = float;
};
template <>
struct ComputeTypeOf<BFloat16> {
  using type = float;
};
template <typename T>
using ComputeType = typename ComputeTypeOf<T>::type;

// Elements that are converted at a time; they stay in the first-level cache.
constexpr int64_t kChunkElements = 512;

// Runs a loop with vector instructions where that pays in the time it takes to compile: for float32.
template <typename T, typename F>
void run_loop(const F& loop) {
  if constexpr (std::is_same_v<T, float>)
    run_vectorised(loop);
  else
    loop();
}

}  // namespace fretsaw
