// Wishes against what the rules allow.
#include "partitioner/sharding/pins.h"

#include <fmt/format.h>

#include <algorithm>

#include "partitioner/cost.h"

namespace fretsaw {

// Values and nodes are visited in the graph's order: the order of candidates decides between strategies that cost the same.
Pins::Pins(const Graph& graph, const StrategyOptions& options, FormTable& forms, Candidates& candidates) : forms_(forms) {
  for (const Node* node : graph.nodes) {
    const auto found = options.operands.find(node);
    if (found == options.operands.end()) continue;
    const NodePins& pins = found->second;
    for (size_t k = 0; k < std::min(pins.inputs.size(), node->inputs.size()); ++k)
      if (node->inputs[k] && pins.inputs[k]) inputs_[node].push_back({k, add(*node->inputs[k], *pins.inputs[k], forms, candidates)});
    for (size_t k = 0; k < std::min(pins.outputs.size(), node->outputs.size()); ++k) {
      if (!node->outputs[k] || !pins.outputs[k]) continue;
      const Form form = add(*node->outputs[k], *pins.outputs[k], forms, candidates);
      outputs_[node].push_back({k, form});
      if (form != kPending) values_[node->outputs[k]] = form;
    }
  }
  if (options.pins.empty()) return;
  for (const Value& value : graph.all_values())
    if (const auto pin = options.pins.find(&value); pin != options.pins.end())
      (value.constant ? constants_ : values_)[&value] = add(value, pin->second, forms, candidates);
}

Form Pins::add(const Value& value, const Sharding& sharding, FormTable& forms, Candidates& candidates) {
  if (sharding.kind == Sharding::Kind::pending) return kPending;
  if (sharding.kind == Sharding::Kind::whole) return kWhole;
  candidates.seed(&value, sharding.dim, sharding.cut);
  return forms.form(sharding.dim, forms.add(sharding.cut));
}

std::vector<Pins::Wish> Pins::inputs_of(const Node& node) const {
  std::vector<Wish> wishes;
  if (const auto found = inputs_.find(&node); found != inputs_.end()) wishes = found->second;
  if (!constants_.empty())
    for (size_t k = 0; k < node.inputs.size(); ++k)
      if (const auto pin = constants_.find(node.inputs[k]); pin != constants_.end()) wishes.push_back({k, pin->second});
  const auto weight = [&](const Wish& w) {
    const Value* v = node.inputs[w.operand];
    return v->constant ? type_bytes(v->type) : -1;
  };
  std::stable_sort(wishes.begin(), wishes.end(), [&](const Wish& a, const Wish& b) { return weight(a) > weight(b); });
  return wishes;
}

void Pins::choose(const Node& node, NodeStrategies& own, std::vector<std::string>& notes) const {
  const auto keep = [&](const auto& follows) {
    const size_t before = own.all.size();
    if (std::none_of(own.all.begin(), own.all.end(), follows)) return false;
    std::erase_if(own.all, [&](const Strategy& s) { return !follows(s); });
    own.pinned |= own.all.size() < before;
    return true;
  };
  for (const Wish& wish : inputs_of(node)) {
    if (keep([&](const Strategy& s) { return s.inputs[wish.operand] == wish.form; })) continue;
    const Value* v = node.inputs[wish.operand];
    const std::string form = forms_.sharding(wish.form).text(v->type.shape ? v->type.shape->size() : 0, "tensor");
    notes.push_back(fmt::format("node '{}' ({}): no rule lets it take '{}' as {} with its other operands, it is given another form of it",
                                node.name, node.op, v->source_name(), form));
  }
  const auto outputs = outputs_.find(&node);
  if (outputs == outputs_.end()) return;
  for (const Wish& wish : outputs->second)
    keep([&](const Strategy& s) {  // a pending sum is added up at once
      const Form made = s.outputs[wish.operand];
      return made == wish.form || (wish.form == kWhole && made == kPending);
    });
}

}  // namespace fretsaw
