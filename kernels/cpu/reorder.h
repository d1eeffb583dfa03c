// Copies of a tensor from one memory layout to another.
#pragma once
#include "kernels/tensor_view.h"

namespace fretsaw {

// `from` and `to` have the same type and dimensions; `to` has its memory. Blocked layouts get zeros in the channels that fill up the last
// block.
void reorder(const TensorView& from, TensorView& to);

}  // namespace fretsaw
