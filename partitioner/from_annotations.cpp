// From annotations of the source to pins and stages of what it became.
#include "partitioner/from_annotations.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "graph/annotation_rules.h"
#include "graph/errors.h"
#include "partitioner/annotated_mesh.h"
#include "partitioner/correspondence.h"
#include "partitioner/plan_metadata.h"

namespace fretsaw {
namespace {

const char* const kRemedy = "annotate the model, or partition it by --mesh";

DeviceConfiguration choose_configuration(const Model& source, const std::string& wanted) {
  const std::vector<DeviceConfiguration> all = device_configurations(source);
  std::vector<std::string> names;
  for (const DeviceConfiguration& c : all) names.push_back(c.name);
  if (all.empty()) throw Error("the model has no device configuration", kRemedy);
  if (wanted.empty()) {
    if (all.size() > 1)
      throw Error(fmt::format("the model has {} device configurations: {}", all.size(), fmt::join(names, ", ")),
                  "choose one by --configuration NAME", ErrorCode::usage);
    return all.front();
  }
  const auto found = std::find(names.begin(), names.end(), wanted);
  if (found == names.end())
    throw Error(fmt::format("--configuration names '{}', and the model has {}", wanted, fmt::join(names, ", ")), "choose one of these",
                ErrorCode::usage);
  return all[static_cast<size_t>(found - names.begin())];
}

void refuse_illegal(const Model& source) {
  for (const Finding& finding : check_annotations(source))
    if (finding.severity == "error") throw Error(finding.message, "`fretsaw check` lists all that is wrong with the annotations");
}

bool cuts_any(const Annotations& annotations) {
  return std::any_of(annotations.nodes.begin(), annotations.nodes.end(), [](const AnnotatedNode& node) {
    return std::any_of(node.tensors.begin(), node.tensors.end(), [](const TensorAnnotation& spec) { return shards_of(spec) > 1; });
  });
}

// The mesh in the file's metadata, where it goes with the configuration.
std::optional<Mesh> mesh_of_file(const Model& source, const DeviceConfiguration& configuration, int stages,
                                 std::vector<std::string>& notes) {
  const std::optional<Mesh> file = mesh_of_metadata(source);
  if (!file || configuration.name != kOwnConfiguration) return std::nullopt;
  if (file->size() == configuration.num_devices && (stages == 0 || stages == file->pipeline)) return *file;
  notes.push_back(
      fmt::format("the mesh in the model's metadata does not go with configuration '{}': it is not followed", configuration.name));
  return std::nullopt;
}

// The form that one spec asks for at its place, or why there is none.
SpecForm wanted_form(const Annotations& annotations, const AnnotatedNode& node, const TensorAnnotation& spec, const Value& value) {
  if (!value.type.is_tensor() || !value.type.shape) return {std::nullopt, "its shape is not known"};
  const auto text = node.node->metadata.find(kCutOfTensor + spec.tensor);
  if (annotations.from_plan && text != node.node->metadata.end())
    return {sharding_from_text(text->second, *value.type.shape, annotations.layout.tensor), ""};
  return form_of_spec(spec, *value.type.shape, annotations.devices[static_cast<size_t>(node.stage)], annotations.layout);
}

// Tensors of which only metadata says how they lie (pending sums).
void add_from_metadata(const Node& node, std::vector<TensorAnnotation>& tensors) {
  for (auto it = node.metadata.lower_bound(kCutOfTensor); it != node.metadata.end() && it->first.starts_with(kCutOfTensor); ++it) {
    const std::string tensor = it->first.substr(kCutOfTensor.size());
    if (std::none_of(tensors.begin(), tensors.end(), [&](const TensorAnnotation& t) { return t.tensor == tensor; }))
      tensors.push_back({tensor, {}, {}, {}});
  }
}

}  // namespace

Annotations read_annotations(const Model& source, const PartitionOptions& options) {
  refuse_illegal(source);
  const DeviceConfiguration configuration = choose_configuration(source, options.configuration);
  Annotations found;
  found.configuration = configuration.name;
  const Graph& graph = *source.graph;
  std::vector<int> stages(graph.nodes.size(), -1);
  std::vector<std::vector<TensorAnnotation>> tensors(graph.nodes.size());
  for (size_t i = 0; i < graph.nodes.size(); ++i)
    for (NodeAnnotation& a : annotations(*graph.nodes[i])) {
      if (a.configuration != configuration.name) continue;
      stages[i] = a.pipeline_stage.value_or(-1);
      tensors[i] = std::move(a.tensors);
    }
  const int count = complete_stages(graph, stages);
  found.has_stages = count > 0;
  std::optional<Mesh> given;  // the user's wins
  if (options.mesh.size() > 1)
    given = options.mesh;
  else
    given = mesh_of_file(source, configuration, count, found.notes);
  found.from_plan = given && options.mesh.size() == 1;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const int stage = count > 0 ? stages[i] : 0;
    for (const Value* v : graph.nodes[i]->outputs)
      if (v && count > 0) found.stage_of_value[v->name] = stage;
    if (found.from_plan) add_from_metadata(*graph.nodes[i], tensors[i]);
    if (!tensors[i].empty()) found.nodes.push_back({graph.nodes[i], stage, std::move(tensors[i])});
  }
  find_mesh(graph, configuration, given, count, found);
  if (found.from_plan) {
    found.stage_exceptions = stage_exceptions_of_metadata(source);
    PlanHistory history = history_of_metadata(source);
    found.kept_whole = std::move(history.kept_whole);
    found.notes.insert(found.notes.end(), history.unfollowed.begin(), history.unfollowed.end());
  }
  found.divides_all = given || !cuts_any(found);
  return found;
}

