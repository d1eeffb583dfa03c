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

// A summand of a pending sum: some ranks have it, the others have zeros.
bool is_added_once(const Forms& forms, size_t k) {
  return std::any_of(forms.begin(), forms.end(), [&](const auto& of_rank) { return is_zeros(*of_rank[k]); });
}

// Which part of which part of the source a constant is, outermost first; empty: all of it.
using Chain = std::vector<std::shared_ptr<const ValuePart>>;
Chain chain_of(const Value& v, const OuterParts& outer) {
  if (!v.part || v.part->dim < 0) return {};
  if (v.part->of_part) return {outer.at(&v), v.part};
  return {v.part};
}

// The cut of one link over the ranks with these numbers; nullopt where two of them hold the same.
std::optional<Cut> cut_over(const std::vector<Chain>& chains, size_t link, int first, int count, int step) {
  Cut cut;
  cut.size = chains[0][link]->size;
  for (int r = first; r < first + count * step; r += step) cut.parts.push_back(chains[static_cast<size_t>(r)][link]->intervals);
  return cut.overlaps() ? std::nullopt : std::optional(std::move(cut));
}

std::optional<StateLayout> single_layout(const Forms& forms, const TensorRanks& ranks) {
  if (forms[0].size() != 1 || is_added_once(forms, 0)) return std::nullopt;
  std::vector<Chain> chains;
  for (const auto& of_rank : forms) chains.push_back(chain_of(*of_rank[0], ranks.outer));
  const auto count = static_cast<int>(forms.size()), y = ranks.second_axis, x = count / y;
  StateLayout layout;
  if (chains[0].empty()) {
    layout.alike_over = count > 1 ? "tensor" : "";
    return layout;
  }
  for (const Chain& chain : chains)
    if (chain.size() != chains[0].size()) return std::nullopt;
  for (size_t link = 0; link < chains[0].size(); ++link) {
    PlanState::Part part{"tensor", chains[0][link]->dim, {}};
    part.cut.size = chains[0][link]->size;
    for (const Chain& chain : chains) part.cut.parts.push_back(chain[link]->intervals);
    layout.parts.push_back(std::move(part));
  }
  if (y == 1) {
    layout.cut_over = "tensor";
    return cut_over(chains, 0, 0, x, 1) ? std::optional(layout) : std::nullopt;
  }
  if (chains[0].size() == 2) {
    layout.cut_over = "tensor";
    bool apart = cut_over(chains, 0, 0, x, y).has_value();
    for (int row = 0; row < x; ++row) apart = apart && cut_over(chains, 1, row * y, y, 1);
    return apart ? std::optional(layout) : std::nullopt;
  }
  const bool second = chains[0][0]->intervals != chains[1][0]->intervals;
  layout.cut_over = second ? "tensor_y" : "tensor_x", layout.alike_over = second ? "tensor_x" : "tensor_y";
  return (second ? cut_over(chains, 0, 0, y, 1) : cut_over(chains, 0, 0, x, y)) ? std::optional(layout) : std::nullopt;
}

std::vector<int64_t> indexes_of(const Intervals& intervals) {
  std::vector<int64_t> indexes;
  for (const Interval& i : intervals)
    for (int64_t k = i.begin; k < i.end; ++k) indexes.push_back(k);
  return indexes;
}

// How a form is taken from the whole: a Slice or Gather for each link of its chain, and zeros where another rank adds it.
struct Taking {
  Chain chain;  // of a rank that adds it; of another one, only its sizes count
  std::vector<bool> by_slice;
  bool added_once = false, mine = true;
};

