// Search, rewrite, and proof: every local shape must be what inference finds; a node where it is not is given whole tensors.
#include "partitioner/sharding/shard.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "graph/catalogue.h"
#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/passes.h"
#include "partitioner/channels_last.h"
#include "partitioner/sharding/rewrite.h"
#include "partitioner/sharding/search.h"
#include "partitioner/sharding/strategies.h"

namespace fretsaw {
namespace {

bool contradicts(const Type& expected, const Type& inferred) {
  if (!expected.is_tensor() || !inferred.is_tensor() || !expected.shape || !inferred.shape) return false;
  if (expected.shape->size() != inferred.shape->size()) return true;
  for (size_t d = 0; d < expected.shape->size(); ++d) {
    const Dim &e = (*expected.shape)[d], &i = (*inferred.shape)[d];
    if (e.known() && i.known() && e.value != i.value) return true;
  }
  return false;
}

struct WrongNode {
  std::string name, why;
};
// The first node whose part came out with another shape than it must have.
std::optional<WrongNode> first_wrong_node(const Model& local) {
  std::unordered_map<const Value*, Value*> copies;
  Model copy;
  copy.opsets = local.opsets;
  copy.functions = local.functions;
  copy.graph = clone(*local.graph, &copies);
  const ShapeFacts facts = infer_shapes(copy, {.evaluate = nullptr, .keep_hints = false, .name_unknown = true});
  for (const Node* node : local.graph->nodes) {
    for (const Finding& f : facts.faults)
      if (f.node == node->name) return WrongNode{node->name, f.message};
    for (const Value* v : node->outputs)
      if (v && contradicts(v->type, copies.at(v)->type))
        return WrongNode{node->name, fmt::format("its part '{}' should be {} and would be {}", v->name, to_string(v->type),
                                                 to_string(copies.at(v)->type))};
  }
  return std::nullopt;
}

const Node* find_node(const Graph& graph, const std::string& name) {
  for (const Node* node : graph.nodes)
    if (node->name == name) return node;
  return nullptr;
}

// The value's form by --shard; nullopt: the value is another view of the tensor. Throws Error where the dimension can't be cut.
std::optional<Sharding> pinned_form(const Value& v, const std::string& name, const PinnedTensor& pin, const std::string& axis, int ranks) {
  if (!v.type.is_tensor() || !v.type.shape || v.type.shape->size() != pin.axes.size()) return std::nullopt;
  Sharding sharding;
  const auto at = std::find(pin.axes.begin(), pin.axes.end(), axis);
  if (at == pin.axes.end()) return sharding;
  sharding.kind = Sharding::Kind::cut;
  sharding.dim = static_cast<int>(at - pin.axes.begin());
  const Dim& dim = (*v.type.shape)[static_cast<size_t>(sharding.dim)];
  if (!dim.known() || dim.value <= 1)
    throw Error(fmt::format("--shard cuts dimension {} of '{}', whose size is {}", sharding.dim, name,
                            dim.known() ? std::to_string(dim.value) : "not known"),
                dim.known() ? "cut another dimension" : "fix the size by --shape, or cut another dimension", ErrorCode::usage);
  sharding.cut = even_cut(dim.value, ranks);
  return sharding;
}

std::unordered_map<const Value*, Sharding> find_pins(const Graph& graph, const ShardOptions& options, const std::string& axis,
                                                     std::vector<std::string>& notes) {
  std::unordered_map<const Value*, Sharding> pins;
  const int ranks = axis == "tensor_y" ? options.second : options.ranks;
  std::map<std::string, const Value*> seen;
  std::set<std::string> fit;
  if (options.pins.empty()) return pins;
  for (const Value& v : graph.all_values()) {
    const auto it = options.pins.find(v.source_name());
    if (it == options.pins.end()) continue;
    seen.try_emplace(it->first, &v);
    if (auto sharding = pinned_form(v, it->first, it->second, axis, ranks)) {
      pins[&v] = std::move(*sharding);
      fit.insert(it->first);
    }
  }
  for (const auto& [name, pin] : options.pins) {
    const auto at = seen.find(name);
    if (at == seen.end()) {
      notes.push_back(fmt::format("--shard {} has nothing to do: no such tensor is left when the model is normalised", name));
    } else if (!fit.count(name)) {
      throw Error(fmt::format("--shard names {} dimensions of '{}', which is {}", pin.axes.size(), name, to_string(at->second->type)),
                  "give an axis or _ for each dimension", ErrorCode::usage);
    }
  }
  return pins;
}

Form form_once_made(const Strategies& strategies, const Value* v, Form made) {
  const auto pin = strategies.pins.find(v);
  return pin == strategies.pins.end() ? made : pin->second;
}

// Which values are gathered because a node takes them whole, and operators that have no rule at all.
void note_gathered(const Graph& graph, const Strategies& strategies, const std::vector<int>& chosen, std::vector<std::string>& notes) {
  std::unordered_map<const Value*, Form> made;
  std::map<std::string, std::vector<std::string>> gathered;  // by reason
  std::set<std::string> without_rule;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = *graph.nodes[i];
    const NodeStrategies& own = strategies.nodes[i];
    const Strategy& s = own.all[static_cast<size_t>(chosen[i])];
    const OperatorRecord* record = find_operator(node.op, node.domain);
    if ((!record || !record->factors) && !communicates(node)) without_rule.insert(node.op);
    auto take = [&](const Value* v, Form form) {
      const auto at = made.find(v);
      if (form != kWhole || at == made.end() || !strategies.forms.is_cut(at->second)) return;
      gathered[own.rule.unknown.empty() ? "it takes all of it" : own.rule.unknown].push_back(
          fmt::format("'{}' for '{}' ({})", v->source_name(), node.name, node.op));
      made.erase(at);  // once
    };
    for (size_t k = 0; k < node.inputs.size(); ++k)
      if (node.inputs[k]) take(node.inputs[k], s.inputs[k]);
    for (const Value* v : captures(node)) take(v, kWhole);
    for (size_t k = 0; k < node.outputs.size(); ++k)
      if (node.outputs[k]) made[node.outputs[k]] = form_once_made(strategies, node.outputs[k], s.outputs[k]);
  }
  for (const auto& [reason, places] : gathered) {
    const size_t shown = std::min<size_t>(places.size(), 3);
    notes.push_back(fmt::format("gathered, as {}: {}{}", reason, fmt::join(places.begin(), places.begin() + static_cast<long>(shown), ", "),
                                places.size() > shown ? fmt::format(" and {} more", places.size() - shown) : ""));
  }
  if (!without_rule.empty())
    notes.push_back(fmt::format("operators without a factor rule run whole on every rank: {}", fmt::join(without_rule, ", ")));
}

void describe(const Graph& graph, const Strategies& strategies, const std::vector<int>& chosen, ShardedModel& result) {
  auto note = [&](const Value* v, Form form) {
    if (!v || form == kWhole || !v->type.shape) return;
    result.shardings[v->source_name()] = strategies.forms.sharding(form).text(v->type.shape->size(), strategies.forms.axis());
  };
  std::map<std::string, std::vector<std::string>> whole;  // reason -> nodes
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = *graph.nodes[i];
    const NodeStrategies& own = strategies.nodes[i];
    const Strategy& s = own.all[static_cast<size_t>(chosen[i])];
    for (size_t k = 0; k < node.inputs.size(); ++k)
      if (node.inputs[k] && node.inputs[k]->constant) note(node.inputs[k], s.inputs[k]);
    for (size_t k = 0; k < node.outputs.size(); ++k) note(node.outputs[k], form_once_made(strategies, node.outputs[k], s.outputs[k]));
    const std::string what = fmt::format("'{}' ({})", node.name, node.op);
    if (own.weighty && !own.divisible && s.kind == Strategy::Kind::whole)
      whole[own.rule.unknown.empty() ? "no dimension of it can be divided" : own.rule.unknown].push_back(what);
    if (s.kind == Strategy::Kind::factor || s.kind == Strategy::Kind::divided) {
      const Cut& cut = strategies.forms.cut(s.cut);
      const std::string& factor = own.rule.factors[static_cast<size_t>(s.factor)].name;
      if (!own.weighty) continue;
      if (cut.overlaps())
        result.notes.push_back(
            fmt::format("node {}: {} of size {} is less than {} ranks, neighbours hold the same", what, factor, cut.size, cut.ranks()));
      else if (!cut.even())
        result.notes.push_back(
            fmt::format("node {}: {} of size {} is cut unevenly, {} on the first rank", what, factor, cut.size, cut.part_size(0)));
    }
  }
  note_gathered(graph, strategies, chosen, result.notes);
  for (const auto& [reason, nodes] : whole)
    result.notes.push_back(fmt::format("replicated on every rank, as {}: {}{}", reason,
                                       fmt::join(nodes.begin(), nodes.begin() + static_cast<long>(std::min<size_t>(nodes.size(), 3)), ", "),
                                       nodes.size() > 3 ? fmt::format(" and {} more", nodes.size() - 3) : ""));
}

