// Collectives among GPUs by NCCL.
#pragma once
#include <memory>

#include "runtime/device_communicator.h"

namespace fretsaw {

bool built_with_nccl();
// The devices of the ranks of `group`, of which each calls with its own; they are connected when it returns. `group` serves to agree, and
// must outlive it, as must `device`. `beside`: they exchange while the devices compute, so that no kernel of ours may fill a device that
// waits for another. Throws Error (code device), with a hint, when a first tiny exchange does not end in time.
std::unique_ptr<DeviceCommunicator> make_nccl_communicator(Communicator& group, Device& device, bool beside = false);

}  // namespace fretsaw
