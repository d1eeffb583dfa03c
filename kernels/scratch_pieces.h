// Dividing the one block of scratch memory that a kernel has in a run (RunContext::scratch).
#pragma once
#include <cstddef>

namespace fretsaw {

class ScratchPieces {
 public:
  // The offset of the next piece. Pieces begin at multiples of what any kernel of a CPU or GPU wants.
  size_t add(size_t bytes) {
    constexpr size_t kAlignment = 256;
    const size_t offset = total_;
    total_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  }
  size_t total() const { return total_; }

 private:
  size_t total_ = 0;
};

}  // namespace fretsaw
