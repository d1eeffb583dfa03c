// fretsaw simulate: a schedule's timeline from costs, without devices.
#include "partitioner/simulate.h"

#include <fmt/format.h>

#include <CLI/App.hpp>
#include <algorithm>
#include <charconv>
#include <cstdio>

#include "graph/training/plan_graphs.h"
#include "partitioner/training_schedules.h"
#include "tools/commands.h"
#include "tools/json_output.h"
#include "tools/options.h"
#include "tools/schedule_picture.h"
#include "tools/text.h"

namespace fretsaw {
namespace {

constexpr size_t kPictureColumns = 230;
constexpr int kMostRuns = 200'000;

struct Settings {
  std::string path;
  std::string schedule, times = "1,1,1";
  int pipeline = 4, micro_batches = 8;
  int chunks = 0;  // 0: what the schedule takes
  bool json = false;
};

// --- a plan ---

void print_ranks(const Simulation& simulation, int forward, int micro_batches) {
  const std::vector<std::string> picture =
      forward > 0 ? schedule_picture(simulation, forward, micro_batches, kPictureColumns) : std::vector<std::string>();
  Table table({"rank", ">busy", ">micro-batches", "timeline"});
  for (size_t i = 0; i < simulation.ranks.size(); ++i) {
    const SimulatedRank& rank = simulation.ranks[i];
    table.add({std::to_string(i), human_time(rank.busy_us), std::to_string(rank.peak_micro_batches),
               i < picture.size() ? picture[i] : timeline(rank, simulation.time_us, 72)});
  }
  table.print();
}

Json simulation_json(const Simulation& simulation) {
  Json ranks = Json::array();
  for (size_t i = 0; i < simulation.ranks.size(); ++i) {
    Json actions = Json::array();
    for (const SimulatedAction& a : simulation.ranks[i].actions)
      actions.push_back({{"action", to_string(a.action)}, {"start_us", a.start_us}, {"end_us", a.end_us}});
    ranks.push_back({{"rank", i},
                     {"busy_us", simulation.ranks[i].busy_us},
                     {"peak_micro_batches", simulation.ranks[i].peak_micro_batches},
                     {"actions", actions}});
  }
  return {{"time_us", simulation.time_us},
          {"idle_share", simulation.idle_share},
          {"step_us", simulation.step_us},
          {"step_idle_share", simulation.step_idle_share},
          {"ranks", ranks}};
}

void simulate_plan(const Settings& settings) {
  const Plan plan = read_plan(settings.path, /*structure_only_weights=*/true);
  const Simulation simulation = simulate(plan);
  if (settings.json) return print_json(simulation_json(simulation));
  std::printf("one step: %s, %s idle\n\n", human_time(simulation.time_us).c_str(), human_percent(simulation.idle_share).c_str());
  const GraphNumbers numbers = graph_numbers(plan);
  print_ranks(simulation, numbers.trains() ? numbers.forward : 0, plan.micro_batches);
}

// --- a schedule by its name ---

// Three numbers: "1,1,1".
TrainingTimes parse_times(const std::string& text) {
  TrainingTimes times;
  const char *at = text.data(), *end = at + text.size();
  for (double* time : {&times.forward_us, &times.backward_us, &times.weight_us}) {
    const auto [next, error] = std::from_chars(at, end, *time);
    const bool last = time == &times.weight_us, followed = last ? next == end : next != end && *next == ',';
    if (error != std::errc() || !followed || !(*time > 0) || *time > 1e12)
      usage_error("--times is '" + text + "'", "write three times above 0 in microseconds, as F,B,W: 1,1,1");
    at = last ? next : next + 1;
  }
  return times;
}

struct NamedSchedule {
  TrainingProblem problem;
  Simulation simulation;
  ScheduleFormula formula;
  double work_us = 0;  // of a rank in a step

