// The rules for multi-device annotations, one function each.
#include "graph/annotation_rules.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "graph/annotations.h"

namespace fretsaw {
namespace {

using Configurations = std::map<std::string, DeviceConfiguration>;

struct Report {
  std::vector<Finding>& findings;
  const Node* node = nullptr;
  std::string tensor;

  void operator()(const std::string& rule, const std::string& problem) const {
    std::string at;
    if (node) at = fmt::format("node '{}' ({}): ", node->name, node->op);
    if (!tensor.empty()) at += fmt::format("tensor '{}' ", tensor);
    findings.push_back({"error", node ? node->name : "", tensor, rule, at + problem});
  }
};

// --- the model's list of configurations ---

Configurations check_configurations(const Model& model, const Report& report) {
  Configurations known;
  for (const DeviceConfiguration& c : device_configurations(model)) {
    if (c.name.empty()) report("configuration-name", "a device configuration has no name");
    if (!known.emplace(c.name, c).second)
      report("configuration-name", fmt::format("there are two device configurations with the name '{}'", c.name));
    if (c.num_devices < 1)
      report("configuration-devices", fmt::format("device configuration '{}' has {} devices", c.name, c.num_devices));
    else if (!c.devices.empty() && c.devices.size() != static_cast<size_t>(c.num_devices))
      report("configuration-devices",
             fmt::format("device configuration '{}' has {} devices and names {}", c.name, c.num_devices, c.devices.size()));
  }
  return known;
}

// --- one tensor of one node ---

const Value* operand(const Node& node, const std::string& name) {
  for (const auto* values : {&node.inputs, &node.outputs})
    for (const Value* v : *values)
      if (v && !name.empty() && v->name == name) return v;
  return nullptr;
}

std::optional<Shape> shape_of_value(const Value& value, const TypeOf& type_of) {
  if (value.constant) return shape_of(value.constant->dims);
  const Type type = type_of ? type_of(value) : value.type;
  return type.is_tensor() ? type.shape : std::nullopt;
}

void check_devices(const TensorAnnotation& tensor, const DeviceConfiguration* configuration, const Report& report) {
  std::set<int64_t> ids;
  for (const DeviceGroup& group : tensor.groups) {
    if (!ids.insert(group.id).second) report("device-group", fmt::format("has two groups of devices with the key {}", group.id));
    if (group.devices.empty()) report("device-group", fmt::format("has a group of devices, {}, with none in it", group.id));
  }
  std::set<int64_t> seen;
  for (const auto& holders : holders_of(tensor))
    for (int64_t device : holders) {
      if (!seen.insert(device).second) {
        report("device-twice", fmt::format("lists device {} twice", device));
      } else if (device < 0) {
        report("device-range", fmt::format("lists device {}, which is negative and no key of a group", device));
      } else if (configuration && configuration->num_devices > 0 && device >= configuration->num_devices) {
        report("device-range",
               fmt::format("lists device {}; configuration '{}' has {}", device, configuration->name, configuration->num_devices));
      }
    }
}

// One part for each entry of the device list: copies of a part are made by groups. No cut at all is a copy on each device listed. Where
// no device is listed, completing the annotation chooses some.
void check_counts(const TensorAnnotation& tensor, const DeviceConfiguration* configuration, const Report& report) {
  for (const ShardedAxis& axis : tensor.axes)
    for (const SimpleSharding& part : axis.parts)
      if (part.num_shards < 1) return report("shard-count", fmt::format("has {} parts along axis {}", part.num_shards, axis.axis));
  const int64_t shards = shards_of(tensor);
  if (shards == 1) return;
  if (tensor.devices.empty()) {
    if (configuration && configuration->num_devices > 0 && shards > configuration->num_devices)
      report("shard-count", fmt::format("is cut into {} parts; configuration '{}' has {} devices", shards, configuration->name,
                                        configuration->num_devices));
  } else if (shards != static_cast<int64_t>(tensor.devices.size())) {
    report("shard-count", fmt::format("is cut into {} parts and lists {} devices or groups: [{}]", shards, tensor.devices.size(),
                                      fmt::join(tensor.devices, ", ")));
  }
}

// The sizes of one axis against the dimension. Several multiply up to it, as dimensions that a reshape fused do; one that isn't named may
// be anything that makes it come out.
void check_sizes(const ShardedAxis& axis, const Dim& dim, const Report& report) {
  int64_t product = 1;
  bool all_named = true;
  std::vector<std::string> named;
  for (const SimpleSharding& part : axis.parts) {
    named.push_back(part.size ? std::to_string(*part.size) : "?");
    if (!part.size) {
      all_named = false;
    } else if (*part.size < 0) {
      return report("shard-size", fmt::format("has the size {} along axis {}", *part.size, axis.axis));
    } else {
      product = *part.size > 0 && product > INT64_MAX / *part.size ? INT64_MAX : product * *part.size;
    }
  }
  if (named.empty() || !dim.known() || product == dim.value) return;
  if (all_named || product == 0 || dim.value % product != 0)
    report("shard-size", fmt::format("has the size {} along axis {}, which has {}", fmt::join(named, "*"), axis.axis, dim.value));
}

void check_axes(const TensorAnnotation& tensor, const std::optional<Shape>& shape, const Report& report) {
  std::set<int64_t> seen;
  for (const ShardedAxis& axis : tensor.axes) {
    int64_t from_front = axis.axis;
    if (shape) {
      const auto rank = static_cast<int64_t>(shape->size());
      if (axis.axis < -rank || axis.axis >= rank) {
        report("axis-range", fmt::format("is cut along axis {}; its rank is {}", axis.axis, rank));
        continue;
      }
      if (from_front < 0) from_front += rank;
    }
    if (!seen.insert(from_front).second) report("axis-twice", fmt::format("is cut along axis {} twice", axis.axis));
    check_sizes(axis, shape ? (*shape)[static_cast<size_t>(from_front)] : Dim(), report);
  }
}

void check_node(const Node& node, const std::vector<NodeAnnotation>& annotations, const Configurations& known, const TypeOf& type_of,
                std::vector<Finding>& findings) {
  std::set<std::string> configurations;
  for (const NodeAnnotation& annotation : annotations) {
    const Report report{findings, &node, ""};
    const auto found = known.find(annotation.configuration);
    const DeviceConfiguration* configuration = found == known.end() ? nullptr : &found->second;
    if (!configuration) report("unknown-configuration", fmt::format("the model has no configuration '{}'", annotation.configuration));
    if (!configurations.insert(annotation.configuration).second)
      report("configuration-twice", fmt::format("is annotated twice for configuration '{}'", annotation.configuration));
    if (annotation.pipeline_stage && *annotation.pipeline_stage < 0)
      report("stage-negative", fmt::format("its pipeline stage is {}", *annotation.pipeline_stage));
    std::set<std::string> tensors;
    for (const TensorAnnotation& tensor : annotation.tensors) {
      const Report of_tensor{findings, &node, tensor.tensor};
      const Value* value = operand(node, tensor.tensor);
      if (!tensors.insert(tensor.tensor).second) of_tensor("tensor-twice", "is annotated twice");
      if (!value)
        of_tensor("unknown-tensor", tensor.tensor.empty() ? "an annotation names no tensor" : "is no input or output of the node");
      check_devices(tensor, configuration, of_tensor);
      check_counts(tensor, configuration, of_tensor);
      check_axes(tensor, value ? shape_of_value(*value, type_of) : std::nullopt, of_tensor);
    }
  }
}

// --- stages along the edges ---

using Annotated = std::unordered_map<const Node*, std::vector<NodeAnnotation>>;

// Walks a model for one configuration. A node that names no stage runs no earlier than what it uses, so that a stage that goes back is
// found across it, too.
class StageOrder {
 public:
  StageOrder(const Annotated& annotated, const std::string& configuration, std::vector<Finding>& findings)
      : annotated_(annotated), configuration_(configuration), findings_(findings) {}

