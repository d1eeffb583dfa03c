// What ScatterElements and ScatterND do with an update and the element that was there, for the kernels of every device.
#pragma once
#include "kernels/kernel.h"

namespace fretsaw {

enum class ScatterReduction : uint8_t { none, add, mul, min, max };
ScatterReduction scatter_reduction_of(const Node& node);  // throws Error for a name that ONNX does not know

}  // namespace fretsaw
