// What training needs of a device's memory.
#pragma once
#include <map>
#include <string>

#include "graph/plan.h"
#include "graph/sizes.h"

namespace fretsaw {

// Sizes of symbols in the inputs of one micro-batch: the plan's own, and those of a whole batch's inputs as far as they are known.
DimSizes sizes_of_micro_batch(const Plan& plan, const std::map<std::string, Dims>& batch);
// Says which sizes of inputs are still open.
void note_open_sizes(const DimSizes& sizes, Plan& plan);
// What the fullest rank holds at once: its states, what micro-batches keep for their way back, and the values of the graph that needs most.
int64_t bytes_of_fullest_rank(const Plan& plan, const DimSizes& sizes);
// Throws Error where that is more than the memory. `recompute` is "none" or "all".
void check_training_memory(const Plan& plan, const DimSizes& sizes, int64_t memory, const std::string& recompute);

}  // namespace fretsaw
