// Convolutions by cuDNN.
#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

void register_convolution(KernelRegistry&) {}

}  // namespace fretsaw::cuda
