// The fretsaw command: finds the subcommand, and turns whatever goes wrong into one line and an exit code.
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <new>
#include <nlohmann/json.hpp>

#include "graph/errors.h"
#include "tools/commands.h"
#include "tools/options.h"
#include "tools/text.h"

namespace fretsaw {
namespace {

constexpr int kUsage = static_cast<int>(ErrorCode::usage);

bool wants_json(int argc, char** argv) {
  for (int i = 1; i < argc; ++i)
    if (std::strcmp(argv[i], "--json") == 0) return true;
  return false;
}

// Names in a message may hold anything; the message stays on one line.
int report(const std::string& message, int code, bool json) {
  const std::string line = one_line(message);
  if (json) {
    const nlohmann::ordered_json object = {{"error", {{"code", code}, {"message", line}}}};
    std::printf("%s\n", object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  }
  std::fflush(stdout);
  std::fprintf(stderr, "fretsaw: error: %s\n", line.c_str());
  return code;
}

// What to say of a command line that CLI11 refused.
std::string usage_message(const CLI::App& app, const CLI::ParseError& error, const std::string& first) {
  std::string command = "fretsaw";
  for (const CLI::App* sub : app.get_subcommands()) command += " " + sub->get_name();
  const bool names_command = app.get_subcommands().empty() && !first.empty() && first[0] != '-';
  if (names_command) return "there is no command '" + first + "'; `fretsaw --help` lists the commands";
  return std::string(error.what()) + "; `" + command + " --help` lists the options";
}

int run_command(int argc, char** argv) {
  CLI::App app("fretsaw cuts an ONNX model into pieces, one for each device, and runs the pieces as one model.", "fretsaw");
  app.set_version_flag("--version", "fretsaw 0.1");
  app.require_subcommand(1);
  Outcome outcome;
  add_inspect(app, outcome);
  add_check(app, outcome);
  add_model(app, outcome);
  add_partition(app, outcome);
  add_run(app, outcome);
  add_merge(app, outcome);
  add_simulate(app, outcome);
  add_train(app, outcome);
  add_bench(app, outcome);
  add_devices(app, outcome);
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) refuse_empty_values(*command);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    return report(usage_message(app, error, argc > 1 ? argv[1] : ""), kUsage, wants_json(argc, argv));
  }
  return outcome.exit_code;
}

// What a command printed has to arrive.
void finish_output() {
  errno = 0;
  const bool flushed = std::fflush(stdout) == 0;
  if (flushed && !std::ferror(stdout)) return;
  const std::string reason = errno != 0 ? std::string(": ") + std::strerror(errno) : "";
  throw Error("the standard output can't be written" + reason, "check where it goes and the space there");
}

}  // namespace

int run_command_line(int argc, char** argv) {
  const bool json = wants_json(argc, argv);
  constexpr int kModel = static_cast<int>(ErrorCode::model);
  try {
    const int code = run_command(argc, argv);
    finish_output();
    return code;
  } catch (const Error& error) {
    return report(error.what(), static_cast<int>(error.code()), json);
  } catch (const std::filesystem::filesystem_error& error) {
    return report(error.path1().string() + ": " + error.code().message() + "; check the path and its permissions", kModel, json);
  } catch (const std::bad_alloc&) {
    return report("not enough memory for this model; use smaller inputs (--shape), more stages or more micro-batches", kModel, json);
  } catch (const std::length_error&) {
    return report("a size in the model is out of all bounds; check the model's shapes", kModel, json);
  } catch (const std::exception& error) {
    return report(std::string("internal error: ") + error.what() + "; please report it with the command and the model", kModel, json);
  } catch (...) {
    return report("internal error; please report it with the command and the model", kModel, json);
  }
}

}  // namespace fretsaw
