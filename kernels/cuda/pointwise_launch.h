// Starting prepared steps, one by one or several as one kernel.
#pragma once
#include <memory>

#include "kernels/cuda/nvrtc.h"
#include "kernels/cuda/pointwise_plan.h"

namespace fretsaw::cuda {

// Where the inputs and outputs of a step stand among those that its run is given.
struct StepPlace {
  size_t first_input = 0, first_output = 0;
};
// Puts the addresses of this run into the step's arguments.
void give_addresses(const PreparedStep& step, RunContext& r, StepPlace place, uint64_t* arguments);
void launch_step(cudaKernel_t kernel, uint64_t blocks, unsigned threads, void* arguments, RunContext& r);

// The step's form that can be joined with others; null: it has none.
std::shared_ptr<const JoinableKernel> joinable_points(const PreparedStep& step, int compute_capability);

}  // namespace fretsaw::cuda
