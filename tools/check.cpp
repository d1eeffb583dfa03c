// fretsaw check: is a model sound.
#include "graph/io/check.h"

#include <CLI/App.hpp>
#include <cstdio>

#include "tools/commands.h"
#include "tools/json_output.h"
#include "tools/text.h"

namespace fretsaw {
namespace {

struct Settings {
  std::string path;
  bool json = false;
};

void print_findings(const std::vector<Finding>& findings, const std::string& path, bool ok) {
  Table table({"severity", "rule", "node", "tensor", "message"});
  for (const Finding& f : findings) table.add({f.severity, f.rule, f.node, f.tensor, f.message});
  if (!table.empty()) table.print(), std::printf("\n");
  std::printf("%s: %s\n", one_line(path).c_str(), ok ? "sound" : "not sound");
}

void check(const Settings& settings, Outcome& outcome) {
  const auto [findings, notes] = check_file(settings.path);
  bool ok = true;
  for (const Finding& finding : findings) ok = ok && finding.severity != "error";
  outcome.exit_code = ok ? 0 : 1;
  if (!settings.json) {
    print_findings(findings, settings.path, ok);
    return print_notes(notes);
  }
  Json list = Json::array();
  for (const Finding& f : findings)
    list.push_back({{"severity", f.severity}, {"node", f.node}, {"tensor", f.tensor}, {"rule", f.rule}, {"message", f.message}});
  print_json({{"ok", ok}, {"findings", list}});
}

}  // namespace

void add_check(CLI::App& app, Outcome& outcome) {
  auto settings = std::make_shared<Settings>();
  CLI::App* command = app.add_subcommand("check", "Tell whether a model is sound");
  command->add_option("model", settings->path, "An ONNX file")->required();
  command->add_flag("--json", settings->json, "Print one JSON object");
  command->callback([settings, &outcome] { check(*settings, outcome); });
}

}  // namespace fretsaw
