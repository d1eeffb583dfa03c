// What the steps from a model to a plan that trains hand to one another.
#pragma once
#include <map>
#include <set>
#include <string>
#include <vector>

#include "graph/training/batch_norm.h"
#include "partitioner/partition.h"
#include "partitioner/recompute.h"
#include "partitioner/stages.h"
#include "partitioner/training.h"
#include "partitioner/training_states.h"

namespace fretsaw {

// A running mean or variance, and which graph output takes its place after a micro-batch.
struct TrainedStatistic {
  std::string name;
  size_t next_output = 0;
};

struct TrainingJob {
  const PartitionOptions& options;
  const TrainingOptions& training;
  Target target;

  // --- the model with its loss; outputs: the loss's sum and count, then the next statistics ---
  std::vector<std::string> parameters;     // by the source's names; those without a gradient are dropped when all ranks have their graphs
  std::set<std::string> without_gradient;  // of the parameters: states that stay as they are
  std::vector<TrainedStatistic> statistics;
  std::map<std::string, Type> types;            // of parameters and statistics, whole
  std::map<std::string, TensorPtr> initial;     // likewise
  std::map<std::string, int> batch_axes;        // of the graph's inputs; -1: none
  StateLayouts layouts;                         // over the tensor ranks
  std::map<std::string, PlanState::Part> data;  // over the data ranks, of what --zero divides
  std::map<std::string, DType> copies;          // parameters that the micro-batches take rounded to this type alone
  StageAssignment forward;                      // of forward nodes, by position
  bool recomputes = false;                      // what passes inside of blocks is computed again
  std::optional<KeptValues> kept;               // between those blocks

  // --- numbers of graphs (PlanGraph) ---
  int stages() const { return forward.stages; }
  int pipeline_ranks() const { return forward.stages / training.chunks; }
  bool scales_loss() const { return training.precision == "fp16"; }
  bool has_weight_graphs() const { return options.schedule.starts_with("zero-bubble"); }
  int backward_of(int stage) const { return 2 * stages() - 1 - stage; }
  int weights_of(int stage) const { return 3 * stages() - 1 - stage; }
  int micro_batch_graphs() const { return (has_weight_graphs() ? 3 : 2) * stages(); }
  int rank_of(int stage) const { return stage % pipeline_ranks(); }
  // The forward stage that a graph of a micro-batch belongs to.
  int forward_of(int number) const {
    if (number < stages()) return number;
    return (number < 2 * stages() ? 2 : 3) * stages() - 1 - number;
  }

  // What a rank keeps of a parameter, or of what goes with it; with_data: where that is divided over the data ranks.
  std::vector<PlanState::Part> parts_of(const std::string& parameter, bool with_data) const {
    std::vector<PlanState::Part> parts = layouts.at(parameter).parts;
    if (const auto part = data.find(parameter); with_data && part != data.end()) parts.push_back(part->second);
    return parts;
  }
  bool divides_gradients() const { return training.zero >= 2; }
  bool divides_parameters() const { return training.zero >= 3; }
  // Whether a data rank keeps a part of the parameter itself: its copy may be whole nevertheless.
  bool divides(const std::string& parameter) const {
    return data.contains(parameter) && (divides_parameters() || copies.contains(parameter));
  }
};

// The graphs of every micro-batch of one tensor rank, forward, backward and weights, put into `plan`: its graphs, routes, states, borders.
// `model` is the rank's forward graph. The first rank's call adds the states, and drops parameters without a gradient from the job.
// `homes`: the stage that each parameter lives in.
void add_micro_batch_graphs(TrainingJob& job, Model& model, const StateValues& values, int tensor, Plan& plan,
                            std::map<std::string, int>& homes);

// The graphs that run once a step, of all ranks, and the states that they keep.
struct StepGraphs {
  std::vector<std::pair<int, int>> reduce, update;  // pipeline rank, graph
};
StepGraphs add_step_graphs(const TrainingJob& job, const std::map<std::string, int>& homes, Plan& plan);

}  // namespace fretsaw
