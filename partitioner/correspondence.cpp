// Names of results first, places of operands second.
#include "partitioner/correspondence.h"

#include <algorithm>

namespace fretsaw {

Correspondence::Correspondence(const Graph& source, const Graph& normalised) {
  makers_.reserve(normalised.nodes.size());
  nodes_.reserve(source.nodes.size());
  for (const Node* node : normalised.nodes)
    for (const Value* v : node->outputs)
      if (v) makers_.try_emplace(v->source_name(), node);
  // From the end: what a removed node went into is known before it.
  std::unordered_map<const Value*, const Node*> went_into;
  went_into.reserve(source.nodes.size());
  for (size_t i = source.nodes.size(); i-- > 0;) {
    const Node* node = source.nodes[i];
    const Node* found = maker_of(node);
    for (size_t k = 0; k < node->outputs.size() && !found; ++k)
      if (const auto it = went_into.find(node->outputs[k]); node->outputs[k] && it != went_into.end()) found = it->second;
    nodes_[node] = found;
    if (!found) continue;
    for (const Value* v : operands(*node)) went_into[v] = found;  // the first user in the end
  }
}

const Node* Correspondence::maker_of(const Node* source) const {
  for (const Value* v : source->outputs)
    if (v)
      if (const auto it = makers_.find(v->name); it != makers_.end()) return it->second;
  return nullptr;
}

const Node* Correspondence::node_of(const Node* source) const {
  const auto it = nodes_.find(source);
  return it == nodes_.end() ? nullptr : it->second;
}

bool Correspondence::is_direct(const Node* source) const {
  return maker_of(source) != nullptr;
}

std::vector<OperandPlace> Correspondence::places_of(const Node& source, const std::string& tensor) const {
  std::vector<OperandPlace> places;
  const Node* node = node_of(&source);
  if (!node || tensor.empty()) return places;
  for (size_t k = 0; k < node->outputs.size(); ++k)
    if (node->outputs[k] && node->outputs[k]->source_name() == tensor) places.push_back({true, k});
  for (size_t k = 0; k < node->inputs.size(); ++k)
    if (node->inputs[k] && node->inputs[k]->source_name() == tensor) places.push_back({false, k});
  if (!places.empty() || !is_direct(&source) || node->op != source.op || node->domain != source.domain) return places;
  for (size_t k = 0; k < source.inputs.size(); ++k)
    if (source.inputs[k] && source.inputs[k]->name == tensor && node->input(k)) places.push_back({false, k});
  return places;
}

}  // namespace fretsaw
