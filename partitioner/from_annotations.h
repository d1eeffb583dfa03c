// What a model's own multi-device annotations ask for: a mesh, the stage of each node, and how operands lie.
//
//   1 configuration of 4 devices, stages 0 and 5, specs over [0, 1] and [2, 3]      pipeline=2,tensor=2
//   2 devices, x [4, 8] cut in 2 along axis 0, no weight cut                        data=2
//
// Annotations name values of the source. Normalising renames, fuses and removes nodes; pins find their way by names of results.
#pragma once
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "graph/annotations.h"
#include "graph/ir.h"
#include "partitioner/partition.h"
#include "partitioner/sharding/shard.h"
#include "partitioner/spec_form.h"
#include "partitioner/stages.h"

namespace fretsaw {

// Nodes of the cut graph that run elsewhere than where their source says, by the name of their first result.
using StageExceptions = std::map<std::string, int>;

// One node's annotation for the configuration that was chosen.
struct AnnotatedNode {
  const Node* node = nullptr;  // of the source graph
  int stage = 0;               // inferred where it names none
  std::vector<TensorAnnotation> tensors;
};
struct Annotations {
  std::string configuration;
  Mesh mesh;
  bool has_stages = false;
  bool from_plan = false;                               // the file is a plan's annotated.onnx: its metadata completes the annotations
  bool divides_all = false;                             // every contraction is to be divided, not only those that have a spec
  std::unordered_map<std::string, int> stage_of_value;  // by source name
  StageExceptions stage_exceptions;
  std::map<std::string, std::string> kept_whole;  // nodes that are known not to be divisible, with the reason
  std::vector<AnnotatedNode> nodes;               // those with specs
  std::vector<DeviceNumbers> devices;             // of each stage
  StageLayout layout;
  std::vector<std::string> notes;
};
// Reads the annotations of a model as it was read. `options`: a mesh that the user gave wins. Throws Error naming what is illegal, or what
// the devices do not suffice for.
Annotations read_annotations(const Model& source, const PartitionOptions& options);

// The pins for the normalised graph. What has no place there is noted.
void pin_operands(const Annotations& annotations, const Graph& source, const Graph& normalised, ShardOptions& options,
                  std::vector<std::string>& notes);

// The stage of every node of a graph that was made from the source: what makes a value of the source runs where that does, the rest where
// its inputs are; -1: copied into each stage that needs it.
std::vector<int> stages_by_source(const GraphIndex& index, const std::unordered_map<std::string, int>& stage_of_value, int stages,
                                  const StageExceptions& exceptions);
// The same as an assignment (without an order). A stage that normalising left nothing of is closed.
StageAssignment assignment_by_source(const GraphIndex& index, const Annotations& annotations);

}  // namespace fretsaw
