// From an assignment of nodes to stages to one graph a stage, with routes between them.
#pragma once
#include <vector>

#include "graph/plan.h"
#include "partitioner/target.h"
#include "partitioner/units.h"

namespace fretsaw {

struct StageAssignment {
  int stages = 1;
  std::vector<int> order;     // positions of the nodes, in an order that is legal to run
  std::vector<int> stage_of;  // of each node, by position; -1: copied into each stage that needs it
  bool may_be_empty = false;  // stages may have no node
};
// Throws Error listing the circle when stages would depend on each other in one, or naming an empty stage.
void check_assignment(const GraphIndex& index, const StageAssignment& assignment);

// Fills graphs, routes, inputs' stages, outputs and notes of the plan. A stage graph takes what it needs of the source's inputs and
// `recv:VALUE` for every value that comes from another stage; it gives the source's outputs that it makes and `send:VALUE>STAGE`.
// With a tensor axis the graphs are those of the rank `tensor` of it.
void build_stages(const Model& model, const GraphIndex& index, const StageAssignment& assignment, Plan& plan, int tensor = 0);

// Times and sizes of one micro-batch, from the stage graphs.
void estimate_stages(Plan& plan, const Target& target);

}  // namespace fretsaw
