// fretsaw bench: warms up, repeats until the figure is steady, reports median and spread.
#include <CLI/App.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "tools/commands.h"
#include "tools/execution.h"
#include "tools/progress.h"
#include "tools/text.h"

namespace fretsaw {
namespace {

struct Settings {
  ExecutionSettings execution;
  bool json = false;
};

constexpr int kMostRuns = 100;
constexpr double kLeastTime_ms = 1000, kMostTime_ms = 20000;

int fewest_runs(const std::string& device) {
  return device == "cpu" ? 5 : 30;
}

// Runs until two times in a row are within 5% of each other, five at most.
void warm_up(Session& session, const Inputs& inputs, const std::string& path) {
  std::vector<RuntimeValue> outputs;
  double before_ms = run_once(session, inputs, path, outputs);
  for (int i = 0; i < 4; ++i) {
    const double time_ms = run_once(session, inputs, path, outputs);
    if (std::fabs(time_ms - before_ms) <= 0.05 * before_ms) return;
    before_ms = time_ms;
  }
}

// Of whole steps, and of the time in which the busiest rank's device computed.
struct Measured {
  Timing step, device;
};

double device_time_ms(const Session& session) {
  double most = 0;
  for (const RankReport& rank : session.ranks()) most = std::max(most, rank.busy_ms);
  return most;
}

// At least `fewest` runs, unless they take too long.
Measured measure(Session& session, const Inputs& inputs, const std::string& path, int fewest) {
  std::vector<RuntimeValue> outputs;
  std::vector<double> times_ms, device_ms;
  double total_ms = 0;
  Progress progress("bench", kMostRuns);
  while (static_cast<int>(times_ms.size()) < kMostRuns && total_ms < kMostTime_ms) {
    if (static_cast<int>(times_ms.size()) >= fewest && total_ms >= kLeastTime_ms) break;
    times_ms.push_back(run_once(session, inputs, path, outputs));
    device_ms.push_back(device_time_ms(session));
    total_ms += times_ms.back();
    progress.done(static_cast<int>(times_ms.size()));
  }
  return {timing_of(std::move(times_ms)), timing_of(std::move(device_ms))};
}

void bench(const Settings& settings) {
  std::vector<std::string> notes;
  check_execution_options(settings.execution, notes);
  const auto plan = open_plan(settings.execution.path, settings.execution, settings.execution.micro_batches.value_or(1), notes);
  const Inputs inputs = gather_inputs(*plan, settings.execution, notes);
  const std::string& path = settings.execution.path;
  const auto session = open_session(plan, session_options(settings.execution, *plan), path);
  warm_up(*session, inputs, path);
  const auto [timing, device] = measure(*session, inputs, path, fewest_runs(settings.execution.device));
  if (settings.json)
    return print_json(
        {{"time_ms", json_of(timing)}, {"device_ms", json_of(device)}, {"ranks", json_of(session->ranks())}, {"notes", notes}});
  print_ranks(session->ranks());
  std::printf("\ntime %.2f ms (median of %d; from %.2f to %.2f)\n", timing.median_ms, timing.runs, timing.min_ms, timing.max_ms);
  print_notes(notes);
}

}  // namespace

void add_bench(CLI::App& app, Outcome&) {
  auto s = std::make_shared<Settings>();
  CLI::App* command = app.add_subcommand("bench", "Measure how fast a model or plan runs");
  add_execution_options(*command, s->execution);
  command->add_flag("--json", s->json, "Print one JSON object");
  command->callback([s] { bench(*s); });
}

}  // namespace fretsaw
