// What a plan that trains holds: its graphs by kind, and what ranks keep from step to step.
#pragma once
#include <map>
#include <string>

#include "graph/training/training_plan_file.h"
#include "tools/json_output.h"

namespace fretsaw {

struct KeptStates {
  int64_t count = 0, bytes = 0;
};
// What a rank keeps: the states that its graphs take or give, as parts. `coordinates` of the rank: data, pipeline, tensor.
KeptStates states_of_rank(const Plan& plan, const std::map<std::string, int>& coordinates);
// Whether this rank runs the graph: it is of the rank's pipeline place, and the coordinates agree on the axes on which the graph differs.
bool runs(const Plan& plan, const std::map<std::string, int>& coordinates, const PlanGraph& graph);

// States by what they are ("parameter", "gradient", "exp_avg", ...): how many, their bytes, and over which axes so many are divided.
Json states_json(const Plan& plan);
void print_states(const Plan& plan);
// Loss, optimizer, options, numbers of parameters and statistics.
Json training_json(const TrainingPlanFile& file);
void print_training(const TrainingPlanFile& file);

}  // namespace fretsaw
