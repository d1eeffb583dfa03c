// The CUDA devices of this machine. A build without CUDA finds none.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace fretsaw {

struct CudaDevice {
  int index = 0;
  std::string name;
  int64_t memory_bytes = 0;
  std::vector<int> peers;  // devices whose memory this one can reach directly
};
std::vector<CudaDevice> cuda_devices();  // empty as well where there is no driver

}  // namespace fretsaw