// Makes the constant `form` from `whole`; the same nodes on every rank.
void derive(Graph& graph, Value& form, Value* whole, const Taking& how) {
  form.constant = nullptr;
  const auto constant = [&](const char* name, TensorPtr tensor) {
    return graph.add_constant(graph.fresh_name(form.name + name), std::move(tensor));
  };
  const auto ints = [&](const char* name, const std::vector<int64_t>& values) { return constant(name, make_int64s(values)); };
  Node* last = nullptr;
  Type type = whole->type;  // of what has been taken
  const auto add = [&](const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes = {}) {
    last = graph.add_node(op, std::move(inputs), {graph.fresh_name(form.name + "/taken")}, std::move(attributes));
    last->name = last->outputs[0]->name;
    last->outputs[0]->type = type;
    return last->outputs[0];
  };
  Value* taken = whole;
  for (size_t link = 0; link < how.chain.size(); ++link) {
    const ValuePart& part = *how.chain[link];
    if (type.shape) (*type.shape)[static_cast<size_t>(part.dim)] = Dim(size_of(part.intervals));
    if (how.by_slice[link]) {
      const Interval& own = part.intervals.at(0);
      taken = add("Slice", {taken, ints("/begin", {own.begin}), ints("/end", {own.end}), ints("/axis", {part.dim})});
    } else {
      taken = add("Gather", {taken, ints("/indexes", indexes_of(part.intervals))}, {{"axis", int64_t{part.dim}}});
    }
  }
  if (how.added_once) {
    auto mine = make_tensor(DType::boolean, {});
    *mutable_data(*mine) = static_cast<std::byte>(how.mine);
    taken = add("Where", {constant("/mine", mine), taken, constant("/zero", make_tensor(whole->type.dtype, {}))});
  }
  if (!last) add("Identity", {taken});
  form.part = nullptr;
  set_output(*last, 0, &form);
}

std::vector<Taking> how_taken(const Forms& forms, size_t k, const OuterParts& outer) {
  std::vector<Taking> all(forms.size());
  const bool added_once = is_added_once(forms, k);
  for (size_t r = 0; r < forms.size(); ++r) {
    all[r].added_once = added_once, all[r].mine = !is_zeros(*forms[r][k]);
    if (all[r].mine) all[r].chain = chain_of(*forms[r][k], outer);
  }
  for (size_t r = 0; r < forms.size(); ++r) {
    if (all[r].mine) continue;
    for (size_t other = 0; other < forms.size(); ++other)
      if (all[other].mine && forms[other][k]->type == forms[r][k]->type) all[r].chain = all[other].chain;
  }
  const auto is_run = [&](size_t link) {
    return std::all_of(all.begin(), all.end(), [&](const Taking& t) { return t.chain[link]->intervals.size() == 1; });
  };
  std::vector<bool> by_slice;
  for (size_t link = 0; link < all[0].chain.size(); ++link) by_slice.push_back(is_run(link));
  for (Taking& t : all) t.by_slice = by_slice;
  return all;
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
void make_whole(const TensorRanks& ranks, const Forms& forms, const std::string& name, const Value& source,
                std::vector<StateValues>& values) {
  std::vector<Value*> wholes;
  for (size_t r = 0; r < ranks.graphs.size(); ++r) wholes.push_back(values[r][name] = add_whole(*ranks.graphs[r], name, source));
  for (size_t k = 0; k < forms[0].size(); ++k) {
    const std::vector<Taking> how = how_taken(forms, k, ranks.outer);
    for (size_t r = 0; r < ranks.graphs.size(); ++r) derive(*ranks.graphs[r], *forms[r][k], wholes[r], how[r]);
  }
}

}  // namespace

SettledStates settle_states(const TensorRanks& tensor_ranks, const Graph& source, const std::vector<std::string>& names,
                            const std::vector<std::string>& whole) {
  const std::vector<Graph*>& ranks = tensor_ranks.graphs;
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
    std::optional<StateLayout> layout = single_layout(forms, tensor_ranks);
    const bool must_be_whole = std::find(whole.begin(), whole.end(), name) != whole.end();
    if (must_be_whole && layout && !is_there_whole(forms)) layout.reset();
    settled.layouts[name] = layout.value_or(StateLayout{{}, "", ranks.size() > 1 ? "tensor" : ""});
    if (!layout) {
      make_whole(tensor_ranks, forms, name, *sources.at(name), settled.values);
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
    bool even = true;
    for (const PlanState::Part& part : layout.parts)
      if (part.dim == static_cast<int>(d)) even = even && part.cut.even(), size = part.cut.part_size(0);
    if (even && size > 0 && size % data_ranks == 0) return PlanState::Part{"data", static_cast<int>(d), even_cut(size, data_ranks)};
  }
  return std::nullopt;
}

}  // namespace fretsaw
