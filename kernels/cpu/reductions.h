// How a reduction walks its input: the axes merged into as few dimensions as possible.
#pragma once
#include <span>

#include "kernels/kernel.h"

namespace fretsaw {

// Example: x [2, 3, 8, 8] over axes 2 and 3 is kept [6], reduced [64]; over axis 1 it is kept [2] and [64], reduced [3].
// Where the last dimension is reduced, `run` elements next to each other fold into one result (width 1); where it is kept,
// `width` results next to each other fold in step. The dimensions before it are in the lists, outermost first.
struct ReductionPlan {
  Dims kept, kept_strides;  // in elements of the input
  Dims reduced, reduced_strides;
  int64_t width = 1;    // neighbouring results
  int64_t run = 1;      // neighbouring elements of one result
  int64_t results = 1;  // of the whole output
  int64_t each = 1;     // elements that fold into one result
};
// `reduce` says for each dimension whether it goes.
ReductionPlan plan_reduction(const Dims& dims, const std::vector<bool>& reduce);

// Where the `index`-th of the combinations of these dimensions lies.
inline int64_t offset_of(int64_t index, const Dims& dims, const Dims& strides) {
  int64_t offset = 0;
  for (size_t i = dims.size(); i-- > 0 && index > 0;) {
    offset += index % dims[i] * strides[i];
    index /= dims[i];
  }
  return offset;
}

class KernelRegistry;
void register_arg_reductions(KernelRegistry& registry);  // ArgMax, ArgMin
void register_cumulative(KernelRegistry& registry);      // CumSum, CumProd

}  // namespace fretsaw
