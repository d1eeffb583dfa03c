// fretsaw model: writes a standard architecture with seeded random weights.
#include <CLI/App.hpp>
#include <cstdio>
#include <filesystem>

#include "graph/errors.h"
#include "graph/io.h"
#include "models/models.h"
#include "tools/commands.h"
#include "tools/options.h"
#include "tools/text.h"

namespace fretsaw {
namespace {

struct Settings {
  std::string name, output;
  std::vector<std::string> sets;
};

void list() {
  Table table({"name", "what it is", "--set keys"});
  for (const ModelInfo& info : list_models()) table.add({info.name, info.summary, join(info.keys, " ")});
  table.print();
}

void write(const Settings& settings) {
  if (settings.name.empty()) return list();
  if (settings.output.empty()) usage_error("model " + settings.name + " needs a file to write", "add -o FILE.onnx");
  std::map<std::string, std::string> keys;
  for (const std::string& text : settings.sets) keys.insert_or_assign(parse_pair("--set", text).first, parse_pair("--set", text).second);
  const Model model = build_model(settings.name, keys);
  write_model(model, settings.output);
  double parameters = 0;
  for (const Value* value : model.graph->initializers()) parameters += static_cast<double>(value->constant->count());
  std::printf("wrote %s: %zu nodes, %s parameters\n", one_line(settings.output).c_str(), model.graph->nodes.size(),
              human_count(parameters).c_str());
  print_notes(model.notes);
}

}  // namespace

void add_model(CLI::App& app, Outcome&) {
  auto settings = std::make_shared<Settings>();
  CLI::App* command = app.add_subcommand("model", "Write a standard architecture with seeded random weights; no name lists them");
  command->add_option("name", settings->name, "resnet50, bert, llama, ...");
  command->add_option("-o,--output", settings->output, "The ONNX file to write");
  add_repeated(*command, "--set", settings->sets, "key=value: a size of the model");
  command->callback([settings] { write(*settings); });
}

}  // namespace fretsaw
