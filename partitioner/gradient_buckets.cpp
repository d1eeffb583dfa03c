// Buckets are filled one gradient after the other, one of each way of exchange at a time.
#include "partitioner/gradient_buckets.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace fretsaw {
namespace {

constexpr double kShareOfLast = 16;  // of a whole bucket's bytes

// The gradients at the end of a bucket that are of at most so many bytes together, when the rest are more.
std::optional<GradientBucket> split_end(GradientBucket& bucket, double most_bytes) {
  double bytes = 0, rest = 0;
  size_t begin = bucket.gradients.size();
  while (begin > 0 && bytes + static_cast<double>(bucket.gradients[begin - 1].bytes) <= most_bytes)
    bytes += static_cast<double>(bucket.gradients[--begin].bytes);
  for (size_t i = 0; i < begin; ++i) rest += static_cast<double>(bucket.gradients[i].bytes);
  if (begin == bucket.gradients.size() || rest <= most_bytes) return std::nullopt;
  GradientBucket end{bucket.exchange, {}};
  const auto from = bucket.gradients.begin() + static_cast<std::ptrdiff_t>(begin);
  std::move(from, bucket.gradients.end(), std::back_inserter(end.gradients));
  bucket.gradients.erase(from, bucket.gradients.end());
  return end;
}

}  // namespace

std::map<std::string, std::pair<int, size_t>> places_of_new_states(const Plan& plan) {
  const std::string_view prefix = kStateOutput;
  std::map<std::string, std::pair<int, size_t>> places;
  for (const PlanGraph& g : plan.graphs) {
    if (std::any_of(g.coordinates.begin(), g.coordinates.end(), [](const auto& at) { return at.second != 0; })) continue;
    for (size_t i = 0; i < g.model->graph->nodes.size(); ++i) {
      for (const Value* v : g.model->graph->nodes[i]->outputs) {
        if (!v || !v->name.starts_with(prefix)) continue;
        auto& place = places[v->name.substr(prefix.size())];
        place = std::max(place, {g.stage, i});
      }
    }
  }
  return places;
}

std::vector<GradientBucket> gradient_buckets(std::vector<ReducedGradient> gradients,
                                             const std::map<std::string, std::pair<int, size_t>>& places, double most_bytes) {
  const auto place = [&](const ReducedGradient& g) {
    const auto found = places.find(g.state);
    return found == places.end() ? std::pair<int, size_t>() : found->second;
  };
  std::stable_sort(gradients.begin(), gradients.end(),
                   [&](const ReducedGradient& a, const ReducedGradient& b) { return place(a) < place(b); });
  std::vector<GradientBucket> buckets;
  std::map<GradientExchange, std::pair<size_t, double>> filling;  // the bucket, and how much is in it
  for (ReducedGradient& g : gradients) {
    if (!g.exchange.is_needed()) continue;
    const auto bytes = static_cast<double>(g.bytes);
    const auto [open, is_new] = filling.try_emplace(g.exchange, buckets.size(), 0);
    if (is_new || open->second.second + bytes > most_bytes) {
      open->second = {buckets.size(), 0};
      buckets.push_back({g.exchange, {}});
    }
    open->second.second += bytes;
    buckets[open->second.first].gradients.push_back(std::move(g));
  }
  // Nothing runs beside the last exchange: it is kept small.
  for (const auto& [exchange, open] : filling)
    if (std::optional<GradientBucket> end = split_end(buckets[open.first], most_bytes / kShareOfLast)) buckets.push_back(std::move(*end));
  std::stable_sort(buckets.begin(), buckets.end(),
                   [&](const GradientBucket& a, const GradientBucket& b) { return place(a.gradients.back()) < place(b.gradients.back()); });
  return buckets;
}

void place_behind_inputs(Graph& graph, const std::vector<Node*>& nodes) {
  const std::unordered_set<const Node*> moved(nodes.begin(), nodes.end());
  std::vector<Node*> order;
  std::unordered_map<const Node*, size_t> place;
  std::unordered_map<size_t, std::vector<Node*>> behind;  // by place of a node that stays; in the order they had
  for (Node* node : graph.nodes) {
    if (!moved.contains(node)) {
      place[node] = order.size();
      order.push_back(node);
    }
  }
  std::vector<Node*> first;  // what takes inputs of the graph alone
  for (Node* node : graph.nodes) {
    if (!moved.contains(node)) continue;
    bool has_producer = false;
    size_t last = 0;
    for (const Value* v : operands(*node)) {
      const auto producer = v->producer ? place.find(v->producer) : place.end();
      if (producer != place.end()) last = std::max(last, producer->second), has_producer = true;
    }
    if (has_producer) place[node] = last;  // what takes its result goes behind it
    (has_producer ? behind[last] : first).push_back(node);
  }
  graph.nodes = std::move(first);
  for (size_t i = 0; i < order.size(); ++i) {
    graph.nodes.push_back(order[i]);
    if (const auto found = behind.find(i); found != behind.end())
      graph.nodes.insert(graph.nodes.end(), found->second.begin(), found->second.end());
  }
}

}  // namespace fretsaw
