// Inputs on their way to a device ahead of their step.
#include "runtime/staged_inputs.h"

#include <algorithm>
#include <utility>

namespace fretsaw {
namespace {

constexpr size_t kSetsAtOnce = 2;  // that of the step at hand, and the next one's

}  // namespace

StagedInputs::StagedInputs(std::shared_ptr<Device> device, std::shared_ptr<AllocationCount> count)
    : device_(std::move(device)), pool_(std::move(count), device_.get()) {}

bool StagedInputs::is_used(const std::vector<Staged>& set) {
  return std::any_of(set.begin(), set.end(), [](const Staged& staged) { return staged.found; });
}

void StagedInputs::stage(const std::vector<Piece>& pieces) {
  device_->use();
  {
    const std::lock_guard lock(mutex_);
    if (sets_.size() >= kSetsAtOnce && !is_used(sets_.front())) sets_.pop_front();  // no step came to look for it
  }
  std::vector<Staged> set;
  for (const Piece& piece : pieces) {
    set.push_back({piece, pool_.take(piece.bytes)});
    device_->upload(set.back().memory.get(), piece.data, piece.bytes);
  }
  device_->synchronize();
  const std::lock_guard lock(mutex_);
  sets_.push_back(std::move(set));
}

const void* StagedInputs::find(const void* host, size_t bytes) {
  const auto* first = static_cast<const std::byte*>(host);
  const std::lock_guard lock(mutex_);
  for (std::vector<Staged>& set : sets_) {
    for (Staged& staged : set) {
      if (first < staged.piece.data || first + bytes > staged.piece.data + staged.piece.bytes) continue;
      staged.found = true;
      return static_cast<const std::byte*>(staged.memory.get()) + (first - staged.piece.data);
    }
  }
  return nullptr;
}

void StagedInputs::forget() {
  const std::lock_guard lock(mutex_);
  std::erase_if(sets_, is_used);
}

}  // namespace fretsaw
