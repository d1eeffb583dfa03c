// Which graph of a micro-batch each node of the joint graph of forward and backward pass runs in.
#pragma once
#include <unordered_map>

#include "graph/ir.h"
#include "partitioner/training_job.h"

namespace fretsaw {

using NodeNumbers = std::unordered_map<const Node*, int>;

// The number of the graph of every node: forward ones where they were, backward ones with their forward node or later; -1: copied.
// `placed`: the numbers of forward nodes and of what was added to stages since; all others are backward ones. `sums`: the stages of those
// that add up gradients.
NodeNumbers number_nodes(const Graph& graph, const TrainingJob& job, const NodeNumbers& placed, const NodeNumbers& sums);

}  // namespace fretsaw
