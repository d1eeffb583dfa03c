// Operators on images: Resize, GridSample, AffineGrid, RoiAlign, MaxRoiPool, Col2Im; and quantisation.
#include "kernels/cuda/movement.h"

namespace fretsaw::cuda {

void register_image(KernelRegistry& registry) {
  register_resize(registry);
  register_sampling(registry);
  register_regions(registry);
  register_quantization(registry);
}

}  // namespace fretsaw::cuda
