// Numbers of a plan's graphs, and the problem that its schedule solves.
#include "graph/training/plan_graphs.h"

#include <algorithm>
#include <set>

namespace fretsaw {
namespace {

std::set<int> numbers_of_kind(const Plan& plan, const std::string& kind) {
  std::set<int> numbers;
  for (const PlanGraph& g : plan.graphs)
    if (g.kind == kind) numbers.insert(g.stage);
  return numbers;
}

}  // namespace

int GraphNumbers::forward_of(int number) const {
  if (number < forward) return number;
  return (number < 2 * forward ? 2 : 3) * forward - 1 - number;
}

int GraphNumbers::rank_of(int number) const {
  return (number < in_micro_batch ? forward_of(number) : number - in_micro_batch) % ranks;
}

GraphNumbers graph_numbers(const Plan& plan) {
  GraphNumbers numbers;
  numbers.ranks = plan.mesh.pipeline;
  if (numbers_of_kind(plan, "backward").empty()) {
    numbers.forward = numbers.in_micro_batch = static_cast<int>(plan.stages.size());
    return numbers;
  }
  numbers.forward = static_cast<int>(numbers_of_kind(plan, "forward").size());
  numbers.in_micro_batch = (numbers_of_kind(plan, "weights").empty() ? 2 : 3) * numbers.forward;
  return numbers;
}

bool same_parts(const PlanState& a, const PlanState& b) {
  return std::equal(a.parts.begin(), a.parts.end(), b.parts.begin(), b.parts.end(), [](const PlanState::Part& x, const PlanState::Part& y) {
    return x.axis == y.axis && x.dim == y.dim && x.cut == y.cut;
  });
}

bool updates_ahead(const Plan& plan, int pipeline_rank) {
  return plan.schedule.name == "zero-bubble-h2" && pipeline_rank + 1 < plan.mesh.pipeline && !plan.states.empty();
}

ScheduleProblem schedule_problem(const Plan& plan) {
  const GraphNumbers numbers = graph_numbers(plan);
  ScheduleProblem problem;
  problem.stages = numbers.in_micro_batch, problem.micro_batches = plan.micro_batches;
  std::vector<std::set<int>> needs(static_cast<size_t>(problem.stages));
  for (const Route& r : plan.routes) needs.at(static_cast<size_t>(r.to_stage)).insert(r.from_stage);
  for (const auto& of_stage : needs) problem.needs.emplace_back(of_stage.begin(), of_stage.end());
  const std::set<int> weights = numbers_of_kind(plan, "weights");
  for (int s = 0; s < problem.stages; ++s) {
    const bool absent = numbers.trains() && s >= 2 * numbers.forward && !weights.contains(s);
    problem.rank_of_stage.push_back(absent ? -1 : numbers.rank_of(s));
  }
  return problem;
}

Schedule of_micro_batches(const Schedule& schedule) {
  Schedule kept = schedule;
  for (auto& rank : kept.ranks)
    std::erase_if(rank, [](const Action& a) { return a.kind == Action::Kind::reduce || a.kind == Action::Kind::step; });
  return kept;
}

Type part_type(const Type& whole, const std::vector<PlanState::Part>& parts, const std::map<std::string, int>& place) {
  Type type = whole;
  for (const PlanState::Part& part : parts) {
    const auto at = place.find(part.axis);
    (*type.shape)[static_cast<size_t>(part.dim)] = Dim(part.cut.part_size(at == place.end() ? 0 : at->second));
  }
  return type;
}

}  // namespace fretsaw
