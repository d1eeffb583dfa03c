// Divides a graph into steps for a device.
#include "runtime/device_steps.h"

#include <algorithm>
#include <unordered_map>

#include "graph/communication_schemas.h"
#include "runtime/collectives.h"
#include "runtime/program.h"

namespace fretsaw {
namespace {

constexpr int64_t host_elements = 4096;  // integers beyond this are data

bool runs_everywhere(const Node& node) {
  return is_control_flow(node) || is_collective(node);
}

bool is_small_integers(const Value& v) {
  const DType dtype = v.constant ? v.constant->dtype : v.type.dtype;
  if (!is_integer(dtype) && dtype != DType::boolean) return false;
  if (v.constant) return v.constant->count() <= host_elements;
  return !v.type.shape || !is_static(*v.type.shape) || count_of(dims_of(*v.type.shape)) <= host_elements;
}

// Walks from the last node to the first, so that it is known of each value whether the host needs it.
class HostSearch {
 public:
  HostSearch(const Graph& graph, const KernelRegistry& kernels, Device* device, bool tf32)
      : kernels_(kernels), device_(device), tf32_(tf32) {
    for (auto it = graph.nodes.rbegin(); it != graph.nodes.rend(); ++it) visit(**it);
    std::reverse(found_.fallbacks.begin(), found_.fallbacks.end());
  }
  HostNodes take() { return std::move(found_); }

 private:
  void visit(const Node& node) {
    if (is_control_flow(node)) {
      need(node.input(0));
      if (node.is("Loop")) need(node.input(1));
      return;
    }
    if (is_collective(node)) return;
    if (reads_only_dims(node)) {
      found_.nodes.insert(&node);
      return;
    }
    const std::string reason = reason_against(node);
    const bool for_host = node.outputs.size() == 1 && needed_.count(node.out(0)) && makes_host_integers(node);
    if (!reason.empty() || for_host) {
      found_.nodes.insert(&node);
      if (!for_host) found_.fallbacks.push_back({node.name, node.op, reason});
      for (const Value* v : node.inputs) need(v);
      return;
    }
    for (size_t i : kernels_.find(node.op, node.domain)->host_inputs) need(node.input(i));
  }

  std::string reason_against(const Node& node) {
    CompileContext c = make_context({&node}, 1);
    c.device = device_;
    c.tf32 = tf32_;
    return why_unsupported(kernels_, c);
  }
  bool makes_host_integers(const Node& node) const {
    const auto fits = [](const Value* v) { return !v || is_small_integers(*v); };
    return std::all_of(node.inputs.begin(), node.inputs.end(), fits) && std::all_of(node.outputs.begin(), node.outputs.end(), fits) &&
           cpu_kernels().find(node.op, node.domain) != nullptr && why_unsupported_on_cpu(make_context({&node}, 1)).empty();
  }
  void need(const Value* v) {
    if (v && !v->constant) needed_.insert(v);
  }

  const KernelRegistry& kernels_;
  Device* device_;
  bool tf32_;
  HostNodes found_;
  std::unordered_set<const Value*> needed_;
};

// Grows steps node by node in graph order.
class StepGrower {
 public:
  StepGrower(const Graph& graph, const HostNodes& host, const Consumers& consumers, const std::unordered_set<const Value*>& graph_outputs,
             Device& device, bool tf32)
      : graph_(graph), host_(host), consumers_(consumers), graph_outputs_(graph_outputs), device_(device), tf32_(tf32) {
    for (size_t i = 0; i < graph.nodes.size(); ++i) place_[graph.nodes[i]] = i;
  }

  std::vector<std::vector<const Node*>> run() {
    for (const Node* node : graph_.nodes) {
      if (!joins(*node)) step_of_[node] = add_step({node});
    }
    std::vector<std::vector<const Node*>> steps;
    for (const Node* node : graph_.nodes) {
      const Members& members = steps_[step_of_.at(node)];
      if (members.back() == node) steps.push_back(members);
    }
    return steps;
  }

 private:
  using Members = std::vector<const Node*>;

  size_t add_step(Members members) {
    steps_.push_back(std::move(members));
    return steps_.size() - 1;
  }
  const KernelRecord* record(const Node& node) const {
    if (runs_everywhere(node) || host_.nodes.count(&node)) return nullptr;
    return device_.kernels().find(node.op, node.domain);
  }

  // Whether the node only widens what those after it compute with: it runs with them, so that nothing of the wide type is stored.
  bool widens_for_followers(const Node& node) const {
    if (!node.is("Cast") || graph_outputs_.contains(node.out(0))) return false;
    const auto users = consumers_.find(node.out(0));
    if (users == consumers_.end() || bits_of(node.out(0)->type.dtype) <= bits_of(node.input(0)->type.dtype)) return false;
    return std::all_of(users->second.begin(), users->second.end(), [&](const Node* user) {
      const KernelRecord* own = record(*user);
      return own && own->follows;
    });
  }

  // Whether the step takes not only this Cast but also the Add after it, its only user: gradients are added up so, in the wide type.
  bool takes_sum_too(size_t step, const Node& cast) const {
    const auto& users = consumers_.at(cast.out(0));
    if (users.size() != 1 || !users.front()->is("Add")) return false;
    Members members = steps_[step];
    members.insert(members.end(), {&cast, users.front()});
    return why_unsupported_on_device(device_context(members, consumers_, graph_outputs_, device_, tf32_)).empty();
  }

