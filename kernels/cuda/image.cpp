// Operators on images: resize, sample, rearrange.
#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

void register_image(KernelRegistry&) {}

}  // namespace fretsaw::cuda
