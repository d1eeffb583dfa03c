// Dynamic programming over the states of live values.
#include "partitioner/sharding/search.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "graph/errors.h"
#include "partitioner/cost.h"
#include "partitioner/sharding/rewrite.h"

namespace fretsaw {

Conversion conversion(const FormTable& forms, Form from, Form to) {
  if (from == to) return Conversion::none;
  if (to == kWhole) return from == kPending ? Conversion::all_reduce : Conversion::all_gather;
  if (to == kPending) {
    if (from == kWhole) return Conversion::once;
    return forms.cut_of(from).overlaps() || !forms.cut_of(from).contiguous() ? Conversion::gather_slice : Conversion::pad;
  }
  if (from == kWhole) return Conversion::slice;
  if (from == kPending) return forms.cut_of(to).overlaps() ? Conversion::reduce_slice : Conversion::reduce_scatter;
  if (forms.dim_of(from) == forms.dim_of(to)) {
    const Cut &a = forms.cut_of(from), &b = forms.cut_of(to);
    bool holds = true;
    for (size_t r = 0; r < a.parts.size(); ++r) holds &= contains(a.parts[r], b.parts[r]);
    if (holds) return Conversion::slice;
  }
  return Conversion::gather_slice;
}

Form form_after(Conversion conversion, Form from, Form to) {
  switch (conversion) {
    case Conversion::none:
    case Conversion::slice:
    case Conversion::once:
    case Conversion::pad:
      return from;
    case Conversion::reduce_scatter:
      return to;
    default:
      return kWhole;
  }
}

// A ring: each rank sends its share to its neighbour, ranks - 1 times.
double one_way_us(double bytes, int ranks, const Target& target) {
  return (ranks - 1) * (target.link_latency_us + bytes / ranks / target.link_bytes_per_us);
}

// Reduce-scatter and all-gather; where latency counts, one exchange of all with all.
double all_reduce_us(double bytes, int ranks, const Target& target) {
  const double direct = target.link_latency_us + (ranks - 1) * bytes / target.link_bytes_per_us;
  return std::min(direct, 2 * one_way_us(bytes, ranks, target));
}

namespace {

constexpr size_t kWidth = 96;           // states kept after each node
constexpr Form kUnset = -1;             // a weight that no node has used yet
constexpr double kGatherWeight = 1.02;  // of ways that take as long, one with sums that may become all-reduces rather than one of gathers
constexpr double kPasses = 5;           // an operator that exchanges partial results is so many plain ones
constexpr double kDuplicateCost = 20;   // a second form of a weight costs so many times reading it

using Forms = std::u32string;  // of the live values

struct State {
  Forms forms;
  double cost = 0;
  int parent = -1, strategy = 0;
};

class Searcher {
 public:
  Searcher(const Strategies& strategies, const Search& search)
      : strategies_(strategies), forms_(strategies.forms), search_(search), target_(search.target) {
    find_last_uses();
  }

  std::vector<int> run() {
    std::vector<State> states{{}};
    open_inputs(states.front());
    const size_t n = search_.graph.nodes.size();
    for (size_t i = 0; i < n; ++i) states = step(i, std::move(states));
    size_t best = 0;
    for (size_t s = 0; s < states.size(); ++s) {
      for (const Value* v : search_.graph.outputs) {
        const int slot = slot_of(v);
        if (slot >= 0) states[s].cost += conversion_us(v, get(states[s].forms, slot), kWhole);
      }
      if (states[s].cost < states[best].cost) best = s;
    }
    std::vector<int> chosen(n, 0);
    int at = static_cast<int>(best);
    for (size_t i = n; i-- > 0;) {
      chosen[i] = history_[i][static_cast<size_t>(at)].strategy;
      at = history_[i][static_cast<size_t>(at)].parent;
    }
    return chosen;
  }

 private:
  static Form get(const Forms& forms, int slot) { return static_cast<Form>(static_cast<int32_t>(forms[static_cast<size_t>(slot)])); }
  static void set(Forms& forms, int slot, Form f) { forms[static_cast<size_t>(slot)] = static_cast<char32_t>(static_cast<int32_t>(f)); }

