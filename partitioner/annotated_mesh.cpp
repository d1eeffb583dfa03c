// Devices of stages, and the split of a stage's devices into a data axis and a tensor axis.
#include "partitioner/annotated_mesh.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <unordered_set>

#include "graph/errors.h"

namespace fretsaw {

int complete_stages(const Graph& source, std::vector<int>& stages) {
  std::set<int> named(stages.begin(), stages.end());
  named.erase(-1);
  if (named.empty()) return 0;
  std::unordered_map<const Value*, int> made, first_use;
  for (size_t i = 0; i < source.nodes.size(); ++i) {
    const Node& node = *source.nodes[i];
    int& stage = stages[i];
    if (stage >= 0) stage = static_cast<int>(std::distance(named.begin(), named.find(stage)));
    const auto after = [&](const Value* v) {
      if (const auto it = made.find(v); it != made.end()) stage = std::max(stage, it->second);
    };
    for (const Value* v : node.inputs) after(v);
    for (const Value* v : captures(node)) after(v);
    for (const Value* v : node.outputs)
      if (v && stage >= 0) made[v] = stage;
  }
  for (size_t i = source.nodes.size(); i-- > 0;) {
    const Node& node = *source.nodes[i];
    if (stages[i] < 0) {
      int first = static_cast<int>(named.size());
      for (const Value* v : node.outputs)
        if (const auto it = first_use.find(v); v && it != first_use.end()) first = std::min(first, it->second);
      stages[i] = first < static_cast<int>(named.size()) ? first : 0;
    }
    const auto use = [&](const Value* v) {
      const auto [it, is_new] = first_use.try_emplace(v, stages[i]);
      if (!is_new) it->second = std::min(it->second, stages[i]);
    };
    for (const Value* v : node.inputs)
      if (v) use(v);
    for (const Value* v : captures(node)) use(v);
  }
  return static_cast<int>(named.size());
}

namespace {

// Values that depend on an input of the model.
std::unordered_set<const Value*> fed_values(const Graph& graph) {
  std::unordered_set<const Value*> fed;
  for (const Value* v : graph.inputs)
    if (!v->constant) fed.insert(v);
  const auto is_fed = [&](const Value* v) { return fed.count(v) > 0; };
  for (const Node* node : graph.nodes) {
    const std::vector<Value*> captured = captures(*node);
    if (std::any_of(node->inputs.begin(), node->inputs.end(), is_fed) || std::any_of(captured.begin(), captured.end(), is_fed))
      fed.insert(node->outputs.begin(), node->outputs.end());
  }
  fed.erase(nullptr);
  return fed;
}

const Value* operand(const Node& node, const std::string& name) {
  for (const auto* values : {&node.inputs, &node.outputs})
    for (const Value* v : *values)
      if (v && v->name == name) return v;
  return nullptr;
}

// One spec that cuts a tensor, with the devices of its stage.
struct CutSpec {
  const TensorAnnotation& spec;
  const DeviceNumbers& numbers;
  bool fed;  // the tensor depends on an input
  std::optional<size_t> rank;
  // Along the dimension that may hold the batch?
  bool along_batch(size_t axis) const {
    const int64_t a = spec.axes[axis].axis;
    return fed && (a == 0 || (rank && a == -static_cast<int64_t>(*rank)));
  }
};

// Whether the data axis accounts for all cuts of the batch and nothing else.
bool goes_with(const CutSpec& cut, const StageLayout& layout) {
  const std::vector<int> parts = parts_by_number(cut.spec, cut.numbers, layout.size());
  for (size_t a = 0; a < cut.spec.axes.size(); ++a) {
    const bool batch = cut.along_batch(a) && shards_of(cut.spec.axes[a]) > 1;
    std::map<int, int64_t> by_tensor;
    for (int n = 0; n < layout.size(); ++n) {
      if (parts[static_cast<size_t>(n)] < 0) return false;
      const int64_t piece = pieces_of_part(cut.spec, parts[static_cast<size_t>(n)])[a];
      if (batch && (piece != layout.data_of(n) || shards_of(cut.spec.axes[a]) != layout.data)) return false;
      if (!batch && by_tensor.try_emplace(layout.tensor_of(n), piece).first->second != piece) return false;
    }
  }
  return true;
}

// As much of the devices as can be for the batch, where some value is cut along it; else all for tensors.
StageLayout find_layout(const std::vector<CutSpec>& cuts, int devices) {
  const bool batch = std::any_of(cuts.begin(), cuts.end(), [](const CutSpec& c) {
    for (size_t a = 0; a < c.spec.axes.size(); ++a)
      if (c.along_batch(a) && shards_of(c.spec.axes[a]) > 1) return true;
    return false;
  });
  for (int data = devices; batch && data > 1; --data) {
    if (devices % data != 0) continue;
    for (const bool data_fastest : {false, true}) {
      const StageLayout layout{data, devices / data, data_fastest};
      if (std::all_of(cuts.begin(), cuts.end(), [&](const CutSpec& c) { return goes_with(c, layout); })) return layout;
    }
  }
  return {1, devices, false};
}

std::vector<CutSpec> cut_specs(const Graph& source, const Annotations& annotations) {
  const std::unordered_set<const Value*> fed = fed_values(source);
  std::vector<CutSpec> cuts;
  for (const AnnotatedNode& node : annotations.nodes)
    for (const TensorAnnotation& spec : node.tensors) {
      const Value* v = operand(*node.node, spec.tensor);
      if (shards_of(spec) <= 1 || !v) continue;
      std::optional<size_t> rank;
      if (v->type.is_tensor() && v->type.shape) rank = v->type.shape->size();
      cuts.push_back({spec, annotations.devices[static_cast<size_t>(node.stage)], fed.count(v) > 0, rank});
    }
  return cuts;
}

// Fills the devices of each stage, numbered in ascending order; returns the number that every stage must have for what its specs ask.
int number_devices(int stages, Annotations& annotations) {
  std::vector<std::set<int64_t>> named(static_cast<size_t>(stages));
  int64_t most = 0;
  for (const AnnotatedNode& node : annotations.nodes)
    for (const TensorAnnotation& spec : node.tensors) {
      for (const auto& holders : holders_of(spec)) named[static_cast<size_t>(node.stage)].insert(holders.begin(), holders.end());
      if (spec.devices.empty() && !spec.axes.empty()) most = std::max(most, shards_of(spec));
    }
  annotations.devices.assign(static_cast<size_t>(stages), {});
  for (size_t s = 0; s < named.size(); ++s) {
    for (const int64_t device : named[s]) annotations.devices[s].emplace(device, static_cast<int>(annotations.devices[s].size()));
    most = std::max(most, static_cast<int64_t>(named[s].size()));
  }
  return static_cast<int>(most);
}

void check_devices(const DeviceConfiguration& configuration, const Annotations& annotations, int stages, int each) {
  if (int64_t{stages} * each <= configuration.num_devices) return;
  std::vector<int64_t> first;
  for (const auto& [device, number] : annotations.devices.front()) first.push_back(device);
  throw Error(
      fmt::format("device configuration '{}' has {} devices, and {} stages of {} devices each are annotated (stage 0 on [{}]): stages "
                  "need devices of their own",
                  configuration.name, configuration.num_devices, stages, each, fmt::join(first, ", ")),
      "annotate other devices for each stage, or leave out the stages");
}

}  // namespace

void find_mesh(const Graph& source, const DeviceConfiguration& configuration, const std::optional<Mesh>& given, int stages,
               Annotations& annotations) {
  Mesh& mesh = annotations.mesh;
  const int annotated_stages = std::max(stages, 1);
  const int named = number_devices(annotated_stages, annotations);
  if (given) {
    mesh = *given;
    annotations.layout = {mesh.data, mesh.tensor, false};
    if (stages > 0 && stages != mesh.pipeline)
      throw Error(fmt::format("the mesh has pipeline={}, and configuration '{}' has {} stages", mesh.pipeline, configuration.name, stages),
                  "leave out --mesh, or name as many stages as are annotated", ErrorCode::usage);
    if (named > annotations.layout.size())
      throw Error(fmt::format("the mesh has {} ranks in a stage, and configuration '{}' names {} devices there", annotations.layout.size(),
                              configuration.name, named),
                  "leave out --mesh, or give it as many ranks", ErrorCode::usage);
    return;
  }
  mesh.pipeline = annotated_stages;
  if (named == 0 && configuration.num_devices % annotated_stages != 0)
    throw Error(fmt::format("device configuration '{}' has {} devices, which {} stages do not share evenly", configuration.name,
                            configuration.num_devices, annotated_stages),
                "annotate the devices of each stage, or give --mesh");
  const int each = named > 0 ? named : configuration.num_devices / annotated_stages;
  check_devices(configuration, annotations, annotated_stages, each);
  annotations.layout = find_layout(cut_specs(source, annotations), each);
  mesh.data = annotations.layout.data;
  mesh.tensor = annotations.layout.tensor;
}

}  // namespace fretsaw
