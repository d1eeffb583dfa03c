// Numbers in place of symbolic dimensions, for figures that need some.
#pragma once
#include <map>
#include <string>

#include "graph/plan.h"

namespace fretsaw {

using DimSizes = std::map<std::string, int64_t>;  // of symbols; one that is not there counts as 1

// The size of a dimension, whose symbol may be an expression ("2*batch", "past+1"): at least 0; 1 where nothing is known.
int64_t size_of(const Dim& dim, const DimSizes& sizes);
Type with_sizes(Type type, const DimSizes& sizes);
// A copy of the model without symbols. Where a type has a dimension of which nothing is known, inference is tried once more with the
// inputs' numbers.
Model with_sizes(const Model& model, const DimSizes& sizes);
// Whether that copy would say the same as taking each unknown dimension for 1.
bool ones_suffice(const Graph& graph, const DimSizes& sizes);
// The batch's symbol with the size of the largest micro-batch, where the plan knows the batch.
DimSizes micro_batch_sizes(const Plan& plan);

}  // namespace fretsaw