  void find_last_uses() {
    const auto& nodes = search_.graph.nodes;
    for (size_t i = 0; i < nodes.size(); ++i) positions_[nodes[i]] = i;
    for (size_t i = 0; i < nodes.size(); ++i) {
      for (size_t k = 0; k < nodes[i]->inputs.size(); ++k)
        if (const Value* v = nodes[i]->inputs[k]) {
          last_use_[v] = i;
          bytes_.try_emplace(v, static_cast<double>(type_bytes(search_.costed.nodes[i]->inputs[k]->type)));
          if (strategies_.nodes[i].heavy && strategies_.derived_constants.count(v)) ++heavy_uses_[root_of(v, kWhole).first];
        }
      for (size_t k = 0; k < nodes[i]->outputs.size(); ++k)
        if (const Value* v = nodes[i]->outputs[k])
          bytes_.try_emplace(v, static_cast<double>(type_bytes(search_.costed.nodes[i]->outputs[k]->type)));
    }
    for (size_t i = 0; i < nodes.size(); ++i)
      if (strategies_.nodes[i].heavy)
        for (const Value* v : nodes[i]->inputs)
          if (v && strategies_.derived_constants.count(v)) last_use_[root_of(v, kWhole).first] = i;
    for (const Value* v : search_.graph.outputs) last_use_[v] = nodes.size();
  }

  // The weight that a derived constant is another view of, and the form it needs of it.
  std::pair<const Value*, Form> root_of(const Value* v, Form form) const {
    while (!v->constant && v->producer && v->producer->input(0) && strategies_.derived_constants.count(v->producer->input(0))) {
      const auto at = positions_.find(v->producer);
      const Strategy* s = at == positions_.end() ? nullptr : strategy_for(strategies_.nodes[at->second], v->output, form);
      form = s ? s->inputs[0] : kWhole;
      v = v->producer->input(0);
    }
    return {v, form};
  }

  int slot_of(const Value* v) const {
    const auto it = slots_.find(v);
    return it == slots_.end() ? -1 : it->second;
  }

  double conversion_us(const Value* v, Form from, Form to) {
    const Conversion c = conversion(forms_, from, to);
    const double bytes = bytes_[v];
    const int n = forms_.ranks();
    const double copy_us = target_.launch_us + 2 * bytes / n / target_.memory_bytes_per_us;
    switch (c) {
      case Conversion::none:
        return 0;
      case Conversion::all_reduce:
        return all_reduce_us(bytes, n, target_);
      case Conversion::reduce_scatter:
        return one_way_us(bytes, n, target_);
      case Conversion::all_gather:
        return kGatherWeight * one_way_us(bytes, n, target_);
      case Conversion::slice:
        return copy_us;
      case Conversion::once:
      case Conversion::pad:
        return copy_us * n;
      case Conversion::reduce_slice:
        return all_reduce_us(bytes, n, target_) + copy_us;
      case Conversion::gather_slice:
        return one_way_us(bytes, n, target_) + copy_us;
    }
    return 0;
  }

  // May some operand come in another form than whole?
  bool is_active(size_t i) const {
    const Node& node = *search_.graph.nodes[i];
    const NodeStrategies& own = strategies_.nodes[i];
    if ((own.heavy || own.pinned) && own.all.front().kind != Strategy::Kind::whole) return true;
    if (std::any_of(node.outputs.begin(), node.outputs.end(), [&](const Value* v) { return is_pinned_part(v); })) return true;
    return std::any_of(node.inputs.begin(), node.inputs.end(), [&](const Value* v) { return v && slot_of(v) >= 0 && !v->constant; });
  }

  bool is_pinned_part(const Value* v) const {
    const auto pin = search_.pins.find(v);
    return pin != search_.pins.end() && pin->second != kWhole;
  }

