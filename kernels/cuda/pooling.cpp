// Pooling.
#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

void register_pooling(KernelRegistry&) {}

}  // namespace fretsaw::cuda
