// Inputs of the next step, brought to a device while the step at hand runs.
//
//   another thread   stage(step k+1) -------------                stage(step k+2) ---
//   rank's thread    step k: find ... forget       step k+1: find ... forget
//
// A rank looks up what it is about to upload by its address on the host. What was staged holds that memory, so that nothing else comes to
// lie there.
#pragma once
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/device.h"
#include "runtime/memory.h"

namespace fretsaw {

class StagedInputs {
 public:
  // A piece of a tensor on the host, and what keeps its memory.
  struct Piece {
    const std::byte* data = nullptr;
    size_t bytes = 0;
    std::shared_ptr<void> owner;
  };
  // `device`: with a stream of its own. What it allocates is counted by `count`.
  StagedInputs(std::shared_ptr<Device> device, std::shared_ptr<AllocationCount> count);

  // Copies the pieces to the device, and returns when they are there. Memory is used again that no step needs any more. Called by one
  // thread.
  void stage(const std::vector<Piece>& pieces);

  // --- the rank's thread ---
  // Where the bytes lie on the device; null: they were not staged. They stay there until `forget`.
  const void* find(const void* host, size_t bytes);
  void forget();  // what the step that ends has found: nothing on the rank's stream reads it any more

 private:
  struct Staged {
    Piece piece;
    std::shared_ptr<void> memory;
    bool found = false;
  };
  static bool is_used(const std::vector<Staged>& set);

  std::shared_ptr<Device> device_;
  BufferPool pool_;
  std::mutex mutex_;  // of what follows
  std::deque<std::vector<Staged>> sets_;
};

}  // namespace fretsaw
