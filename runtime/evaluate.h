// Running nodes while graphs are made.
#pragma once
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

// The node's outputs by its CPU kernel, as InferOptions::evaluate wants them. False where it has none, draws random numbers, communicates,
// or would make more than 64 MiB.
bool evaluate_on_constants(const Node& node, const std::vector<TensorPtr>& inputs, std::vector<TensorPtr>& outputs);

}  // namespace fretsaw