  // Tries the steps of all producers together, then each alone: contractions first, then the latest.
  bool joins(const Node& node) {
    const KernelRecord* own = record(node);
    if (!own || !own->follows) return false;
    const bool leaves_contractions = widens_for_followers(node);
    std::vector<size_t> producers;
    for (const Value* v : node.inputs) {
      if (!v || !v->producer || !step_of_.count(v->producer)) continue;
      const size_t step = step_of_.at(v->producer);
      const KernelRecord* leader = record(*steps_[step].front());
      if (!leader || !leader->leads || std::count(producers.begin(), producers.end(), step)) continue;
      if (leaves_contractions && !leader->follows && !takes_sum_too(step, node)) continue;
      producers.push_back(step);
    }
    if (producers.size() > 1 && join(producers, node)) return true;
    std::stable_sort(producers.begin(), producers.end(), [&](size_t a, size_t b) {
      const bool contraction_a = !record(*steps_[a].front())->follows, contraction_b = !record(*steps_[b].front())->follows;
      if (contraction_a != contraction_b) return contraction_a;
      return place_.at(steps_[a].back()) > place_.at(steps_[b].back());
    });
    return std::any_of(producers.begin(), producers.end(), [&](size_t step) { return join({step}, node); });
  }

  bool join(const std::vector<size_t>& parts, const Node& node) {
    Members members;
    for (size_t step : parts) members.insert(members.end(), steps_[step].begin(), steps_[step].end());
    if (members.size() >= most_members) return false;
    std::sort(members.begin(), members.end(), [&](const Node* a, const Node* b) { return place_.at(a) < place_.at(b); });
    members.push_back(&node);
    if (needed_before(members, place_.at(&node))) return false;
    const CompileContext c = device_context(members, consumers_, graph_outputs_, device_, tf32_);
    if (!why_unsupported_on_device(c).empty()) return false;
    const size_t step = add_step(std::move(members));
    for (const Node* member : steps_[step]) step_of_[member] = step;
    return true;
  }

  // Whether somebody outside takes a member's result before the place where the step would run. That may also be a step that grew earlier
  // and runs at its last member.
  bool needed_before(const Members& members, size_t place) const {
    const std::unordered_set<const Node*> inside(members.begin(), members.end());
    for (const Node* member : members) {
      for (const Value* v : member->outputs) {
        auto users = consumers_.find(v);
        if (users == consumers_.end()) continue;
        for (const Node* user : users->second) {
          if (inside.count(user)) continue;
          auto step = step_of_.find(user);
          const size_t runs_at = step == step_of_.end() ? place_.at(user) : place_.at(steps_[step->second].back());
          if (runs_at < place) return true;
        }
      }
    }
    return false;
  }

  static constexpr size_t most_members = 64;
  const Graph& graph_;
  const HostNodes& host_;
  const Consumers& consumers_;
  const std::unordered_set<const Value*>& graph_outputs_;
  Device& device_;
  bool tf32_;
  std::unordered_map<const Node*, size_t> place_, step_of_;
  std::vector<Members> steps_;  // those that grew on are left behind
};

}  // namespace

HostNodes find_host_nodes(const Graph& graph, const KernelRegistry& kernels, Device* device, bool tf32) {
  return HostSearch(graph, kernels, device, tf32).take();
}

CompileContext device_context(const std::vector<const Node*>& nodes, const Consumers& consumers,
                              const std::unordered_set<const Value*>& graph_outputs, Device& device, bool tf32) {
  CompileContext c = make_context({nodes.front()}, 1);
  c.nodes = nodes;
  c.device = &device;
  c.tf32 = tf32;
  if (nodes.size() == 1) return c;
  const std::unordered_set<const Node*> inside(nodes.begin(), nodes.end());
  c.outputs.clear(), c.output_types.clear();
  for (size_t i = 0; i < nodes.size(); ++i) {
    for (const Value* v : nodes[i]->inputs) {
      if (i == 0 || !v || (v->producer && inside.count(v->producer))) continue;
      c.inputs.push_back(v);
      c.constants.push_back(v->constant);
      c.input_types.push_back(v->constant ? Type::tensor(v->constant->dtype, shape_of(v->constant->dims)) : v->type);
      c.offered.push_back(Layout::plain);
    }
    for (const Value* v : nodes[i]->outputs) {
      auto users = v ? consumers.find(v) : consumers.end();
      bool taken = v && graph_outputs.count(v);
      if (users != consumers.end()) {
        taken |= std::any_of(users->second.begin(), users->second.end(), [&](const Node* user) { return !inside.count(user); });
      }
      if (!taken) continue;
      c.outputs.push_back(v);
      c.output_types.push_back(v->type);
    }
  }
  return c;
}

std::vector<std::vector<const Node*>> device_steps(const Graph& graph, const HostNodes& host, const Consumers& consumers,
                                                   const std::unordered_set<const Value*>& graph_outputs, Device& device, bool tf32) {
  return StepGrower(graph, host, consumers, graph_outputs, device, tf32).run();
}

}  // namespace fretsaw
