// Units: what ties nodes together, what is copied, and the order that lets little cross.
#include "partitioner/units.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <queue>
#include <string_view>

#include "graph/catalogue.h"
#include "partitioner/cost.h"

namespace fretsaw {

GraphIndex::GraphIndex(const Graph& g) : graph(g), nodes(g.nodes), inputs(g.inputs.begin(), g.inputs.end()) {
  uses.resize(nodes.size());
  producers.resize(nodes.size());
  position.reserve(nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) {
    position[nodes[i]] = static_cast<int>(i);
    auto& list = uses[i];
    auto add = [&](Value* v) {
      if (v && std::find(list.begin(), list.end(), v) == list.end()) list.push_back(v);
    };
    for (Value* v : nodes[i]->inputs) add(v);
    for (Value* v : captures(*nodes[i])) add(v);
  }
  for (size_t i = 0; i < nodes.size(); ++i)
    for (const Value* v : uses[i]) producers[i].push_back(producer(v));
}

SizedGraph::SizedGraph(const GraphIndex& i, const Target& t) : index(i), target(t) {
  costs.reserve(index.nodes.size());
  for (const Node* node : index.nodes) costs.push_back(cost_of({node}, target));
}

int GraphIndex::producer(const Value* value) const {
  if (!value->producer) return -1;
  auto it = position.find(value->producer);
  return it == position.end() ? -1 : it->second;
}

std::vector<char> copied_nodes(const GraphIndex& index) {
  constexpr int64_t kMostBytes = int64_t{1} << 20;  // of what depends on shapes: beyond that it is sent
  std::vector<char> copied(index.nodes.size(), 0);
  std::vector<char> constant(index.nodes.size(), 0);
  for (size_t i = 0; i < index.nodes.size(); ++i) {
    const Node& node = *index.nodes[i];
    if (node.group >= 0 || !node.domain.empty() || !bodies(node).empty() || is_random(node)) continue;
    bool only_constants = true, only_copied = true;
    for (size_t k = 0; k < index.uses[i].size(); ++k) {
      int p = index.producers[i][k];
      if (p < 0 && index.is_fixed(index.uses[i][k])) continue;
      only_constants = only_constants && p >= 0 && constant[static_cast<size_t>(p)];
      only_copied = only_copied && p >= 0 && copied[static_cast<size_t>(p)];
    }
    int64_t bytes = 0;
    bool tensors = true;
    for (const Value* v : node.outputs)
      if (v) {
        tensors = tensors && v->type.is_tensor();
        bytes += type_bytes(v->type);
      }
    bool reads_shape = node.is("Shape") || node.is("Size");
    constant[i] = only_constants && tensors;
    copied[i] = constant[i] || (tensors && bytes <= kMostBytes && (only_copied || reads_shape));
  }
  return copied;
}

namespace {

// Nodes joined into clusters; the number of a cluster is that of one of its nodes.
class Clusters {
 public:
  explicit Clusters(size_t n) : parent_(n) { std::iota(parent_.begin(), parent_.end(), 0); }
  int find(int x) {
    auto& p = parent_;
    while (p[static_cast<size_t>(x)] != x) {
      p[static_cast<size_t>(x)] = p[static_cast<size_t>(p[static_cast<size_t>(x)])];
      x = p[static_cast<size_t>(x)];
    }
    return x;
  }
  void join(int a, int b) { parent_[static_cast<size_t>(find(a))] = find(b); }

