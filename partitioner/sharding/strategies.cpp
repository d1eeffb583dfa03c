// From factor rules and candidate cuts to strategies.
#include "partitioner/sharding/strategies.h"

#include <algorithm>
#include <unordered_set>

#include "graph/catalogue.h"
#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "partitioner/cost.h"
#include "partitioner/sharding/candidates.h"
#include "partitioner/sharding/pins.h"

namespace fretsaw {

int FormTable::add(const Cut& cut) {
  std::vector<int64_t> key{cut.size};
  for (const Intervals& part : cut.parts) {
    key.push_back(static_cast<int64_t>(part.size()));
    for (const Interval& i : part) key.insert(key.end(), {i.begin, i.end});
  }
  const auto [it, is_new] = cut_numbers_.try_emplace(std::move(key), static_cast<int>(cuts_.size()));
  if (is_new) cuts_.push_back(cut);
  return it->second;
}

Form FormTable::form(int dim, int cut) {
  const auto [it, is_new] = form_numbers_.try_emplace({dim, cut}, static_cast<Form>(forms_.size()) + 2);
  if (is_new) forms_.push_back({dim, cut});
  return it->second;
}

Sharding FormTable::sharding(Form f) const {
  Sharding s;
  if (f == kPending) s.kind = Sharding::Kind::pending;
  if (!is_cut(f)) return s;
  s.kind = Sharding::Kind::cut;
  s.dim = dim_of(f);
  s.cut = cut_of(f);
  return s;
}

namespace {

using Kind = Factor::Kind;

constexpr int64_t kSmallTableBytes = 4096;  // rows of fewer bytes are not worth an exchange

bool is_real(DType t) {
  return t == DType::float32 || t == DType::float64 || t == DType::float16 || t == DType::bfloat16;
}
bool can_be_summed(const Value* v) {
  return v->type.is_tensor() && (is_real(v->type.dtype) || v->type.dtype == DType::int32 || v->type.dtype == DType::int64);
}
bool whole_bytes(const Value* v) {
  return v->type.is_tensor() && v->type.dtype != DType::string && bits_of(v->type.dtype) >= 8;
}

// The strategies of one node.
class NodeBuilder {
 public:
  NodeBuilder(const Node& node, const NodeStrategies& own, FormTable& forms) : node_(node), rule_(own.rule), forms_(forms) {}

  Strategy whole() const {
    Strategy s;
    s.inputs.assign(node_.inputs.size(), kWhole);
    s.outputs.assign(node_.outputs.size(), kWhole);
    return s;
  }

  std::optional<Strategy> cut_factor(int factor, int cut) {
    const Factor& f = rule_.factors[static_cast<size_t>(factor)];
    if (f.kind != Kind::parallel && rule_.rounds) return std::nullopt;
    const bool divided = f.when_cut != Factor::WhenCut::impossible, combined = f.when_cut == Factor::WhenCut::combined;
    if (divided && (!forms_.cut(cut).in_order() || !real_result())) return std::nullopt;
    Strategy s = whole();
    s.kind = divided ? Strategy::Kind::divided : Strategy::Kind::factor;
    s.factor = factor;
    s.cut = cut;
    s.share = static_cast<double>(forms_.cut(cut).largest_part()) / static_cast<double>(f.size.value);
    bool cuts_any = false;
    for (size_t k = 0; k < node_.inputs.size(); ++k) {
      if (!node_.inputs[k]) continue;
      if (k >= rule_.inputs.size()) return std::nullopt;
      const auto form = operand_form(*node_.inputs[k], rule_.inputs[k], factor, cut);
      if (!form) return std::nullopt;
      s.inputs[k] = *form;
      cuts_any |= forms_.is_cut(*form);
    }
    if (!cuts_any) return std::nullopt;
    const bool adds = f.kind == Kind::sum || (divided && !combined);
    if (combined) s.exchanges = rule_.exchanges;
    for (size_t k = 0; k < node_.outputs.size(); ++k) {
      const Value* v = node_.outputs[k];
      if (!v) continue;
      if (k >= rule_.outputs.size()) return std::nullopt;
      const auto form = operand_form(*v, rule_.outputs[k], factor, cut);
      if (!form) return std::nullopt;
      s.outputs[k] = *form;
      if (forms_.is_cut(*form) || combined) continue;
      if (!adds || !can_be_summed(v)) return std::nullopt;
      s.outputs[k] = kPending;
    }
    if (adds)
      for (const size_t k : rule_.added) s.inputs[k] = kPending;
    return s;
  }

