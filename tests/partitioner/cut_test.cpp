// The cutting of unit sequences, against trying every cut.
#include "partitioner/cut.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <random>
#include <set>

namespace fretsaw {
namespace {

struct Measured {
  double us = 0;
  double memory = 0;
};

Measured measure(const CutProblem& p, int begin, int end) {
  Measured m;
  double sent = 0;
  std::set<int> weights;
  for (int u = begin; u < end; ++u) {
    m.us += p.time_us[static_cast<size_t>(u)];
    weights.insert(p.weights[static_cast<size_t>(u)].begin(), p.weights[static_cast<size_t>(u)].end());
    double active = 0;
    for (const CutValue& v : p.values)
      if (v.made_by <= u && v.last_used_by >= u) active += static_cast<double>(v.bytes);
    m.memory = std::max(m.memory, active);
  }
  for (const CutValue& v : p.values)
    if (v.made_by >= begin && v.made_by < end && v.last_used_by >= end) sent += static_cast<double>(v.bytes);
  if (sent > 0) m.us += p.link_latency_us + sent / p.link_bytes_per_us;
  for (int w : weights) m.memory += static_cast<double>(p.weight_bytes[static_cast<size_t>(w)]);
  return m;
}

// Calls f with the ends of every cut into p.stages stages.
void for_every_cut(const CutProblem& p, const std::function<void(const std::vector<int>&)>& f) {
  auto n = static_cast<int>(p.time_us.size());
  std::vector<int> ends;
  std::function<void(int)> place = [&](int from) {
    if (static_cast<int>(ends.size()) + 1 == p.stages) {
      ends.push_back(n);
      f(ends);
      ends.pop_back();
      return;
    }
    for (int e = from + 1; e < n; ++e) {
      ends.push_back(e);
      place(e);
      ends.pop_back();
    }
  };
  if (n >= p.stages) place(0);
}

CutProblem random_problem(std::mt19937& rng, int units, int stages) {
  auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); };
  CutProblem p;
  p.stages = stages;
  p.link_bytes_per_us = 4;
  p.link_latency_us = draw(0, 2);
  int weights = draw(1, 6);
  for (int w = 0; w < weights; ++w) p.weight_bytes.push_back(draw(1, 50));
  for (int u = 0; u < units; ++u) {
    p.time_us.push_back(draw(0, 20));
    std::set<int> used;
    for (int k = draw(0, 2); k > 0; --k) used.insert(draw(0, weights - 1));
    p.weights.emplace_back(used.begin(), used.end());
  }
  for (int u = 0; u + 1 < units; ++u)
    for (int k = draw(0, 2); k > 0; --k) p.values.push_back({u, draw(u + 1, units - 1), draw(1, 40)});
  return p;
}

TEST(StageCut, EqualsTheBestOfAllCuts) {
  std::mt19937 rng(7);
  for (int round = 0; round < 600; ++round) {
    int units = 1 + round % 10, stages = 1 + static_cast<int>(rng() % 5);
    CutProblem p = random_problem(rng, units, stages);
    if (round % 3 == 1) p.memory_bytes = 20 + static_cast<int64_t>(rng() % 150);
    double best = -1;
    for_every_cut(p, [&](const std::vector<int>& ends) {
      double slowest = 0;
      int begin = 0;
      for (int end : ends) {
        Measured m = measure(p, begin, end);
        if (p.memory_bytes && m.memory > static_cast<double>(*p.memory_bytes)) return;
        slowest = std::max(slowest, m.us);
        begin = end;
      }
      if (best < 0 || slowest < best) best = slowest;
    });
    std::optional<StageCut> cut = find_cut(p);
    ASSERT_EQ(cut.has_value(), best >= 0) << "round " << round;
    if (!cut) continue;
    ASSERT_EQ(static_cast<int>(cut->ends.size()), stages);
    EXPECT_NEAR(cut->slowest_us, best, 1e-5 * best) << "round " << round;
    int begin = 0;
    double slowest = 0;
    for (int end : cut->ends) {
      ASSERT_LT(begin, end) << "an empty stage in round " << round;
      slowest = std::max(slowest, measure(p, begin, end).us);
      begin = end;
    }
    EXPECT_EQ(begin, units);
    EXPECT_NEAR(slowest, best, 1e-5 * best) << "round " << round;
  }
}

TEST(StageCut, LeastMemoryEqualsThatOfAllCuts) {
  std::mt19937 rng(11);
  for (int round = 0; round < 200; ++round) {
    int units = 2 + round % 8, stages = 1 + static_cast<int>(rng() % static_cast<unsigned>(units));
    CutProblem p = random_problem(rng, units, stages);
    double least = 1e18;
    for_every_cut(p, [&](const std::vector<int>& ends) {
      double most = 0;
      int begin = 0;
      for (int end : ends) {
        most = std::max(most, measure(p, begin, end).memory);
        begin = end;
      }
      least = std::min(least, most);
    });
    EXPECT_NEAR(static_cast<double>(least_memory_bytes(p)), std::max(least, 1.0), 1) << "round " << round;
  }
}

// Of two cuts that are equally fast the one that sends less.
TEST(StageCut, SendsLittleWhereItCanChoose) {
  CutProblem p;
  p.stages = 2;
  p.time_us = {10, 0, 0, 10};
  p.weights.resize(4);
  p.values = {{0, 1, 1000}, {1, 2, 1}, {2, 3, 1000}};
  p.link_bytes_per_us = 1e6;
  p.time_us[3] = 11;
  ASSERT_TRUE(find_cut(p));
  EXPECT_EQ(find_cut(p)->ends, (std::vector<int>{2, 4}));
}

TEST(StageCut, IsQuickForManyUnits) {
  std::mt19937 rng(3);
  CutProblem p;
  p.stages = 16;
  constexpr int kUnits = 100000;
  for (int u = 0; u < kUnits; ++u) {
    p.time_us.push_back(1 + static_cast<double>(rng() % 100) / 10);
    p.weights.push_back({u});
    p.weight_bytes.push_back(100);
    if (u > 0) p.values.push_back({u - 1, std::min<int>(kUnits - 1, u + static_cast<int>(rng() % 20)), static_cast<int64_t>(rng() % 1000)});
  }
  p.link_bytes_per_us = 100;
  p.memory_bytes = kUnits * 100;
  auto start = std::chrono::steady_clock::now();
  std::optional<StageCut> cut = find_cut(p);
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  ASSERT_TRUE(cut);
  double total = 0;
  for (double t : p.time_us) total += t;
  EXPECT_LT(cut->slowest_us, total / 16 + 120);
  EXPECT_LT(seconds, 20);  // 0.5 alone on a machine; others may run beside it
}

}  // namespace
}  // namespace fretsaw