std::vector<NodePins> chosen_operands(const Graph& graph, const Strategies& strategies, const std::vector<int>& chosen) {
  std::vector<NodePins> all(graph.nodes.size());
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = *graph.nodes[i];
    const Strategy& s = strategies.nodes[i].all[static_cast<size_t>(chosen[i])];
    all[i].inputs.resize(node.inputs.size());
    all[i].outputs.resize(node.outputs.size());
    if (std::all_of(node.outputs.begin(), node.outputs.end(), [&](const Value* v) { return !v || strategies.derived_constants.count(v); }))
      continue;
    for (size_t k = 0; k < node.inputs.size(); ++k)
      if (node.inputs[k]) all[i].inputs[k] = strategies.forms.sharding(s.inputs[k]);
    for (size_t k = 0; k < node.outputs.size(); ++k)
      if (node.outputs[k]) all[i].outputs[k] = strategies.forms.sharding(form_once_made(strategies, node.outputs[k], s.outputs[k]));
  }
  return all;
}

// Strategies of one graph under the options. `kept_whole` names nodes.
Strategies strategies_of(const Graph& graph, StrategyOptions wanted, const ShardOptions& options,
                         const std::map<std::string, std::string>& kept_whole, std::vector<std::string>& notes) {
  wanted.pins = find_pins(graph, options, wanted.axis, notes);
  for (const Node* node : graph.nodes)
    if (const auto kept = kept_whole.find(node->name); kept != kept_whole.end()) wanted.kept_whole[node] = kept->second;
  return find_strategies(graph, wanted);
}