  std::optional<Strategy> cut_segments(int cut) {
    const Segments& segments = *rule_.segments;
    Strategy s = whole();
    s.kind = Strategy::Kind::segments;
    s.cut = cut;
    s.share = static_cast<double>(forms_.cut(cut).largest_part()) / static_cast<double>(segments.factor);
    const int axis = static_cast<int>(segments.axis);
    std::vector<Form>& parts = segments.splits ? s.outputs : s.inputs;
    std::vector<Cut> cuts;
    for (size_t k = 0; k < segments.sizes.size(); ++k) {
      cuts.push_back(widen(forms_.cut(cut), 1, segments.sizes[k] / segments.factor));
      parts[k] = forms_.form(axis, forms_.add(cuts.back()));
    }
    (segments.splits ? s.inputs : s.outputs)[0] = forms_.form(axis, forms_.add(join(cuts)));
    return s;
  }

  // Pending sums pass an operator that is linear in them.
  std::vector<Strategy> pass_sums(Linear linear) const {
    std::vector<Strategy> found;
    const auto numbers = [](const Value* v) { return !v || (v->type.is_tensor() && is_real(v->type.dtype)); };
    if (linear == Linear::no || !std::all_of(node_.outputs.begin(), node_.outputs.end(), numbers)) return found;
    Strategy s = whole();
    s.kind = Strategy::Kind::linear;
    for (size_t k = 0; k < node_.outputs.size(); ++k) s.outputs[k] = node_.outputs[k] ? kPending : kWhole;
    if (linear == Linear::all) {
      for (size_t k = 0; k < node_.inputs.size(); ++k) s.inputs[k] = node_.inputs[k] ? kPending : kWhole;
      return {s};
    }
    const size_t most = linear == Linear::first ? 1 : node_.inputs.size();
    for (size_t k = 0; k < std::min(most, node_.inputs.size()); ++k) {
      if (!node_.inputs[k] || node_.inputs[k]->constant) continue;
      s.inputs.assign(node_.inputs.size(), kWhole);
      s.inputs[k] = kPending;
      found.push_back(s);
    }
    return found;
  }

 private:
  // The form of an operand when the factor is cut: whole where it does not stand in it. Nullopt: it can't be cut there.
  std::optional<Form> operand_form(const Value& value, const std::vector<std::vector<int>>& dims, int factor, int cut) {
    Form form = kWhole;
    for (size_t d = 0; d < dims.size(); ++d) {
      if (std::find(dims[d].begin(), dims[d].end(), factor) == dims[d].end()) continue;
      if (form != kWhole || !whole_bytes(&value) || !value.type.shape || value.type.shape->size() != dims.size()) return std::nullopt;
      const auto place = place_in(rule_, dims[d], factor, (*value.type.shape)[d]);
      if (!place) return std::nullopt;
      form = forms_.form(static_cast<int>(d), forms_.add(widen(forms_.cut(cut), place->outer, place->inner)));
    }
    return form;
  }

  bool real_result() const {
    return node_.out(0) && node_.out(0)->type.is_tensor() &&
           (is_real(node_.out(0)->type.dtype) || node_.is("ArgMax") || node_.is("ArgMin"));
  }

