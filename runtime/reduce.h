// Elementwise reductions of the ranks' buffers, as the collectives over host memory need them.
#pragma once
#include <cstddef>
#include <span>

#include "runtime/communicator.h"

namespace fretsaw {

// out[i] = parts[0][i] op parts[1][i] op ... for `count` elements starting at element `first` of each part (out is written from its start).
// The parts are combined in the order given; half precision is added up in float32 and rounded once. Throws Error for a type
// that can't be reduced so (strings, packed or complex types). `out` may lie exactly on the elements read of one part.
void reduce_parts(std::span<const std::byte* const> parts, std::byte* out, size_t first, size_t count, DType dtype, Reduction reduction);

}  // namespace fretsaw
