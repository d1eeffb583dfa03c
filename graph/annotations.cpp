// Annotations from and to ONNX's messages, which the graph keeps serialized in `extra`.
#include "graph/annotations.h"

#include <onnx/onnx_pb.h>

#include <algorithm>

#include "graph/errors.h"

namespace fretsaw {
namespace {

// The fields of ModelProto or NodeProto that the graph has no place for.
template <typename Proto>
Proto parse_extra(const std::string& extra) {
  Proto proto;
  if (!proto.ParseFromString(extra)) throw Error("its further fields do not parse", "the file is damaged");
  return proto;
}

ShardedAxis axis_from(const onnx::ShardedDimProto& proto) {
  ShardedAxis axis{proto.axis(), {}};
  for (const auto& part : proto.simple_sharding()) {
    axis.parts.push_back({part.num_shards(), std::nullopt, part.dim_param()});
    if (part.has_dim_value()) axis.parts.back().size = part.dim_value();
  }
  return axis;
}

TensorAnnotation tensor_from(const onnx::ShardingSpecProto& proto) {
  TensorAnnotation tensor{proto.tensor_name(), {proto.device().begin(), proto.device().end()}, {}, {}};
  for (const auto& group : proto.index_to_device_group_map())
    tensor.groups.push_back({group.key(), {group.value().begin(), group.value().end()}});
  for (const auto& dim : proto.sharded_dim()) tensor.axes.push_back(axis_from(dim));
  return tensor;
}

NodeAnnotation node_from(const onnx::NodeDeviceConfigurationProto& proto) {
  NodeAnnotation node{proto.configuration_id(), std::nullopt, {}};
  if (proto.has_pipeline_stage()) node.pipeline_stage = proto.pipeline_stage();
  for (const auto& spec : proto.sharding_spec()) node.tensors.push_back(tensor_from(spec));
  return node;
}

void write(const ShardedAxis& axis, onnx::ShardedDimProto& proto) {
  proto.set_axis(axis.axis);
  for (const SimpleSharding& part : axis.parts) {
    auto& to = *proto.add_simple_sharding();
    if (part.size)
      to.set_dim_value(*part.size);
    else if (!part.symbol.empty())
      to.set_dim_param(part.symbol);
    to.set_num_shards(part.num_shards);
  }
}

void write(const TensorAnnotation& tensor, onnx::ShardingSpecProto& proto) {
  proto.set_tensor_name(tensor.tensor);
  proto.mutable_device()->Add(tensor.devices.begin(), tensor.devices.end());
  for (const DeviceGroup& group : tensor.groups) {
    auto& to = *proto.add_index_to_device_group_map();
    to.set_key(group.id);
    to.mutable_value()->Add(group.devices.begin(), group.devices.end());
  }
  for (const ShardedAxis& axis : tensor.axes) write(axis, *proto.add_sharded_dim());
}

void write(const NodeAnnotation& node, onnx::NodeDeviceConfigurationProto& proto) {
  proto.set_configuration_id(node.configuration);
  if (node.pipeline_stage) proto.set_pipeline_stage(*node.pipeline_stage);
  for (const TensorAnnotation& tensor : node.tensors) write(tensor, *proto.add_sharding_spec());
}

int64_t product(int64_t a, int64_t b) {
  if (a <= 0 || b <= 0) return std::min(a, b);
  return a > INT64_MAX / b ? INT64_MAX : a * b;
}

}  // namespace

std::vector<DeviceConfiguration> device_configurations(const Model& model) {
  std::vector<DeviceConfiguration> found;
  if (model.extra.empty()) return found;
  const auto proto = parse_extra<onnx::ModelProto>(model.extra);
  for (const auto& c : proto.configuration()) found.push_back({c.name(), c.num_devices(), {c.device().begin(), c.device().end()}});
  return found;
}

void set_device_configurations(Model& model, const std::vector<DeviceConfiguration>& configurations) {
  auto proto = parse_extra<onnx::ModelProto>(model.extra);
  proto.clear_configuration();
  for (const DeviceConfiguration& configuration : configurations) {
    auto& to = *proto.add_configuration();
    to.set_name(configuration.name);
    to.set_num_devices(configuration.num_devices);
    for (const std::string& device : configuration.devices) to.add_device(device);
  }
  model.extra = proto.SerializeAsString();
}

std::vector<NodeAnnotation> annotations(const Node& node) {
  std::vector<NodeAnnotation> found;
  if (node.extra.empty()) return found;
  const auto proto = parse_extra<onnx::NodeProto>(node.extra);
  for (const auto& configuration : proto.device_configurations()) found.push_back(node_from(configuration));
  return found;
}

void remove_annotations(Graph& graph) {
  for (Node* node : graph.nodes) {
    if (!node->extra.empty()) set_annotations(*node, {});
    for (const GraphPtr& body : bodies(*node)) remove_annotations(*body);
  }
}

void set_annotations(Node& node, const std::vector<NodeAnnotation>& annotations) {
  auto proto = parse_extra<onnx::NodeProto>(node.extra);
  proto.clear_device_configurations();
  for (const NodeAnnotation& annotation : annotations) write(annotation, *proto.add_device_configurations());
  node.extra = proto.SerializeAsString();
}

int64_t shards_of(const ShardedAxis& axis) {
  int64_t shards = 1;
  for (const SimpleSharding& part : axis.parts) shards = product(shards, part.num_shards);
  return shards;
}

int64_t shards_of(const TensorAnnotation& tensor) {
  int64_t shards = 1;
  for (const ShardedAxis& axis : tensor.axes) shards = product(shards, shards_of(axis));
  return shards;
}

std::vector<std::vector<int64_t>> holders_of(const TensorAnnotation& tensor) {
  std::vector<std::vector<int64_t>> holders;
  for (int64_t device : tensor.devices) {
    const auto group = std::find_if(tensor.groups.begin(), tensor.groups.end(), [&](const DeviceGroup& g) { return g.id == device; });
    holders.push_back(group == tensor.groups.end() ? std::vector{device} : group->devices);
  }
  return holders;
}

}  // namespace fretsaw