  const Node& node_;
  const FactorRule& rule_;
  FormTable& forms_;
};

bool measures(const Node& node) {
  return node.is("Shape") || node.is("Size");
}

bool is_no_shape_arithmetic(const Node& node) {
  const Value* v = node.out(0);
  return v && v->type.is_tensor() && v->type.dtype != DType::int64;
}

// A large table of which rows are taken.
bool takes_rows_of_weight(const Node& node) {
  const Value* table = node.input(0);
  return node.is("Gather") && table && table->constant && type_bytes(table->type) >= kSmallTableBytes;
}

// Nodes that are worth dividing even where their operands are whole: those with a weight, and contractions of what comes from them.
std::vector<char> heavy_nodes(const Graph& graph, const std::unordered_map<const Value*, bool>& constants) {
  std::vector<char> heavy;
  std::unordered_set<const Value*> from_weights;
  for (const Node* node : graph.nodes) {
    const bool after = std::any_of(node->inputs.begin(), node->inputs.end(), [&](const Value* v) { return from_weights.count(v); });
    const bool weighted = std::any_of(node->inputs.begin(), node->inputs.end(), [&](const Value* v) { return v && constants.count(v); });
    const bool contraction = role_of(*node) == Role::contraction && (after || (weighted && is_no_shape_arithmetic(*node)));
    heavy.push_back(contraction || takes_rows_of_weight(*node));
    if (after || heavy.back()) from_weights.insert(node->outputs.begin(), node->outputs.end());
  }
  return heavy;
}

// Of strategies that divide the largest weight, or where there is none the work, only these remain. False where there are none.
bool keep_dividing(const Node& node, const std::unordered_map<const Value*, bool>& constants, const FormTable& forms, bool look_only,
                   std::vector<Strategy>& all) {
  int weight = -1;
  for (size_t k = 0; k < node.inputs.size(); ++k) {
    const Value* v = node.inputs[k];
    if (!v || !constants.count(v)) continue;
    if (weight < 0 || type_bytes(v->type) > type_bytes(node.inputs[static_cast<size_t>(weight)]->type)) weight = static_cast<int>(k);
  }
  auto divides = [&](const Strategy& s) { return s.share < 1 && (weight < 0 || forms.is_cut(s.inputs[static_cast<size_t>(weight)])); };
  if (std::none_of(all.begin(), all.end(), divides)) return false;
  if (!look_only) std::erase_if(all, [&](const Strategy& s) { return !divides(s); });
  return true;
}

void find_derived_constants(const Graph& graph, std::unordered_map<const Value*, bool>& derived) {
  for (const Value& v : graph.all_values())
    if (v.constant && std::find(graph.inputs.begin(), graph.inputs.end(), &v) == graph.inputs.end()) derived[&v] = true;
  for (const Node* node : graph.nodes) {
    const bool known = !node->inputs.empty() && bodies(*node).empty() && !is_random(*node) &&
                       std::all_of(node->inputs.begin(), node->inputs.end(), [&](const Value* v) { return !v || derived.count(v); });
    if (!known || takes_rows_of_weight(*node) || communicates(*node)) continue;  // a table is divided whatever the indexes are
    for (const Value* v : node->outputs)
      if (v) derived[v] = true;
  }
}

}  // namespace

Strategies find_strategies(const Graph& graph, const StrategyOptions& options) {
  Strategies result(options.ranks, options.axis);
  find_derived_constants(graph, result.derived_constants);
  result.nodes.resize(graph.nodes.size());
  std::vector<const FactorRule*> rules;
  const std::vector<char> heavy = heavy_nodes(graph, result.derived_constants);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = *graph.nodes[i];
    NodeStrategies& own = result.nodes[i];
    own.rule = factor_rule(node);
    if (!bodies(node).empty() || is_random(node)) own.rule.unknown = "it is given whole tensors";
    if (const auto kept = options.kept_whole.find(&node); kept != options.kept_whole.end()) own.rule.unknown = kept->second;
    own.weighty = heavy[i];
    own.heavy = own.weighty && (!options.to_divide || options.to_divide->count(&node));
    rules.push_back(&own.rule);
  }
  Candidates candidates(graph, rules, options.all ? std::vector<char>(heavy.size(), 1) : heavy, options.even, result.forms);
  const Pins pins(graph, options, result.forms, candidates);
  result.pins = pins.of_values();
  candidates.propagate();
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = *graph.nodes[i];
    NodeStrategies& own = result.nodes[i];
    NodeBuilder builder(node, own, result.forms);
    own.all.push_back(builder.whole());
    if (measures(node) && node.input(0)) {
      std::vector<Form> forms = candidates.forms_of(node.input(0));
      forms.push_back(kPending);
      for (const Form f : forms) {
        Strategy s = builder.whole();
        s.kind = Strategy::Kind::measure;
        s.inputs[0] = f;
        own.all.push_back(std::move(s));
      }
      if (!result.derived_constants.count(node.input(0))) pins.choose(node, own, result.notes);
      continue;
    }
    if (!own.rule.unknown.empty()) {
      pins.choose(node, own, result.notes);
      continue;
    }
    for (size_t f = 0; f < own.rule.factors.size(); ++f)
      for (const int cut : candidates.of_factor(i, static_cast<int>(f)))
        if (auto s = builder.cut_factor(static_cast<int>(f), cut)) own.all.push_back(std::move(*s));
    if (own.rule.segments)
      for (const int cut : candidates.of_segments(i))
        if (auto s = builder.cut_segments(cut)) own.all.push_back(std::move(*s));
    if (const OperatorRecord* record = find_operator(node.op, node.domain))
      for (Strategy& s : builder.pass_sums(record->linear)) own.all.push_back(std::move(s));
    const bool derived =
        std::all_of(node.outputs.begin(), node.outputs.end(), [&](const Value* v) { return !v || result.derived_constants.count(v); });
    if (derived) continue;  // made in any form
    own.divisible = own.weighty && keep_dividing(node, result.derived_constants, result.forms, true, own.all);
    pins.choose(node, own, result.notes);
    if (own.heavy && !options.all) keep_dividing(node, result.derived_constants, result.forms, false, own.all);
  }
  return result;
}

}  // namespace fretsaw