 private:
  std::vector<int> parent_;
};

using Edges = std::vector<std::vector<int>>;

// Clusters numbered from 0, with the clusters each one uses.
struct Quotient {
  std::vector<int> cluster_of;  // of each node
  Edges members, uses;
};

Quotient quotient(const GraphIndex& index, Clusters& clusters) {
  Quotient q;
  size_t n = index.nodes.size();
  q.cluster_of.assign(n, -1);
  std::vector<int> number(n, -1);
  for (size_t i = 0; i < n; ++i) {
    int& k = number[static_cast<size_t>(clusters.find(static_cast<int>(i)))];
    if (k < 0) {
      k = static_cast<int>(q.members.size());
      q.members.emplace_back();
    }
    q.cluster_of[i] = k;
    q.members[static_cast<size_t>(k)].push_back(static_cast<int>(i));
  }
  q.uses.resize(q.members.size());
  for (size_t i = 0; i < n; ++i)
    for (int p : index.producers[i]) {
      if (p >= 0 && q.cluster_of[static_cast<size_t>(p)] != q.cluster_of[i])
        q.uses[static_cast<size_t>(q.cluster_of[i])].push_back(q.cluster_of[static_cast<size_t>(p)]);
    }
  for (auto& u : q.uses) {
    std::sort(u.begin(), u.end());
    u.erase(std::unique(u.begin(), u.end()), u.end());
  }
  return q;
}

// Joins clusters that depend on each other in a circle (Tarjan's components, without recursion). True when any were.
bool join_circles(const Quotient& q, Clusters& clusters) {
  size_t n = q.members.size();
  std::vector<int> number(n, -1), low(n, 0), stack;
  std::vector<char> on_stack(n, 0);
  std::vector<std::pair<int, size_t>> calls;
  int counter = 0;
  bool joined = false;
  for (size_t root = 0; root < n; ++root) {
    if (number[root] >= 0) continue;
    calls.push_back({static_cast<int>(root), 0});
    while (!calls.empty()) {
      auto [at, edge] = calls.back();
      auto a = static_cast<size_t>(at);
      if (edge == 0) {
        number[a] = low[a] = counter++;
        stack.push_back(at);
        on_stack[a] = 1;
      }
      if (edge < q.uses[a].size()) {
        int to = q.uses[a][edge];
        ++calls.back().second;
        if (number[static_cast<size_t>(to)] < 0)
          calls.push_back({to, 0});
        else if (on_stack[static_cast<size_t>(to)])
          low[a] = std::min(low[a], number[static_cast<size_t>(to)]);
        continue;
      }
      calls.pop_back();
      if (!calls.empty()) low[static_cast<size_t>(calls.back().first)] = std::min(low[static_cast<size_t>(calls.back().first)], low[a]);
      if (low[a] != number[a]) continue;
      for (int member = -1; member != at;) {
        member = stack.back();
        stack.pop_back();
        on_stack[static_cast<size_t>(member)] = 0;
        if (member == at) break;
        clusters.join(q.members[static_cast<size_t>(member)][0], q.members[a][0]);
        joined = true;
      }
    }
  }
  return joined;
}

void join_groups(const GraphIndex& index, Clusters& clusters) {
  std::unordered_map<int, int> last;  // group -> its node before
  for (size_t i = 0; i < index.nodes.size(); ++i) {
    const Node& node = *index.nodes[i];
    if (node.group < 0) continue;
    auto [it, is_new] = last.try_emplace(node.group, static_cast<int>(i));
    if (is_new) continue;
    clusters.join(static_cast<int>(i), it->second);
    it->second = static_cast<int>(i);
  }
}

// Ties the makers and users of values that ranks can't send each other.
void join_unsendable(const GraphIndex& index, Clusters& clusters, std::string& tied_by) {
  for (size_t i = 0; i < index.nodes.size(); ++i)
    for (size_t k = 0; k < index.uses[i].size(); ++k) {
      int p = index.producers[i][k];
      if (p < 0) continue;
      const Value* v = index.uses[i][k];
      std::string why = why_not_sent(v->type);
      if (why.empty()) continue;
      clusters.join(static_cast<int>(i), p);
      if (tied_by.empty()) tied_by = fmt::format("'{}': {}", v->source_name(), why);
    }
}

// Clusters in an order that is legal to run, each where its last node stands in the file, or as soon after as it can.
std::vector<int> running_order(const Quotient& q) {
  size_t n = q.members.size();
  Edges users(n);
  std::vector<int> waits(n, 0);
  for (size_t c = 0; c < n; ++c)
    for (int u : q.uses[c]) {
      users[static_cast<size_t>(u)].push_back(static_cast<int>(c));
      ++waits[c];
    }
  using Entry = std::pair<int, int>;  // position of the last node, cluster
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> ready;
  for (size_t c = 0; c < n; ++c)
    if (waits[c] == 0) ready.push({q.members[c].back(), static_cast<int>(c)});
  std::vector<int> order;
  while (!ready.empty()) {
    int c = ready.top().second;
    ready.pop();
    order.push_back(c);
    for (int u : users[static_cast<size_t>(c)])
      if (--waits[static_cast<size_t>(u)] == 0) ready.push({q.members[static_cast<size_t>(u)].back(), u});
  }
  return order;
}

// Lets cheap clusters float: one whose results are larger than what it takes runs just before its first user, one whose
// results are smaller right after what it takes is made. Keys only grow along edges, ties keep the order: it stays legal.
void float_cheap(const SizedGraph& sized, const Quotient& q, const std::vector<char>& copied, std::vector<int>& order) {
  const GraphIndex& index = sized.index;
  size_t n = order.size();
  std::vector<int> rank(n);
  for (size_t i = 0; i < n; ++i) rank[static_cast<size_t>(order[i])] = static_cast<int>(i);
  std::vector<double> time(n, 0);
  std::vector<int64_t> grows(n, 0);  // bytes of results less bytes taken from other clusters
  double total = 0;
  for (size_t c = 0; c < n; ++c) {
    for (int m : q.members[c]) time[c] += sized.costs[static_cast<size_t>(m)].time_us;
    total += time[c];
    if (q.members[c].size() > 1) continue;  // only single nodes float
    auto m = static_cast<size_t>(q.members[c][0]);
    for (const Value* v : index.nodes[m]->outputs)
      if (v) grows[c] += type_bytes(v->type);
    for (size_t k = 0; k < index.uses[m].size(); ++k)
      if (index.producers[m][k] >= 0) grows[c] -= type_bytes(index.uses[m][k]->type);
  }
  Edges users(n);
  for (size_t c = 0; c < n; ++c)
    for (int u : q.uses[c]) users[static_cast<size_t>(u)].push_back(static_cast<int>(c));
  auto cheap = [&](size_t c) {
    return q.members[c].size() == 1 && (copied[static_cast<size_t>(q.members[c][0])] || time[c] < 2e-3 * total);
  };
  std::vector<int> key(n);
  for (size_t i = 0; i < n; ++i) key[static_cast<size_t>(order[i])] = static_cast<int>(i);
  for (size_t i = n; i-- > 0;) {
    auto c = static_cast<size_t>(order[i]);
    bool late = !users[c].empty() && cheap(c) && (grows[c] > 0 || copied[static_cast<size_t>(q.members[c][0])]);
    if (!late) continue;
    int first = INT32_MAX;
    for (int u : users[c]) first = std::min(first, key[static_cast<size_t>(u)]);
    key[c] = first;
  }
  for (size_t i = 0; i < n; ++i) {
    auto c = static_cast<size_t>(order[i]);
    if (q.uses[c].empty() || key[c] != static_cast<int>(i) || !cheap(c) || grows[c] >= 0 || copied[static_cast<size_t>(q.members[c][0])])
      continue;
    int last = 0;
    for (int u : q.uses[c]) last = std::max(last, key[static_cast<size_t>(u)]);
    key[c] = last;
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    auto x = static_cast<size_t>(a), y = static_cast<size_t>(b);
    return key[x] != key[y] ? key[x] < key[y] : rank[x] < rank[y];
  });
}

}  // namespace

