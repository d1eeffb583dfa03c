// The timeline of a schedule, from costs alone.
#pragma once
#include <map>
#include <utility>
#include <vector>

#include "graph/plan.h"
#include "graph/sizes.h"

namespace fretsaw {

struct SimulatedAction {
  Action action;
  double start_us = 0, end_us = 0;
};
struct SimulatedRank {
  double busy_us = 0;
  double begin_us = 0, end_us = 0;  // of its first run, and of its last one
  // The most micro-batches alive on the rank at once. When training, each counts from its forward run to the last run backward, or of
  // weight gradients, that uses it; a rank of several chunks counts each chunk's by itself.
  int peak_micro_batches = 0;
  int64_t peak_kept_bytes = 0;  // the most bytes that these keep for the way back at once
  std::vector<SimulatedAction> actions;
};
struct Simulation {
  double time_us = 0;     // from the first run of all to the last
  double idle_share = 0;  // of all ranks' time
  // The time of a step where steps follow one another and a rank begins the next one when it is done with its own part of this one: the
  // longest that a rank takes from its first run to its last.
  double step_us = 0;
  double step_idle_share = 0;  // of all ranks' time in it
  std::vector<SimulatedRank> ranks;
};

// What there is to say of time where there is no plan.
struct ScheduleTimes {
  std::vector<double> run_us;                           // of each graph, by its number in the problem
  std::map<std::pair<int, int>, double> transfer_us{};  // of all values from one graph to another; 0 where it is not named
  std::vector<int64_t> kept_bytes{};                    // of each forward stage, what a micro-batch keeps for its way back; empty: nothing
};
// Plays the schedule, which may end with reductions and updates of numbers beyond the problem's: they take no time. `forward` is the
// number of forward stages of a schedule that trains, numbered as TrainingProblem says, and 0 of any other. Transfers run beside the
// ranks' work, begin when the receive is posted and follow one another between two graphs. Throws what verify() does.
Simulation simulate(const Schedule& schedule, const ScheduleProblem& problem, const ScheduleTimes& times, int forward = 0);

// By the plan's own estimates, of inference or of training. `sizes`: of symbols; without it they count as 1.
Simulation simulate(const Plan& plan);
Simulation simulate(const Plan& plan, const DimSizes& sizes);

}  // namespace fretsaw
