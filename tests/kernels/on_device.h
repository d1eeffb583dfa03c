// Running a device's kernels in tests: inputs go up, the step runs, outputs come down.
//
// FRETSAW_TEST_DEVICE=cuda makes every test that goes through run_node run on the GPU where there is a kernel for it.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "kernels/device.h"

namespace fretsaw::testing {

// The device of the environment variable FRETSAW_TEST_DEVICE, opened once; null where the variable is not set. Throws where it can't be
// opened.
Device* test_device();
// The first GPU, opened once; null, with the reason printed, where there is none.
Device* any_device();

// Runs the step that `c` describes (a node or a fused step; `c.device` is set here). `inputs` are host values, one for each of
// `c.inputs`, null where left out. The outputs are host values in the plain layout, one for each of `c.outputs`. It runs twice: as it is,
// and captured and replayed where the kernel says it can be; both must give the same bits.
std::vector<RuntimeValue> run_on_device(Device& device, CompileContext c, const std::vector<RuntimeValue*>& inputs);

// What ran where since the beginning: operators that had no kernel on the device, and how often.
std::map<std::string, int>& host_fallbacks();

}  // namespace fretsaw::testing
