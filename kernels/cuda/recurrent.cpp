// Recurrent layers by cuDNN.
#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

void register_recurrent(KernelRegistry&) {}

}  // namespace fretsaw::cuda
