// fretsaw run: runs a model or plan, and compares what comes out.
#include <CLI/App.hpp>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include "graph/errors.h"
#include "tools/commands.h"
#include "tools/compare.h"
#include "tools/execution.h"
#include "tools/options.h"
#include "tools/progress.h"
#include "tools/run_files.h"
#include "tools/text.h"
#include "tools/value_files.h"

namespace fretsaw {
namespace {

struct Settings {
  ExecutionSettings execution;
  std::string output, expect, compare, trace;
  Tolerance tolerance;
  int repeat = 1, warmup = 0;
  bool json = false;
};

struct Result {
  std::vector<RuntimeValue> outputs;
  std::vector<std::optional<Difference>> differences;  // one an output; unset: not compared
  Timing timing;
  std::vector<RankReport> ranks;
  std::vector<CommunicationCount> communication;
  bool ok = true;
};

void execute(Session& session, const Inputs& inputs, const Settings& settings, Result& result) {
  std::vector<double> times_ms;
  Progress progress("run", settings.warmup + settings.repeat);
  for (int i = 0; i < settings.warmup + settings.repeat; ++i) {
    const double time_ms = run_once(session, inputs, settings.execution.path, result.outputs);
    if (i >= settings.warmup) times_ms.push_back(time_ms);
    progress.done(i + 1);
  }
  result.timing = timing_of(std::move(times_ms));
  result.ranks = session.ranks();
  result.communication = session.communication();
}

void take_differences(const std::vector<RuntimeValue>& want, const Settings& settings, Result& result) {
  for (size_t i = 0; i < result.outputs.size(); ++i) {
    const Difference one = compare(result.outputs[i], want[i], settings.tolerance);
    std::optional<Difference>& all = result.differences[i];
    all = all ? worse(*all, one) : one;
    result.ok = result.ok && one.ok;
  }
}

// --compare MODEL: that model whole, on the same inputs, micro-batches and threads.
void compare_with_model(const Plan& plan, const Inputs& inputs, int threads, const Settings& settings, Result& result) {
  ExecutionSettings whole = settings.execution;
  whole.micro_batches.reset();
  std::vector<std::string> ignored;
  const auto reference = open_plan(settings.compare, whole, plan.micro_batches, ignored, &plan);
  if (reference->outputs.size() != plan.outputs.size())
    throw Error("has " + std::to_string(reference->outputs.size()) + " outputs, what runs has " + std::to_string(plan.outputs.size()),
                "compare with the model that the plan was made from")
        .in_file(settings.compare);
  SessionOptions options = session_options(whole, *reference);
  options.threads = threads;
  const auto session = open_session(reference, options, settings.compare);
  take_differences(run_session(*session, inputs, settings.compare), settings, result);
}

void compare_with_files(const Plan& plan, const Settings& settings, Result& result) {
  std::vector<RuntimeValue> want;
  for (size_t i = 0; i < plan.outputs.size(); ++i)
    want.push_back(
        read_value_file((std::filesystem::path(settings.expect) / ("output_" + std::to_string(i) + ".pb")).string(), plan.outputs[i].type));
  take_differences(want, settings, result);
}

Json number_or_null(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

Json outputs_json(const Plan& plan, const Result& result) {
  Json out = Json::array();
  for (size_t i = 0; i < plan.outputs.size(); ++i) {
    Json one = value_json(plan.outputs[i].name, plan.outputs[i].type, result.outputs[i]);
    const std::optional<Difference>& d = result.differences[i];
    one["max_abs_diff"] = d ? number_or_null(d->max_abs) : Json(nullptr);
    one["max_rel_diff"] = d ? number_or_null(d->max_rel) : Json(nullptr);
    one["diff_over_range"] = d ? number_or_null(d->over_range) : Json(nullptr);
    one["ok"] = !d || d->ok;
    if (d && !d->why.empty()) one["why"] = d->why;
    out.push_back(one);
  }
  return out;
}

void print_result(const Plan& plan, const Result& result, const Settings& settings) {
  Table table({"output", "value", ">max abs diff", ">over range", "", ""});
  for (size_t i = 0; i < plan.outputs.size(); ++i) {
    const std::optional<Difference>& d = result.differences[i];
    char abs[32] = "", range[32] = "";
    if (d && !std::isnan(d->max_abs))
      std::snprintf(abs, sizeof abs, "%.3g", d->max_abs), std::snprintf(range, sizeof range, "%.3g", d->over_range);
    table.add({plan.outputs[i].name, describe(result.outputs[i]), abs, range, !d ? "" : d->ok ? "ok" : "DIFFERS", d ? d->why : ""});
  }
  table.print();
  std::printf("\n");
  print_ranks(result.ranks);
  std::printf("\ntime %.2f ms", result.timing.median_ms);
  if (result.timing.runs > 1)
    std::printf(" (median of %d; from %.2f to %.2f)", result.timing.runs, result.timing.min_ms, result.timing.max_ms);
  std::printf("\n");
  if (!settings.expect.empty() || !settings.compare.empty()) std::printf("%s\n", result.ok ? "results agree" : "results differ");
}

void run_command(const Settings& settings, Outcome& outcome) {
  std::vector<std::string> notes;
  check_execution_options(settings.execution, notes);
  const auto plan = open_plan(settings.execution.path, settings.execution, settings.execution.micro_batches.value_or(1), notes);
  const Inputs inputs = gather_inputs(*plan, settings.execution, notes);
  SessionOptions options = session_options(settings.execution, *plan);
  options.trace = !settings.trace.empty();
  Result result;
  result.differences.resize(plan->outputs.size());
  {
    const auto session = open_session(plan, options, settings.execution.path);
    execute(*session, inputs, settings, result);
    if (options.trace) write_trace(session->trace(), settings.trace);
  }
  if (!settings.expect.empty()) compare_with_files(*plan, settings, result);
  if (!settings.compare.empty()) compare_with_model(*plan, inputs, options.threads, settings, result);
  if (!settings.output.empty()) write_outputs(*plan, result.outputs, settings.output);
  outcome.exit_code = result.ok ? 0 : static_cast<int>(ErrorCode::results_differ);
  if (!settings.json) {
    print_result(*plan, result, settings);
    return print_notes(notes);
  }
  print_json({{"ok", result.ok},
              {"outputs", outputs_json(*plan, result)},
              {"time_ms", json_of(result.timing)},
              {"communication", json_of(result.communication)},
              {"ranks", json_of(result.ranks)},
              {"notes", notes}});
}

}  // namespace

void add_run(CLI::App& app, Outcome& outcome) {
  auto s = std::make_shared<Settings>();
  CLI::App* command = app.add_subcommand("run", "Run a model or plan");
  add_execution_options(*command, s->execution);
  command->add_option("--output", s->output, "Write output_K.pb and outputs.json into this folder");
  command->add_option("--expect", s->expect, "Compare with the output_K.pb of this folder");
  command->add_option("--compare", s->compare, "Run this model whole on the same inputs and compare");
  from_zero(command->add_option("--rtol", s->tolerance.rtol, "Relative tolerance (1e-4 in float32)"));
  from_zero(command->add_option("--atol", s->tolerance.atol, "Absolute tolerance (1e-5 in float32)"));
  from_zero(command->add_option("--range-tol", s->tolerance.range_tol, "Tolerance as a share of the output's largest value"));
  command->add_option("--repeat", s->repeat, "Timed runs")->check(CLI::Range(1, 1 << 30));
  command->add_option("--warmup", s->warmup, "Runs before them")->check(CLI::Range(0, 1 << 30));
  command->add_option("--trace", s->trace, "Write a Chrome trace of the last run to this file");
  command->add_flag("--json", s->json, "Print one JSON object");
  command->callback([s, &outcome] { run_command(*s, outcome); });
}

}  // namespace fretsaw
