// ONNX's multi-device annotations (IR 11): what a model file itself says of how it is to be cut.
//
// A model has configurations, each a name and a number of devices. A node says, for a configuration, its pipeline stage and how its inputs
// and outputs lie on the devices. docs/annotations.md has the rules, graph/annotation_rules.h checks them.
//
//   weight [8, 12], columns over two devices    {.tensor = "w", .devices = {0, 1}, .axes = {{.axis = 1, .parts = {{.num_shards = 2}}}}}
//   rows over two groups, a copy on each member {.tensor = "w", .devices = {-1, -2}, .groups = {{-1, {0, 1}}, {-2, {2, 3}}},
//                                                .axes = {{.axis = 0, .parts = {{.num_shards = 2}}}}}
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

struct DeviceConfiguration {
  std::string name;
  int num_devices = 0;
  std::vector<std::string> devices;  // their names: none, or one for each
  bool operator==(const DeviceConfiguration&) const = default;
};

// A dimension, or one of the dimensions that a reshape fused into it, and the number of parts it is cut into.
struct SimpleSharding {
  int64_t num_shards = 0;
  std::optional<int64_t> size;  // where the annotation names it
  std::string symbol;           // in place of the size
  bool operator==(const SimpleSharding&) const = default;
};
struct ShardedAxis {
  int64_t axis = 0;                   // negative ones count from the end
  std::vector<SimpleSharding> parts;  // slowest first; mostly one
  bool operator==(const ShardedAxis&) const = default;
};
// Devices that hold the same part of a tensor.
struct DeviceGroup {
  int64_t id = 0;
  std::vector<int64_t> devices;
  bool operator==(const DeviceGroup&) const = default;
};
struct TensorAnnotation {
  std::string tensor;            // an input or output of the node
  std::vector<int64_t> devices;  // one for each part, the last cut axis the fastest; each a device or the id of a group
  std::vector<DeviceGroup> groups;
  std::vector<ShardedAxis> axes;
  bool operator==(const TensorAnnotation&) const = default;
};
struct NodeAnnotation {
  std::string configuration;
  std::optional<int> pipeline_stage;
  std::vector<TensorAnnotation> tensors;
  bool operator==(const NodeAnnotation&) const = default;
};

// In file order. The setters replace what was there and keep every other field; setting annotations doesn't raise the model's IR version.
std::vector<DeviceConfiguration> device_configurations(const Model& model);
void set_device_configurations(Model& model, const std::vector<DeviceConfiguration>& configurations);
std::vector<NodeAnnotation> annotations(const Node& node);
void set_annotations(Node& node, const std::vector<NodeAnnotation>& annotations);
void remove_annotations(Graph& graph);  // of all its nodes, bodies included

inline constexpr int64_t kIrWithAnnotations = 11;

// The parts that an axis is cut into: the product over its simple shardings. Negative or zero where one of them is; INT64_MAX where it is
// too large for a number.
int64_t shards_of(const ShardedAxis& axis);
// The same over all axes.
int64_t shards_of(const TensorAnnotation& tensor);
// For each entry of `devices`, the devices it stands for.
std::vector<std::vector<int64_t>> holders_of(const TensorAnnotation& tensor);

}  // namespace fretsaw
