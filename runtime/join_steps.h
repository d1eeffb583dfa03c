// Small steps of a device that do the same, as one.
#pragma once
#include <vector>

#include "runtime/program.h"

namespace fretsaw {

// Steps whose kernels can be joined (JoinableKernel) become one where the last of them stands: updates of parameters, casts of small
// gradients. Nothing between them takes what they make, and what they read stays until then at little cost: inputs of the program,
// constants, or small values. Before values are placed. `overwrites`: of each step, as for place_values.
void join_alike_steps(Program& program, std::vector<int>& overwrites);

}  // namespace fretsaw
