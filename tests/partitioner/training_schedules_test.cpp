// Schedules of training for every size: sound, no larger than they say, and as fast as the papers say.
#include "partitioner/training_schedules.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <set>

#include "graph/errors.h"
#include "partitioner/simulate.h"

namespace fretsaw {
namespace {

using testing::HasSubstr;

constexpr int kMicroBatches[] = {1, 2, 3, 4, 7, 8, 16, 32, 64};

// Each chunk takes its share of a rank's time.
ScheduleTimes chunk_times(const TrainingProblem& training, int chunks, const TrainingTimes& times) {
  ScheduleTimes result;
  const bool apart = training.problem.stages > 2 * training.forward;
  for (int s = 0; s < training.problem.stages; ++s) {
    const char letter = letter_of_training_stage(s, training.forward);
    const double backward = times.backward_us + (apart ? 0 : times.weight_us);
    result.run_us.push_back((letter == 'F' ? times.forward_us : letter == 'B' ? backward : times.weight_us) / chunks);
  }
  return result;
}

// The most values of forward graphs that the list itself keeps: from the run to the free.
int most_kept(const TrainingProblem& training, const std::vector<Action>& list) {
  int kept = 0, most = 0;
  for (const Action& a : list) {
    if (a.stage >= training.forward) continue;
    if (a.kind == Action::Kind::forward) most = std::max(most, ++kept);
    if (a.kind == Action::Kind::free) --kept;
  }
  EXPECT_EQ(kept, 0);
  return most;
}

// What the papers state: the idle time of a step, micro-batches kept by the rank that keeps most, and from how many micro-batches on.
struct Row {
  const char* name;
  bool weights_apart;
  int least_chunks, most_chunks;
  double (*idle)(double others, int chunks, const TrainingTimes& t);
  int (*kept)(int ranks, int rank, int chunks, int micro_batches);
  bool (*stated)(int ranks, int micro_batches);
};
const Row kRows[] = {
    {"gpipe", false, 1, 1, [](double p1, int, const TrainingTimes& t) { return p1 * t.sum_us(); }, [](int, int, int, int m) { return m; },
     [](int, int) { return true; }},
    {"1f1b", false, 1, 1, [](double p1, int, const TrainingTimes& t) { return p1 * t.sum_us(); },
     [](int p, int r, int, int m) { return std::min(m, p - r); }, [](int, int) { return true; }},
    {"1f1b", true, 1, 1, [](double p1, int, const TrainingTimes& t) { return p1 * t.sum_us(); },
     [](int p, int r, int, int m) { return std::min(m, p - r); }, [](int, int) { return false; }},
    {"interleaved", false, 2, 4, [](double p1, int v, const TrainingTimes& t) { return p1 * t.sum_us() / v; },
     [](int p, int r, int v, int m) { return std::min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1); },
     [](int p, int m) { return m % p == 0; }},
    {"interleaved", false, 1, 1, [](double p1, int, const TrainingTimes& t) { return p1 * t.sum_us(); },
     [](int p, int r, int, int m) { return std::min(m, p - r); }, [](int, int) { return true; }},
    {"zero-bubble-h1", true, 1, 1, [](double p1, int, const TrainingTimes& t) { return p1 * (t.forward_us + t.backward_us - t.weight_us); },
     [](int p, int, int, int m) { return std::min(m, p); }, [](int p, int m) { return m >= p; }},
    {"zero-bubble-h2", true, 1, 1,
     [](double p1, int, const TrainingTimes& t) { return p1 * (t.forward_us + t.backward_us - 2 * t.weight_us); },
     [](int p, int, int, int m) { return std::min(m, 2 * p - 1); }, [](int p, int m) { return m >= 2 * p - 1; }},
};

void check_times(const Row& row, const TrainingProblem& training, const Schedule& schedule, int ranks, int chunks) {
  const int micro_batches = training.problem.micro_batches;
  for (const TrainingTimes& times : {TrainingTimes{4, 4, 4}, TrainingTimes{4, 8, 2}}) {
    const Simulation played = simulate(schedule, training.problem, chunk_times(training, chunks, times), training.forward);
    const double work = micro_batches * times.sum_us(), idle = row.idle(ranks - 1, chunks, times);
    const double one_forward_one_backward = (ranks - 1) * times.sum_us();
    ASSERT_LE(played.step_us - work, one_forward_one_backward + 1e-6);
    if (row.stated(ranks, micro_batches)) {
      ASSERT_NEAR(played.step_us - work, idle, 1e-6);
      ASSERT_NEAR(played.step_idle_share, idle / (work + idle), 1e-9);
    }
    const ScheduleFormula formula = schedule_formula(row.name, ranks, chunks, micro_batches, times);
    if (row.stated(ranks, micro_batches)) {
      ASSERT_TRUE(formula.exact);
      ASSERT_NEAR(formula.idle_us, idle, 1e-6);
    }
    for (int r = 0; r < ranks; ++r) {
      const SimulatedRank& rank = played.ranks[static_cast<size_t>(r)];
      ASSERT_NEAR(rank.busy_us, work, 1e-6);
      const int bound = row.kept(ranks, r, chunks, micro_batches);
      ASSERT_LE(rank.peak_micro_batches, bound) << "rank " << r;
      ASSERT_EQ(formula.peak_of_rank[static_cast<size_t>(r)], bound);
      if (row.stated(ranks, micro_batches)) {
        ASSERT_EQ(rank.peak_micro_batches, bound) << "rank " << r;
      }
      ASSERT_LE(most_kept(training, schedule.ranks[static_cast<size_t>(r)]), bound) << "rank " << r;
    }
  }
}

TEST(TrainingSchedules, AreSoundBoundedAndAsFastAsStated) {
  for (const Row& row : kRows)
    for (int ranks = 1; ranks <= 16; ++ranks)
      for (int micro_batches : kMicroBatches)
        for (int chunks = row.least_chunks; chunks <= row.most_chunks; ++chunks) {
          SCOPED_TRACE(fmt::format("{} on {} ranks, {} micro-batches, {} chunks", row.name, ranks, micro_batches, chunks));
          const TrainingProblem training = training_chain(ranks, chunks, micro_batches, row.weights_apart);
          const Schedule schedule = make_training_schedule(row.name, training);
          EXPECT_EQ(schedule.ranks.size(), static_cast<size_t>(ranks));
          check_times(row, training, schedule, ranks, chunks);  // proves it first
          if (testing::Test::HasFatalFailure()) return;
        }
}

// Where the papers' condition W <= F does not hold, ours.
TEST(TrainingSchedules, ZeroBubbleForOtherTimes) {
  for (const char* name : {"zero-bubble-h1", "zero-bubble-h2"})
    for (int ranks : {2, 3, 5, 8})
      for (int more : {0, 1, 9})
        for (const TrainingTimes& times : {TrainingTimes{1, 4, 6}, TrainingTimes{4, 6, 5}, TrainingTimes{3, 1, 3}, TrainingTimes{1, 4, 2},
                                           TrainingTimes{6, 5, 6}, TrainingTimes{2, 2, 1}, TrainingTimes{4, 1, 6}}) {
          const int micro_batches = 2 * ranks - 1 + more;
          const TrainingProblem training = training_chain(ranks, 1, micro_batches, true);
          const Simulation played =
              simulate(make_training_schedule(name, training), training.problem, chunk_times(training, 1, times), training.forward);
          const ScheduleFormula formula = schedule_formula(name, ranks, 1, micro_batches, times);
          ASSERT_TRUE(formula.exact);
          ASSERT_NEAR(played.step_us - micro_batches * times.sum_us(), formula.idle_us, 1e-6)
              << name << " on " << ranks << " ranks, times " << times.forward_us << " " << times.backward_us << " " << times.weight_us;
        }
}

std::string runs_of(const Schedule& schedule, size_t rank, int forward) {
  std::string text;
  for (const Action& a : schedule.ranks[rank])
    if (a.kind == Action::Kind::forward) text += fmt::format("{}{} ", letter_of_training_stage(a.stage, forward), a.micro_batch);
  return text;
}

TEST(TrainingSchedules, OrdersAreThoseOfThePapers) {
  struct {
    const char* name;
    int ranks, micro_batches;
    bool weights_apart;
    size_t rank;
    const char* runs;
  } const cases[] = {
      {"gpipe", 2, 2, false, 0, "F0 F1 B0 B1 "},
      {"1f1b", 3, 4, false, 0, "F0 F1 F2 B0 F3 B1 B2 B3 "},
      {"1f1b", 3, 4, false, 2, "F0 B0 F1 B1 F2 B2 F3 B3 "},
      {"zero-bubble-h1", 3, 4, true, 0, "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3 "},
      {"zero-bubble-h1", 3, 4, true, 2, "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3 "},
      {"zero-bubble-h2", 2, 4, true, 0, "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3 "},
      {"zero-bubble-h2", 2, 4, true, 1, "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3 "},
      {"zero-bubble-h2", 4, 1, true, 3, "F0 B0 W0 "},
  };
  for (const auto& c : cases) {
    const TrainingProblem training = training_chain(c.ranks, 1, c.micro_batches, c.weights_apart);
    EXPECT_EQ(runs_of(make_training_schedule(c.name, training), c.rank, training.forward), c.runs) << c.name << " rank " << c.rank;
  }
}

// Two chunks on two ranks: numbers of graphs, as their chunks show there. Of three micro-batches the fourth is left out.
TEST(TrainingSchedules, InterleavedPassesThroughChunksInGroups) {
  const auto text = [](int micro_batches, size_t rank) {
    std::string all;
    const Schedule schedule = make_training_schedule("interleaved", training_chain(2, 2, micro_batches, false));
    for (const Action& a : schedule.ranks[rank])
      if (a.kind == Action::Kind::forward) all += fmt::format("{}.{} ", a.stage, a.micro_batch);
    return all;
  };
  EXPECT_EQ(text(2, 0), "0.0 0.1 2.0 2.1 5.0 5.1 7.0 7.1 ");
  EXPECT_EQ(text(2, 1), "1.0 1.1 3.0 4.0 3.1 4.1 6.0 6.1 ");
  EXPECT_EQ(text(3, 1), "1.0 1.1 3.0 4.0 3.1 4.1 1.2 6.0 6.1 3.2 4.2 6.2 ");
}

// Values of far stages, parameters shared over stages, and stages without weight gradients.
TEST(TrainingSchedules, OtherNeedsAreSound) {
  const auto add = [](std::vector<int>& needs, int from) {
    needs.push_back(from);
    std::sort(needs.begin(), needs.end());
    needs.erase(std::unique(needs.begin(), needs.end()), needs.end());
  };
  struct {
    const char* name;
    int chunks;
    bool weights_apart;
  } const schedules[] = {{"gpipe", 1, false},         {"gpipe", 3, true},          {"1f1b", 1, false},
                         {"1f1b", 1, true},           {"interleaved", 2, false},   {"interleaved", 3, true},
                         {"zero-bubble-h1", 1, true}, {"zero-bubble-h2", 1, true}, {"zero-bubble-h1", 1, false}};
  for (const auto& s : schedules)
    for (int ranks : {1, 2, 3, 4, 7})
      for (int micro_batches : {1, 2, 5, 8, 13})
        for (int kind = 0; kind < 4; ++kind) {
          TrainingProblem training = training_chain(ranks, s.chunks, micro_batches, s.weights_apart);
          ScheduleProblem& p = training.problem;
          const int n = training.forward;
          for (int to = 0; to < n; ++to)
            for (int from = 0; from + 1 < to; ++from) {
              const bool skips = kind == 1 || (kind == 2 && from == 0);  // all to all, or all use a value of the first
              if (!skips) continue;
              add(p.needs[static_cast<size_t>(to)], from);
              add(p.needs[static_cast<size_t>(2 * n - 1 - from)], 2 * n - 1 - to);
            }
          if (kind == 3 && s.weights_apart) {  // every second stage has no weights; the first one's go to the last stage too
            for (int k = 1; k < n; k += 2) {
              p.rank_of_stage[static_cast<size_t>(3 * n - 1 - k)] = -1;
              p.needs[static_cast<size_t>(3 * n - 1 - k)].clear();
            }
            if (n % 2 && n > 1) add(p.needs[static_cast<size_t>(3 * n - 1)], 2 * n);
          }
          SCOPED_TRACE(fmt::format("{}, kind {} on {} ranks, {} micro-batches, {} chunks", s.name, kind, ranks, micro_batches, s.chunks));
          const Schedule schedule = make_training_schedule(s.name, training);
          ASSERT_NO_THROW(verify(schedule, p));
          const ScheduleTimes times = chunk_times(training, s.chunks, {1, 2, 4});
          double work = 0, busy = 0;
          for (int g = 0; g < p.stages; ++g)
            if (p.rank_of_stage[static_cast<size_t>(g)] >= 0) work += micro_batches * times.run_us[static_cast<size_t>(g)];
          const Simulation played = simulate(schedule, p, times, n);
          for (const SimulatedRank& rank : played.ranks) busy += rank.busy_us;
          ASSERT_NEAR(busy, work, 1e-6);
          ASSERT_LE(played.step_us, played.time_us);
        }
}

// The first and the last stage share a parameter: the last one's part of its gradient is made in B, or with weight gradients.
TEST(TrainingSchedules, ZeroBubbleWithASharedParameter) {
  for (const char* name : {"zero-bubble-h1", "zero-bubble-h2"})
    for (int ranks : {2, 4, 8})
      for (const bool in_backward : {true, false}) {
        TrainingProblem training = training_chain(ranks, 1, 2 * ranks, true);
        std::vector<int>& needs = training.problem.needs[static_cast<size_t>(3 * ranks - 1)];
        needs.push_back(in_backward ? ranks : 2 * ranks);
        std::sort(needs.begin(), needs.end());
        const TrainingTimes times{1, 1, 1};
        const Simulation played =
            simulate(make_training_schedule(name, training), training.problem, chunk_times(training, 1, times), training.forward);
        const double idle = played.step_us - 2 * ranks * times.sum_us();
        if (in_backward)
          EXPECT_NEAR(idle, schedule_formula(name, ranks, 1, 2 * ranks, times).idle_us, 1e-6) << name << " " << ranks;
        else
          EXPECT_LT(idle, schedule_formula("1f1b", ranks, 1, 2 * ranks, times).idle_us) << name << " " << ranks;
      }
}

TEST(TrainingSchedules, WhatCannotBeIsRefused) {
  for (const std::string name : {"2f2b", ""}) {
    try {
      make_training_schedule(name, training_chain(2, 1, 2, false));
      ADD_FAILURE() << name;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::usage);
      EXPECT_THAT(e.remedy(), HasSubstr("1f1b"));
    }
    EXPECT_THROW(schedule_formula(name, 2, 1, 2, {}), Error);
  }
  for (const char* name : {"1f1b", "zero-bubble-h1", "zero-bubble-h2"})
    EXPECT_THROW(make_training_schedule(name, training_chain(2, 2, 2, true)), Error);
  TrainingProblem moved = training_chain(2, 1, 2, false);
  std::swap(moved.problem.rank_of_stage[2], moved.problem.rank_of_stage[3]);
  EXPECT_THROW(make_training_schedule("1f1b", moved), Error);
  TrainingProblem circle = training_chain(2, 1, 2, false);
  circle.problem.needs[0] = {1};
  EXPECT_THROW(make_training_schedule("1f1b", circle), Error);
}

}  // namespace
}  // namespace fretsaw
