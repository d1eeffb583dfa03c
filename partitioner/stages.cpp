// Which stage runs what, what each takes from the others, and the graphs that follow.
#include "partitioner/stages.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/sizes.h"
#include "graph/training/plan_graphs.h"
#include "partitioner/channels_last.h"
#include "partitioner/cost.h"
#include "partitioner/sharding/search.h"
#include "partitioner/stage_graph.h"

namespace fretsaw {

void check_assignment(const GraphIndex& index, const StageAssignment& a) {
  std::map<std::pair<int, int>, const Value*> crossing;  // from stage, to stage -> a value
  std::vector<int> nodes(static_cast<size_t>(a.stages), 0);
  for (size_t i = 0; i < index.nodes.size(); ++i) {
    int to = a.stage_of[i];
    if (to < 0) continue;
    ++nodes[static_cast<size_t>(to)];
    for (size_t k = 0; k < index.uses[i].size(); ++k) {
      int p = index.producers[i][k];
      int from = p < 0 ? -1 : a.stage_of[static_cast<size_t>(p)];
      if (from >= 0 && from != to) crossing.try_emplace({from, to}, index.uses[i][k]);
    }
  }
  for (const auto& [edge, value] : crossing) {
    auto back = crossing.find({edge.second, edge.first});
    if (back != crossing.end())
      throw Error(
          fmt::format("stages {} and {} would depend on each other: stage {} needs '{}' of stage {}, which needs '{}' of stage {}",
                      edge.first, edge.second, edge.second, value->source_name(), edge.first, back->second->source_name(), edge.second),
          "cut so that values only go to later stages");
    if (edge.first > edge.second)
      throw Error(fmt::format("stage {} would need '{}' of the later stage {}", edge.second, value->source_name(), edge.first),
                  "cut so that values only go to later stages");
  }
  for (int s = 0; s < a.stages; ++s)
    if (a.stages > 1 && !a.may_be_empty && nodes[static_cast<size_t>(s)] == 0)
      throw Error(fmt::format("stage {} would be empty", s), "use fewer stages, or cut elsewhere");
}

namespace {

// Decides for every stage which copies it needs and which values it receives.
class Placement {
 public:
  Placement(const GraphIndex& index, const StageAssignment& a)
      : index_(index), a_(a), stages_(static_cast<size_t>(a.stages)), has_(stages_.size()) {
    for (auto& h : has_) h.assign(index.nodes.size(), 0);
    for (size_t i = 0; i < index.nodes.size(); ++i)
      if (a.stage_of[i] >= 0) has_[static_cast<size_t>(a.stage_of[i])][i] = 1;
    find_homes();
    std::vector<std::pair<const Value*, int>> later;  // copies are placed when it is known what every stage receives
    for (size_t i = 0; i < index.nodes.size(); ++i)
      if (a.stage_of[i] >= 0)
        for (size_t k = 0; k < index.uses[i].size(); ++k) {
          Value* v = index.uses[i][k];
          int p = index.producers[i][k];
          int from = p < 0 ? -1 : a.stage_of[static_cast<size_t>(p)];
          if (p >= 0 && from < 0)
            later.push_back({v, a.stage_of[i]});
          else if (from != a.stage_of[i])
            require(v, a.stage_of[i]);
        }
    for (auto [v, s] : later) require(v, s);
    place_outputs();
  }

  std::vector<StageParts> take() {
    for (int position : a_.order)
      for (size_t s = 0; s < stages_.size(); ++s)
        if (has_[s][static_cast<size_t>(position)]) stages_[s].nodes.push_back(index_.nodes[static_cast<size_t>(position)]);
    for (Value* v : index_.graph.inputs)
      for (size_t s = 0; s < stages_.size(); ++s)
        if (inputs_.count({v, static_cast<int>(s)})) stages_[s].inputs.push_back(v);
    return std::move(stages_);
  }
  int stage_of_output(size_t i) const { return output_stages_[i]; }

 private:
  // The earliest stage in which a copied node has all it needs.
  void find_homes() {
    home_.assign(index_.nodes.size(), 0);
    for (int position : a_.order) {
      auto i = static_cast<size_t>(position);
      if (a_.stage_of[i] >= 0) {
        home_[i] = a_.stage_of[i];
        continue;
      }
      for (int p : index_.producers[i])
        if (p >= 0) home_[i] = std::max(home_[i], home_[static_cast<size_t>(p)]);
    }
  }