void pin_operands(const Annotations& annotations, const Graph& source, const Graph& normalised, ShardOptions& options,
                  std::vector<std::string>& notes) {
  const Correspondence same(source, normalised);
  options.kept_whole = annotations.kept_whole;
  if (!annotations.divides_all) options.to_divide.emplace();
  for (const bool direct : {true, false})  // what a node says itself comes before what removed nodes said
    for (const AnnotatedNode& annotated : annotations.nodes) {
      if (same.is_direct(annotated.node) != direct) continue;
      const Node* node = same.node_of(annotated.node);
      if (node && options.to_divide) options.to_divide->insert(node);
      for (const TensorAnnotation& spec : annotated.tensors) {
        std::string why = "it is gone when the model is normalised";
        for (const OperandPlace& place : same.places_of(*annotated.node, spec.tensor)) {
          NodePins& pins = options.operands[node];
          pins.inputs.resize(node->inputs.size());
          pins.outputs.resize(node->outputs.size());
          SpecForm form = wanted_form(annotations, annotated, spec, *(place.output ? node->outputs : node->inputs)[place.index]);
          why = form.why;
          auto& pin = (place.output ? pins.outputs : pins.inputs)[place.index];
          if (form.sharding && !pin) pin = std::move(form.sharding);
        }
        if (!why.empty() && shards_of(spec) > 1)
          notes.push_back(fmt::format("node '{}' ({}): the annotation of '{}' is not followed: {}", annotated.node->name,
                                      annotated.node->op, spec.tensor, why));
      }
    }
}

namespace {

// Stages that a node without one takes from its inputs, else from its first user.
void fill_from_neighbours(const GraphIndex& index, std::vector<int>& stage) {
  for (size_t i = 0; i < stage.size(); ++i)
    for (const int p : index.producers[i])
      if (p >= 0) stage[i] = std::max(stage[i], stage[static_cast<size_t>(p)]);
  std::vector<int> first_use(stage.size(), -1);
  for (size_t i = stage.size(); i-- > 0;) {
    if (stage[i] < 0) stage[i] = std::max(first_use[i], 0);
    for (const int p : index.producers[i])
      if (p >= 0) {
        int& first = first_use[static_cast<size_t>(p)];
        first = first < 0 ? stage[i] : std::min(first, stage[i]);
      }
  }
}

void close_empty_stages(StageAssignment& a) {
  std::vector<int> number(static_cast<size_t>(a.stages), 0);
  for (const int s : a.stage_of)
    if (s >= 0) number[static_cast<size_t>(s)] = 1;
  int next = 0;
  for (int& n : number) n = n ? next++ : -1;
  for (int& s : a.stage_of)
    if (s >= 0) s = number[static_cast<size_t>(s)];
  a.stages = std::max(next, 1);
}

}  // namespace

std::vector<int> stages_by_source(const GraphIndex& index, const std::unordered_map<std::string, int>& stage_of_value, int stages,
                                  const StageExceptions& exceptions) {
  std::vector<int> stage(index.nodes.size(), -1);
  for (size_t i = 0; i < stage.size(); ++i)
    for (const Value* v : index.nodes[i]->outputs)
      if (v)
        if (const auto known = stage_of_value.find(v->source_name()); known != stage_of_value.end())
          stage[i] = std::max(stage[i], known->second);
  fill_from_neighbours(index, stage);
  const std::vector<char> copied = copied_nodes(index);
  std::vector<int> own(static_cast<size_t>(stages), 0);
  for (size_t i = 0; i < stage.size(); ++i) own[static_cast<size_t>(stage[i])] += !copied[i];
  // A stage that would hold nothing but copies keeps them as its own.
  const bool copy = std::find(own.begin(), own.end(), 0) == own.end();
  for (size_t i = 0; i < stage.size(); ++i) {
    if (copied[i] && copy) stage[i] = -1;
    const Value* first = index.nodes[i]->out(0);
    if (exceptions.empty() || !first) continue;
    if (const auto other = exceptions.find(first->name); other != exceptions.end() && other->second < stages) stage[i] = other->second;
  }
  return stage;
}

StageAssignment assignment_by_source(const GraphIndex& index, const Annotations& annotations) {
  StageAssignment a;
  a.stages = annotations.mesh.pipeline;
  a.stage_of = stages_by_source(index, annotations.stage_of_value, a.stages, annotations.stage_exceptions);
  close_empty_stages(a);
  return a;
}

}  // namespace fretsaw
