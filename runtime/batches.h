// How a step's inputs are checked and divided, and how its outputs come together.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "graph/plan.h"
#include "runtime/memory.h"

namespace fretsaw {

// A range of the batch axis that one micro-batch of one data rank takes.
struct BatchPart {
  int64_t begin = 0, count = 0;
};
// Larger parts first: 7 in 3 is 3, 2, 2.
std::vector<BatchPart> split_evenly(BatchPart whole, int parts);

struct StepBatches {
  int64_t batch = 0;                          // 0: no input has a batch axis
  std::vector<std::vector<BatchPart>> parts;  // [data rank][micro-batch]; empty for a data rank with no share
};
// The given inputs in the plan's order, null where a default counts. Throws Error naming the input at fault.
std::vector<const RuntimeValue*> check_inputs(const Plan& plan, const std::map<std::string, RuntimeValue>& given,
                                              const std::vector<bool>& has_default);
StepBatches divide_batch(const Plan& plan, const std::vector<const RuntimeValue*>& inputs);
// Part of a tensor along an axis: a view where it lies in one piece, otherwise a copy in the pool.
void take_part(const RuntimeValue& whole, int axis, BatchPart part, RuntimeValue& out, BufferPool& pool);
// The parts of one output, in order, with how many samples each stands for.
RuntimeValue merge_parts(const PlanOutput& output, const std::vector<const RuntimeValue*>& parts, const std::vector<int64_t>& samples,
                         BufferPool& pool);

}  // namespace fretsaw
