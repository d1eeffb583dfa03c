// What the passes and gradients of loops share. Private to graph.
#pragma once
#include <cstdint>
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

// The body of a Loop; null where it is missing, or does not take the pass's number, the condition and what is carried, and give the
// condition and that again.
GraphPtr fitting_body(const Node& loop);
// The order of dimensions for a Transpose that moves the first of `rank` ones, that of stacked rows, to `axis`.
std::vector<int64_t> first_moved_to(int64_t axis, int64_t rank);
TensorPtr make_true();

}  // namespace fretsaw
