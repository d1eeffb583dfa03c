// Block borders are chosen by bytes, then forward nodes are copied in front of the backward nodes that need them.
#include "partitioner/recompute.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <unordered_set>
#include <vector>

#include "graph/catalogue.h"
#include "graph/communication_schemas.h"
#include "graph/plan.h"
#include "partitioner/cost.h"

namespace fretsaw {
namespace {

// Values that parameters have a part in.
std::unordered_set<const Value*> learned_values(const Graph& graph) {
  std::unordered_set<const Value*> learned;
  for (const Value* v : graph.inputs)
    if (v->name.starts_with(kStateInput)) learned.insert(v);
  for (const Node* node : graph.nodes) {
    const std::vector<Value*> taken = operands(*node);
    if (std::any_of(taken.begin(), taken.end(), [&](const Value* v) { return learned.contains(v); }))
      learned.insert(node->outputs.begin(), node->outputs.end());
  }
  learned.erase(nullptr);
  return learned;
}

bool can_run_again(const Node& node) {
  const OperatorRecord* record = find_operator(node.op, node.domain);
  return record && !record->random && bodies(node).empty() && !communicates(node);
}

// One stage's forward nodes, in order, and which of their results are alive behind each.
class Blocks {
 public:
  Blocks(std::vector<Node*> nodes, const std::unordered_set<const Value*>& learned, const std::unordered_set<const Value*>& saved)
      : nodes_(std::move(nodes)) {
    std::unordered_map<const Value*, size_t> made;
    for (size_t i = 0; i < nodes_.size(); ++i)
      for (const Value* v : nodes_[i]->outputs)
        if (v && learned.contains(v) && can_run_again(*nodes_[i])) made[v] = i;
    std::unordered_map<const Value*, size_t> last;
    for (size_t i = 0; i < nodes_.size(); ++i)
      for (const Value* v : operands(*nodes_[i]))
        if (made.contains(v)) last[v] = i;
    alive_.resize(nodes_.size());
    inner_.resize(nodes_.size());
    for (const auto& [v, at] : made) {
      if (saved.contains(v)) inner_[at] += bytes(v);
      const auto end = last.find(v);
      for (size_t i = at; end != last.end() && i < end->second; ++i) alive_[i].push_back(v);
    }
  }

  // What is kept of the stage.
  std::unordered_set<const Value*> kept() const {
    const std::vector<size_t> places = narrow_places();
    std::unordered_set<const Value*> best;
    double least = total({}, best);
    for (size_t blocks = 2; blocks <= std::min<size_t>(places.size() + 1, 128); ++blocks) {
      std::unordered_set<const Value*> kept;
      if (const double bytes = total(even_borders(places, blocks), kept); bytes < least) least = bytes, best = std::move(kept);
    }
    return best;
  }

 private:
  static double bytes(const Value* v) { return static_cast<double>(std::max<int64_t>(type_bytes(v->type), 1)); }
  double passing(size_t place) const {
    double sum = 0;
    for (const Value* v : alive_[place]) sum += bytes(v);
    return sum;
  }

  // Places behind which no more passes than behind those around them.
  std::vector<size_t> narrow_places() const {
    constexpr size_t kAround = 8;
    std::vector<double> sizes;
    for (size_t i = 0; i < nodes_.size(); ++i) sizes.push_back(passing(i));
    std::vector<size_t> places;
    for (size_t i = 0; i + 1 < nodes_.size(); ++i) {
      const size_t first = i < kAround ? 0 : i - kAround, end = std::min(i + kAround + 1, nodes_.size() - 1);
      const bool narrow = std::all_of(sizes.begin() + static_cast<long>(first), sizes.begin() + static_cast<long>(end),
                                      [&](double size) { return size >= sizes[i]; });
      if (narrow && sizes[i] > 0) places.push_back(i);
    }
    return places;
  }
  // Borders that divide what would be kept without them evenly.
  std::vector<size_t> even_borders(const std::vector<size_t>& places, size_t blocks) const {
    double all = 0, so_far = 0;
    for (const double b : inner_) all += b;
    std::vector<size_t> borders;
    size_t place = 0;
    for (size_t i = 0; i < inner_.size() && borders.size() + 1 < blocks; ++i) {
      so_far += inner_[i];
      if (place == places.size() || places[place] != i) continue;
      ++place;
      if (so_far >= all * static_cast<double>(borders.size() + 1) / static_cast<double>(blocks)) borders.push_back(i);
    }
    return borders;
  }
  // Bytes that are there at once when the backward pass is at the largest block; fills `kept`.
  double total(const std::vector<size_t>& borders, std::unordered_set<const Value*>& kept) const {
    double sum = 0, largest = 0, block = 0;
    for (size_t i = 0, border = 0; i < nodes_.size(); ++i) {
      block += inner_[i];
      largest = std::max(largest, block);
      if (border == borders.size() || borders[border] != i) continue;
      ++border, block = 0;
      for (const Value* v : alive_[i])
        if (kept.insert(v).second) sum += bytes(v);
    }
    return sum + largest;
  }

