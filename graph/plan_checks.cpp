// The cross-references of a plan.
#include "graph/plan_checks.h"

#include <fmt/format.h>

#include <map>
#include <set>

#include "graph/errors.h"
#include "graph/training/dropout.h"
#include "graph/training/plan_graphs.h"

namespace fretsaw {
namespace {

[[noreturn]] void damaged(const std::string& what) {
  throw Error(what, "the plan is damaged; partition the model again");
}

// --- numbers ---

// The numbers that graphs of each kind have, [begin, end).
std::map<std::string, std::pair<int, int>> ranges_of_kinds(const GraphNumbers& numbers) {
  const int n = numbers.forward, all = numbers.in_micro_batch, ranks = numbers.ranks;
  if (!numbers.trains()) return {{"forward", {0, n}}};
  return {{"forward", {0, n}},
          {"backward", {n, 2 * n}},
          {"weights", {2 * n, all}},
          {"reduce", {all, all + ranks}},
          {"update", {all + ranks, all + 2 * ranks}}};
}

void check_graphs(const Plan& plan) {
  const GraphNumbers numbers = graph_numbers(plan);
  const auto ranges = ranges_of_kinds(numbers);
  for (size_t i = 0; i < plan.graphs.size(); ++i) {
    const PlanGraph& g = plan.graphs[i];
    const auto range = ranges.find(g.kind);
    if (range == ranges.end())
      damaged(fmt::format("field 'graphs[{}].kind' is '{}', which no graph of a plan {} is", i, g.kind,
                          numbers.trains() ? "that trains" : "without backward graphs"));
    if (g.stage < range->second.first || g.stage >= range->second.second)
      damaged(fmt::format("field 'graphs[{}].stage' is {}, which is out of range for a graph of kind {}", i, g.stage, g.kind));
    for (const auto& [axis, index] : g.coordinates)
      if (index >= plan.mesh.ranks_of(axis))
        damaged(fmt::format("field 'graphs[{}].coordinates' names {} of axis {}, which the mesh does not have", i, index, axis));
  }
  if (numbers.trains() && numbers.forward % numbers.ranks != 0)
    damaged(
        fmt::format("field 'graphs' has {} forward stages, which {} pipeline ranks do not share evenly", numbers.forward, numbers.ranks));
  if (static_cast<int>(plan.stages.size()) != numbers.in_micro_batch)
    damaged(fmt::format("field 'stages' has {} entries for {} graphs of a micro-batch", plan.stages.size(), numbers.in_micro_batch));
}

// Ascending, neither empty nor touching, and none beyond the end.
bool are_sound(const Intervals& intervals, int64_t size) {
  int64_t end = -1;
  for (const Interval& i : intervals) {
    if (i.begin <= end || i.end <= i.begin || i.end > size) return false;
    end = i.end;
  }
  return true;
}

bool is_sound(const Cut& cut) {
  int64_t sum = 0;
  for (const Intervals& part : cut.parts) {
    if (!are_sound(part, cut.size)) return false;
    sum += size_of(part);
  }
  return sum == cut.size && !cut.overlaps();
}

// Each part once, where as many ranks hold each.
Cut different_parts(const Cut& cut) {
  Cut different{cut.size, {}};
  const auto holders = [&](const Intervals& part) { return std::count(cut.parts.begin(), cut.parts.end(), part); };
  for (const Intervals& part : cut.parts) {
    if (holders(part) != holders(cut.parts[0])) return cut;
    if (std::find(different.parts.begin(), different.parts.end(), part) == different.parts.end()) different.parts.push_back(part);
  }
  return different;
}

void check_parts(const PlanState& state, const Mesh& mesh, const std::string& place) {
  Shape left = *state.type.shape;  // what a rank has; -1: not the same on all
  for (size_t k = 0; k < state.parts.size(); ++k) {
    const PlanState::Part& part = state.parts[k];
    const std::string here = fmt::format("{}.parts[{}]", place, k);
    const int ranks = mesh.ranks_of(part.axis);
    if (part.axis != "tensor" && part.axis != "data")
      damaged(fmt::format("field '{}.axis' is '{}', which divides no state", here, part.axis));
    if (part.dim >= static_cast<int>(left.size()))
      damaged(fmt::format("field '{}.dim' is {}, which the state does not have", here, part.dim));
    Dim& dim = left[static_cast<size_t>(part.dim)];
    if (part.cut.size != dim.value) damaged(fmt::format("field '{}.size' is {} where {} are left", here, part.cut.size, dim.value));
    if (part.cut.ranks() != ranks)
      damaged(fmt::format("field '{}.intervals' has {} parts for {} ranks of the axis {}", here, part.cut.ranks(), ranks, part.axis));
    if (!is_sound(part.axis == "tensor" && mesh.tensor_y > 1 ? different_parts(part.cut) : part.cut))
      damaged(fmt::format("field '{}.intervals' does not hold each index once, in order", here));
    dim = Dim(part.cut.even() ? part.cut.part_size(0) : -1);
  }
}

void check_states(const Plan& plan) {
  std::set<std::string> names;
  for (size_t i = 0; i < plan.states.size(); ++i) {
    const PlanState& state = plan.states[i];
    const std::string place = fmt::format("state[{}]", i);
    if (!names.insert(state.name).second) damaged(fmt::format("field '{}.name' is '{}', which another state is", place, state.name));
    bool known = state.type.is_tensor() && state.type.shape;
    for (size_t d = 0; known && d < state.type.shape->size(); ++d) known = (*state.type.shape)[d].known();
    if (!known) damaged(fmt::format("field '{}.type' is no tensor of known shape", place));
    check_parts(state, plan.mesh, place);
  }
  for (size_t i = 0; i < plan.states.size(); ++i) {
    const PlanState& state = plan.states[i];
    if (state.rounded_from.empty()) continue;
    const auto from =
        std::find_if(plan.states.begin(), plan.states.end(), [&](const PlanState& s) { return s.name == state.rounded_from; });
    if (from == plan.states.end() || dims_of(*from->type.shape) != dims_of(*state.type.shape))
      damaged(fmt::format("field 'state[{}].rounded_from' names '{}', which is no state of its shape", i, state.rounded_from));
  }
}

// --- the schedule ---

// Reductions and updates stand behind everything else, each graph once on its rank.
void check_ends_of_step(const Plan& plan) {
  const GraphNumbers numbers = graph_numbers(plan);
  std::map<int, std::string> left;  // graphs, of these kinds
  for (const PlanGraph& g : plan.graphs)
    if (g.kind == "reduce" || g.kind == "update") left[g.stage] = g.kind;
  for (size_t r = 0; r < plan.schedule.ranks.size(); ++r) {
    bool ends = false;
    for (size_t i = 0; i < plan.schedule.ranks[r].size(); ++i) {
      const Action& a = plan.schedule.ranks[r][i];
      const bool once = a.kind == Action::Kind::reduce || a.kind == Action::Kind::step;
      if (!once && !ends) continue;
      ends = true;
      const auto graph = left.find(a.stage);
      const bool right = once && graph != left.end() && (graph->second == "reduce") == (a.kind == Action::Kind::reduce) &&
                         numbers.rank_of(a.stage) == static_cast<int>(r);
      if (!right) damaged(fmt::format("field 'schedule.ranks[{}][{}]' is {}, which has no place there", r, i, to_string(a)));
      left.erase(graph);
    }
  }
  if (!left.empty())
    damaged(fmt::format("field 'schedule' leaves out the graph of kind {} with number {}", left.begin()->second, left.begin()->first));
}

// --- names ---

const Graph& graph_of(const Plan& plan, int stage) {
  for (const PlanGraph& g : plan.graphs)
    if (g.stage == stage) return *g.model->graph;
  damaged(fmt::format("stage {} has no graph", stage));
}

const Value* named(const std::vector<Value*>& values, const std::string& name) {
  for (const Value* v : values)
    if (v->name == name) return v;
  return nullptr;
}

using KnownInputs = std::map<int, std::set<std::string>>;  // by the graph's number

void check_routes(const Plan& plan, KnownInputs& known) {
  std::set<int> tags;
  for (size_t i = 0; i < plan.routes.size(); ++i) {
    const Route& r = plan.routes[i];
    if (!tags.insert(r.tag).second) damaged(fmt::format("field 'routes[{}].tag' is used twice", i));
    if (!named(graph_of(plan, r.from_stage).outputs, r.from_name))
      damaged(fmt::format("field 'routes[{}].from_name' names '{}', which is no output of stage {}", i, r.from_name, r.from_stage));
    if (!named(graph_of(plan, r.to_stage).inputs, r.to_name))
      damaged(fmt::format("field 'routes[{}].to_name' names '{}', which is no input of stage {}", i, r.to_name, r.to_stage));
    known[r.to_stage].insert(r.to_name);
  }
}

void check_borders(const Plan& plan, KnownInputs& known) {
  for (size_t i = 0; i < plan.inputs.size(); ++i)
    for (int s : plan.inputs[i].stages) {
      if (!named(graph_of(plan, s).inputs, plan.inputs[i].name))
        damaged(fmt::format("field 'inputs[{}].stages' names stage {}, which has no input '{}'", i, s, plan.inputs[i].name));
      known[s].insert(plan.inputs[i].name);
    }
  for (size_t i = 0; i < plan.outputs.size(); ++i)
    if (!named(graph_of(plan, plan.outputs[i].stage).outputs, plan.outputs[i].name))
      damaged(fmt::format("field 'outputs[{}].stage' names stage {}, which has no output '{}'", i, plan.outputs[i].stage,
                          plan.outputs[i].name));
}

// Of a graph's input or output that a rank keeps: whether it is the state's part there.
bool fits(const Type& type, const PlanState& state, const PlanGraph& graph) {
  const Type part = part_type(state.type, state.parts, graph.coordinates);
  if (type.dtype != DType::undefined && type.dtype != part.dtype) return false;
  if (!type.shape) return true;
  if (type.shape->size() != part.shape->size()) return false;
  for (size_t d = 0; d < part.shape->size(); ++d)
    if ((*type.shape)[d].known() && (*type.shape)[d].value != (*part.shape)[d].value) return false;
  return true;
}

// The state that a graph's input or output stands for; null: none.
const PlanState* state_of(const std::map<std::string, const PlanState*>& states, const std::string& name, const std::string& prefix) {
  if (!name.starts_with(prefix)) return nullptr;
  const auto found = states.find(name.substr(prefix.size()));
  return found == states.end() ? nullptr : found->second;
}

void check_graph_ends(const Plan& plan, const KnownInputs& known) {
  std::map<std::string, const PlanState*> states;
  for (const PlanState& state : plan.states) states[state.name] = &state;
  const auto check_fit = [](const Value& v, const PlanState& state, const PlanGraph& g) {
    if (!fits(v.type, state, g))
      damaged(fmt::format("'{}' of {} is {}, which is not the part of {} that field 'state' says", v.name, g.file, to_string(v.type),
                          to_string(state.type)));
  };
  for (const PlanGraph& g : plan.graphs) {
    const auto given = known.find(g.stage);
    for (const Value* v : g.model->graph->inputs) {
      if (given != known.end() && given->second.contains(v->name)) continue;
      if (v->name == kSamplesAtHand) continue;  // the ranks fill it in
      const PlanState* state = state_of(states, v->name, kStateInput);
      if (!state) damaged(fmt::format("stage {} takes '{}', which nobody gives it", g.stage, v->name));
      check_fit(*v, *state, g);
    }
    for (const Value* v : g.model->graph->outputs)
      if (const PlanState* state = state_of(states, v->name, kStateOutput)) check_fit(*v, *state, g);
  }
}

}  // namespace

void check_numbers(const Plan& plan) {
  check_graphs(plan);
  check_states(plan);
}

void check_schedule(const Plan& plan) {
  verify(of_micro_batches(plan.schedule), schedule_problem(plan));
  check_ends_of_step(plan);
}

void check_references(const Plan& plan) {
  const ScheduleProblem problem = schedule_problem(plan);
  for (int s = 0; s < problem.stages; ++s)
    if (problem.rank_of_stage[static_cast<size_t>(s)] >= 0) graph_of(plan, s);
  KnownInputs known;
  check_routes(plan, known);
  check_borders(plan, known);
  check_graph_ends(plan, known);
}

}  // namespace fretsaw
