// Timelines that can be worked out by hand.
#include "partitioner/simulate.h"

#include <gtest/gtest.h>

#include "partitioner/schedules.h"

namespace fretsaw {
namespace {

Plan chain(const std::vector<double>& times_us, int micro_batches, double latency_us = 0, double bytes_per_us = 1e9) {
  Plan plan;
  plan.mesh.pipeline = static_cast<int>(times_us.size());
  plan.micro_batches = micro_batches;
  plan.link_latency_us = latency_us;
  plan.link_bytes_per_us = bytes_per_us;
  for (size_t s = 0; s < times_us.size(); ++s) {
    StageEstimate e;
    e.time_us = times_us[s];
    plan.stages.push_back(e);
    if (s == 0) continue;
    Route r;
    r.tag = static_cast<int>(s);
    r.from_stage = static_cast<int>(s) - 1;
    r.to_stage = static_cast<int>(s);
    r.type = Type::tensor(DType::float32, Shape{Dim("n"), 25});  // 100 bytes
    plan.routes.push_back(r);
  }
  plan.schedule = gpipe(schedule_problem(plan));
  return plan;
}

struct Case {
  std::vector<double> times_us;
  int micro_batches;
  double time_us, idle_share;
};

TEST(Simulate, FillAndDrain) {
  // Equal stages: (stages - 1 + micro-batches) steps; unequal ones wait for the slowest.
  for (const Case& c : std::vector<Case>{{{10}, 3, 30, 0},
                                         {{10, 10}, 1, 20, 0.5},
                                         {{10, 10}, 8, 90, 1 - 160.0 / 180},
                                         {{10, 10, 10, 10}, 4, 70, 1 - 160.0 / 280},
                                         {{10, 20}, 3, 70, 1 - 90.0 / 140}}) {
    Simulation s = simulate(chain(c.times_us, c.micro_batches));
    EXPECT_NEAR(s.time_us, c.time_us, 1e-3);
    EXPECT_NEAR(s.idle_share, c.idle_share, 1e-3);
    ASSERT_EQ(s.ranks.size(), c.times_us.size());
    for (size_t r = 0; r < s.ranks.size(); ++r) EXPECT_NEAR(s.ranks[r].busy_us, c.times_us[r] * c.micro_batches, 1e-3);
  }
}

TEST(Simulate, TransfersTakeTime) {
  // One micro-batch: 10, then 5 + 100 bytes / 20, then 10.
  EXPECT_NEAR(simulate(chain({10, 10}, 1, 5, 20)).time_us, 30, 1e-3);
  // Beside computing: the next micro-batch runs while the first is on its way.
  EXPECT_NEAR(simulate(chain({10, 10}, 2, 5, 20)).time_us, 40, 1e-3);
}

TEST(Simulate, ActionsAreOrderedAndComplete) {
  Plan plan = chain({10, 10, 5}, 3, 1, 100);
  Simulation s = simulate(plan);
  for (size_t r = 0; r < s.ranks.size(); ++r) {
    EXPECT_EQ(s.ranks[r].actions.size(), plan.schedule.ranks[r].size());
    for (const SimulatedAction& a : s.ranks[r].actions) {
      EXPECT_LE(a.start_us, a.end_us);
      EXPECT_LE(a.end_us, s.time_us);
    }
    EXPECT_GE(s.ranks[r].peak_micro_batches, 1);
    EXPECT_LE(s.ranks[r].peak_micro_batches, 2);
  }
}

}  // namespace
}  // namespace fretsaw
