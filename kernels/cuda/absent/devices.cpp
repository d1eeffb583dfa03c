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

namespace {

[[noreturn]] void refuse() {
  throw Error("this build has no CUDA", "build with -DFRETSAW_CUDA=ON, or use --device cpu", ErrorCode::device);
}

}  // namespace

std::unique_ptr<Device> open_cuda_device(int) {
  refuse();
}

const KernelRegistry& kernels_of_cuda_devices() {
  refuse();
}

}  // namespace fretsaw
