// Constants of ranks' graphs are parts of what is trained; some must be made from one value first.
#include "partitioner/training_states.h"

#include <algorithm>

#include "graph/errors.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

bool is_zeros(const Value& v) {
  return v.part && v.part->of.empty();
}

// The parts of one initializer on all ranks: [rank][form].
using Forms = std::vector<std::vector<Value*>>;

// A summand of a pending sum: the first rank has it, the others have zeros.
bool is_added_once(const Forms& forms, size_t k) {
  return forms.size() > 1 && is_zeros(*forms[1][k]);
}

std::optional<StateLayout> single_layout(const Forms& forms) {
  if (forms[0].size() != 1 || is_added_once(forms, 0)) return std::nullopt;
  StateLayout layout;
  const Value& first = *forms[0][0];
  if (!first.part || first.part->dim < 0) return layout;
  if (first.part->of_part) return std::nullopt;
  layout.kind = StateLayout::Kind::cut;
  layout.dim = first.part->dim;
  layout.cut.size = first.part->size;
  for (const auto& of_rank : forms) layout.cut.parts.push_back(of_rank[0]->part->intervals);
  if (layout.cut.overlaps()) return std::nullopt;
  return layout;
}

std::vector<int64_t> indexes_of(const Intervals& intervals) {
  std::vector<int64_t> indexes;
  for (const Interval& i : intervals)
    for (int64_t k = i.begin; k < i.end; ++k) indexes.push_back(k);
  return indexes;
}

enum class Taken : uint8_t { whole, by_slice, by_indexes, once };

// Makes the constant `form` from `whole`; the same nodes on every rank.
void derive(Graph& graph, Value& form, Value* whole, Taken how, bool first_rank) {
  const ValuePart part = form.part ? *form.part : ValuePart{};
  form.constant = nullptr;
  form.part = nullptr;
  const auto constant = [&](const char* name, TensorPtr tensor) {
    return graph.add_constant(graph.fresh_name(form.name + name), std::move(tensor));
  };
  const auto ints = [&](const char* name, const std::vector<int64_t>& values) { return constant(name, make_int64s(values)); };
  const std::string made = graph.fresh_name(form.name + "/taken");
  Node* node = nullptr;
  if (how == Taken::whole) {
    node = graph.add_node("Identity", {whole}, {made});
  } else if (how == Taken::once) {
    auto mine = make_tensor(DType::boolean, {});
    *mutable_data(*mine) = static_cast<std::byte>(first_rank);
    node = graph.add_node("Where", {constant("/mine", mine), whole, constant("/zero", make_tensor(whole->type.dtype, {}))}, {made});
  } else if (how == Taken::by_slice) {
    const Interval& own = part.intervals.at(0);
    node = graph.add_node("Slice", {whole, ints("/begin", {own.begin}), ints("/end", {own.end}), ints("/axis", {part.dim})}, {made});
  } else {
    node = graph.add_node("Gather", {whole, ints("/indexes", indexes_of(part.intervals))}, {made}, {{"axis", int64_t{part.dim}}});
  }
  node->name = made;
  set_output(*node, 0, &form);
}

Taken how_taken(const Forms& forms, size_t k) {
  if (is_added_once(forms, k)) return Taken::once;
  if (!forms[0][k]->part || forms[0][k]->part->dim < 0) return Taken::whole;
  const bool runs = std::all_of(forms.begin(), forms.end(), [&](const auto& of_rank) { return of_rank[k]->part->intervals.size() == 1; });
  return runs ? Taken::by_slice : Taken::by_indexes;
}

Value* add_whole(Graph& graph, const std::string& name, const Value& source) {
  Value* whole = graph.add_constant(graph.fresh_name(name + "/whole"), source.constant);
  whole->type = source.type;
  whole->source = name;
  return whole;
}

bool is_there_whole(const Forms& forms) {
  return std::all_of(forms.begin(), forms.end(), [](const auto& of_rank) {
    return of_rank.size() == 1 && !is_zeros(*of_rank[0]) && (!of_rank[0]->part || of_rank[0]->part->dim < 0);
  });
}

// One whole value on every rank, of which the forms are made.
void make_whole(const std::vector<Graph*>& ranks, const Forms& forms, const std::string& name, const Value& source,
                std::vector<StateValues>& values) {
  std::vector<Value*> wholes;
  for (size_t r = 0; r < ranks.size(); ++r) wholes.push_back(values[r][name] = add_whole(*ranks[r], name, source));
  for (size_t k = 0; k < forms[0].size(); ++k) {
    const Taken how = how_taken(forms, k);
    for (size_t r = 0; r < ranks.size(); ++r) derive(*ranks[r], *forms[r][k], wholes[r], how, r == 0);
  }
}

}  // namespace

SettledStates settle_states(const std::vector<Graph*>& ranks, const Graph& source, const std::vector<std::string>& names,
                            const std::vector<std::string>& whole) {
  std::map<std::string, Forms> found;
  for (const std::string& name : names) found[name].resize(ranks.size());
  for (size_t r = 0; r < ranks.size(); ++r)
    for (Value& v : ranks[r]->all_values())
      if (v.constant)
        if (const auto at = found.find(v.source_name()); at != found.end()) at->second[r].push_back(&v);
  std::map<std::string, const Value*> sources;
  for (const Value* v : source.initializers()) sources[v->name] = v;
  SettledStates settled;
  settled.values.resize(ranks.size());
  for (const auto& [name, forms] : found) {
    for (const auto& of_rank : forms)
      if (of_rank.size() != forms[0].size()) throw Error("the ranks' graphs differ in '" + name + "'", "please report the model");
    if (forms[0].empty()) continue;  // nothing uses it
    std::optional<StateLayout> layout = single_layout(forms);
    const bool must_be_whole = std::find(whole.begin(), whole.end(), name) != whole.end();
    if (must_be_whole && layout && !is_there_whole(forms)) layout.reset();
    settled.layouts[name] = layout.value_or(StateLayout{});
    if (!layout) {
      make_whole(ranks, forms, name, *sources.at(name), settled.values);
      continue;
    }
    for (size_t r = 0; r < ranks.size(); ++r) settled.values[r][name] = forms[r][0];
  }
  for (Graph* graph : ranks) sort_nodes(*graph);
  return settled;
}

std::optional<PlanState::Part> data_part(const Type& type, const StateLayout& layout, int data_ranks) {
  const Shape& shape = *type.shape;
  for (size_t d = 0; d < shape.size(); ++d) {
    int64_t size = shape[d].value;
    if (layout.kind == StateLayout::Kind::cut && layout.dim == static_cast<int>(d)) {
      if (!layout.cut.even()) continue;
      size = layout.cut.part_size(0);
    }
    if (size > 0 && size % data_ranks == 0) return PlanState::Part{"data", static_cast<int>(d), even_cut(size, data_ranks)};
  }
  return std::nullopt;
}

}  // namespace fretsaw
