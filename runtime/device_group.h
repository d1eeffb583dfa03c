// The devices of a session's ranks, and how they reach each other.
#pragma once
#include <memory>
#include <vector>

#include "runtime/rank.h"

namespace fretsaw {

struct DeviceGroup {
  std::vector<std::shared_ptr<Device>> devices;  // by rank; empty: the ranks run on the CPU
  std::shared_ptr<DeviceMailbox> mailbox;
  bool shared = false;  // several ranks on one device: they exchange through the host

  Rank::OnDevice of_rank(int rank) const;
};

// Opens `ranks` GPUs: those that `chosen` names in the order of ranks, or the first ones. One that is named several times runs several
// ranks. Throws Error when there are too few.
DeviceGroup open_devices(const std::vector<int>& chosen, int ranks);
// Throws Error, with what is needed and what is free on each device, when the ranks' weights do not fit. Nothing has been put there yet.
// Whether a program's values fit too is checked when it is compiled, before its constants are uploaded.
void check_device_memory(const DeviceGroup& group, const std::vector<std::unique_ptr<Rank>>& ranks);

}  // namespace fretsaw
