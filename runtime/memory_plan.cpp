// Greedy best-fit placement of buffers by size.
#include "runtime/memory_plan.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <utility>

namespace fretsaw {
namespace {

constexpr size_t alignment = 64;
size_t rounded(size_t bytes) {
  return (bytes + alignment - 1) / alignment * alignment;
}

}  // namespace

Placement place_buffers(const std::vector<BufferLife>& buffers) {
  Placement plan;
  plan.offsets.assign(buffers.size(), 0);
  std::vector<size_t> order(buffers.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    if (rounded(buffers[a].bytes) != rounded(buffers[b].bytes)) return buffers[a].bytes > buffers[b].bytes;
    return buffers[a].first < buffers[b].first;
  });
  // The buffers already placed, by the steps in which they live: long graphs have few neighbours in any one step.
  std::map<int, std::vector<size_t>> by_step;
  std::vector<std::pair<size_t, size_t>> taken;  // [begin, end) of neighbours
  std::vector<int> seen(buffers.size(), -1);
  int turn = 0;
  for (size_t b : order) {
    const BufferLife& life = buffers[b];
    taken.clear();
    ++turn;
    for (auto it = by_step.lower_bound(life.first); it != by_step.end() && it->first <= life.last; ++it) {
      for (size_t other : it->second) {
        if (std::exchange(seen[other], turn) == turn) continue;
        taken.emplace_back(plan.offsets[other], plan.offsets[other] + rounded(buffers[other].bytes));
      }
    }
    std::sort(taken.begin(), taken.end());
    size_t need = rounded(life.bytes), best = SIZE_MAX, best_gap = SIZE_MAX, free_from = 0;
    for (auto [begin, end] : taken) {
      if (begin >= free_from + need && begin - free_from < best_gap) best = free_from, best_gap = begin - free_from;
      free_from = std::max(free_from, end);
    }
    plan.offsets[b] = best == SIZE_MAX ? free_from : best;
    plan.bytes = std::max(plan.bytes, plan.offsets[b] + need);
    for (int step = life.first; step <= life.last; ++step) by_step[step].push_back(b);
  }
  return plan;
}

size_t placement_bound(const std::vector<BufferLife>& buffers) {
  std::map<int, int64_t> change;
  for (const auto& life : buffers) {
    change[life.first] += static_cast<int64_t>(rounded(life.bytes));
    change[life.last + 1] -= static_cast<int64_t>(rounded(life.bytes));
  }
  int64_t alive = 0, most = 0;
  for (auto [step, bytes] : change) most = std::max(most, alive += bytes);
  return static_cast<size_t>(most);
}

}  // namespace fretsaw
