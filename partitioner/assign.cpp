// Automatic cuts by cost, the user's own, and those of annotations.
#include "partitioner/assign.h"

#include <fmt/format.h>

#include <algorithm>

#include "graph/errors.h"
#include "partitioner/units.h"
#include "partitioner/user_cut.h"

namespace fretsaw {

std::optional<int64_t> memory_limit(const PartitionOptions& options, const Target& target) {
  return options.memory_bytes ? options.memory_bytes : target.memory_bytes;
}

namespace {

Error too_many_stages(int wanted, size_t possible, const std::string& tied_by) {
  std::string why = tied_by.empty() ? "" : fmt::format(" (nodes around {} stay together)", tied_by);
  return Error(fmt::format("{} stages are asked for and {} {} possible{}", wanted, possible, possible == 1 ? "is" : "are", why),
               "use fewer stages");
}

StageAssignment automatic_assignment(const GraphIndex& index, const SizedGraph& sized, int stages, std::optional<int64_t> memory) {
  Units units;
  std::optional<CutProblem> problem;
  // Whole groups where they suffice; else groups are opened, and then even nodes that could be copied count.
  for (UnitOptions options : {UnitOptions{false, false}, {true, false}, {true, true}}) {
    units = make_units(index, sized, options);
    if (static_cast<int>(units.members.size()) < stages) continue;
    problem = make_cut_problem(units, sized);
    break;
  }
  if (!problem) throw too_many_stages(stages, units.members.size(), units.tied_by);
  problem->stages = stages;
  problem->memory_bytes = memory;
  std::optional<StageCut> cut = find_cut(*problem);
  if (!cut)
    throw Error(fmt::format("the model does not fit: {} stages need {} bytes on a device, and {} are available", stages,
                            least_memory_bytes(*problem), memory.value_or(0)),
                "use more stages, or devices with more memory");
  StageAssignment a;
  a.stages = stages;
  a.order = units.order;
  a.stage_of.assign(index.nodes.size(), -1);
  int begin = 0;
  for (int s = 0; s < stages; ++s) {
    for (int u = begin; u < cut->ends[static_cast<size_t>(s)]; ++u)
      for (int m : units.members[static_cast<size_t>(u)]) a.stage_of[static_cast<size_t>(m)] = s;
    begin = cut->ends[static_cast<size_t>(s)];
  }
  return a;
}

// One stage: every node, in file order; nothing is copied, even what nobody needs stays.
StageAssignment single_stage(const GraphIndex& index) {
  StageAssignment a;
  a.stage_of.assign(index.nodes.size(), 0);
  for (size_t i = 0; i < index.nodes.size(); ++i) a.order.push_back(static_cast<int>(i));
  return a;
}

// Whole groups, and what belongs to one stage, next to each other where the assignment allows it.
std::vector<int> order_for(const GraphIndex& index, const SizedGraph& sized, const StageAssignment& a) {
  std::vector<int> order;
  for (const UnitOptions options : {UnitOptions{false, false}, {true, false}, {true, true}}) {
    const Units units = make_units(index, sized, options);
    order = units.order;
    const bool kept = std::all_of(units.members.begin(), units.members.end(), [&](const std::vector<int>& members) {
      return std::all_of(members.begin(), members.end(),
                         [&](int m) { return a.stage_of[static_cast<size_t>(m)] == a.stage_of[static_cast<size_t>(members.front())]; });
    });
    if (kept && static_cast<int>(units.members.size()) >= a.stages) break;
  }
  return order;
}

}  // namespace

StageAssignment assign(const GraphIndex& index, const Graph& costed, const Graph& source, const PartitionOptions& options,
                       const Annotations* annotations, const Target& target, int stages) {
  if (stages == 1) return single_stage(index);
  std::optional<GraphIndex> other;
  if (&costed != &index.graph) other.emplace(costed);
  SizedGraph sized(other ? *other : index, target);
  const bool annotated = annotations && annotations->has_stages;
  if (options.cuts.empty() && !annotated) return automatic_assignment(index, sized, stages, memory_limit(options, target));
  StageAssignment a =
      annotated ? assignment_by_source(index, *annotations) : user_assignment(index, source, options.cuts, {}, copied_nodes(index));
  if (a.stages == 1) return single_stage(index);
  a.order = order_for(index, sized, a);
  return a;
}

}  // namespace fretsaw
