// The CUDA devices of this machine. A build without CUDA finds none.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fretsaw {

class Device;
class KernelRegistry;

struct CudaDevice {
  int index = 0;
  std::string name;
  int64_t memory_bytes = 0;
  std::vector<int> peers;  // devices whose memory this one can reach directly
};
std::vector<CudaDevice> cuda_devices();  // empty as well where there is no driver

bool built_with_cuda();
// A rank's view of the GPU: a stream, libraries' handles and memory of its own. Several ranks may open one GPU. Throws Error (code device)
// when there is no such GPU, or the build is without CUDA.
std::unique_ptr<Device> open_cuda_device(int index);
// What GPUs have kernels for; no GPU need be there. Throws Error (code device) in a build without CUDA.
const KernelRegistry& kernels_of_cuda_devices();

}  // namespace fretsaw
