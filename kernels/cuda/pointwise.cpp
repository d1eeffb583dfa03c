// Elementwise operators, alone and fused, compiled at run time from the rows of the table.
#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

void register_pointwise(KernelRegistry&) {}

}  // namespace fretsaw::cuda
