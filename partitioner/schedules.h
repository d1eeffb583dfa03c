// Generators of schedules: pure functions of stages, micro-batches and who needs what.
#pragma once
#include <string>
#include <vector>

#include "graph/schedule.h"

namespace fretsaw {

// Fill and drain: every stage runs micro-batches 0, 1, 2, ... forward. Receives are posted one micro-batch ahead and a micro-batch is
// dropped only after the next one ran, so that moving values and computing overlap:
//   2 stages, 2 micro-batches   rank 0: 0F0 0S0>1 0F1 0D0 0S1>1 0D1      rank 1: 1R0<0 1R1<0 1F0 1D0 1F1 1D1
Schedule gpipe(const ScheduleProblem& problem);

// One run of a graph: which stage, which micro-batch.
struct StageRun {
  int stage = 0, micro_batch = 0;
};
// The lists of all ranks from the orders of their runs, `runs[r]` being rank r's: results are sent when they are made, and a micro-batch is
// freed after its last use. A run comes after those of its own rank that it needs.
//
// Receives are posted at least one run ahead, and before the run in whose time their sender is done, played with `time_of_stage` (any
// unit, above 0). So no sender waits for its receiver where runs take these times, and as each receive is posted before its send in that
// timeline, there is an order in which all of them go on even if every send waits: no such list has a rendezvous deadlock.
//
// Throws Error when the orders can't be played: ranks wait for each other in a circle.
std::vector<std::vector<Action>> actions_around(const ScheduleProblem& problem, const std::vector<std::vector<StageRun>>& runs,
                                                const std::vector<double>& time_of_stage);
int ranks_of(const ScheduleProblem& problem);

// By name. Throws Error for a name that there is not, or one that needs a backward pass.
Schedule make_schedule(const std::string& name, const ScheduleProblem& problem);

}  // namespace fretsaw