  // Inputs of the graph are whole but where they are pinned.
  void open_inputs(State& state) {
    for (const Value* v : search_.graph.inputs) {
      if (!is_pinned_part(v) || !last_use_.count(v) || strategies_.derived_constants.count(v)) continue;
      slots_[v] = static_cast<int>(live_.size());
      live_.push_back(v);
      state.forms.push_back(static_cast<char32_t>(static_cast<int32_t>(search_.pins.at(v))));
    }
  }

  std::vector<State> step(size_t i, std::vector<State> states) {
    const Node& node = *search_.graph.nodes[i];
    const NodeStrategies& own = strategies_.nodes[i];
    auto& history = history_.emplace_back();
    // Nothing to choose: the states stay. What is made from constants is made in the form that is needed.
    if (!is_active(i) || all_derived(node)) {
      for (size_t s = 0; s < states.size(); ++s) history.push_back({static_cast<int>(s), 0});
      return states;
    }
    const double time_us = cost_of({search_.costed.nodes[i]}, target_).time_us;
    const double exchange_us = all_reduce_us(small_bytes(node), forms_.ranks(), target_);
    open_slots(node, own.heavy, states);
    std::vector<State> next;
    std::unordered_map<std::u32string, size_t> known;
    for (size_t s = 0; s < states.size(); ++s)
      for (size_t k = 0; k < own.all.size(); ++k) {
        State to;
        if (!apply(node, own, own.all[k], states[s], to)) continue;
        const double passes = own.all[k].exchanges > 0 ? kPasses : 1;
        to.cost += passes * time_us * own.all[k].share + own.all[k].exchanges * exchange_us;
        to.parent = static_cast<int>(s);
        to.strategy = static_cast<int>(k);
        const auto [it, is_new] = known.try_emplace(to.forms, next.size());
        if (is_new)
          next.push_back(std::move(to));
        else if (to.cost < next[it->second].cost)
          next[it->second] = std::move(to);
      }
    if (next.empty()) throw Error("no way to run it on parts is left", "this is a fault of fretsaw").at_node(node.name, node.op);
    close_slots(i, next);
    prune(next);
    for (const State& state : next) history.push_back({state.parent, state.strategy});
    return next;
  }

  // Of what a divided node exchanges: about one of each row of what it reads.
  double small_bytes(const Node& node) {
    const Value* x = node.input(0);
    if (!x || !x->type.shape || x->type.shape->empty()) return 0;
    const Dim& last = x->type.shape->back();
    return bytes_[x] / static_cast<double>(last.known() ? std::max<int64_t>(last.value, 1) : 1);
  }

  bool all_derived(const Node& node) const {
    return std::all_of(node.outputs.begin(), node.outputs.end(),
                       [&](const Value* v) { return !v || strategies_.derived_constants.count(v); });
  }

  void open_slots(const Node& node, bool heavy, std::vector<State>& states) {
    auto open = [&](const Value* v, Form f) {
      if (!slots_.try_emplace(v, static_cast<int>(live_.size())).second) return;
      live_.push_back(v);
      for (State& s : states) s.forms.push_back(static_cast<char32_t>(static_cast<int32_t>(f)));
    };
    if (heavy)
      for (const Value* v : node.inputs)
        if (v && strategies_.derived_constants.count(v))
          if (const Value* root = root_of(v, kWhole).first; heavy_uses_[root] > 1) open(root, kUnset);
    for (const Value* v : node.outputs)
      if (v && last_use_.count(v)) open(v, kWhole);
  }

