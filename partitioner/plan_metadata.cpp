// Entries as text: numbers, lists with commas, one entry for each name.
#include "partitioner/plan_metadata.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

#include "graph/annotations.h"
#include "graph/errors.h"

namespace fretsaw {
namespace {

constexpr const char* kMesh = "fretsaw.mesh";
constexpr const char* kSchedule = "fretsaw.schedule";
constexpr const char* kMicroBatches = "fretsaw.micro_batches";
constexpr const char* kTarget = "fretsaw.target";
constexpr const char* kMemory = "fretsaw.memory";
constexpr const char* kBatch = "fretsaw.batch.";  // these are followed by the name of an input, output or node
constexpr const char* kMerge = "fretsaw.merge.";
constexpr const char* kShape = "fretsaw.shape.";
constexpr const char* kShard = "fretsaw.shard.";
constexpr const char* kStage = "fretsaw.stage.";
constexpr const char* kKeptWhole = "fretsaw.whole.";
constexpr const char* kUnfollowed = "fretsaw.unfollowed.";  // or by a number

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

int64_t number(const std::string& key, const std::string& text, int64_t least, int64_t most) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least || value > most)
    throw Error(fmt::format("the model's metadata has '{}' for '{}'", text, key), "correct the entry or remove it");
  return value;
}

// Entries whose key begins so, by the rest of the key.
std::map<std::string, std::string> entries(const Model& model, const std::string& prefix) {
  std::map<std::string, std::string> found;
  for (auto it = model.metadata.lower_bound(prefix); it != model.metadata.end() && it->first.starts_with(prefix); ++it)
    found[it->first.substr(prefix.size())] = it->second;
  return found;
}

std::optional<std::string> entry(const Model& model, const std::string& key) {
  const auto it = model.metadata.find(key);
  if (it == model.metadata.end()) return std::nullopt;
  return it->second;
}

MergeRule merge_rule(const std::string& key, const std::string& text) {
  const size_t colon = text.find(':');
  MergeRule rule{text.substr(0, colon), 0};
  if (colon != std::string::npos) rule.axis = static_cast<int>(number(key, text.substr(colon + 1), -64, 64));
  return rule;
}

Dims dims_of_text(const std::string& key, const std::string& text) {
  Dims dims;
  if (!text.empty())
    for (const std::string& part : split(text, ',')) dims.push_back(number(key, part, 0, INT64_MAX));
  return dims;
}

}  // namespace

void write_metadata(const Plan& plan, const PartitionOptions& options, const std::map<std::string, int>& stage_exceptions,
                    const PlanHistory& history, Model& model) {
  const Mesh& mesh = plan.mesh;
  auto& entries = model.metadata;
  entries[kMesh] = fmt::format("data={},pipeline={},tensor={}", mesh.data, mesh.pipeline, mesh.tensor);
  entries[kSchedule] = options.schedule;
  entries[kMicroBatches] = std::to_string(options.micro_batches);
  entries[kTarget] = options.target;
  if (options.memory_bytes) entries[kMemory] = std::to_string(*options.memory_bytes);
  for (const auto& [name, axis] : options.batch_axes) entries[kBatch + name] = std::to_string(axis);
  for (const auto& [name, rule] : options.merges) entries[kMerge + name] = fmt::format("{}:{}", rule.merge, rule.axis);
  for (const auto& [name, dims] : options.shapes) entries[kShape + name] = fmt::format("{}", fmt::join(dims, ","));
  for (const Value* v : model.graph->inputs)  // what --shard says of values that nodes make stands in specs
    if (const auto pin = options.pins.find(v->name); pin != options.pins.end() && mesh.tensor > 1)
      entries[kShard + v->name] = fmt::format("{}", fmt::join(pin->second.axes, ","));
  for (const auto& [name, stage] : stage_exceptions) entries[kStage + name] = std::to_string(stage);
  for (const auto& [name, reason] : history.kept_whole) entries[kKeptWhole + name] = reason;
  for (size_t k = 0; k < history.unfollowed.size(); ++k) entries[fmt::format("{}{:04}", kUnfollowed, k)] = history.unfollowed[k];
}

void remove_metadata(Model& model) {
  std::erase_if(model.metadata, [](const auto& e) { return e.first.starts_with("fretsaw."); });
  for (Node* node : model.graph->nodes)
    if (!node->metadata.empty()) std::erase_if(node->metadata, [](const auto& e) { return e.first.starts_with(kCutOfTensor); });
}

std::optional<Mesh> mesh_of_metadata(const Model& model) {
  const std::optional<std::string> text = entry(model, kMesh);
  if (!text) return std::nullopt;
  Mesh mesh;
  for (const std::string& part : split(*text, ',')) {
    const size_t at = std::min(part.find('='), part.size());
    const std::string axis = part.substr(0, at);
    const auto size = static_cast<int>(number(kMesh, at < part.size() ? part.substr(at + 1) : "", 1, 65536));
    if (axis == "data")
      mesh.data = size;
    else if (axis == "pipeline")
      mesh.pipeline = size;
    else if (axis == "tensor")
      mesh.tensor = size;
    else
      throw Error(fmt::format("the model's metadata names the unknown mesh axis '{}'", axis), "correct the entry or remove it");
  }
  return mesh;
}

PlanHistory history_of_metadata(const Model& model) {
  PlanHistory history{{}, entries(model, kKeptWhole)};
  for (const auto& [number, note] : entries(model, kUnfollowed)) history.unfollowed.push_back(note);
  return history;
}

std::map<std::string, int> stage_exceptions_of_metadata(const Model& model) {
  std::map<std::string, int> stages;
  for (const auto& [name, text] : entries(model, kStage)) stages[name] = static_cast<int>(number(kStage + name, text, -1, 65536));
  return stages;
}

PartitionOptions with_metadata(PartitionOptions options, const Model& model) {
  const std::vector<DeviceConfiguration> all = device_configurations(model);
  const bool own =
      options.configuration == kOwnConfiguration || (options.configuration.empty() && all.size() == 1 && all[0].name == kOwnConfiguration);
  if (!own) return options;
  const auto absent = [&](const char* option, bool usual) { return usual && !options.told.count(option); };
  if (const auto text = entry(model, kMicroBatches); text && absent("--micro-batches", options.micro_batches == 1))
    options.micro_batches = static_cast<int>(number(kMicroBatches, *text, 1, 1 << 20));
  if (const auto text = entry(model, kSchedule); text && absent("--schedule", options.schedule == "gpipe")) options.schedule = *text;
  if (const auto text = entry(model, kTarget); text && absent("--target", options.target == "cpu")) options.target = *text;
  if (const auto text = entry(model, kMemory); text && !options.memory_bytes) options.memory_bytes = number(kMemory, *text, 1, INT64_MAX);
  for (const auto& [name, text] : entries(model, kBatch))
    options.batch_axes.try_emplace(name, static_cast<int>(number(kBatch + name, text, -1, 1000)));
  for (const auto& [name, text] : entries(model, kMerge)) options.merges.try_emplace(name, merge_rule(kMerge + name, text));
  for (const auto& [name, text] : entries(model, kShape)) options.shapes.try_emplace(name, dims_of_text(kShape + name, text));
  for (const auto& [name, text] : entries(model, kShard)) options.pins.try_emplace(name, PinnedTensor{split(text, ',')});
  return options;
}

}  // namespace fretsaw
