// Sums over ranks that run as one step with the addition and the norm that follow them, on devices that have a kernel for it.
//
//   AllReduce(p)  ->  Add(x, .)  ->  RMSNormalization      of each half of a transformer's block, with few tokens
//
// The sum then crosses the link once and goes through no memory in between. The three stand at the place of the norm, so nothing that
// communicates may stand between it and the AllReduce: ranks meet in the order of their graphs.
#pragma once
#include <unordered_set>
#include <vector>

#include "runtime/program.h"

namespace fretsaw {

// Joins such steps of a graph's `steps` (runtime/device_steps.h).
void join_norms_to_sums(std::vector<std::vector<const Node*>>& steps, const HostNodes& host, const Consumers& consumers,
                        const std::unordered_set<const Value*>& graph_outputs, RankContext& rank);
// The kernel of such a step. `rank` must outlive it. Throws Error when the sum's attributes don't fit the mesh.
CompiledKernel make_sum_with_norm(const CompileContext& c, RankContext& rank);

}  // namespace fretsaw
