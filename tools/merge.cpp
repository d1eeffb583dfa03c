// fretsaw merge: a plan's pieces back into one model.
#include "graph/merge.h"

#include <CLI/App.hpp>
#include <cstdio>
#include <filesystem>

#include "graph/errors.h"
#include "graph/io.h"
#include "graph/io/temporary_file.h"
#include "tools/commands.h"
#include "tools/execution.h"
#include "tools/text.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;

struct Settings {
  std::string path, output;
  bool overwrite = false;
};

// The model's file and that of its weights must not stand in the way of anything, least of all of the plan that is read.
void check_output(const Settings& settings) {
  std::error_code error;
  const fs::path folder = fs::absolute(end_of_links(settings.output), error).parent_path();
  if (fs::equivalent(folder, settings.path, error))
    throw Error("lies in the plan's own folder", "write the model to another folder").in_file(settings.output);
  for (const std::string& file : {settings.output, settings.output + ".data"}) {
    if (fs::symlink_status(file, error).type() == fs::file_type::not_found) continue;
    if (!settings.overwrite || fs::is_directory(file, error))
      throw Error("there is something at this path already", "choose another file or add --overwrite").in_file(file);
  }
}

void merge_command(const Settings& settings) {
  check_output(settings);
  refuse_training_plan(settings.path);
  const Plan plan = read_plan(settings.path);
  const Model model = merge(plan);
  write_model(model, settings.output);
  double parameters = 0;
  bool missing = false;
  for (const Value* value : model.graph->initializers()) {
    parameters += static_cast<double>(value->constant->count());
    missing |= value->constant->is_missing();
  }
  std::printf("wrote %s: %zu nodes, %s parameters\n", one_line(settings.output).c_str(), model.graph->nodes.size(),
              human_count(parameters).c_str());
  if (missing) print_notes({"the plan holds no weights (--structure-only), so the model has none"});
}

}  // namespace

void add_merge(CLI::App& app, Outcome&) {
  auto settings = std::make_shared<Settings>();
  CLI::App* command = app.add_subcommand("merge", "Bring a plan's pieces back into one model");
  command->add_option("plan", settings->path, "A plan folder")->required();
  command->add_option("-o,--output", settings->output, "The ONNX file to write")->required();
  command->add_flag("--overwrite", settings->overwrite, "Replace the file that is there");
  command->callback([settings] { merge_command(*settings); });
}

}  // namespace fretsaw
