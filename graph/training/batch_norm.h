// BatchNormalization while a model is trained.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

// A running mean or variance, each once: the initializer, and the value that takes its place after a micro-batch.
struct RunningStatistic {
  Value *running = nullptr, *next = nullptr;
};

// The means of those BatchNormalizations that the file has in their form for inference (training_mode=0) beside others in training, layers
// that the user froze, and of those in that form whose statistics are computed. A file in which none is in training does not say so of any
// with running statistics, as some exporters write all of them that way.
std::set<std::string> frozen_running_means(const Graph& graph);

// Writes the BatchNormalizations with these means as the operators that they are in inference, so that they stay so. Returns the names of
// their statistics. Types must be known, and are known afterwards.
std::set<std::string> write_frozen_batch_norms(Model& model, const std::set<std::string>& means);

// Takes every BatchNormalization of the graph back to its form for inference, with one output. Where the graph used
// the others, it gets the running statistics as they are.
void batch_norms_for_inference(Graph& graph);

// Turns every BatchNormalization of the main graph to training: it normalises by the statistics of the micro-batch, population variances
// as in ONNX, and moves the running ones, which nodes in 16 bits read as they are kept; one that several nodes share moves once for each,
// in their order. What is not finite moves nothing. With `data_ranks` above 1 the statistics are those of all of them, by AllReduce over
// the axis "data". Types must be known, and are known afterwards. Throws Error naming a node whose running statistics are computed, that
// can't be synchronised, or that stands in a body.
std::vector<RunningStatistic> train_batch_norms(Model& model, int data_ranks);

}  // namespace fretsaw
