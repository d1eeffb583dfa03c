// From a model, a loss and an optimizer to a plan that trains.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "graph/passes.h"
#include "graph/training/loss.h"
#include "graph/training/optimizer.h"
#include "graph/training/training_plan.h"
#include "partitioner/partition.h"

namespace fretsaw {

struct TrainingOptions {
  LossSpec loss;
  OptimizerSpec optimizer;
  // Patterns of parameter names (name_pattern.h): only what `train` matches, where there is one, and nothing that `freeze` does.
  std::vector<std::string> train, freeze;
  bool sync_batch_norm = false;  // BatchNormalization by the statistics of all data ranks' samples of a micro-batch
  int chunks = 1;                // stages a pipeline rank runs, of the schedule "interleaved"
  // What is divided over the data ranks: 1 what the optimizer keeps, 2 and the sums of gradients, 3 and the parameters.
  int zero = 0;
  // What the backward pass computes once more: "none", "all" (only what passes between blocks of nodes is kept), or "auto" (all where a
  // device's memory does not hold it otherwise).
  std::string recompute = "none";
  double bucket_mb = 25;             // MiB of gradients that ranks add up in one exchange
  std::map<std::string, Dims> dims;  // of the inputs of a whole batch, where they are known: how much memory a rank needs
  std::string precision = "fp32";    // of weights and activations: fp32, fp16, bf16; parameters and what is kept of them stay float32
  // Runs a node on constants, as InferOptions::evaluate: finds scales and masks of attention that exporters compute. Null: they stay
  // computed.
  decltype(InferOptions::evaluate) evaluate = nullptr;
};

// Forward, backward and update graphs. Trained are the float initializers of the source that the loss depends on, as the options choose
// among them. BatchNormalization becomes its training form, with its running statistics as states.
//
// Throws Error naming the node or value that stands in the way: an operator without a gradient, a loss that does not fit the output, no
// parameter left to train, a pattern that matches nothing; and where PartitionOptions::memory_bytes does not hold what a rank needs.
TrainingPlan partition_for_training(Model model, const PartitionOptions& options, const TrainingOptions& training);

}  // namespace fretsaw
