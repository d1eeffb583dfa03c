// How a graph is divided into steps for the host: single nodes, and the fusion groups that the CPU's kernels take.
#include <algorithm>
#include <optional>
#include <unordered_map>

#include "runtime/program.h"

namespace fretsaw {
namespace {

// Folding may have taken members away; what is left must still be a chain whose inner results nobody else uses.
bool is_chain(const std::vector<const Node*>& group, const Consumers& consumers, const std::unordered_set<const Value*>& graph_outputs) {
  for (size_t i = 0; i + 1 < group.size(); ++i) {
    const Value* inner = group[i]->out(0);
    if (!inner || graph_outputs.count(inner) || group[i]->outputs.size() != 1) return false;
    auto users = consumers.find(inner);
    if (users == consumers.end() || users->second.size() != 1 || users->second[0] != group[i + 1]) return false;
    if (std::count(group[i + 1]->inputs.begin(), group[i + 1]->inputs.end(), inner) != 1) return false;
  }
  return true;
}

}  // namespace

std::vector<std::vector<const Node*>> host_steps(const Graph& graph, const Consumers& consumers,
                                                 const std::unordered_set<const Value*>& graph_outputs, const TakesGroup& takes) {
  struct Group {
    std::vector<const Node*> members;
    std::optional<bool> fused;
  };
  std::unordered_map<int, Group> groups;
  for (const Node* node : graph.nodes) {
    if (node->group >= 0) groups[node->group].members.push_back(node);
  }
  const auto runs_fused = [&](const std::vector<const Node*>& members) {
    if (members.size() == 1 || !is_chain(members, consumers, graph_outputs)) return false;
    const KernelRecord* record = cpu_kernels().find(members.front()->op, members.front()->domain);
    return record && record->make && takes(*record, members);
  };
  std::vector<std::vector<const Node*>> steps;
  for (const Node* node : graph.nodes) {
    if (node->group < 0) {
      steps.push_back({node});
      continue;
    }
    Group& group = groups[node->group];
    if (!group.fused) group.fused = runs_fused(group.members);
    if (!*group.fused) {
      steps.push_back({node});
    } else if (node == group.members.back()) {
      steps.push_back(group.members);
    }
  }
  return steps;
}

}  // namespace fretsaw
