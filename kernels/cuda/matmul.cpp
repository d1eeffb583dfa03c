// Matrix products by cuBLASLt.
#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

void register_matmul(KernelRegistry&) {}

}  // namespace fretsaw::cuda
