// Indexes that reach outside their tensor: kernels leave word of them in pinned memory, the host reads it once it has waited.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "graph/ir.h"

namespace fretsaw::cuda {

// What a kernel writes, whole, when it meets such an index; of several, one stays. It goes on without the index: what would have been
// read is zeros, what would have been written is left out.
struct alignas(16) DeviceFault {
  int64_t index;
  int64_t beyond;  // 1 + the size of the dimension that the index is for; 0: there is no fault
};

class DeviceFaults : public std::enable_shared_from_this<DeviceFaults> {
 public:
  // Pinned memory for this many kernels at a time; more is added when they are all held.
  static constexpr size_t kBlock = 256;

  ~DeviceFaults();
  // The word of this node's kernel, for as long as it is held.
  std::shared_ptr<DeviceFault> word_of(const Node& node);
  // Throws the Error of the first node whose kernel has left word, and forgets all words.
  void check();

 private:
  struct Holder {
    std::string name, op;
    bool held = false;
  };
  DeviceFault& word(size_t i) { return blocks_[i / kBlock][i % kBlock]; }

  std::vector<DeviceFault*> blocks_;
  std::vector<Holder> holders_;
};

}  // namespace fretsaw::cuda
