// Opening the devices of a session's ranks.
#include "runtime/device_group.h"

#include <map>
#include <set>
#include <string>

#include "graph/errors.h"
#include "kernels/cuda/devices.h"
#include "runtime/cuda/nccl.h"

namespace fretsaw {
namespace {

// What the ranks on one device need of its memory.
struct Need {
  Device* device = nullptr;
  int64_t bytes = 0, available = 0;
};

}  // namespace

Rank::OnDevice DeviceGroup::of_rank(int rank) const {
  if (devices.empty()) return {};
  auto connect = [shared = shared](Communicator& group, Device& device, bool beside) {
    return shared || !built_with_nccl() ? make_staged_communicator(group, device) : make_nccl_communicator(group, device, beside);
  };
  const std::shared_ptr<Device>& device = devices.at(static_cast<size_t>(rank));
  return {device, mailbox, connect, [index = device->index()]() -> std::shared_ptr<Device> { return open_cuda_device(index); }};
}

DeviceGroup open_devices(const std::vector<int>& chosen, int ranks) {
  DeviceGroup group;
  std::vector<int> indexes = chosen;
  if (indexes.empty()) {
    const int found = static_cast<int>(cuda_devices().size());
    if (found < ranks && found > 0) {
      throw Error("the plan has " + std::to_string(ranks) + " ranks, and this machine has " + std::to_string(found) + " CUDA devices",
                  "use a smaller mesh, --device cpu, or name a device several times with --devices", ErrorCode::device);
    }
    for (int r = 0; r < ranks; ++r) indexes.push_back(r);
  }
  if (static_cast<int>(indexes.size()) < ranks) {
    throw Error("--devices names " + std::to_string(indexes.size()) + " devices for " + std::to_string(ranks) + " ranks",
                "name one for each rank", ErrorCode::device);
  }
  indexes.resize(static_cast<size_t>(ranks));
  for (int index : indexes) group.devices.push_back(open_cuda_device(index));
  group.shared = std::set<int>(indexes.begin(), indexes.end()).size() < indexes.size();
  group.mailbox = std::make_shared<DeviceMailbox>();
  return group;
}

void check_device_memory(const DeviceGroup& group, const std::vector<std::unique_ptr<Rank>>& ranks) {
  std::map<int, Need> needs;
  for (size_t r = 0; r < group.devices.size(); ++r) {
    Need& need = needs[group.devices[r]->index()];
    need.device = group.devices[r].get();
    need.bytes += ranks[r]->report().weight_bytes;
  }
  std::string told;
  bool fits = true;
  for (auto& [index, need] : needs) {
    need.device->use();
    need.available = static_cast<int64_t>(need.device->free_bytes());
    fits &= need.bytes <= need.available;
    told += (told.empty() ? "" : ", ") + need.device->name() + " needs " + gibibytes(need.bytes) + " and has " + gibibytes(need.available) +
            " free";
  }
  if (fits) return;
  throw Error("the weights do not fit on the devices: " + told, "use more devices (--mesh), or a smaller type (--precision bf16)",
              ErrorCode::device);
}

}  // namespace fretsaw
