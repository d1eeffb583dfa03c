// What ONNX's annotations have no place for, as metadata of annotated.onnx: docs/annotations.md lists the entries.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "graph/ir.h"
#include "graph/plan.h"
#include "partitioner/partition.h"

namespace fretsaw {

inline constexpr const char* kOwnConfiguration = "fretsaw";
// Of a node, followed by the tensor's name: how it lies where a spec can't say it.
inline const std::string kCutOfTensor = "fretsaw.cut.";

// What was found out on the way to a plan.
struct PlanHistory {
  std::vector<std::string> unfollowed;            // notes of what was asked for and could not be done
  std::map<std::string, std::string> kept_whole;  // as of ShardedModel
};
// The entries of a plan that was made with these options.
void write_metadata(const Plan& plan, const PartitionOptions& options, const std::map<std::string, int>& stage_exceptions,
                    const PlanHistory& history, Model& model);
void remove_metadata(Model& model);  // of the model and its nodes

std::optional<Mesh> mesh_of_metadata(const Model& model);
PlanHistory history_of_metadata(const Model& model);
std::map<std::string, int> stage_exceptions_of_metadata(const Model& model);
// Options that the user did not give are taken from the model.
PartitionOptions with_metadata(PartitionOptions options, const Model& model);

}  // namespace fretsaw
