// What a plan holds and costs: the counts behind `inspect PLAN` and `partition`.
#include "tools/plan_summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <unordered_set>

#include "graph/communication_schemas.h"
#include "graph/sizes.h"
#include "graph/training/plan_graphs.h"
#include "tools/model_summary.h"
#include "tools/text.h"
#include "tools/training_summary.h"

namespace fretsaw {
namespace {

std::map<std::string, int> mesh_axes(const Mesh& mesh) {
  std::map<std::string, int> axes = {{"data", mesh.data}, {"pipeline", mesh.pipeline}, {"tensor", mesh.tensor}};
  if (mesh.tensor_y == 1) return axes;
  axes.erase("tensor");
  axes["tensor_x"] = mesh.tensor_x();
  axes["tensor_y"] = mesh.tensor_y;
  return axes;
}

// Bytes of the initializers that some graphs name, shared ones once: tensors of one name and shape are one.
class WeightCount {
 public:
  void add(const Graph& graph) {
    for (const Value& value : graph.all_values()) {
      // Parts of one tensor that differ are two: a rank may hold it whole and in part.
      if (value.is_constant() && names_.insert(value.source_name() + to_string(value.constant->dims)).second)
        bytes_ += saturating_bytes(value.constant->dtype, value.constant->dims);
    }
    for (const Node* node : graph.nodes)
      for (const GraphPtr& body : bodies(*node)) add(*body);
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::unordered_set<std::string> names_;
  int64_t bytes_ = 0;
};

int64_t weight_bytes(const PlanGraph& graph) {
  WeightCount count;
  count.add(*graph.model->graph);
  return count.bytes();
}

const StageEstimate& estimate(const Plan& plan, int stage) {
  static const StageEstimate none;
  return stage >= 0 && static_cast<size_t>(stage) < plan.stages.size() ? plan.stages[stage] : none;
}

// The forward stages of each pipeline rank, ascending.
std::vector<std::vector<int>> stages_of_ranks(const Plan& plan) {
  const GraphNumbers numbers = graph_numbers(plan);
  std::vector<std::vector<int>> stages(static_cast<size_t>(plan.mesh.pipeline));
  for (int stage = 0; stage < numbers.forward; ++stage) stages[static_cast<size_t>(numbers.rank_of(stage))].push_back(stage);
  return stages;
}

struct RankSummary {
  int rank = 0;
  std::map<std::string, int> coordinates;
  std::vector<int> stages;
  std::vector<std::string> graphs;
  int64_t weight_bytes = 0;
  double flops = 0;
  KeptStates states;
};

std::vector<RankSummary> rank_summaries(const Plan& plan) {
  const std::vector<std::vector<int>> stages = stages_of_ranks(plan);
  std::vector<RankSummary> ranks;
  for (int d = 0; d < plan.mesh.data; ++d) {
    for (int p = 0; p < plan.mesh.pipeline; ++p) {
      for (int t = 0; t < plan.mesh.tensor; ++t) {
        RankSummary rank{
            plan.mesh.rank(d, p, t), {{"data", d}, {"pipeline", p}, {"tensor", t}}, stages[static_cast<size_t>(p)], {}, 0, 0, {}};
        WeightCount weights;
        for (const PlanGraph& graph : plan.graphs) {
          if (!runs(plan, rank.coordinates, graph)) continue;
          rank.graphs.push_back(graph.file);
          rank.flops += estimate(plan, graph.stage).flops;
          weights.add(*graph.model->graph);
        }
        rank.weight_bytes = weights.bytes();
        rank.states = states_of_rank(plan, rank.coordinates);
        ranks.push_back(std::move(rank));
      }
    }
  }
  return ranks;
}

bool is_of_lowest_rank(const PlanGraph& graph) {
  return std::all_of(graph.coordinates.begin(), graph.coordinates.end(), [](const auto& place) { return place.second == 0; });
}

// What one micro-batch does on the lowest rank of each stage: one Send for each route between ranks, and the collectives of its graphs; and
// those of the end of a step.
std::vector<CommunicationCount> communication(const Plan& plan) {
  std::vector<CommunicationCount> counts;
  auto add = [&](const std::string& op, const std::string& axis, int64_t count, int64_t bytes) {
    auto same = std::find_if(counts.begin(), counts.end(), [&](const CommunicationCount& c) { return c.op == op && c.axis == axis; });
    if (same == counts.end()) same = counts.insert(counts.end(), {op, axis, 0, 0});
    same->count += count;
    same->bytes += bytes;
  };
  const GraphNumbers numbers = graph_numbers(plan);
  for (const Route& r : plan.routes)
    if (numbers.rank_of(r.from_stage) != numbers.rank_of(r.to_stage)) add("Send", "pipeline", 1, 0);
  for (const StageEstimate& stage : plan.stages)
    if (stage.send_bytes > 0) add("Send", "pipeline", 0, stage.send_bytes);
  const DimSizes sizes = micro_batch_sizes(plan);
  for (const PlanGraph& graph : plan.graphs) {
    if (!is_of_lowest_rank(graph)) continue;
    for (const Node* node : graph.model->graph->nodes) {
      if (!communicates(*node) || node->op == "Send" || node->op == "Recv") continue;
      int64_t bytes = 0;
      for (const Value* v : node->op == "AllGather" ? node->outputs : node->inputs) {
        const Type type = with_sizes(v->type, sizes);
        if (type.shape) bytes += saturating_bytes(type.dtype, dims_of(*type.shape));
      }
      add(node->op, node->get_string("axis", "tensor"), 1, bytes);
    }
  }
  return counts;
}

int64_t nodes_of_stage(const Plan& plan, int stage) {
  for (const PlanGraph& graph : plan.graphs)
    if (graph.stage == stage) return static_cast<int64_t>(graph.model->graph->nodes.size());
  return 0;
}

int64_t weights_of_stage(const Plan& plan, int stage) {
  WeightCount weights;
  for (const PlanGraph& graph : plan.graphs)
    if (graph.stage == stage && is_of_lowest_rank(graph)) weights.add(*graph.model->graph);
  return weights.bytes();
}

std::string list_of(const std::vector<int>& numbers) {
  std::string out;
  for (const int n : numbers) out += (out.empty() ? "" : ",") + std::to_string(n);
  return out;
}

void print_stages(const Plan& plan) {
  Table table({"stage", ">nodes", ">flops", ">weights", ">sends", ">predicted"});
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    const auto stage = static_cast<int>(i);
    const StageEstimate& e = plan.stages[i];
    table.add({std::to_string(i), std::to_string(nodes_of_stage(plan, stage)), human_count(e.flops),
               human_bytes(static_cast<double>(weights_of_stage(plan, stage))), human_bytes(static_cast<double>(e.send_bytes)),
               human_time(e.time_us)});
  }
  table.print();
}

// Of a plan that trains: a line for each graph, those of the end of a step as well.
void print_graphs(const Plan& plan) {
  const GraphNumbers numbers = graph_numbers(plan);
  Table table({"graph", "stage", "pipeline rank", ">nodes", ">flops", ">weights", ">sends", ">predicted"});
  for (const PlanGraph& graph : plan.graphs) {
    if (!is_of_lowest_rank(graph)) continue;
    const bool of_stage = graph.stage < numbers.in_micro_batch;
    const StageEstimate& e = estimate(plan, graph.stage);
    table.add({graph.kind, of_stage ? std::to_string(numbers.forward_of(graph.stage)) : "", std::to_string(numbers.rank_of(graph.stage)),
               std::to_string(graph.model->graph->nodes.size()), of_stage ? human_count(e.flops) : "",
               human_bytes(static_cast<double>(weights_of_stage(plan, graph.stage))),
               of_stage ? human_bytes(static_cast<double>(e.send_bytes)) : "", of_stage ? human_time(e.time_us) : ""});
  }
  table.print();
}

void print_training_ranks(const Plan& plan) {
  Table table({"rank", "stages", ">graphs", ">flops", ">weights", ">states", ">kept"});
  for (const RankSummary& rank : rank_summaries(plan))
    table.add({std::to_string(rank.rank), list_of(rank.stages), std::to_string(rank.graphs.size()), human_count(rank.flops),
               human_bytes(static_cast<double>(rank.weight_bytes)), std::to_string(rank.states.count),
               human_bytes(static_cast<double>(rank.states.bytes))});
  table.print();
}

void print_ranks(const Plan& plan) {
  Table table({"rank", "stages", "graphs", ">flops", ">weights"});
  for (const RankSummary& rank : rank_summaries(plan))
    table.add({std::to_string(rank.rank), list_of(rank.stages), join(rank.graphs, ","), human_count(rank.flops),
               human_bytes(static_cast<double>(rank.weight_bytes))});
  table.print();
}

void print_routes(const Plan& plan) {
  Table table({"from", "to", "value", "type"});
  for (const Route& route : plan.routes)
    table.add({"stage " + std::to_string(route.from_stage), "stage " + std::to_string(route.to_stage),
               route.source.empty() ? route.value : route.source, to_string(route.type)});
  if (!table.empty()) std::printf("\n"), table.print();
}

}  // namespace

Json plan_json(const Plan& plan) {
  Json out;
  out["mesh"] = mesh_axes(plan.mesh);
  out["schedule"] = plan.schedule.name;
  out["micro_batches"] = plan.micro_batches;
  out["graphs"] = Json::array();
  for (const PlanGraph& graph : plan.graphs) {
    out["graphs"].push_back({{"file", graph.file},
                             {"stage", graph.stage},
                             {"kind", graph.kind},
                             {"nodes", graph.model->graph->nodes.size()},
                             {"flops", estimate(plan, graph.stage).flops},
                             {"weight_bytes", weight_bytes(graph)}});
  }
  out["ranks"] = Json::array();
  for (const RankSummary& rank : rank_summaries(plan)) {
    out["ranks"].push_back({{"rank", rank.rank},
                            {"coordinates", rank.coordinates},
                            {"stages", rank.stages},
                            {"graphs", rank.graphs},
                            {"weight_bytes", rank.weight_bytes},
                            {"flops", rank.flops}});
    if (!plan.states.empty()) out["ranks"].back()["states"] = rank.states.count, out["ranks"].back()["state_bytes"] = rank.states.bytes;
  }
  if (!plan.states.empty()) out["states"] = states_json(plan);
  out["stages"] = Json::array();
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    const auto stage = static_cast<int>(i);
    out["stages"].push_back({{"stage", stage},
                             {"nodes", nodes_of_stage(plan, stage)},
                             {"flops", plan.stages[i].flops},
                             {"weight_bytes", weights_of_stage(plan, stage)},
                             {"send_bytes", plan.stages[i].send_bytes}});
  }
  out["communication"] = json_of(communication(plan));
  out["shardings"] = Json::array();
  for (const auto& [tensor, sharding] : plan.shardings) out["shardings"].push_back({{"tensor", tensor}, {"sharding", sharding}});
  out["notes"] = plan.notes;
  return out;
}

void print_plan(const Plan& plan) {
  std::printf("mesh data=%d pipeline=%d tensor=%d, %d micro-batch%s, schedule %s, costs of %s\n\n", plan.mesh.data, plan.mesh.pipeline,
              plan.mesh.tensor, plan.micro_batches, plan.micro_batches == 1 ? "" : "es", plan.schedule.name.c_str(), plan.target.c_str());
  if (graph_numbers(plan).trains()) {
    print_graphs(plan);
    std::printf("\n");
    print_training_ranks(plan);
    print_states(plan);
  } else {
    print_stages(plan);
    std::printf("\n");
    print_ranks(plan);
    print_routes(plan);
  }
  if (!plan.notes.empty()) std::printf("\n");
  print_notes(plan.notes);
}

}  // namespace fretsaw
