// The search for the best cut: sweeps for a limit, bisection over limits, and among the best cuts the one that sends least.
#include "partitioner/cut.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <span>

namespace fretsaw {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

// Values by a unit of theirs, one after another in memory.
class Lists {
 public:
  Lists() = default;
  Lists(size_t units, const std::vector<CutValue>& values, int CutValue::*unit) : first_(units + 1, 0), values_(values.size()) {
    for (const CutValue& v : values) ++first_[static_cast<size_t>(v.*unit) + 1];
    for (size_t i = 1; i < first_.size(); ++i) first_[i] += first_[i - 1];
    std::vector<size_t> next(first_.begin(), first_.end() - 1);
    for (const CutValue& v : values) values_[next[static_cast<size_t>(v.*unit)]++] = v;
  }
  std::span<const CutValue> operator[](int unit) const {
    auto u = static_cast<size_t>(unit);
    return {values_.data() + first_[u], first_[u + 1] - first_[u]};
  }

 private:
  std::vector<size_t> first_;
  std::vector<CutValue> values_;
};

class Cutter {
 public:
  explicit Cutter(const CutProblem& problem) : p_(problem), n_(static_cast<int>(problem.time_us.size())) {
    auto n = static_cast<size_t>(n_);
    made_ = Lists(n, problem.values, &CutValue::made_by);
    ends_ = Lists(n, problem.values, &CutValue::last_used_by);
    live_.assign(n + 2, 0);
    active_.assign(n + 1, 0);
    prefix_.assign(n + 1, 0);
    for (size_t i = 0; i < n; ++i) prefix_[i + 1] = prefix_[i] + problem.time_us[i];
    for (const CutValue& value : problem.values) {
      auto bytes = static_cast<double>(value.bytes);
      live_[static_cast<size_t>(value.made_by) + 1] += bytes;
      live_[static_cast<size_t>(value.last_used_by) + 1] -= bytes;
      active_[static_cast<size_t>(value.made_by)] += bytes;
      active_[static_cast<size_t>(value.last_used_by) + 1] -= bytes;
    }
    for (size_t i = 1; i < live_.size(); ++i) live_[i] += live_[i - 1];
    for (size_t i = 1; i < active_.size(); ++i) active_[i] += active_[i - 1];
  }

  double total_us() const { return prefix_.back(); }
  double stage_us(int begin, int end, double sent) const {
    double send = sent > 0.5 ? p_.link_latency_us + sent / p_.link_bytes_per_us : 0;
    return prefix_[static_cast<size_t>(end)] - prefix_[static_cast<size_t>(begin)] + send;
  }
  // Bytes made in [begin, end) and used at or after `end`.
  double sent(int begin, int end) const {
    double bytes = 0;
    for (int u = begin; u < end; ++u)
      for (const CutValue& v : made_[u])
        if (v.last_used_by >= end) bytes += static_cast<double>(v.bytes);
    return bytes;
  }

  // A cut no stage of which is slower than `limit_us` or larger than `memory`; empty when there is none.
  std::vector<int> within(double limit_us, double memory) {
    auto n = static_cast<size_t>(n_);
    std::vector<std::vector<int>> start(static_cast<size_t>(p_.stages),
                                        std::vector<int>(n + 1, -1));  // [stage][end] -> where that stage starts
    std::vector<char> reached(n + 1, 0);
    reached[0] = 1;
    for (int k = 0; k < p_.stages; ++k) reached = sweep(reached, limit_us, memory, start[static_cast<size_t>(k)]);
    if (!reached[n]) return {};
    std::vector<int> ends(static_cast<size_t>(p_.stages));
    int end = n_;
    for (int k = p_.stages; k-- > 0;) {
      ends[static_cast<size_t>(k)] = end;
      end = start[static_cast<size_t>(k)][static_cast<size_t>(end)];
    }
    return ends;
  }

  double slowest(const std::vector<int>& ends) const {
    double worst = 0;
    int begin = 0;
    for (int end : ends) {
      worst = std::max(worst, stage_us(begin, end, sent(begin, end)));
      begin = end;
    }
    return worst;
  }

