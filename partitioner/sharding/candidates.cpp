// Cuts travel: from a factor to the dimensions it stands in, from a dimension to the factors of the nodes that use it.
#include "partitioner/sharding/candidates.h"

#include <algorithm>

namespace fretsaw {
namespace {

using Kind = Factor::Kind;

bool may_be_cut(const Factor& factor) {
  return (factor.kind == Kind::parallel || factor.kind == Kind::sum || factor.when_cut != Factor::WhenCut::impossible) &&
         !factor.repeated && factor.size.known() && factor.size.value > 1;
}

bool put(std::vector<int>& cuts, int cut, size_t most) {
  if (cuts.size() >= most || std::find(cuts.begin(), cuts.end(), cut) != cuts.end()) return false;
  cuts.push_back(cut);
  return true;
}

bool leaves_one_empty(const Cut& cut) {
  return std::any_of(cut.parts.begin(), cut.parts.end(), [](const Intervals& part) { return part.empty(); });
}

}  // namespace

std::optional<FactorPlace> place_in(const FactorRule& rule, const std::vector<int>& factors, int factor, const Dim& dim) {
  const auto at = std::find(factors.begin(), factors.end(), factor);
  if (at == factors.end() || !dim.known()) return std::nullopt;
  FactorPlace place;
  int64_t total = 1;
  for (auto it = factors.begin(); it != factors.end(); ++it) {
    const Dim& size = rule.factors[static_cast<size_t>(*it)].size;
    if (!size.known()) return std::nullopt;
    total *= size.value;
    if (it < at) place.outer *= size.value;
    if (it > at) place.inner *= size.value;
  }
  if (total != dim.value) return std::nullopt;
  return place;
}

Candidates::Candidates(const Graph& graph, const std::vector<const FactorRule*>& rules, const std::vector<char>& heavy, bool even,
                       FormTable& forms)
    : graph_(graph), rules_(rules), forms_(forms), even_(even), factor_cuts_(rules.size()), segment_cuts_(rules.size()) {
  for (size_t i = 0; i < rules.size(); ++i) {
    const Node& node = *graph.nodes[i];
    for (size_t k = 0; k < node.inputs.size(); ++k)
      if (node.inputs[k]) uses_[node.inputs[k]].push_back({static_cast<int>(i), false, static_cast<int>(k)});
    for (size_t k = 0; k < node.outputs.size(); ++k)
      if (node.outputs[k]) uses_[node.outputs[k]].push_back({static_cast<int>(i), true, static_cast<int>(k)});
    factor_cuts_[i].resize(rules[i]->factors.size());
  }
  for (size_t i = 0; i < rules.size(); ++i) {
    if (rules[i]->unknown.empty() && rules[i]->segments)
      add_to_segments(i, forms_.add(even_cut(rules[i]->segments->factor, forms_.ranks())));
    if (!heavy[i] || !rules[i]->unknown.empty()) continue;
    for (size_t f = 0; f < rules[i]->factors.size(); ++f)
      if (may_be_cut(rules[i]->factors[f]))
        add_to_factor(i, static_cast<int>(f), forms_.add(even_cut(rules[i]->factors[f].size.value, forms_.ranks())));
  }
}

bool Candidates::usable(const Cut& cut) const {
  return !leaves_one_empty(cut) && !(even_ && (!cut.even() || cut.overlaps()));
}

void Candidates::seed(const Value* value, int dim, const Cut& cut) {
  add_to_value(value, dim, forms_.add(cut));
}

void Candidates::propagate() {
  while (!work_.empty()) {
    const Work work = work_.back();
    work_.pop_back();
    const Cut cut = forms_.cut(work.cut);
    const auto found = uses_.find(work.value);
    if (found == uses_.end()) continue;
    for (const Use& use : found->second) visit_use(use, work.value, work.dim, cut);
  }
}

std::vector<Form> Candidates::forms_of(const Value* value) {
  std::vector<Form> forms;
  const auto found = value_cuts_.find(value);
  if (found == value_cuts_.end()) return forms;
  for (size_t d = 0; d < found->second.size(); ++d)
    for (const int cut : found->second[d]) forms.push_back(forms_.form(static_cast<int>(d), cut));
  return forms;
}

void Candidates::add_to_factor(size_t node, int factor, int cut) {
  const FactorRule& rule = *rules_[node];
  const Factor& f = rule.factors[static_cast<size_t>(factor)];
  if (!may_be_cut(f)) return;
  if (!usable(forms_.cut(cut))) return;
  if (f.kind != Kind::parallel && forms_.cut(cut).overlaps()) return;  // a term of a sum counts once
  if (!put(factor_cuts_[node][static_cast<size_t>(factor)], cut, kMostCuts)) return;
  const Node& n = *graph_.nodes[node];
  auto spread = [&](const std::vector<Value*>& values, const auto& dims) {
    for (size_t k = 0; k < values.size() && k < dims.size(); ++k) {
      if (!values[k] || !values[k]->type.shape || values[k]->type.shape->size() != dims[k].size()) continue;
      for (size_t d = 0; d < dims[k].size(); ++d)
        if (const auto place = place_in(rule, dims[k][d], factor, (*values[k]->type.shape)[d]))
          add_to_value(values[k], static_cast<int>(d), forms_.add(widen(forms_.cut(cut), place->outer, place->inner)));
    }
  };
  spread(n.inputs, rule.inputs);
  spread(n.outputs, rule.outputs);
}

void Candidates::add_to_segments(size_t node, int cut) {
  if (!usable(forms_.cut(cut)) || !put(segment_cuts_[node], cut, kMostCuts)) return;
  const Segments& segments = *rules_[node]->segments;
  const Node& n = *graph_.nodes[node];
  const std::vector<Value*>& parts = segments.splits ? n.outputs : n.inputs;
  std::vector<Cut> cuts;
  for (size_t s = 0; s < segments.sizes.size(); ++s) {
    cuts.push_back(widen(forms_.cut(cut), 1, segments.sizes[s] / segments.factor));
    if (parts[s]) add_to_value(parts[s], static_cast<int>(segments.axis), forms_.add(cuts.back()));
  }
  add_to_value(segments.splits ? n.inputs[0] : n.outputs[0], static_cast<int>(segments.axis), forms_.add(join(cuts)));
}

void Candidates::add_to_value(const Value* value, int dim, int cut) {
  if (!value->type.is_tensor() || !value->type.shape) return;
  auto& dims = value_cuts_[value];
  dims.resize(value->type.shape->size());
  if (put(dims[static_cast<size_t>(dim)], cut, kMostCuts)) work_.push_back({value, dim, cut});
}

void Candidates::visit_use(const Use& use, const Value* value, int dim, const Cut& cut) {
  const auto node = static_cast<size_t>(use.node);
  const FactorRule& rule = *rules_[node];
  if (!rule.unknown.empty()) return;
  if (rule.segments && dim == static_cast<int>(rule.segments->axis)) visit_segments(use, dim, cut);
  const auto& operands = use.output ? rule.outputs : rule.inputs;
  if (static_cast<size_t>(use.operand) >= operands.size()) return;
  const auto& dims = operands[static_cast<size_t>(use.operand)];
  if (static_cast<size_t>(dim) >= dims.size()) return;
  const std::vector<int>& factors = dims[static_cast<size_t>(dim)];
  for (const int f : factors) {
    const auto place = place_in(rule, factors, f, (*value->type.shape)[static_cast<size_t>(dim)]);
    if (!place) continue;
    const auto own = narrow(cut, place->outer, rule.factors[static_cast<size_t>(f)].size.value, place->inner);
    if (own && own->size > 1) add_to_factor(node, f, forms_.add(*own));
  }
}

// A cut of a segment says how the factor that all segments share is cut; one of the whole must cut every segment alike.
void Candidates::visit_segments(const Use& use, int, const Cut& cut) {
  const Segments& segments = *rules_[static_cast<size_t>(use.node)]->segments;
  const bool is_part = segments.splits == use.output;
  if (is_part) {
    const int64_t size = segments.sizes[static_cast<size_t>(use.operand)];
    if (auto own = narrow(cut, 1, segments.factor, size / segments.factor))
      add_to_segments(static_cast<size_t>(use.node), forms_.add(*own));
    return;
  }
  // The first segment's share of the whole's cut; the others must agree.
  Cut first{segments.sizes[0], {}};
  for (const Intervals& part : cut.parts) {
    Intervals own;
    for (const Interval& i : part)
      if (i.begin < first.size) own.push_back({i.begin, std::min(i.end, first.size)});
    first.parts.push_back(std::move(own));
  }
  const auto own = narrow(first, 1, segments.factor, segments.sizes[0] / segments.factor);
  if (!own) return;
  std::vector<Cut> cuts;
  for (const int64_t size : segments.sizes) cuts.push_back(widen(*own, 1, size / segments.factor));
  if (join(cuts) == cut) add_to_segments(static_cast<size_t>(use.node), forms_.add(*own));
}

}  // namespace fretsaw