Units make_units(const GraphIndex& index, const SizedGraph& sized, const UnitOptions& options) {
  Units units;
  Clusters clusters(index.nodes.size());
  if (!options.open_groups) join_groups(index, clusters);
  join_unsendable(index, clusters, units.tied_by);
  Quotient q = quotient(index, clusters);
  if (join_circles(q, clusters)) q = quotient(index, clusters);
  std::vector<char> copied = options.count_copied ? std::vector<char>(index.nodes.size(), 0) : copied_nodes(index);
  for (const auto& members : q.members)  // a node that is tied to others is not copied
    if (members.size() > 1)
      for (int m : members) copied[static_cast<size_t>(m)] = 0;
  // What uses such a node may not be copied either.
  for (size_t i = 0; i < copied.size(); ++i) {
    const Node& node = *index.nodes[i];
    if (!copied[i] || node.is("Shape") || node.is("Size")) continue;
    for (int p : index.producers[i])
      if (p >= 0 && !copied[static_cast<size_t>(p)]) copied[i] = 0;
  }
  std::vector<int> order = running_order(q);
  float_cheap(sized, q, copied, order);
  units.unit_of.assign(index.nodes.size(), -1);
  for (int c : order) {
    const auto& members = q.members[static_cast<size_t>(c)];
    units.order.insert(units.order.end(), members.begin(), members.end());
    if (copied[static_cast<size_t>(members[0])]) continue;
    for (int m : members) units.unit_of[static_cast<size_t>(m)] = static_cast<int>(units.members.size());
    units.members.push_back(members);
  }
  return units;
}