bool alike(const Strategies& a, const Strategies& b) {
  for (size_t i = 0; i < a.nodes.size(); ++i) {
    if (a.nodes[i].all.size() != b.nodes[i].all.size()) return false;
    for (size_t k = 0; k < a.nodes[i].all.size(); ++k)
      if (a.nodes[i].all[k].kind != b.nodes[i].all[k].kind || a.nodes[i].all[k].factor != b.nodes[i].all[k].factor) return false;
  }
  return true;
}

// Divides models that are alike, the same way: the ranks' parts of the first, then those of the second, and so on.
ShardedModel shard_alike(const std::vector<const Model*>& models, const Graph& costed, const StrategyOptions& wanted,
                         const ShardOptions& options) {
  const Graph& graph = *models.front()->graph;
  std::map<std::string, std::string> kept_whole = options.kept_whole;
  while (true) {
    ShardedModel result;
    const Strategies strategies = strategies_of(graph, wanted, options, kept_whole, result.pin_notes);
    const std::vector<int> chosen = choose_strategies(strategies, {graph, costed, options.target, strategies.pins});
    std::optional<WrongNode> wrong;
    for (const Model* model : models) {
      std::vector<std::string> said;
      const Strategies own = model == models.front() ? strategies : strategies_of(*model->graph, wanted, options, kept_whole, said);
      if (!alike(strategies, own)) throw Error("the parts along one tensor axis can't be cut alike along the other", "use one tensor axis");
      for (int rank = 0; rank < wanted.ranks && !wrong; ++rank) {
        result.models.push_back(local_model(*model, {own, chosen, own.pins}, rank, result.outer_parts));
        if (rank == 0 || rank == wanted.ranks - 1) wrong = first_wrong_node(result.models.back());
      }
    }
    if (!wrong) {
      for (Model& local : result.models) {
        mark_channels_last(*local.graph);
        mark_groups(local);
      }
      result.pin_notes.insert(result.pin_notes.end(), strategies.notes.begin(), strategies.notes.end());
      describe(graph, strategies, chosen, result);
      for (const Node* node : graph.nodes)
        if (const auto kept = kept_whole.find(node->name); kept != kept_whole.end())
          result.notes.push_back(fmt::format("node '{}' ({}) is given whole tensors: {}", node->name, node->op, kept->second));
      result.kept_whole = std::move(kept_whole);
      result.operands = chosen_operands(graph, strategies, chosen);
      return result;
    }
    if (!find_node(graph, wrong->name) || !kept_whole.try_emplace(wrong->name, wrong->why).second)
      throw Error(fmt::format("node '{}' can't be divided over {} ranks: {}", wrong->name, wanted.ranks, wrong->why),
                  "use a smaller tensor axis; please report the model");
  }
}