  void require(const Value* value, int stage) {
    std::vector<const Value*> open{value};
    while (!open.empty()) {
      const Value* v = open.back();
      open.pop_back();
      if (index_.is_fixed(v)) continue;
      int p = index_.producer(v);
      if (p < 0) {
        inputs_.insert({v, stage});
      } else if (a_.stage_of[static_cast<size_t>(p)] >= 0) {
        receive(v, a_.stage_of[static_cast<size_t>(p)], stage);
      } else if (!has_[static_cast<size_t>(stage)][static_cast<size_t>(p)]) {
        place(static_cast<size_t>(p), v, stage, open);
      }
    }
  }

  void receive(const Value* v, int from, int stage) {
    if (from == stage || !received_.insert({v, stage}).second) return;
    std::string why = why_not_sent(v->type);
    if (!why.empty())
      throw Error(fmt::format("value '{}' would go from stage {} to stage {}, but {}", v->source_name(), from, stage, why),
                  "cut the model elsewhere");
    stages_[static_cast<size_t>(stage)].receives.push_back({const_cast<Value*>(v), from});
    stages_[static_cast<size_t>(from)].sends.push_back({const_cast<Value*>(v), stage});
  }

  // A copy of node p in the stage; but the shape of a value that the stage does not have otherwise is taken where the value is
  // made, and sent: a few integers in place of an activation.
  void place(size_t p, const Value* wanted, int stage, std::vector<const Value*>& open) {
    const Node& node = *index_.nodes[p];
    if (node.is("Shape") || node.is("Size")) {
      const Value* measured = node.input(0);
      int maker = measured ? index_.producer(measured) : -1;
      int from = maker < 0 ? -1 : a_.stage_of[static_cast<size_t>(maker)];
      if (from >= 0 && from != stage && !received_.count({measured, stage})) {
        has_[static_cast<size_t>(from)][p] = 1;
        return receive(wanted, from, stage);
      }
    }
    has_[static_cast<size_t>(stage)][p] = 1;
    open.insert(open.end(), index_.uses[p].begin(), index_.uses[p].end());
  }

  void place_outputs() {
    for (Value* v : index_.graph.outputs) {
      int p = index_.producer(v), stage = 0;
      if (p >= 0) {
        stage = home_[static_cast<size_t>(p)];
        for (int s = a_.stages; s-- > stage;)
          if (has_[static_cast<size_t>(s)][static_cast<size_t>(p)]) stage = s;
        require(v, stage);
      } else {
        for (int s = a_.stages; s-- > 0;)
          if (inputs_.count({v, s})) stage = s;
        require(v, stage);
      }
      output_stages_.push_back(stage);
      auto& outputs = stages_[static_cast<size_t>(stage)].outputs;
      if (std::find(outputs.begin(), outputs.end(), v) == outputs.end()) outputs.push_back(v);
    }
  }

