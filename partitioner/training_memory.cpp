// What training needs of a device's memory.
#include "partitioner/training_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "graph/errors.h"
#include "graph/training/plan_graphs.h"
#include "partitioner/cost.h"
#include "partitioner/simulate.h"
#include "partitioner/stages.h"

namespace fretsaw {

DimSizes sizes_of_micro_batch(const Plan& plan, const std::map<std::string, Dims>& batch) {
  DimSizes sizes = micro_batch_sizes(plan);
  const auto share = [](int64_t size, int parts) { return (size + parts - 1) / parts; };
  for (const PlanInput& input : plan.inputs) {
    const auto known = batch.find(input.name);
    if (known == batch.end() || !input.type.shape || known->second.size() != input.type.shape->size()) continue;
    for (size_t k = 0; k < known->second.size(); ++k) {
      const Dim& d = (*input.type.shape)[k];
      if (d.known() || d.symbol.empty()) continue;
      const bool is_batch = static_cast<int>(k) == input.batch_axis;
      sizes.try_emplace(d.symbol, is_batch ? share(share(known->second[k], plan.mesh.data), plan.micro_batches) : known->second[k]);
    }
  }
  return sizes;
}

void note_open_sizes(const DimSizes& sizes, Plan& plan) {
  std::set<std::string> open;
  for (const PlanInput& input : plan.inputs)
    for (size_t k = 0; input.type.shape && k < input.type.shape->size(); ++k)
      if (const Dim& d = (*input.type.shape)[k]; !d.known() && !sizes.contains(d.symbol))
        open.insert(d.symbol.empty() ? fmt::format("{}[{}]", input.name, k) : d.symbol);
  if (!open.empty())
    plan.notes.push_back(fmt::format("memory is counted with 1 for what is not known: {}; data or --shape say it", fmt::join(open, ", ")));
}

namespace {

// Of what the updates of a pipeline rank have twice where they may be taken back: all that they make but roundings that can be made again
// from what lies on the same rank.
int64_t bytes_of_second_places(const Plan& plan, const std::set<int>& own, const std::map<std::string, int64_t>& state_bytes) {
  std::set<std::string> made;
  for (const PlanGraph& g : plan.graphs) {
    if (g.kind != "update" || !own.contains(g.stage)) continue;
    for (const Value* v : g.model->graph->outputs) made.insert(v->name);
  }
  std::map<std::string, const PlanState*> states;
  for (const PlanState& state : plan.states) states[state.name] = &state;
  int64_t bytes = 0;
  for (const auto& [name, state] : states) {
    const bool is_made_again = !state->rounded_from.empty() && same_parts(*state, *states.at(state->rounded_from));
    if (!is_made_again && made.contains(kStateOutput + name)) bytes += state_bytes.at(kStateInput + name);
  }
  return bytes;
}

}  // namespace

int64_t bytes_of_fullest_rank(const Plan& plan, const DimSizes& sizes) {
  std::map<std::string, int64_t> state_bytes;
  for (const PlanState& state : plan.states) state_bytes[kStateInput + state.name] = type_bytes(part_type(state.type, state.parts, {}));
  const Simulation simulation = simulate(plan, sizes);
  int64_t most = 0;
  for (size_t p = 0; p < plan.schedule.ranks.size(); ++p) {
    std::set<int> own;
    for (const Action& action : plan.schedule.ranks[p]) own.insert(action.stage);
    std::set<std::string> states;
    int64_t working = 0, held = 0;
    std::set<std::pair<int, std::string>> kept;  // graphs and values
    for (const Route& r : plan.routes)
      if (own.contains(r.from_stage) && own.contains(r.to_stage)) {
        for (const int stage : {r.from_stage, r.to_stage}) kept.emplace(stage, r.value);
        kept.emplace(r.to_stage, r.to_name), kept.emplace(r.from_stage, r.from_name);
      }
    for (const PlanGraph& g : plan.graphs) {
      if (!own.contains(g.stage)) continue;
      for (const Value* v : g.model->graph->inputs)
        if (const auto state = state_bytes.find(v->name); state != state_bytes.end() && states.insert(v->name).second)
          held += state->second;
      const auto elsewhere = [&](const Value& v) {  // in what is held or kept
        return v.name.starts_with(kStateInput) || v.name.starts_with(kStateOutput) || kept.contains({g.stage, v.name});
      };
      working = std::max(working, peak_activation_bytes(*with_sizes(*g.model, sizes).graph, elsewhere));
    }
    if (updates_ahead(plan, static_cast<int>(p))) held += bytes_of_second_places(plan, own, state_bytes);
    most = std::max(most, held + working + simulation.ranks[p].peak_kept_bytes);
  }
  return most;
}

void check_training_memory(const Plan& plan, const DimSizes& sizes, int64_t memory, const std::string& recompute) {
  const int64_t needed = bytes_of_fullest_rank(plan, sizes);
  if (needed <= memory) return;
  const std::string again = recompute == "none" ? "--recompute auto, " : "";
  throw Error(fmt::format("a rank needs {} bytes{}, and --memory gives it {}", needed,
                          recompute == "none" ? "" : ", although activations are computed again", memory),
              "use " + again + "more micro-batches, smaller batches, --zero over data ranks, more ranks, or a device with more memory");
}

}  // namespace fretsaw
