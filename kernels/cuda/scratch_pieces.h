// Dividing one block of scratch memory, which is all that a kernel has at a time.
#pragma once
#include <cstddef>

namespace fretsaw::cuda {

// Pieces of one block of scratch memory.
class Pieces {
 public:
  size_t add(size_t bytes) {  // returns the offset
    const size_t offset = total_;
    total_ += (bytes + 255) / 256 * 256;
    return offset;
  }
  size_t total() const { return total_; }

 private:
  size_t total_ = 0;
};

}  // namespace fretsaw::cuda
