// A build without NCCL: devices exchange through the host.
#include "runtime/cuda/nccl.h"

namespace fretsaw {

bool built_with_nccl() {
  return false;
}

std::unique_ptr<DeviceCommunicator> make_nccl_communicator(Communicator& group, Device& device, bool /*beside*/) {
  return make_staged_communicator(group, device);
}

}  // namespace fretsaw