// "[_, tensor_x]" and "[tensor_y, _]" are "[tensor_y, tensor_x]"; a dimension that both cut is "tensor_x+tensor_y".
std::string join_text(const std::string& first, const std::string& second) {
  auto split = [](const std::string& text) {
    std::vector<std::string> dims(1);
    for (const char c : text.substr(1, text.find(']') - 1)) {
      if (c == ' ') continue;
      if (c == ',')
        dims.emplace_back();
      else
        dims.back() += c;
    }
    return dims;
  };
  std::vector<std::string> dims = split(first);
  const std::vector<std::string> other = split(second);
  for (size_t d = 0; d < std::min(dims.size(), other.size()); ++d)
    if (other[d] != "_") dims[d] = dims[d] == "_" ? other[d] : dims[d] + "+" + other[d];
  return fmt::format("[{}]{}{}", fmt::join(dims, ", "), first.substr(first.find(']') + 1), second.substr(second.find(']') + 1));
}

}  // namespace

ShardedModel shard(const Model& model, const Graph& costed, const ShardOptions& options) {
  register_communication_schemas();
  StrategyOptions wanted;
  wanted.ranks = options.ranks;
  wanted.operands = options.operands;
  wanted.to_divide = options.to_divide;
  if (options.second == 1) return shard_alike({&model}, costed, wanted, options);
  wanted.axis = "tensor_x";
  wanted.even = true;
  ShardedModel rows = shard_alike({&model}, costed, wanted, options);
  StrategyOptions across;
  across.ranks = options.second;
  across.axis = "tensor_y";
  std::vector<const Model*> parts;
  for (const Model& part : rows.models) parts.push_back(&part);
  ShardedModel grid = shard_alike(parts, *options.sized(rows.models.front()).graph, across, options);
  for (const auto& [tensor, text] : rows.shardings) {
    const auto at = grid.shardings.find(tensor);
    grid.shardings[tensor] = at == grid.shardings.end() ? text : join_text(text, at->second);
  }
  grid.notes.insert(grid.notes.begin(), rows.notes.begin(), rows.notes.end());
  grid.pin_notes.insert(grid.pin_notes.begin(), rows.pin_notes.begin(), rows.pin_notes.end());
  grid.kept_whole.merge(rows.kept_whole);
  grid.operands.clear();  // of the parts' nodes, not of the model's
  return grid;
}

}  // namespace fretsaw