  // Among the cuts within the limits, the one that sends least in all, and then the most even one. Quadratic: for moderate sizes.
  std::vector<int> least_sending(double limit_us, double memory) {
    auto n = static_cast<size_t>(n_);
    std::vector<double> best(n + 1, kNoLimit), next;
    best[0] = 0;
    std::vector<std::vector<int>> start(static_cast<size_t>(p_.stages), std::vector<int>(n + 1, -1));
    for (int k = 0; k < p_.stages; ++k) {
      next.assign(n + 1, kNoLimit);
      int last = n_ - (p_.stages - 1 - k);
      for (int end = k + 1 == p_.stages ? n_ : k + 1; end <= last; ++end)
        scan_starts(end, limit_us, memory, best, next, start[static_cast<size_t>(k)]);
      best.swap(next);
    }
    if (best[n] == kNoLimit) return {};
    std::vector<int> ends(static_cast<size_t>(p_.stages));
    int end = n_;
    for (int k = p_.stages; k-- > 0;) {
      ends[static_cast<size_t>(k)] = end;
      end = start[static_cast<size_t>(k)][static_cast<size_t>(end)];
    }
    return ends;
  }

 private:
  // The weights and the activity of a window of units whose both ends only move right.
  struct Window {
    std::vector<int> uses;
    double weight_bytes = 0;
    std::deque<int> peaks;  // units of falling activity; the front is the largest in the window
  };
  void add_unit(Window& w, int unit) const {
    for (int x : p_.weights[static_cast<size_t>(unit)])
      if (w.uses[static_cast<size_t>(x)]++ == 0) w.weight_bytes += static_cast<double>(p_.weight_bytes[static_cast<size_t>(x)]);
    while (!w.peaks.empty() && active_[static_cast<size_t>(w.peaks.back())] <= active_[static_cast<size_t>(unit)]) w.peaks.pop_back();
    w.peaks.push_back(unit);
  }
  void drop_unit(Window& w, int unit) const {
    for (int x : p_.weights[static_cast<size_t>(unit)])
      if (--w.uses[static_cast<size_t>(x)] == 0) w.weight_bytes -= static_cast<double>(p_.weight_bytes[static_cast<size_t>(x)]);
    if (!w.peaks.empty() && w.peaks.front() == unit) w.peaks.pop_front();
  }

  // One more stage: the ends that can be reached from the starts in `from`, each from the rightmost start before it.
  std::vector<char> sweep(const std::vector<char>& from, double limit_us, double memory, std::vector<int>& start) const {
    std::vector<char> reached(static_cast<size_t>(n_) + 1, 0);
    bool limited = memory < kNoLimit;
    Window window;
    if (limited) window.uses.assign(p_.weight_bytes.size(), 0);
    int begin = -1;
    double passing = 0;  // bytes made before `begin` and used at or after `end`
    for (int end = 1; end <= n_; ++end) {
      if (begin >= 0)
        for (const CutValue& v : ends_[end - 1])
          if (v.made_by < begin) passing -= static_cast<double>(v.bytes);
      if (limited) add_unit(window, end - 1);
      if (from[static_cast<size_t>(end) - 1]) {
        for (int u = std::max(begin, 0); u < end - 1; ++u) {
          for (const CutValue& v : made_[u])
            if (v.last_used_by >= end) passing += static_cast<double>(v.bytes);
          if (limited) drop_unit(window, u);
        }
        begin = end - 1;
      }
      if (begin < 0) continue;
      if (stage_us(begin, end, live_[static_cast<size_t>(end)] - passing) > limit_us) continue;
      if (limited && window.weight_bytes + active_[static_cast<size_t>(window.peaks.front())] > memory) continue;
      reached[static_cast<size_t>(end)] = 1;
      start[static_cast<size_t>(end)] = begin;
    }
    return reached;
  }