  std::vector<Node*> nodes_;
  std::vector<std::vector<const Value*>> alive_;  // behind each node
  std::vector<double> inner_;                     // bytes each node makes that the backward pass takes
};

class Recomputation {
 public:
  Recomputation(Graph& graph, const RecomputeProblem& problem) : graph_(graph), problem_(problem), learned_(learned_values(graph)) {}

  std::unordered_map<Node*, int> run(std::optional<KeptValues>& kept) {
    choose(kept);
    std::vector<Node*> order = std::move(graph_.nodes);
    graph_.nodes.clear();
    for (Node* node : order) {
      if (const int stage = problem_.backward_stage(*node); stage >= 0)
        for (Value* v : operands(*node))
          if (Value* copy = again(v, stage); copy != v) replace_operand(*node, v, copy);
      graph_.nodes.push_back(node);
    }
    return std::move(made_);
  }

 private:
  void choose(std::optional<KeptValues>& kept) {
    std::map<int, std::vector<Node*>> stages;
    std::unordered_set<const Value*> saved;
    for (Node* node : graph_.nodes) {
      if (const int stage = problem_.forward_stage(*node); stage >= 0) stages[stage].push_back(node);
      if (problem_.backward_stage(*node) < 0) continue;
      for (const Value* v : operands(*node)) saved.insert(v);
    }
    for (auto& [stage, nodes] : stages) {
      if (!kept) kept_.merge(Blocks(nodes, learned_, saved).kept());
      for (const Node* node : nodes) stage_of_[node] = stage;
    }
    if (!kept) {
      kept.emplace();
      for (const Value* v : kept_) kept->emplace(v->producer->name, v->output);
      return;
    }
    for (const auto& [node, stage] : stage_of_)
      for (const Value* v : node->outputs)
        if (v && kept->contains({node->name, v->output})) kept_.insert(v);
  }

  // The value as the stage's backward graph has it.
  Value* again(Value* v, int stage) {
    Node* maker = v->producer;
    if (!maker || kept_.contains(v) || !learned_.contains(v) || !can_run_again(*maker)) return v;
    if (const auto at = stage_of_.find(maker); at == stage_of_.end() || at->second != stage) return v;
    Node*& copy = copies_[maker];
    if (!copy) copy = run_again(*maker, stage);
    return copy->outputs[static_cast<size_t>(v->output)];
  }
  Node* run_again(const Node& node, int stage) {
    std::vector<Value*> inputs;
    for (Value* v : node.inputs) inputs.push_back(v ? again(v, stage) : nullptr);
    Node* copy = graph_.add_node_object();
    copy->name = node.name + "/again";
    copy->op = node.op, copy->domain = node.domain, copy->overload = node.overload;
    copy->attributes = node.attributes;
    copy->inputs = std::move(inputs);
    for (const Value* v : node.outputs) {
      Value* made = v ? graph_.add_value(graph_.fresh_name(v->name + "/again"), v->type) : nullptr;
      if (made) made->source = v->source_name(), made->producer = copy, made->output = static_cast<int>(copy->outputs.size());
      copy->outputs.push_back(made);
    }
    graph_.nodes.push_back(copy);
    made_[copy] = stage;
    return copy;
  }

  Graph& graph_;
  const RecomputeProblem& problem_;
  std::unordered_set<const Value*> learned_, kept_;
  std::unordered_map<const Node*, int> stage_of_;
  std::unordered_map<const Node*, Node*> copies_;
  std::unordered_map<Node*, int> made_;
};

}  // namespace

std::unordered_map<Node*, int> recompute_blocks(Graph& graph, const RecomputeProblem& problem, std::optional<KeptValues>& kept) {
  return Recomputation(graph, problem).run(kept);
}

}  // namespace fretsaw
