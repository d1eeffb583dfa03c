// Schedules of training are sound, and keep as much alive as they say, for every size.
#include "partitioner/training_schedules.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "graph/errors.h"

namespace fretsaw {
namespace {

// A chain of stages forward and back, each backward graph using what its forward graph keeps.
TrainingProblem chain(int ranks, int micro_batches) {
  TrainingProblem training;
  training.forward = ranks;
  ScheduleProblem& p = training.problem;
  p.stages = 2 * ranks, p.micro_batches = micro_batches;
  for (int s = 0; s < p.stages; ++s) {
    std::vector<int>& needs = p.needs.emplace_back();
    if (s >= ranks) needs.push_back(2 * ranks - 1 - s);
    if (s > 0 && s - 1 != (needs.empty() ? -1 : needs[0])) needs.push_back(s - 1);
    std::sort(needs.begin(), needs.end());
    p.rank_of_stage.push_back(s < ranks ? s : 2 * ranks - 1 - s);
  }
  return training;
}

// The most micro-batches that a rank has run forward and not backward.
int most_alive(const TrainingProblem& training, const Schedule& schedule, int rank) {
  int alive = 0, most = 0;
  for (const Action& a : schedule.ranks[static_cast<size_t>(rank)]) {
    if (a.kind != Action::Kind::forward) continue;
    alive += a.stage < training.forward ? 1 : -1;
    most = std::max(most, alive);
  }
  return most;
}

TEST(TrainingSchedules, AreSoundAndBounded) {
  for (int ranks : {1, 2, 3, 4, 8, 16}) {
    for (int micro_batches : {1, 2, 3, 4, 8, 17, 64}) {
      const TrainingProblem training = chain(ranks, micro_batches);
      for (const std::string name : {"gpipe", "1f1b"}) {
        SCOPED_TRACE(name + " on " + std::to_string(ranks) + " ranks, " + std::to_string(micro_batches) + " micro-batches");
        const Schedule schedule = make_training_schedule(name, training);
        EXPECT_NO_THROW(verify(schedule, training.problem));
        for (int r = 0; r < ranks; ++r)
          EXPECT_EQ(most_alive(training, schedule, r), name == "gpipe" ? micro_batches : std::min(micro_batches, ranks - r)) << r;
      }
    }
  }
}

TEST(TrainingSchedules, UnknownNamesAreErrors) {
  for (const std::string name : {"2f2b", "", "interleaved"}) {
    try {
      make_training_schedule(name, chain(2, 2));
      ADD_FAILURE() << name;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::usage);
      EXPECT_NE(e.remedy().find("1f1b"), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace fretsaw
