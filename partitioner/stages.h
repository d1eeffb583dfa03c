// From an assignment of nodes to stages to one graph a stage, with routes between them.
#pragma once
#include <functional>
#include <vector>

#include "graph/plan.h"
#include "graph/sizes.h"
#include "partitioner/target.h"
#include "partitioner/units.h"

namespace fretsaw {

struct StageAssignment {
  int stages = 1;
  std::vector<int> order;     // positions of the nodes, in an order that is legal to run
  std::vector<int> stage_of;  // of each node, by position; -1: copied into each stage that needs it
  bool may_be_empty = false;  // stages may have no node
  int forward = 0;            // above 0: so many stages run forward, and the other numbers are those of their graphs for the way back
};
// Throws Error listing the circle when stages would depend on each other in one, or naming an empty stage.
void check_assignment(const GraphIndex& index, const StageAssignment& assignment);

// Fills graphs, routes, inputs' stages, outputs and notes of the plan. A stage graph takes what it needs of the source's inputs and
// `recv:VALUE` for every value that comes from another stage; it gives the source's outputs that it makes and `send:VALUE>STAGE`.
// With a tensor axis the graphs are those of the rank `tensor` of it.
void build_stages(const Model& model, const GraphIndex& index, const StageAssignment& assignment, Plan& plan, int tensor = 0);

// The most bytes of values alive at once, in running order; inputs from the start, outputs to the end. Send and Recv pass on what they
// take. What `elsewhere` says is counted elsewhere.
int64_t peak_activation_bytes(const Graph& graph, const std::function<bool(const Value&)>& elsewhere = {});

// Times and sizes of one micro-batch, from the stage graphs. `sizes`: of symbols, where it is not micro_batch_sizes() that counts.
void estimate_stages(Plan& plan, const Target& target);
void estimate_stages(Plan& plan, const Target& target, const DimSizes& sizes);

}  // namespace fretsaw
