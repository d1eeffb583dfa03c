// fretsaw simulate: the schedule's timeline from costs, without devices.
#include "partitioner/simulate.h"

#include <CLI/App.hpp>
#include <algorithm>
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

// A rank's timeline as one line of `width` columns: the micro-batch's last digit while it computes, dots while it waits.
std::string timeline(const SimulatedRank& rank, double time_us, size_t width) {
  std::string line(width, '.');
  if (time_us <= 0) return line;
  for (const SimulatedAction& a : rank.actions) {
    using Kind = Action::Kind;
    if (a.action.kind != Kind::forward && a.action.kind != Kind::backward && a.action.kind != Kind::weight) continue;
    const auto column = [&](double t) { return static_cast<size_t>(t / time_us * static_cast<double>(width)); };
    for (size_t i = column(a.start_us); i < std::min(width, std::max(column(a.end_us), column(a.start_us) + 1)); ++i)
      line[i] = static_cast<char>('0' + a.action.micro_batch % 10);
  }
  return line;
}

void print_simulation(const Simulation& simulation) {
  std::printf("one step: %s, %s idle\n\n", human_time(simulation.time_us).c_str(), human_percent(simulation.idle_share).c_str());
  Table table({"rank", ">busy", ">micro-batches", "timeline"});
  for (size_t i = 0; i < simulation.ranks.size(); ++i) {
    const SimulatedRank& rank = simulation.ranks[i];
    table.add(
        {std::to_string(i), human_time(rank.busy_us), std::to_string(rank.peak_micro_batches), timeline(rank, simulation.time_us, 72)});
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
  return {{"time_us", simulation.time_us}, {"idle_share", simulation.idle_share}, {"ranks", ranks}};
}

}  // namespace

void add_simulate(CLI::App& app, Outcome&) {
  auto settings = std::make_shared<Settings>();
  CLI::App* command = app.add_subcommand("simulate", "Show the schedule's timeline from costs, without devices");
  command->add_option("plan", settings->path, "A plan folder")->required();
  command->add_flag("--json", settings->json, "Print one JSON object");
  command->callback([settings] {
    const Simulation simulation = simulate(read_plan(settings->path, /*structure_only_weights=*/true));
    if (settings->json) {
      print_json(simulation_json(simulation));
    } else {
      print_simulation(simulation);
    }
  });
}

}  // namespace fretsaw
