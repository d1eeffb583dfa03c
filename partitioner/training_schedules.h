// Orders of forward and backward passes.
#pragma once
#include <string>

#include "graph/schedule.h"

namespace fretsaw {

// The plan's graphs as a schedule sees them: `problem` has forward and backward graphs as its stages; the first `forward` of them are
// forward, in their order.
struct TrainingProblem {
  ScheduleProblem problem;
  int forward = 1;
};

//   gpipe   all micro-batches forward, then all backward
//   1f1b    rank p of P first runs P - 1 - p forward, then one forward and one backward in turns, then the backward ones that are left
//
// In both, micro-batches are run backward in their order. Throws Error for another name.
Schedule make_training_schedule(const std::string& name, const TrainingProblem& problem);

}  // namespace fretsaw
