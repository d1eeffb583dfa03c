// The graph that one rank of the tensor axis runs, from the strategies chosen.
#pragma once
#include <string>
#include <vector>

#include "partitioner/sharding/search.h"
#include "partitioner/sharding/shard.h"
#include "partitioner/sharding/strategies.h"

namespace fretsaw {

struct Choice {
  const Strategies& strategies;
  const std::vector<int>& chosen;  // by node position
  const std::unordered_map<const Value*, Form>& pins;
};
// Nodes, names and their order are the same on every rank; constants and sizes differ. Values carry the types of their parts. Constants
// that were parts before, and are cut once more, go into `outer`.
Model local_model(const Model& model, const Choice& choice, int rank, OuterParts& outer);

// Which form the producer of a derived constant has to take for the value to come in this form; null: none, it is made whole and sliced.
const Strategy* strategy_for(const NodeStrategies& producer, int output, Form form);

}  // namespace fretsaw
