// Gradients of operators that pick elements along one axis after another (Slice, Pad): by picking among the positions.
//
//   y = Slice(x [5, 4], axis 0, from 4 down to 0 by -2)     positions Slice([0 1 2 3 4], ...) = [4 2]
//   dx = GatherGrad(g [2, 4], [4 2], [5, 4], axis 0)        rows 4 and 2 are those of g, the others 0
#pragma once
#include <functional>

#include "graph/gradients.h"

namespace fretsaw {

// Element k of a list of integers, as int64 [1].
Value* list_element(GradientContext& c, Value* list, size_t k);

// The gradient of input 0. `pick` does the k-th of `axes` of what the node does, to any tensor along any axis.
Value* unpick_axes(GradientContext& c, const std::vector<int64_t>& axes,
                   const std::function<Value*(Value* x, int64_t axis, size_t k)>& pick);

}  // namespace fretsaw
