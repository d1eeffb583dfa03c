// Places buffers of known size and lifetime in one block of memory.
//
//   bytes  lives in steps      offset
//    256     0..1                0        the biggest first, each at the lowest gap that fits between those that
//    128     1..2              256        live at the same time and lie there already
//    192     2..3                0
#pragma once
#include <cstddef>
#include <vector>

namespace fretsaw {

struct BufferLife {
  size_t bytes = 0;
  int first = 0, last = 0;  // steps, both included
};
struct Placement {
  std::vector<size_t> offsets;  // for each buffer, a multiple of 64
  size_t bytes = 0;             // of the whole block
};
Placement place_buffers(const std::vector<BufferLife>& buffers);
// The least any placement needs: the most bytes (rounded up to 64 each) alive in one step.
size_t placement_bound(const std::vector<BufferLife>& buffers);

}  // namespace fretsaw
