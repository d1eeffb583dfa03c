// The CUDA devices that a build without CUDA finds.
#include "kernels/cuda/devices.h"

namespace fretsaw {

std::vector<CudaDevice> cuda_devices() {
  return {};
}

}  // namespace fretsaw
