// The source model with what the plan decided, as ONNX's own multi-device annotations (IR 11).
#pragma once
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "graph/plan.h"
#include "partitioner/batch.h"
#include "partitioner/from_annotations.h"
#include "partitioner/plan_metadata.h"

namespace fretsaw {

struct Annotating {
  const Plan& plan;  // its mesh and options
  const PartitionOptions& options;
  const Graph& normalised;
  const BatchFacts& facts;                // of the normalised graph
  const std::vector<NodePins>* operands;  // of its nodes; null: there is no tensor axis
  const GraphIndex& index;                // of the graph that was cut, and how
  const StageAssignment& assignment;
  const PlanHistory& history;
};
// Every node of the source gets its stage and, where stages have several devices, a sharding spec for each operand whose lie is decided;
// values between nodes that were fused have none. `stage_of_value`: the stage that makes a value of the plan's graphs, by source name.
// Large weights are left out.
std::shared_ptr<Model> annotate(Model source, const std::unordered_map<std::string, int>& stage_of_value, const Annotating& a);

}  // namespace fretsaw
