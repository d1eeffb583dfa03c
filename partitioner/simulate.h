// The timeline of a plan's schedule, from the costs in the plan alone.
#pragma once
#include <vector>

#include "graph/plan.h"

namespace fretsaw {

struct SimulatedAction {
  Action action;
  double start_us = 0, end_us = 0;
};
struct SimulatedRank {
  double busy_us = 0;
  int peak_micro_batches = 0;  // the most micro-batches alive on the rank at once
  std::vector<SimulatedAction> actions;
};
struct Simulation {
  double time_us = 0;
  double idle_share = 0;  // of all ranks' time
  std::vector<SimulatedRank> ranks;
};
Simulation simulate(const Plan& plan);

}  // namespace fretsaw
