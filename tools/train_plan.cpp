// Between the options of the command train and the files of a plan.
#include "tools/train_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "graph/errors.h"
#include "graph/io.h"
#include "graph/training/name_pattern.h"
#include "graph/training/plan_graphs.h"
#include "graph/training/training_plan_file.h"
#include "tools/options.h"
#include "tools/text.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;
using Options = std::map<std::string, std::string>;  // without the dashes; equal where they mean the same

// What training.json keeps beside loss and optimizer; the plan itself says the rest.
Options options_of_file(const TrainSettings& s) {
  const std::string memory = s.memory.empty() ? "" : std::to_string(parse_size_bytes("--memory", s.memory));
  return {{"zero", std::to_string(s.zero)},
          {"bucket-mb", fmt::format("{}", s.bucket_mb)},
          {"recompute", s.recompute},
          {"precision", training_options(s).precision},
          {"memory", memory},
          {"train", s.train},
          {"freeze", s.freeze},
          {"sync-batch-norm", s.sync_batch_norm ? "yes" : "no"},
          {"shape", join(s.shapes, "\n")}};
}

std::string mesh_text(const Mesh& mesh) {
  return fmt::format("data={},pipeline={},tensor={}", mesh.data, mesh.pipeline, mesh.tensor);
}

Options options_of_plan(const TrainingPlanFile& file) {
  const Plan& plan = *file.training.plan;
  const GraphNumbers numbers = graph_numbers(plan);
  Options options = file.specs.options;
  options["loss"] = file.specs.loss, options["optimizer"] = file.specs.optimizer;
  options["mesh"] = mesh_text(plan.mesh), options["micro-batches"] = std::to_string(plan.micro_batches);
  options["schedule"] = plan.schedule.name, options["chunks"] = std::to_string(numbers.forward / numbers.ranks);
  return options;
}

Options options_of_command(const TrainSettings& s) {
  Options options = options_of_file(s);
  options["loss"] = s.loss, options["optimizer"] = s.optimizer;
  options["mesh"] = mesh_text(parse_mesh(s.mesh)), options["micro-batches"] = std::to_string(s.micro_batches);
  options["schedule"] = s.schedule, options["chunks"] = std::to_string(training_options(s).chunks);
  return options;
}

// What training.json says must be what --save-plan can have written there.
void check_options_of_file(const Options& options, const std::string& folder) {
  const auto wrong = [&](const std::string& name, const std::string& what) {
    return Error(fmt::format("field 'options.{}' {}", name, what), "the plan is damaged; partition the model again")
        .in_file((fs::path(folder) / "training.json").string());
  };
  for (const auto& [name, value] : options_of_file({}))
    if (!options.contains(name)) throw wrong(name, "is missing");
  const auto check = [&](const std::string& name, const std::vector<std::string>& allowed) {
    const std::string& value = options.at(name);
    if (std::find(allowed.begin(), allowed.end(), value) == allowed.end())
      throw wrong(name, fmt::format("is '{}', which is none of {}", one_line(value), join(allowed, ", ")));
  };
  check("zero", {"0", "1", "2", "3"});
  check("recompute", {"none", "all", "auto"});
  check("precision", {"fp32", "fp16", "bf16"});
  check("sync-batch-norm", {"yes", "no"});
  try {
    if (!options.at("memory").empty()) parse_size_bytes("--memory", options.at("memory"));
  } catch (const Error&) {
    throw wrong("memory", fmt::format("is '{}', which is no size", one_line(options.at("memory"))));
  }
  for (const char* name : {"train", "freeze"}) try {
      if (!options.at(name).empty()) split_patterns(options.at(name));
    } catch (const Error& e) {
      throw wrong(name, e.problem());
    }
}

void refuse_other_values(const TrainSettings& settings, const Options& of_plan) {
  for (const auto& [name, value] : options_of_command(settings)) {
    const std::string& own = of_plan.at(name);
    if (!settings.told.contains("--" + name) || value == own) continue;
    const std::string hint = name == "optimizer" ? "leave it out (--lr sets another learning rate)" : "leave it out";
    usage_error(fmt::format("--{} {}: the plan was made {}", name, one_line(value),
                            own.empty() ? "without it" : fmt::format("with {}", one_line(own))),
                hint + ", or make another plan of the model with --save-plan");
  }
}

void take_options(TrainSettings& s, const Options& of_plan) {
  const auto number = [&](const char* name) { return static_cast<int>(parse_integer(std::string("--") + name, of_plan.at(name))); };
  s.loss = of_plan.at("loss"), s.optimizer = of_plan.at("optimizer"), s.mesh = of_plan.at("mesh"), s.schedule = of_plan.at("schedule");
  s.micro_batches = number("micro-batches"), s.chunks = number("chunks"), s.zero = number("zero");
  s.recompute = of_plan.at("recompute"), s.memory = of_plan.at("memory");
  s.train = of_plan.at("train"), s.freeze = of_plan.at("freeze");
  s.sync_batch_norm = of_plan.at("sync-batch-norm") == "yes";
  s.shapes.clear();                                                            // they are in the graphs, as buckets are
  if (!s.told.contains("--precision")) s.precision = of_plan.at("precision");  // tf32 and fp32 share their graphs
}

}  // namespace

TrainingPlan open_training_plan(TrainSettings& settings) {
  const std::string& folder = settings.path;
  if (!settings.save_plan.empty())
    usage_error("--save-plan has nothing to do: " + one_line(folder) + " is a plan already", "name the model, or leave --save-plan out");
  if (!is_training_plan(folder))
    throw Error(is_plan_folder(folder) ? "holds a plan that does not train" : "is a folder without a plan",
                "give an ONNX file, or a folder that `fretsaw train MODEL --save-plan DIR` wrote")
        .in_file(folder);
  TrainingPlanFile file = read_training_plan(folder);
  const Options options = options_of_plan(file);
  check_options_of_file(options, folder);
  refuse_other_values(settings, options);
  take_options(settings, options);
  return std::move(file.training);
}

void save_training_plan(const TrainingPlan& plan, const TrainSettings& settings) {
  std::error_code error;
  if (const fs::path source = fs::absolute(plan.plan->source_file, error); !error) plan.plan->source_file = source.string();
  write_training_plan(plan, {settings.loss, settings.optimizer, options_of_file(settings)}, settings.save_plan,
                      {.overwrite = settings.overwrite});
}

Model source_of(const Plan& plan) {
  const auto wrong = [&](const std::string& what) {
    return Error(what, "--export and --eval need the model that the plan was made from: put it back, or leave them out")
        .in_file(plan.source_file);
  };
  std::error_code error;
  if (!fs::exists(plan.source_file, error)) throw wrong("the plan's model is not there any more");
  Model model = read_model(plan.source_file);
  if (model.digest != plan.source_digest) throw wrong("the plan's model has changed since the plan was made");
  return model;
}

}  // namespace fretsaw
