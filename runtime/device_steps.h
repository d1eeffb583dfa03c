// How a graph is divided into steps for a device: which nodes run on the host, and which run together as one step.
#pragma once
#include <string>
#include <unordered_set>
#include <vector>

#include "graph/ir.h"
#include "kernels/device.h"

namespace fretsaw {

// A node that the device has no kernel for.
struct HostFallback {
  std::string node, op, reason;
};

// A node runs on the host when the device has no kernel for it, or when it makes small integers that the host needs (shapes, axes,
// conditions) out of such integers: they are not worth a trip to the device and back.
struct HostNodes {
  std::unordered_set<const Node*> nodes;
  std::vector<HostFallback> fallbacks;
};
// `kernels`: the device's. It is null where the device need not be there.
HostNodes find_host_nodes(const Graph& graph, const KernelRegistry& kernels, Device* device, bool tf32);

// What the step `nodes` (a node, or several that run as one) is told. Its outputs are the values that somebody outside takes.
CompileContext device_context(const std::vector<const Node*>& nodes, const Consumers& consumers,
                              const std::unordered_set<const Value*>& graph_outputs, Device& device, bool tf32);

// Single nodes and fused steps, each at the place of its last member.
//
//   MatMul -> Add(bias) -> Gelu -> MatMul -> Add(bias) -> Add(x) -> LayerNormalization
//   [MatMul Add Gelu] [MatMul Add Add] [LayerNormalization]      with kernels that take bias, activation and residual
//
// A node joins the steps that make its inputs when the kernel that leads them takes it, and nobody needs their results before it.
std::vector<std::vector<const Node*>> device_steps(const Graph& graph, const HostNodes& host, const Consumers& consumers,
                                                   const std::unordered_set<const Value*>& graph_outputs, Device& device, bool tf32);

}  // namespace fretsaw
