// Looks for kernels as compiling does.
#include "runtime/host_nodes.h"

#include "runtime/program.h"

namespace fretsaw {

std::vector<HostFallback> nodes_without_kernel(const Model& model, const KernelRegistry& kernels) {
  const std::vector<Value*>& inputs = model.graph->inputs;
  std::vector<InputSpec> specs;
  for (const Value* v : inputs) specs.push_back({.given = v->constant == nullptr, .type = v->type, .content = nullptr});
  RankContext rank;
  const Specialised specialised = specialise(model, inputs, specs, {}, rank, &kernels);
  return find_host_nodes(*specialised.model->graph, kernels, nullptr, /*tf32=*/false).fallbacks;
}

}  // namespace fretsaw
