// Which part of a backward pass nobody waits for.
#pragma once
#include <functional>
#include <unordered_set>

#include "graph/ir.h"

namespace fretsaw {

// The backward nodes that lead to gradients of parameters alone: with dY of a product Y = X W, W^T dY is what the node before waits for,
// X^T dY is not. `stage_of` says which stage a backward node belongs to, and -1 of others. What another stage takes is waited for.
std::unordered_set<const Node*> weight_gradient_nodes(const Graph& graph, const std::function<int(const Node&)>& stage_of);

}  // namespace fretsaw
