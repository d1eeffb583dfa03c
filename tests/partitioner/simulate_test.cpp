// Timelines that can be worked out by hand.
#include "partitioner/simulate.h"

#include <gtest/gtest.h>

#include <tuple>

#include "graph/errors.h"
#include "partitioner/schedules.h"
#include "partitioner/training_schedules.h"

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

// A plan that trains: routes of 100 bytes between ranks, and once a step a reduction and an update on each.
Plan training_plan(const std::string& schedule, int ranks, int chunks, int micro_batches, bool weights_apart, double latency_us = 0) {
  const TrainingProblem training = training_chain(ranks, chunks, micro_batches, weights_apart);
  const ScheduleProblem& p = training.problem;
  Plan plan;
  plan.mesh.pipeline = ranks, plan.micro_batches = micro_batches;
  plan.link_latency_us = latency_us, plan.link_bytes_per_us = 1e9;
  for (int s = 0; s < p.stages; ++s) {
    plan.graphs.push_back({s, s < training.forward ? "forward" : s < 2 * training.forward ? "backward" : "weights", {}, "", nullptr});
    plan.stages.emplace_back().time_us = 10;
    for (int from : p.needs[static_cast<size_t>(s)]) {
      Route& r = plan.routes.emplace_back();
      r.tag = static_cast<int>(plan.routes.size()), r.from_stage = from, r.to_stage = s;
      r.type = Type::tensor(DType::float32, Shape{Dim("n"), 25});
    }
  }
  plan.schedule = make_training_schedule(schedule, training);
  for (int r = 0; r < ranks; ++r) {
    for (const auto& [kind, number, name] :
         {std::tuple{Action::Kind::reduce, p.stages + r, "reduce"}, std::tuple{Action::Kind::step, p.stages + ranks + r, "update"}}) {
      plan.graphs.push_back({number, name, {}, "", nullptr});
      plan.schedule.ranks[static_cast<size_t>(r)].push_back({kind, number, 0, -1});
    }
  }
  return plan;
}

TEST(Simulate, TrainingPlans) {
  struct {
    const char* schedule;
    int ranks, chunks, micro_batches;
    bool weights_apart;
    double latency_us, time_us;
    std::vector<int> alive;
  } const cases[] = {
      {"1f1b", 1, 1, 3, false, 0, 60, {1}},
      {"1f1b", 2, 1, 1, false, 5, 50, {1, 1}},   // two forward, two backward, two transfers
      {"1f1b", 2, 1, 4, false, 0, 100, {2, 1}},  // (P - 1) 20 on top of 4 20
      {"gpipe", 2, 1, 4, false, 0, 100, {4, 4}},
      {"interleaved", 2, 2, 4, false, 0, 180, {5, 3}},  // (P - 1) 20 on top of 4 40
      {"zero-bubble-h1", 2, 1, 4, true, 0, 130, {2, 2}},
      {"zero-bubble-h2", 2, 1, 4, true, 0, 130, {3, 3}},
  };
  for (const auto& c : cases) {
    const Simulation played = simulate(training_plan(c.schedule, c.ranks, c.chunks, c.micro_batches, c.weights_apart, c.latency_us));
    EXPECT_NEAR(played.time_us, c.time_us, 1e-3) << c.schedule;
    std::vector<int> alive;
    for (const SimulatedRank& rank : played.ranks) {
      alive.push_back(rank.peak_micro_batches);
      EXPECT_EQ(rank.actions.back().action.kind, Action::Kind::step);
    }
    EXPECT_EQ(alive, c.alive) << c.schedule;
  }
}

// Steps overlap: rank 1 begins a forward run later than rank 0, and ends as much later.
TEST(Simulate, StepsThatFollowOneAnother) {
  const Simulation h1 = simulate(training_plan("zero-bubble-h1", 2, 1, 4, true));
  const Simulation h2 = simulate(training_plan("zero-bubble-h2", 2, 1, 4, true));
  EXPECT_NEAR(h1.step_us, 130, 1e-3);
  EXPECT_NEAR(h2.step_us, 120, 1e-3);
  EXPECT_NEAR(h2.step_idle_share, 0, 1e-6);
  EXPECT_NEAR(h2.idle_share, 1 - 12.0 / 13, 1e-6);
  EXPECT_NEAR(h2.ranks[1].begin_us, 10, 1e-3);
  EXPECT_NEAR(h2.ranks[1].end_us, 130, 1e-3);
}

TEST(Simulate, AScheduleThatCannotRunIsAnError) {
  Plan plan = training_plan("1f1b", 2, 1, 2, false);
  auto& first = plan.schedule.ranks[0];
  std::erase_if(first, [](const Action& a) { return a.kind == Action::Kind::send && a.micro_batch == 1; });
  EXPECT_THROW(simulate(plan), Error);
}

// Each stage counts what it keeps itself, a value that both graphs of the way back take once.
TEST(Simulate, KeptBytes) {
  const auto kept = [](Plan plan, int64_t n) {
    std::vector<int64_t> bytes;
    for (const SimulatedRank& rank : simulate(plan, {{"n", n}}).ranks) bytes.push_back(rank.peak_kept_bytes);
    return bytes;
  };
  // Values by where they come from: 100 n bytes each.
  const auto named = [](Plan plan) {
    for (Route& r : plan.routes) r.value = "of" + std::to_string(r.from_stage);
    return plan;
  };
  EXPECT_EQ(kept(named(training_plan("gpipe", 1, 1, 4, false)), 1), (std::vector<int64_t>{400}));
  EXPECT_EQ(kept(named(training_plan("1f1b", 1, 1, 4, false)), 3), (std::vector<int64_t>{300}));
  const Plan interleaved = named(training_plan("interleaved", 2, 2, 4, false));
  const std::vector<int64_t> alive = {5, 3};  // chunks of micro-batches
  const std::vector<int64_t> chunks = kept(interleaved, 1);
  for (size_t r = 0; r < alive.size(); ++r) EXPECT_LE(chunks[r], alive[r] * 100) << r;
  // Forward gives both graphs of the way back one value, and the first gives the second another.
  EXPECT_EQ(kept(named(training_plan("zero-bubble-h1", 1, 1, 1, true)), 1), (std::vector<int64_t>{200}));
  Plan once = named(training_plan("zero-bubble-h1", 1, 1, 1, true));
  std::erase_if(once.routes, [](const Route& r) { return r.from_stage == 1; });
  EXPECT_EQ(kept(once, 1), (std::vector<int64_t>{100}));
}

}  // namespace
}  // namespace fretsaw
