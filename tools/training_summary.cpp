// States of a plan, counted.
#include "tools/training_summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <set>

#include "graph/training/plan_graphs.h"
#include "tools/model_summary.h"
#include "tools/text.h"

namespace fretsaw {
namespace {

struct StateGroup {
  std::string what;
  int64_t count = 0, bytes = 0, first_rank_bytes = 0;
  std::map<std::string, int64_t> divided;  // axes, as "tensor" or "tensor, data", or "whole": states
};

std::string axes_of(const PlanState& state) {
  std::vector<std::string> axes;
  for (const PlanState::Part& part : state.parts) axes.push_back(part.axis);
  return axes.empty() ? "whole" : join(axes, ", ");
}

// What a state is, from its name: of a parameter's "exp_avg:NAME" that is exp_avg. Names may hold colons themselves.
std::string kind_of(const PlanState& state, const std::set<std::string>& names) {
  const std::string& name = state.name;
  if (name.starts_with(kScalarState) || name == kSquaredSum) return "scalar";
  const size_t colon = name.find(':');
  if (colon != std::string::npos && names.contains(name.substr(colon + 1))) return name.substr(0, colon);
  return names.contains(gradient_of(name)) ? "parameter" : "statistic";
}

std::vector<StateGroup> groups_of(const Plan& plan) {
  std::set<std::string> names;
  for (const PlanState& state : plan.states) names.insert(state.name);
  std::vector<StateGroup> groups;
  for (const PlanState& state : plan.states) {
    const std::string what = kind_of(state, names);
    auto group = std::find_if(groups.begin(), groups.end(), [&](const StateGroup& g) { return g.what == what; });
    if (group == groups.end()) group = groups.insert(groups.end(), {what, 0, 0, 0, {}});
    ++group->count;
    group->bytes += bytes_of_type(state.type);
    group->first_rank_bytes += bytes_of_type(part_type(state.type, state.parts, {}));
    ++group->divided[axes_of(state)];
  }
  return groups;
}

}  // namespace

bool runs(const Plan& plan, const std::map<std::string, int>& coordinates, const PlanGraph& graph) {
  if (graph_numbers(plan).rank_of(graph.stage) != coordinates.at("pipeline")) return false;
  return std::all_of(graph.coordinates.begin(), graph.coordinates.end(), [&](const auto& place) {
    const auto found = coordinates.find(place.first);
    return place.first == "pipeline" || found == coordinates.end() || found->second == place.second;
  });
}

KeptStates states_of_rank(const Plan& plan, const std::map<std::string, int>& coordinates) {
  std::set<std::string> own;
  for (const PlanGraph& graph : plan.graphs) {
    if (!runs(plan, coordinates, graph)) continue;
    for (const Value* v : graph.model->graph->inputs) own.insert(v->name);
    for (const Value* v : graph.model->graph->outputs) own.insert(v->name);
  }
  KeptStates kept;
  for (const PlanState& state : plan.states) {
    if (!own.contains(kStateInput + state.name) && !own.contains(kStateOutput + state.name)) continue;
    ++kept.count;
    kept.bytes += bytes_of_type(part_type(state.type, state.parts, coordinates));
  }
  return kept;
}

Json states_json(const Plan& plan) {
  Json list = Json::array();
  for (const StateGroup& g : groups_of(plan))
    list.push_back({{"kind", g.what}, {"count", g.count}, {"bytes", g.bytes}, {"part_bytes", g.first_rank_bytes}, {"divided", g.divided}});
  return list;
}

void print_states(const Plan& plan) {
  Table table({"kept", ">states", ">bytes", ">in parts", "divided over"});
  for (const StateGroup& g : groups_of(plan)) {
    std::vector<std::string> divided;
    for (const auto& [axes, count] : g.divided) divided.push_back(g.divided.size() == 1 ? axes : fmt::format("{} ({})", axes, count));
    table.add({one_line(g.what), std::to_string(g.count), human_bytes(static_cast<double>(g.bytes)),
               human_bytes(static_cast<double>(g.first_rank_bytes)), join(divided, "; ")});
  }
  if (!table.empty()) std::printf("\n"), table.print();
}

Json training_json(const TrainingPlanFile& file) {
  const TrainingPlan& t = file.training;
  return {{"loss", file.specs.loss},           {"optimizer", file.specs.optimizer}, {"options", file.specs.options},
          {"parameters", t.parameters.size()}, {"statistics", t.statistics.size()}, {"target", t.target}};
}

void print_training(const TrainingPlanFile& file) {
  std::printf("trains %zu parameters of %s: loss %s, optimizer %s\n", file.training.parameters.size(),
              one_line(file.training.plan->source_file).c_str(), one_line(file.specs.loss).c_str(), one_line(file.specs.optimizer).c_str());
}

}  // namespace fretsaw