  // False where the strategy does not go with the state.
  bool apply(const Node& node, const NodeStrategies& own, const Strategy& strategy, const State& from, State& to) {
    to = from;
    bool any_part = false;
    for (size_t k = 0; k < node.inputs.size(); ++k) {
      const Value* v = node.inputs[k];
      if (!v) continue;
      const Form need = strategy.inputs[k];
      const int slot = slot_of(v);
      if (strategies_.derived_constants.count(v)) {
        const auto [root, root_form] = root_of(v, need);
        if (const int weight = own.heavy ? slot_of(root) : -1; weight >= 0) to.cost += use_weight(root, weight, root_form, to);
        continue;
      }
      const Form have = slot >= 0 ? get(to.forms, slot) : kWhole;
      any_part |= have != kWhole;
      const Conversion c = conversion(forms_, have, need);
      if (c == Conversion::none) continue;
      if (strategy.kind == Strategy::Kind::measure && !own.pinned) return false;  // it takes any form, so none is made for it
      to.cost += conversion_us(v, have, need);
      if (slot >= 0) set(to.forms, slot, form_after(c, have, need));
    }
    // Work on whole values is divided where it is heavy or pinned; else whoever needs a part takes it.
    if (!own.heavy && !own.pinned && strategy.kind != Strategy::Kind::whole && !any_part) return false;
    for (size_t k = 0; k < node.outputs.size(); ++k) {
      const Value* v = node.outputs[k];
      const int slot = v ? slot_of(v) : -1;
      if (slot < 0) continue;
      Form made = strategy.outputs[k];
      if (const auto pin = search_.pins.find(v); pin != search_.pins.end() && pin->second != made) {
        to.cost += conversion_us(v, made, pin->second);
        made = pin->second;  // whole as it may be: those after it take the part
      }
      set(to.forms, slot, made);
    }
    return true;
  }

  double use_weight(const Value* v, int slot, Form need, State& to) {
    const Form have = get(to.forms, slot);
    if (have == kUnset) set(to.forms, slot, need);
    if (have == kUnset || have == need) return 0;
    const double part = need == kWhole ? 1 : 1.0 / forms_.ranks();
    return kDuplicateCost * part * bytes_[v] / target_.memory_bytes_per_us;
  }

  void close_slots(size_t i, std::vector<State>& states) {
    std::vector<int> kept;
    for (size_t k = 0; k < live_.size(); ++k)
      if (last_use_.at(live_[k]) > i) kept.push_back(static_cast<int>(k));
    if (kept.size() == live_.size()) return;
    std::vector<const Value*> live;
    slots_.clear();
    for (const int k : kept) {
      slots_[live_[static_cast<size_t>(k)]] = static_cast<int>(live.size());
      live.push_back(live_[static_cast<size_t>(k)]);
    }
    live_ = std::move(live);
    std::unordered_map<std::u32string, size_t> known;
    std::vector<State> merged;
    for (State& s : states) {
      Forms forms;
      for (const int k : kept) forms.push_back(s.forms[static_cast<size_t>(k)]);
      s.forms = std::move(forms);
      const auto [it, is_new] = known.try_emplace(s.forms, merged.size());
      if (is_new)
        merged.push_back(std::move(s));
      else if (s.cost < merged[it->second].cost)
        merged[it->second] = std::move(s);
    }
    states = std::move(merged);
  }

  void prune(std::vector<State>& states) {
    if (states.size() <= kWidth) return;
    std::vector<std::pair<double, size_t>> order;
    for (size_t s = 0; s < states.size(); ++s) {
      double owed = 0;
      for (size_t k = 0; k < live_.size(); ++k)
        if (get(states[s].forms, static_cast<int>(k)) == kPending) owed += one_way_us(bytes_[live_[k]], forms_.ranks(), target_);
      order.push_back({states[s].cost + owed, s});
    }
    std::nth_element(order.begin(), order.begin() + kWidth, order.end());
    std::vector<State> kept;
    for (size_t k = 0; k < kWidth; ++k) kept.push_back(std::move(states[order[k].second]));
    states = std::move(kept);
  }

  struct Came {
    int parent, strategy;
  };
  const Strategies& strategies_;
  const FormTable& forms_;
  const Search& search_;
  const Target& target_;
  std::unordered_map<const Value*, size_t> last_use_;
  std::unordered_map<const Value*, double> bytes_;
  std::unordered_map<const Value*, int> heavy_uses_;  // of weights, through views too
  std::unordered_map<const Node*, size_t> positions_;
  std::unordered_map<const Value*, int> slots_;
  std::vector<const Value*> live_;
  std::vector<std::vector<Came>> history_;
};

}  // namespace

std::vector<int> choose_strategies(const Strategies& strategies, const Search& search) {
  return Searcher(strategies, search).run();
}

}  // namespace fretsaw
