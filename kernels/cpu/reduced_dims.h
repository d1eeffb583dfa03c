// Which dimensions the Reduce operators take away, and the shapes that they give, which every device needs.
#pragma once
#include <vector>

#include "graph/types.h"

namespace fretsaw {

// For each dimension whether it goes: those that `axes` (input 1) names, or where it names none all of them.
std::vector<bool> reduced_dimensions(const std::vector<int64_t>& axes, size_t rank, bool none_when_empty);
Dims reduced_dims(const Dims& dims, const std::vector<bool>& reduce, bool keep);

}  // namespace fretsaw