  double stated_us() const { return work_us + formula.idle_us; }
  double stated_idle_share() const { return formula.idle_us / stated_us(); }
};

// Ranks of equal times whose values move at once, which is what the formulas are about.
NamedSchedule play(const Settings& s, int chunks) {
  const TrainingTimes times = parse_times(s.times);
  const bool apart = s.schedule.starts_with("zero-bubble");
  NamedSchedule made{training_chain(s.pipeline, chunks, s.micro_batches, apart), {}, {}, s.micro_batches * times.sum_us()};
  made.formula = schedule_formula(s.schedule, s.pipeline, chunks, s.micro_batches, times);
  const Schedule schedule = make_training_schedule(s.schedule, made.problem);
  ScheduleTimes runs;
  for (int g = 0; g < made.problem.problem.stages; ++g) {
    const char letter = letter_of_training_stage(g, made.problem.forward);
    const double backward_us = times.backward_us + (apart ? 0 : times.weight_us);
    runs.run_us.push_back((letter == 'F' ? times.forward_us : letter == 'B' ? backward_us : times.weight_us) / chunks);
  }
  made.simulation = simulate(schedule, made.problem.problem, runs, made.problem.forward);
  return made;
}

Json named_json(const Settings& s, const NamedSchedule& made, int chunks) {
  Json object = {{"schedule", s.schedule}, {"pipeline", s.pipeline}, {"chunks", chunks}, {"micro_batches", s.micro_batches}};
  object["formula"] = {{"exact", made.formula.exact},
                       {"idle_us", made.formula.idle_us},
                       {"step_us", made.stated_us()},
                       {"step_idle_share", made.stated_idle_share()},
                       {"peak_micro_batches", made.formula.peak_of_rank}};
  object.update(simulation_json(made.simulation));
  return object;
}

void print_named(const Settings& s, const NamedSchedule& made, int chunks) {
  const Simulation& simulation = made.simulation;
  const std::vector<std::string> picture = schedule_picture(simulation, made.problem.forward, s.micro_batches, kPictureColumns);
  for (size_t r = 0; r < picture.size(); ++r) std::printf("rank %-3zu %s\n", r, picture[r].c_str());
  const auto percent = [](double share) { return fmt::format("{:.1f}%", share * 100); };
  std::printf("\na step: %s, %s idle; by the formula %s, %s idle%s\n", human_time(simulation.step_us).c_str(),
              percent(simulation.step_idle_share).c_str(), human_time(made.stated_us()).c_str(), percent(made.stated_idle_share()).c_str(),
              made.formula.exact ? "" : " (stated for other numbers of micro-batches)");
  std::printf("from the first run to the last: %s, %s idle\n\n", human_time(simulation.time_us).c_str(),
              percent(simulation.idle_share).c_str());
  Table table({"rank", ">busy", chunks > 1 ? ">chunks kept" : ">micro-batches kept", ">at most"});
  for (size_t r = 0; r < simulation.ranks.size(); ++r)
    table.add({std::to_string(r), human_time(simulation.ranks[r].busy_us), std::to_string(simulation.ranks[r].peak_micro_batches),
               std::to_string(made.formula.peak_of_rank[r])});
  table.print();
}

void simulate_named(const Settings& settings) {
  const int chunks = settings.chunks > 0 ? settings.chunks : settings.schedule == "interleaved" ? 2 : 1;
  if (int64_t{3} * settings.pipeline * chunks * settings.micro_batches > kMostRuns)
    usage_error("ranks, chunks and micro-batches make a schedule of more than " + std::to_string(kMostRuns) + " runs", "ask for fewer");
  const NamedSchedule made = play(settings, chunks);
  if (settings.json) return print_json(named_json(settings, made, chunks));
  print_named(settings, made, chunks);
}

}  // namespace

void add_simulate(CLI::App& app, Outcome&) {
  auto settings = std::make_shared<Settings>();
  Settings& s = *settings;
  CLI::App* command = app.add_subcommand("simulate", "Show a schedule's timeline from costs, without devices");
  command->add_option("plan", s.path, "A plan folder");
  command->add_option("--schedule", s.schedule, "Instead of a plan: gpipe, 1f1b, interleaved, zero-bubble-h1 or zero-bubble-h2");
  std::vector<CLI::Option*> of_schedules = {
      command->add_option("--pipeline", s.pipeline, "Ranks (4 without it)")->check(CLI::Range(1, 1024)),
      command->add_option("--micro-batches", s.micro_batches, "Parts of a batch (8 without it)")->check(CLI::Range(1, 1 << 16)),
      command->add_option("--chunks", s.chunks, "Stages of each rank (1, of interleaved 2 without it)")->check(CLI::Range(1, 64)),
      command->add_option("--times", s.times, "F,B,W: what a micro-batch takes on a rank, in us (1,1,1 without it)")};
  command->add_flag("--json", s.json, "Print one JSON object");
  command->callback([settings, of_schedules] {
    const bool by_name = !settings->schedule.empty();
    if (by_name == !settings->path.empty())
      usage_error("simulate takes a plan or a schedule's name",
                  "write simulate PLAN, or simulate --schedule NAME --pipeline P --micro-batches M");
    for (const CLI::Option* option : of_schedules)
      if (!by_name && option->count() > 0)
        usage_error(option->get_name() + " says nothing of a plan", "leave it out, or name a --schedule instead of the plan");
    by_name ? simulate_named(*settings) : simulate_plan(*settings);
  });
}

}  // namespace fretsaw
