// Scattering with a reduction, where several updates may go to one place.
#pragma once
#include "kernels/cpu/scatter.h"
#include "kernels/cuda/indexing.h"

namespace fretsaw::cuda {

// The updates [items, inner] to be reduced into rows of y [rows, inner].
struct Updates {
  const TensorView &y, &updates;
  int64_t items, inner, rows;
};

// Bytes of scratch memory for reduce_in_order. N is the type of with_count_type.
template <typename N>
size_t bytes_to_order(const Updates& u);

// Brings the updates of one row together, in their order, by a stable sort: targets[k] is the row that update order[k] goes to. `scratch`
// is as that of reduce_in_order.
template <typename N>
struct Ordered {
  const N *targets, *order;
};
template <typename N>
Ordered<N> bring_together(RunContext& r, const Updates& u, void* scratch);

// `scratch` begins with the row of y that each item goes to (`rows`: none) and the numbers of the items, 0, 1, 2, ..., each N[items].
// The updates of one row are taken in their order, one thread for each of its elements, so that the result is always the same, and that
// of the CPU.
template <typename N>
void reduce_in_order(RunContext& r, ScatterReduction reduction, const Updates& u, void* scratch);

}  // namespace fretsaw::cuda
