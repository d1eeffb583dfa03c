// Which nodes of a model would run on the host, told without running it.
#pragma once
#include <vector>

#include "graph/ir.h"
#include "kernels/kernel.h"
#include "runtime/device_steps.h"

namespace fretsaw {

// The nodes that a device with these kernels has none for, once the model is compiled for inputs of the types that it names. Control flow
// always runs on the host and is not among them.
std::vector<HostFallback> nodes_without_kernel(const Model& model, const KernelRegistry& kernels);

}  // namespace fretsaw
