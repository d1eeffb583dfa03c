// Sizes that costs are computed for, where a model leaves them open.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "graph/ir.h"
#include "partitioner/batch.h"

namespace fretsaw {

// A copy of the model whose inputs have numbers for sizes: what the cut is balanced for. Nodes stand at the same positions. With a batch
// that was made symbolic they are those of the largest of `parts` micro-batches of the inputs' `whole` shapes.
Model at_likely_sizes(const Model& model, const BatchFacts& facts, const std::map<std::string, Dims>& whole, int parts,
                      std::vector<std::string>& notes);
// Whether all that is not known of the inputs is sizes that count as 1 anyway.
bool likely_sizes_are_one(const Graph& graph);
// Inputs all of whose dimensions have numbers.
std::map<std::string, Dims> static_inputs(const Graph& graph);

}  // namespace fretsaw
