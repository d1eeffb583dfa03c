// The CUDA devices that a build without CUDA finds.
#include "kernels/cuda/devices.h"

#include "graph/errors.h"
#include "kernels/device.h"

namespace fretsaw {

std::vector<CudaDevice> cuda_devices() {
  return {};
}

bool built_with_cuda() {
  return false;
}

std::unique_ptr<Device> open_cuda_device(int) {
  throw Error("this build has no CUDA", "build with -DFRETSAW_CUDA=ON, or use --device cpu", ErrorCode::device);
}

}  // namespace fretsaw
