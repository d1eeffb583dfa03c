// The shapes that Reshape and its kin give, which every device needs.
#pragma once
#include "kernels/kernel.h"

namespace fretsaw {

// Fills in zeros (the input's dimension, unless `allow_zero`) and one -1 of a requested shape.
Dims reshaped_dims(const Dims& from, Dims to, bool allow_zero);
Dims flattened_dims(const Dims& dims, int64_t axis);
// Of input 0 with the axes that input 1 names, on the host.
Dims squeezed_dims(RunContext& r);
Dims unsqueezed_dims(RunContext& r);

}  // namespace fretsaw