  struct Made {
    int stage = -1;  // -1: nothing says
    const Node* node = nullptr;
  };
  // `within`: when the node runs whose body the graph is. Returns the latest stage in the graph.
  Made walk(const Graph& graph, const Made& within) {
    Made latest = within;
    for (const Node* node : graph.nodes) latest = later(latest, visit(*node, within));
    return latest;
  }

 private:
  static Made later(const Made& a, const Made& b) { return b.stage > a.stage ? b : a; }

  Made after(const std::vector<Value*>& values, Made made) const {
    for (const Value* v : values)
      if (auto it = made_.find(v); v && it != made_.end()) made = later(made, it->second);
    return made;
  }

  Made visit(const Node& node, const Made& within) {
    const Made inputs = after(node.inputs, within);
    const std::vector<GraphPtr> inner = bodies(node);
    const Made needed = inner.empty() ? inputs : after(captures(node), inputs);
    const std::optional<int> own = stage_of(node);
    if (own && *own < needed.stage) tell(node, *own, needed);
    // What a body captures is held against the node in it that uses it, unless the whole body has a stage.
    const Made start = own ? Made{*own, &node} : inputs;
    Made made = own ? start : needed;
    for (const GraphPtr& body : inner) made = later(made, walk(*body, start));
    for (const Value* v : node.outputs)
      if (v) made_[v] = made;
    return made;
  }

  std::optional<int> stage_of(const Node& node) const {
    const auto it = annotated_.find(&node);
    if (it == annotated_.end()) return std::nullopt;
    for (const NodeAnnotation& a : it->second)
      if (a.configuration == configuration_ && a.pipeline_stage && *a.pipeline_stage >= 0) return a.pipeline_stage;
    return std::nullopt;
  }

  void tell(const Node& node, int stage, const Made& needed) const {
    Report{findings_, &node, ""}("stage-back", fmt::format("its pipeline stage is {}, and it needs what node '{}' makes in stage {}", stage,
                                                           needed.node->name, needed.stage));
  }

  const Annotated& annotated_;
  const std::string& configuration_;
  std::vector<Finding>& findings_;
  std::unordered_map<const Value*, Made> made_;
};

void for_each_node(const Graph& graph, const std::function<void(const Node&)>& visit) {
  for (const Node* node : graph.nodes) {
    visit(*node);
    for (const GraphPtr& body : bodies(*node)) for_each_node(*body, visit);
  }
}

}  // namespace

std::vector<Finding> check_annotations(const Model& model, const TypeOf& type_of) {
  std::vector<Finding> findings;
  const Configurations known = check_configurations(model, {findings, nullptr, ""});
  Annotated annotated;
  std::set<std::string> with_stages;
  for_each_node(*model.graph, [&](const Node& node) {
    std::vector<NodeAnnotation> found = annotations(node);
    if (found.empty()) return;
    check_node(node, found, known, type_of, findings);
    for (const NodeAnnotation& a : found)
      if (a.pipeline_stage) with_stages.insert(a.configuration);
    annotated.emplace(&node, std::move(found));
  });
  for (const std::string& configuration : with_stages) StageOrder(annotated, configuration, findings).walk(*model.graph, {});
  return findings;
}

}  // namespace fretsaw
