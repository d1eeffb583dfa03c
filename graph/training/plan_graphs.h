// How the graphs of a plan are numbered, and which part of a state lies where.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "graph/plan.h"

namespace fretsaw {

// Numbers of graphs (PlanGraph::stage). Of a plan that does not train, they are its stages.
struct GraphNumbers {
  int ranks = 1;           // of the pipeline
  int forward = 0;         // stages
  int in_micro_batch = 0;  // graphs that run each micro-batch: stages, twice or three times as many of a plan that trains
  bool trains() const { return in_micro_batch > forward; }
  int forward_of(int number) const;  // the stage that a graph of a micro-batch belongs to
  int rank_of(int number) const;     // the pipeline rank that runs the graph
};
GraphNumbers graph_numbers(const Plan& plan);

// The schedule without what is done once a step.
Schedule of_micro_batches(const Schedule& schedule);

// The type of a part of a state, by the rank's place on each axis; axes that are left out count as 0.
Type part_type(const Type& whole, const std::vector<PlanState::Part>& parts, const std::map<std::string, int>& place);

}  // namespace fretsaw
