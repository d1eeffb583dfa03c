// The CUDA devices of this machine, as the driver lists them.
#include "kernels/cuda/devices.h"

#include <cuda_runtime_api.h>

namespace fretsaw {

std::vector<CudaDevice> cuda_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return {};
  std::vector<CudaDevice> devices;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    CudaDevice device{i, properties.name, static_cast<int64_t>(properties.totalGlobalMem), {}};
    for (int peer = 0; peer < count; ++peer) {
      int reachable = 0;
      if (peer != i && cudaDeviceCanAccessPeer(&reachable, i, peer) == cudaSuccess && reachable) device.peers.push_back(peer);
    }
    devices.push_back(std::move(device));
  }
  return devices;
}

bool built_with_cuda() {
  return true;
}

}  // namespace fretsaw