  void scan_starts(int end, double limit_us, double memory, const std::vector<double>& best, std::vector<double>& next,
                   std::vector<int>& start) {
    double bytes = 0, weight_bytes = 0, active = 0;
    ++stamp_;
    seen_.resize(p_.weight_bytes.size(), 0);
    for (int begin = end - 1; begin >= 0; --begin) {
      for (const CutValue& v : made_[begin])
        if (v.last_used_by >= end) bytes += static_cast<double>(v.bytes);
      double us = stage_us(begin, end, bytes);
      if (us > limit_us) return;
      if (memory < kNoLimit) {
        for (int x : p_.weights[static_cast<size_t>(begin)])
          if (seen_[static_cast<size_t>(x)] != stamp_) {
            seen_[static_cast<size_t>(x)] = stamp_;
            weight_bytes += static_cast<double>(p_.weight_bytes[static_cast<size_t>(x)]);
          }
        active = std::max(active, active_[static_cast<size_t>(begin)]);
        if (weight_bytes + active > memory) return;
      }
      if (best[static_cast<size_t>(begin)] == kNoLimit) continue;
      double send = us - (prefix_[static_cast<size_t>(end)] - prefix_[static_cast<size_t>(begin)]);
      double evenness = limit_us > 0 ? 1e-3 * us * us / limit_us : 0;
      double total = best[static_cast<size_t>(begin)] + send + evenness;
      if (total < next[static_cast<size_t>(end)]) {
        next[static_cast<size_t>(end)] = total;
        start[static_cast<size_t>(end)] = begin;
      }
    }
  }

  const CutProblem& p_;
  int n_;
  Lists made_, ends_;           // values by the unit that makes them, and by their last user
  std::vector<double> live_;    // [end]: bytes made before `end` and used at or after it
  std::vector<double> active_;  // [unit]: bytes alive while it runs
  std::vector<double> prefix_;  // of time
  std::vector<uint32_t> seen_;
  uint32_t stamp_ = 0;
};

}  // namespace

std::optional<StageCut> find_cut(const CutProblem& problem) {
  auto n = static_cast<int>(problem.time_us.size());
  if (problem.stages < 1 || problem.stages > n) return std::nullopt;
  Cutter cutter(problem);
  double memory = problem.memory_bytes ? static_cast<double>(*problem.memory_bytes) : kNoLimit;
  std::vector<int> best = cutter.within(kNoLimit, memory);
  if (best.empty()) return std::nullopt;
  double high = cutter.slowest(best), low = cutter.total_us() / problem.stages;
  for (double t : problem.time_us) low = std::max(low, t);
  low *= 1 - 1e-9;
  for (double over = 1.001; low * over < high; over += (over - 1) * 3) {  // mostly the optimum is close to an even division
    std::vector<int> found = cutter.within(low * over, memory);
    if (found.empty()) continue;
    best = std::move(found);
    high = cutter.slowest(best);
    break;
  }
  while (high - low > 1e-7 * high) {
    double middle = (low + high) / 2;
    std::vector<int> found = cutter.within(middle, memory);
    if (found.empty()) {
      low = middle;
    } else {
      best = std::move(found);
      high = std::min(middle, cutter.slowest(best));
    }
  }
  constexpr int kModerate = 6000;
  if (n <= kModerate) {
    std::vector<int> lighter = cutter.least_sending(high * (1 + 1e-9), memory);
    if (!lighter.empty()) best = std::move(lighter);
  }
  return StageCut{best, cutter.slowest(best)};
}

int64_t least_memory_bytes(const CutProblem& problem) {
  Cutter cutter(problem);
  double high = 1;
  for (int64_t b : problem.weight_bytes) high += static_cast<double>(b);
  for (const CutValue& v : problem.values) high += static_cast<double>(v.bytes);
  double low = 0;
  while (high - low > 0.5) {
    double middle = std::floor((low + high) / 2);
    if (middle <= low) break;
    (cutter.within(kNoLimit, middle).empty() ? low : high) = middle;
  }
  return static_cast<int64_t>(std::ceil(high));
}

}  // namespace fretsaw
