// Indexes that reach outside their tensor, as the host sees them.
#include "kernels/cuda/device_faults.h"

#include <algorithm>
#include <utility>

#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

DeviceFaults::~DeviceFaults() {
  for (DeviceFault* block : blocks_) cudaFreeHost(block);
}

std::shared_ptr<DeviceFault> DeviceFaults::word_of(const Node& node) {
  const auto free = std::find_if(holders_.begin(), holders_.end(), [](const Holder& h) { return !h.held; });
  const auto at = static_cast<size_t>(free - holders_.begin());
  if (free == holders_.end()) holders_.emplace_back();
  if (at / kBlock == blocks_.size()) {
    void* block = nullptr;
    FRETSAW_CUDA_CHECK(cudaHostAlloc(&block, kBlock * sizeof(DeviceFault), cudaHostAllocPortable | cudaHostAllocMapped));
    blocks_.push_back(static_cast<DeviceFault*>(block));
  }
  holders_[at] = {.name = node.name, .op = node.op, .held = true};
  word(at) = {};
  return {&word(at), [self = shared_from_this(), at](DeviceFault*) { self->holders_[at].held = false; }};
}

void DeviceFaults::check() {
  for (size_t i = 0; i < holders_.size(); ++i) {
    // The device writes it, which the compiler can't see.
    const int64_t beyond = *const_cast<const volatile int64_t*>(&word(i).beyond);
    if (beyond == 0) continue;
    const int64_t index = *const_cast<const volatile int64_t*>(&word(i).index);
    word(i) = {};
    if (!holders_[i].held) continue;  // its kernel is gone, and with it whoever could mind
    for (size_t k = i + 1; k < holders_.size(); ++k) word(k) = {};
    try {
      throw_index_out_of_range(index, beyond - 1);
    } catch (const Error& e) {
      throw e.at_node(holders_[i].name, holders_[i].op);
    }
  }
}

}  // namespace fretsaw::cuda