CutProblem make_cut_problem(const Units& units, const SizedGraph& sized) {
  const GraphIndex& index = sized.index;
  CutProblem problem;
  problem.link_bytes_per_us = sized.target.link_bytes_per_us;
  problem.link_latency_us = sized.target.link_latency_us;
  std::unordered_map<const Value*, int> weight_number, value_number;
  for (size_t u = 0; u < units.members.size(); ++u) {
    std::vector<const Node*> nodes;
    std::vector<int> weights;
    auto unit = static_cast<int>(u);
    for (int m : units.members[u]) {
      nodes.push_back(index.nodes[static_cast<size_t>(m)]);
      for (size_t k = 0; k < index.uses[static_cast<size_t>(m)].size(); ++k) {
        const Value* v = index.uses[static_cast<size_t>(m)][k];
        if (v->constant) {
          auto [it, is_new] = weight_number.try_emplace(v, static_cast<int>(problem.weight_bytes.size()));
          if (is_new) problem.weight_bytes.push_back(static_cast<int64_t>(v->constant->bytes()));
          if (std::find(weights.begin(), weights.end(), it->second) == weights.end()) weights.push_back(it->second);
          continue;
        }
        int p = index.producers[static_cast<size_t>(m)][k];
        if (p < 0 || units.unit_of[static_cast<size_t>(p)] < 0 || units.unit_of[static_cast<size_t>(p)] == unit) continue;
        auto [it, is_new] = value_number.try_emplace(v, static_cast<int>(problem.values.size()));
        if (is_new) problem.values.push_back({units.unit_of[static_cast<size_t>(p)], unit, type_bytes(v->type)});
        CutValue& value = problem.values[static_cast<size_t>(it->second)];
        value.last_used_by = std::max(value.last_used_by, unit);
      }
    }
    // Nodes that only share a unit run one by one: their costs add up. A fusion group is one kernel.
    bool fused = nodes.size() > 1 &&
                 std::all_of(nodes.begin(), nodes.end(), [&](const Node* n) { return n->group >= 0 && n->group == nodes[0]->group; });
    double us = 0;
    if (fused)
      us = cost_of(nodes, sized.target).time_us;
    else
      for (int m : units.members[u]) us += sized.costs[static_cast<size_t>(m)].time_us;
    problem.time_us.push_back(us);
    problem.weights.push_back(std::move(weights));
  }
  return problem;
}

}  // namespace fretsaw
