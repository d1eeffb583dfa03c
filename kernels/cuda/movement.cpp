// Operators that move elements: transpose, concatenate, split, slice, pad.
#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

void register_movement(KernelRegistry&) {}

}  // namespace fretsaw::cuda
