// What ScatterElements and ScatterND do with an update and the element that was there, for the kernels of every device.
#pragma once
#include <type_traits>

#include "kernels/host_device.h"
#include "kernels/kernel.h"

namespace fretsaw {

enum class ScatterReduction : uint8_t { none, add, mul, min, max };
ScatterReduction scatter_reduction_of(const Node& node);  // throws Error for a name that ONNX does not know

// What stands there afterwards, of a number type that computes in itself. Integers wrap around on overflow; of NaN and a number, NaN stays.
template <typename T>
FRETSAW_HOST_DEVICE T scattered(ScatterReduction reduction, T old, T update) {
  switch (reduction) {
    case ScatterReduction::add:
    case ScatterReduction::mul:
      if constexpr (std::is_integral_v<T>) {  // in 64 bits because 16-bit operands are promoted to int
        const auto a = static_cast<uint64_t>(old), b = static_cast<uint64_t>(update);
        return static_cast<T>(reduction == ScatterReduction::add ? a + b : a * b);
      } else {
        return reduction == ScatterReduction::add ? old + update : old * update;
      }
    case ScatterReduction::min:
      return update < old || update != update ? update : old;
    case ScatterReduction::max:
      return update > old || update != update ? update : old;
    case ScatterReduction::none:
      break;
  }
  return update;
}

}  // namespace fretsaw
