// fretsaw partition: cuts a model into a plan.
#include "partitioner/partition.h"

#include <CLI/App.hpp>
#include <cstdio>
#include <filesystem>

#include "graph/errors.h"
#include "graph/io.h"
#include "tools/commands.h"
#include "tools/options.h"
#include "tools/plan_summary.h"
#include "tools/text.h"

namespace fretsaw {
namespace {

struct Settings {
  std::string path, output, mesh, schedule = "gpipe", configuration, target = "cpu", memory, weights;
  int micro_batches = 1, chunks = 2;
  std::vector<std::string> cuts, shards, batches, merges, shapes;
  std::set<std::string> told;  // options that were given
  bool from_annotations = false, structure_only = false, overwrite = false, json = false;
};

// The schedule to make, and what to say when it is not what was asked for.
std::string schedule_of(const Settings& settings, std::vector<std::string>& notes) {
  static const std::set<std::string> known = {"gpipe", "1f1b", "interleaved", "zero-bubble-h1", "zero-bubble-h2"};
  if (!known.contains(settings.schedule))
    usage_error("--schedule names the unknown schedule '" + settings.schedule + "'",
                "the schedules are " + join({known.begin(), known.end()}, ", "));
  if (settings.schedule != "gpipe")
    notes.push_back("--schedule " + settings.schedule + " has nothing to do without training: inference fills and drains, as gpipe does");
  return "gpipe";
}

// --weights: the bytes of every initializer from another file's initializer of the same name.
void take_weights(Model& model, const std::string& path) {
  const Model other = read_model(path);
  std::unordered_map<std::string, TensorPtr> tensors;
  for (const Value* value : other.graph->initializers()) tensors[value->name] = value->constant;
  for (Value* value : model.graph->initializers()) {
    const auto found = tensors.find(value->name);
    if (found == tensors.end()) {
      if (!value->constant->is_missing()) continue;
      throw Error("holds no initializer '" + value->name + "', which the model needs", "give the file that the model's weights came from")
          .in_file(path);
    }
    if (found->second->dtype != value->constant->dtype || found->second->dims != value->constant->dims)
      throw Error("initializer '" + value->name + "' is " + std::string(name_of(found->second->dtype)) + to_string(found->second->dims) +
                      ", in the model it is " + std::string(name_of(value->constant->dtype)) + to_string(value->constant->dims),
                  "give the file that the model's weights came from")
          .in_file(path);
    value->constant = found->second;
  }
}

// What can never run is refused before it is cut.
void refuse_unsound(Model& model) {
  for (const Finding& finding : check_model(model))
    if (finding.severity == "error")
      throw Error(finding.message, "mend or export the model again; `fretsaw check` lists all that is wrong").in_file(model.path);
}

std::set<std::string> value_names(const Model& model) {
  std::set<std::string> names;
  for (const Value& value : model.graph->all_values()) names.insert(value.name);
  return names;
}

PartitionOptions options_of(const Settings& settings, const Model& model, std::vector<std::string>& notes) {
  PartitionOptions options;
  options.mesh = parse_mesh(settings.mesh);
  options.micro_batches = settings.micro_batches;
  options.schedule = schedule_of(settings, notes);
  if (!settings.cuts.empty()) options.cuts = parse_cuts(settings.cuts, value_names(model));
  options.batch_axes = parse_batch_axes(settings.batches);
  options.merges = parse_merges(settings.merges);
  options.shapes = parse_shapes(settings.shapes);
  options.pins = parse_shards(settings.shards);
  options.from_annotations = settings.from_annotations;
  options.configuration = settings.configuration;
  options.told = settings.told;
  options.target = settings.target;
  if (!settings.memory.empty()) options.memory_bytes = parse_size_bytes("--memory", settings.memory);
  if (!options.cuts.empty() && settings.mesh.empty()) options.mesh.pipeline = static_cast<int>(options.cuts.size()) + 1;
  return options;
}

void partition_command(const Settings& settings) {
  parse_mesh(settings.mesh);  // wrong usage is told before a file is opened
  std::error_code error;
  if (std::filesystem::exists(settings.output, error) && !settings.overwrite && !std::filesystem::is_empty(settings.output, error))
    throw Error("there is something at this path already", "choose another folder or add --overwrite").in_file(settings.output);
  const bool may_miss = settings.structure_only || !settings.weights.empty();
  Model model = read_model(settings.path, {.allow_missing_weights = may_miss});
  if (!settings.weights.empty()) take_weights(model, settings.weights);
  refuse_unsound(model);
  std::vector<std::string> notes;
  const PartitionOptions options = options_of(settings, model, notes);
  Plan plan;
  try {
    plan = partition(std::move(model), options);
  } catch (const Error& error) {
    throw error.code() == ErrorCode::usage ? error : error.in_file(settings.path);
  }
  plan.structure_only = settings.structure_only;
  plan.notes.insert(plan.notes.end(), notes.begin(), notes.end());
  write_plan(plan, settings.output, {.overwrite = settings.overwrite});
  if (settings.json) return print_json(plan_json(plan));
  print_plan(plan);
  std::printf("\nwrote %s\n", one_line(settings.output).c_str());
}

}  // namespace

void add_partition(CLI::App& app, Outcome&) {
  auto s = std::make_shared<Settings>();
  CLI::App* command = app.add_subcommand("partition", "Cut a model into a plan");
  command->add_option("model", s->path, "An ONNX file")->required();
  command->add_option("-o,--output", s->output, "The plan folder to write")->required();
  command->add_option("--mesh", s->mesh, "AXIS=N,...: the devices, as pipeline=4");
  command->add_option("--micro-batches", s->micro_batches, "Parts the batch is run in")->check(CLI::Range(1, 1 << 20));
  command->add_option("--schedule", s->schedule, "gpipe, 1f1b, interleaved, zero-bubble-h1 or zero-bubble-h2");
  command->add_option("--chunks", s->chunks, "Stages of a rank under the interleaved schedule")->check(CLI::Range(1, 1 << 20));
  add_repeated(*command, "--cut", s->cuts, "VALUE[,VALUE]...: end a stage after these values; one option a boundary");
  add_repeated(*command, "--shard", s->shards, "TENSOR=SPEC: how a tensor lies, as W=[tensor,_]; _ is not cut");
  command->add_flag("--from-annotations", s->from_annotations, "Cut as the model's own multi-device annotations say");
  command->add_option("--configuration", s->configuration, "Which device configuration of the annotations");
  add_repeated(*command, "--batch", s->batches, "NAME=AXIS|none: an input's batch axis (0 without it)");
  add_repeated(*command, "--merge", s->merges, "OUTPUT=concat[:AXIS]|mean|sum|same: how an output comes together");
  add_repeated(*command, "--shape", s->shapes, "NAME=D,D,...: fix an input's dimensions");
  command->add_option("--target", s->target, "cpu, h100, h200 or a file: the device whose speeds the costs assume");
  command->add_option("--memory", s->memory, "SIZE: memory of each device, as 8GiB");
  command->add_option("--weights", s->weights, "Take the weights from this model file");
  command->add_flag("--structure-only", s->structure_only, "Do not need the weights' bytes");
  command->add_flag("--overwrite", s->overwrite, "Replace the plan that is there");
  command->add_flag("--json", s->json, "Print one JSON object");
  command->callback([s, command] {
    for (const CLI::Option* option : command->get_options())
      if (option->count() > 0) s->told.insert(option->get_name());
    partition_command(*s);
  });
}

}  // namespace fretsaw