  const GraphIndex& index_;
  const StageAssignment& a_;
  std::vector<StageParts> stages_;
  std::vector<std::vector<char>> has_;  // [stage][node]
  std::vector<int> home_, output_stages_;
  std::set<std::pair<const Value*, int>> inputs_, received_;
};

// A group whose nodes are not all in one stage is one no more; what stays together with its contraction is.
void split_groups(const GraphIndex& index, const StageAssignment& a) {
  std::map<int, int> first_stage;
  for (int position : a.order) {
    Node& node = *index.nodes[static_cast<size_t>(position)];
    if (node.group < 0) continue;
    int stage = a.stage_of[static_cast<size_t>(position)];
    auto [it, is_new] = first_stage.try_emplace(node.group, stage);
    if (is_new || it->second == stage) continue;
    node.group = -1;
  }
}

std::string readable_bytes(double bytes) {
  if (bytes >= 1e9) return fmt::format("{:.1f} GB", bytes / 1e9);
  if (bytes >= 1e6) return fmt::format("{:.1f} MB", bytes / 1e6);
  return fmt::format("{:.1f} kB", bytes / 1e3);
}

// `forward` as in StageAssignment: backward graphs are numbered from the last stage back, and so are those of weights.
void note_shared_weights(const std::vector<PlanGraph>& graphs, int forward, std::vector<std::string>& notes) {
  const auto stage_of = [&](int number) {
    return forward == 0 || number < forward ? number : number < 2 * forward ? 2 * forward - 1 - number : 3 * forward - 1 - number;
  };
  std::map<const Tensor*, std::pair<std::string, std::set<int>>> users;
  for (const PlanGraph& g : graphs)
    for (const Value* v : g.model->graph->initializers())
      if (v->constant->bytes() >= 1024) {
        auto& entry = users[v->constant.get()];
        entry.first = v->source_name();
        entry.second.insert(stage_of(g.stage));
      }
  std::map<std::string, std::string> lines;
  for (const auto& [tensor, entry] : users)
    if (entry.second.size() > 1)
      lines[entry.first] = fmt::format("weight '{}' ({}) is used in stages {}: each keeps a copy", entry.first,
                                       readable_bytes(static_cast<double>(tensor->bytes())), fmt::join(entry.second, ", "));
  size_t shown = 0;
  for (const auto& [name, line] : lines) {
    if (++shown > 10) {
      notes.push_back(fmt::format("{} more weights are used in several stages", lines.size() - 10));
      break;
    }
    notes.push_back(line);
  }
}

}  // namespace

int64_t peak_activation_bytes(const Graph& graph, const std::function<bool(const Value&)>& elsewhere) {
  size_t n = graph.nodes.size();
  std::unordered_map<const Value*, size_t> last;
  for (size_t i = 0; i < n; ++i) {
    for (const Value* v : graph.nodes[i]->inputs)
      if (v) last[v] = i;
    for (const Value* v : captures(*graph.nodes[i])) last[v] = i;
  }
  for (const Value* v : graph.outputs) last[v] = n;
  std::vector<int64_t> change(n + 2, 0);
  auto lives = [&](const Value* v, size_t from) {
    if (!v || v->constant || (elsewhere && elsewhere(*v))) return;
    auto it = last.find(v);
    change[from] += type_bytes(v->type);
    change[(it == last.end() ? from : it->second) + 1] -= type_bytes(v->type);
  };
  std::set<const Value*> received;
  for (size_t i = 0; i < n; ++i) {
    const Node& node = *graph.nodes[i];
    if (node.domain == kCommunicationDomain && node.op == "Send") continue;
    bool receives = node.domain == kCommunicationDomain && node.op == "Recv";
    if (receives) received.insert(node.input(0));
    for (const Value* v : node.outputs) lives(v, receives ? 0 : i);
  }
  for (const Value* v : graph.inputs)
    if (!received.count(v)) lives(v, 0);
  int64_t live = 0, peak = 0;
  for (int64_t c : change) peak = std::max(peak, live += c);
  return peak;
}

void build_stages(const Model& model, const GraphIndex& index, const StageAssignment& a, Plan& plan, int tensor) {
  check_assignment(index, a);
  split_groups(index, a);
  Placement placement(index, a);
  std::vector<StageParts> parts = placement.take();
  const std::unordered_set<const Value*> images = channels_last_values(*model.graph);
  // Routes in the order of their makers' stages; tags from 1.
  for (size_t from = 0; from < parts.size(); ++from) {
    auto& sends = parts[from].sends;
    std::stable_sort(sends.begin(), sends.end(), [](const Border& x, const Border& y) { return x.peer < y.peer; });
    for (Border& send : sends) {
      auto to = static_cast<size_t>(send.peer);
      send.tag = static_cast<int>(plan.routes.size()) + 1;
      send.channels_last = images.count(send.value) > 0;
      for (Border& receive : parts[to].receives)
        if (receive.value == send.value) receive.tag = send.tag, receive.channels_last = send.channels_last;
      Route& route = plan.routes.emplace_back();
      route.tag = send.tag;
      route.from_stage = static_cast<int>(from);
      route.to_stage = send.peer;
      route.value = send.value->name;
      route.source = send.value->source_name();
      route.type = send.value->type;
    }
  }
  for (size_t s = 0; s < parts.size(); ++s) {
    std::sort(parts[s].receives.begin(), parts[s].receives.end(), [](const Border& x, const Border& y) { return x.tag < y.tag; });
    PlanGraph& graph = plan.graphs.emplace_back();
    graph.stage = static_cast<int>(s);
    graph.file = fmt::format("stage{}.onnx", s);
    if (plan.mesh.tensor > 1) {
      graph.coordinates = {{"tensor", tensor}};
      graph.file = fmt::format("stage{}.tensor{}.onnx", s, tensor);
    }
    graph.model = build_stage_graph(model, parts[s], static_cast<int>(s));
    for (Route& route : plan.routes) {  // the names that the borders were given
      if (route.from_stage == static_cast<int>(s)) route.from_name = parts[s].name_of_send(route.tag);
      if (route.to_stage == static_cast<int>(s)) route.to_name = parts[s].name_of_receive(route.tag);
    }
  }
  for (PlanInput& input : plan.inputs) {
    input.stages.clear();
    for (size_t s = 0; s < parts.size(); ++s)
      for (const Value* v : parts[s].inputs)
        if (v->name == input.name) input.stages.push_back(static_cast<int>(s));
  }
  for (size_t i = 0; i < plan.outputs.size(); ++i) plan.outputs[i].stage = placement.stage_of_output(i);
  note_shared_weights(plan.graphs, a.forward, plan.notes);
}

namespace {

double collective_us(const Node& node, int ranks, const Target& target) {
  if (node.op == "Send" || node.op == "Recv") return 0;
  double bytes = 0;
  for (const Value* v : node.op == "AllGather" ? node.outputs : node.inputs) bytes += static_cast<double>(type_bytes(v->type));
  return node.op == "AllReduce" ? all_reduce_us(bytes, ranks, target) : one_way_us(bytes, ranks, target);
}

// Of ranks that share a stage the one with the most counts.
void take_larger(StageEstimate& stage, const StageEstimate& rank) {
  stage.flops = std::max(stage.flops, rank.flops);
  stage.time_us = std::max(stage.time_us, rank.time_us);
  stage.weight_bytes = std::max(stage.weight_bytes, rank.weight_bytes);
  stage.activation_bytes = std::max(stage.activation_bytes, rank.activation_bytes);
}

}  // namespace

void estimate_stages(Plan& plan, const Target& target) {
  estimate_stages(plan, target, micro_batch_sizes(plan));
}

void estimate_stages(Plan& plan, const Target& target, const DimSizes& sizes) {
  plan.stages.clear();
  for (const PlanGraph& g : plan.graphs) {
    StageEstimate e;
    std::map<int, std::vector<const Node*>> groups;
    auto add = [&](const std::vector<const Node*>& nodes) {
      Cost cost = cost_of(nodes, target);
      e.flops += cost.flops;
      e.time_us += cost.time_us;
    };
    const GraphPtr graph = ones_suffice(*g.model->graph, sizes) ? g.model->graph : with_sizes(*g.model, sizes).graph;
    for (const Node* node : graph->nodes) {
      if (communicates(*node)) {
        e.time_us += collective_us(*node, static_cast<int>(node->get_int("group_size", plan.mesh.tensor)), target);
        continue;
      }
      if (node->group >= 0)
        groups[node->group].push_back(node);
      else
        add({node});
    }
    for (const auto& [id, nodes] : groups) add(nodes);
    std::set<const Tensor*> weights;
    for (const Value* v : graph->initializers())
      if (weights.insert(v->constant.get()).second) e.weight_bytes += static_cast<int64_t>(v->constant->bytes());
    e.activation_bytes = peak_activation_bytes(*graph);
    if (plan.stages.size() <= static_cast<size_t>(g.stage)) plan.stages.resize(static_cast<size_t>(g.stage) + 1);
    take_larger(plan.stages[static_cast<size_t>(g.stage)], e);
  }
  const GraphNumbers numbers = graph_numbers(plan);
  for (const Route& r : plan.routes)
    if (numbers.rank_of(r.from_stage) != numbers.rank_of(r.to_stage))
      plan.stages[static_cast<size_t>(r.from_stage)].send_bytes += type_bytes(with_sizes(r.type, sizes));
}

}  // namespace fretsaw
