// Where running statistics are moved.
#include "partitioner/statistic_stages.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace fretsaw {

namespace {

// What is made of constants alone runs in the stage that uses it first: parts of a statistic where the norm is that moves it.
void take_parts_along(const GraphIndex& index, std::vector<int>& stage_of) {
  std::vector<bool> of_constants(index.nodes.size());
  std::unordered_map<const Value*, int> first_use;
  for (size_t i = 0; i < index.nodes.size(); ++i) {
    const std::vector<Value*> taken = operands(*index.nodes[i]);
    of_constants[i] = !taken.empty() && std::all_of(taken.begin(), taken.end(), [&](const Value* v) {
      const int maker = index.producer(v);
      return v->constant || (maker >= 0 && of_constants[static_cast<size_t>(maker)]);
    });
  }
  for (size_t i = index.nodes.size(); i-- > 0;) {
    int& stage = stage_of[i];
    if (of_constants[i] && stage >= 0) {
      int earliest = -1;
      for (const Value* v : index.nodes[i]->outputs)
        if (const auto use = first_use.find(v); use != first_use.end())
          earliest = earliest < 0 ? use->second : std::min(earliest, use->second);
      if (earliest >= 0) stage = earliest;
    }
    if (stage < 0) continue;
    for (const Value* v : operands(*index.nodes[i])) first_use[v] = std::min(first_use.try_emplace(v, stage).first->second, stage);
  }
}

}  // namespace

void keep_statistics_together(const GraphIndex& index, std::vector<int>& stage_of) {
  take_parts_along(index, stage_of);
  const Graph& first = index.graph;
  std::unordered_set<const Value*> of_loss(first.outputs.begin(), first.outputs.begin() + 2);
  for (auto it = first.nodes.rbegin(); it != first.nodes.rend(); ++it) {
    const bool used = std::any_of((*it)->outputs.begin(), (*it)->outputs.end(), [&](const Value* v) { return v && of_loss.contains(v); });
    if (!used) continue;
    for (const Value* v : operands(**it)) of_loss.insert(v);
  }
  std::unordered_map<const Node*, size_t> place;
  for (size_t i = 0; i < index.nodes.size(); ++i) place[index.nodes[i]] = i;
  for (size_t s = 2; s < first.outputs.size(); ++s) {
    std::vector<const Node*> tail, left = {first.outputs[s]->producer};
    int stage = -1;
    while (!left.empty()) {
      const Node* node = left.back();
      left.pop_back();
      if (!node) continue;
      const bool own = std::none_of(node->outputs.begin(), node->outputs.end(), [&](const Value* v) { return v && of_loss.contains(v); });
      if (!own) {
        stage = std::max(stage, stage_of[place.at(node)]);
        continue;
      }
      if (std::find(tail.begin(), tail.end(), node) != tail.end()) continue;
      tail.push_back(node);
      for (const Value* v : node->inputs)
        if (v) left.push_back(v->producer);
    }
    for (const Node* node : tail)
      if (stage >= 0) stage_of[place.at(node)] = stage;
  }
}

}  // namespace fretsaw
