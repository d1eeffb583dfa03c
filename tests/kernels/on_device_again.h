// For kernels whose sums come in another order each time.
#pragma once
#include "tests/kernels/on_device.h"

namespace fretsaw::testing {

// As run_on_device, but the replayed run may differ by `tolerance` times an output's largest element.
std::vector<RuntimeValue> run_on_device_with_noise(Device& device, CompileContext c, const std::vector<RuntimeValue*>& inputs,
                                                   double tolerance);

}  // namespace fretsaw::testing
