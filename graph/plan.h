// A plan: the pieces of a cut model, and everything that says how they fit together. The runtime needs nothing else.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "graph/ir.h"
#include "graph/schedule.h"
#include "graph/sharding.h"

namespace fretsaw {

struct Mesh {
  int data = 1, pipeline = 1, tensor = 1;
  int tensor_y =
      1;  // where there are two tensor axes, the second: tensor = tensor_x * tensor_y, and rank t of it is (t / tensor_y, t % tensor_y)
  int tensor_x() const { return tensor / tensor_y; }
  int size() const { return data * pipeline * tensor; }
  int ranks_of(const std::string& axis) const {  // 0: there is no such axis
    if (axis == "tensor_x" || axis == "tensor_y") return tensor_y == 1 ? 0 : axis == "tensor_x" ? tensor_x() : tensor_y;
    return axis == "tensor" ? tensor : axis == "data" ? data : axis == "pipeline" ? pipeline : 0;
  }
  // Ranks are row-major in the order data, pipeline, tensor, the last fastest.
  int rank(int d, int p, int t) const { return (d * pipeline + p) * tensor + t; }
};

// A graph that some ranks run. Of a plan that trains, with n forward stages: "forward" k of 0 .. n - 1, "backward" 2 n - 1 - k and, where
// gradients of weights are made apart, "weights" 3 n - 1 - k, all on the pipeline rank k % P of P, which together run each micro-batch;
// then, once a step, "reduce" s + p and "update" s + P + p of pipeline rank p, where s is the number of those before.
struct PlanGraph {
  int stage = 0;
  std::string kind = "forward";
  std::map<std::string, int> coordinates;  // the mesh axes on which it differs, with the index: {"tensor": 0}
  std::string file;                        // "stage0.onnx"
  std::shared_ptr<Model> model;
};

// A value that crosses from the stage that makes it to one that uses it (one route for each such stage, also past stages between).
// In the graphs: `value -> Send -> from_name` (a graph output) in from_stage, `to_name` (a graph input) `-> Recv -> value` in to_stage.
struct Route {
  int tag = 0;  // unique in the plan, from 1; the communicator's tag
  int from_stage = 0, to_stage = 0;
  std::string value;      // the name inside both stage graphs: before the Send there, after the Recv here
  std::string from_name;  // the graph output of from_stage: "send:VALUE>STAGE"
  std::string to_name;    // the graph input of to_stage: "recv:VALUE"
  std::string source;     // the source model's value
  Type type;              // symbolic dimensions kept
};

// How a source input is split over data ranks and micro-batches.
struct PlanInput {
  std::string name;
  Type type;
  int batch_axis = -1;      // -1: given whole to each
  std::vector<int> stages;  // the stages whose graphs take it
};
// How a source output comes together.
struct PlanOutput {
  std::string name;
  Type type;
  int stage = 0;
  std::string merge = "concat";  // concat, mean, sum, same
  int axis = 0;                  // of concat
};

// What ranks keep from step to step: a parameter, its gradient, what the optimizer keeps of it, running statistics. Graphs take it as the
// input "state:NAME" and give its new value as the output "next:NAME".
struct PlanState {
  // One dimension in parts, one for each rank of the mesh axis. Of two tensor axes all ranks together are the axis "tensor"; those along an
  // axis that does not cut the dimension have the same part.
  struct Part {
    std::string axis;  // "tensor", "data"
    int dim = 0;
    Cut cut;
  };
  std::string name;               // "fc.weight", "gradient:fc.weight", "exp_avg:fc.weight"
  Type type;                      // of the whole, of known shape
  TensorPtr initial;              // of the whole; null: zeros
  bool starts_at_zero = false;    // in every step
  std::vector<Part> parts;        // what a rank keeps of it; each cuts what the one before leaves. Empty: all of it
  std::string rounded_from = "";  // it is always that state, of the same shape, rounded to this one's type; "": none
};
bool same_parts(const PlanState& a, const PlanState& b);  // whether ranks keep the same part of both
inline constexpr const char *kStateInput = "state:", *kStateOutput = "next:";

struct StageEstimate {
  double flops = 0, time_us = 0;
  int64_t weight_bytes = 0, activation_bytes = 0, send_bytes = 0;  // of one micro-batch
};

struct Plan {
  static constexpr int format_version = 1;
  std::string folder;  // "" while in memory
  std::string source_file, source_digest;
  Mesh mesh;
  int micro_batches = 1;
  int64_t batch = -1;  // the source's baked batch, -1 when it was symbolic already
  Schedule schedule;
  std::vector<PlanGraph> graphs;
  std::vector<Route> routes;
  std::vector<PlanInput> inputs;    // in the source's order
  std::vector<PlanOutput> outputs;  // in the source's order
  std::vector<PlanState> states;    // of a plan that trains
  std::vector<StageEstimate> stages;
  std::map<std::string, std::string> shardings;  // tensor -> "[_, tensor]"
  std::vector<std::string> notes;
  std::string target = "cpu";
  double link_bytes_per_us = 0, link_latency_us = 0;  // between two ranks of the target, as the costs assume
  bool structure_only = false;
  std::shared_ptr<Model> annotated;  // the source with ONNX's multi-device annotations, for annotated.onnx; null when not made
  std::shared_ptr<Model> whole;      // the normalised model without weights, for whole.onnx, which merging needs; null once read
};

struct WritePlanOptions {
  bool overwrite = false;
};
// What a schedule of this plan must respect: which stages need values from which, and which pipeline rank runs each.
ScheduleProblem schedule_problem(const Plan& plan);
// Whether the pipeline rank has done its part of a step before later ranks have, and would wait for them: its update can be made
// meanwhile, and is taken back where it turns out that there should be none (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section
// 4, where all of the next step's beginning is taken back; here ranks agree before it begins).
bool updates_ahead(const Plan& plan, int pipeline_rank);
// Writes the folder under a temporary name and renames it: plan.json, one model file for each graph with its weights in one external file
// beside it, states.onnx with the states' first values, annotated.onnx, whole.onnx. Weights are streamed from the files they are mapped
// from. An existing folder is refused, or with `overwrite` replaced when it is a plan or empty.
void write_plan(const Plan& plan, const std::string& folder, const WritePlanOptions& options = {});
// Throws Error naming the file and the field that is missing or wrong.
Plan read_plan(const std::string& folder, bool structure_only_weights = false);
bool is_plan_folder(const std::string& path);  // holds a plan.json

}  // namespace fretsaw
