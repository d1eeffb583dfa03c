// Every generated schedule is sound, and its text is what a reader expects.
#include "partitioner/schedules.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "graph/errors.h"

namespace fretsaw {
namespace {

std::string text(const std::vector<Action>& actions) {
  std::string all;
  for (const Action& a : actions) all += (all.empty() ? "" : " ") + to_string(a);
  return all;
}

ScheduleProblem chain(int stages, int micro_batches) {
  ScheduleProblem p{stages, micro_batches, {}, {}};
  for (int s = 0; s < stages; ++s) {
    p.needs.push_back(s ? std::vector<int>{s - 1} : std::vector<int>{});
    p.rank_of_stage.push_back(s);
  }
  return p;
}

TEST(Gpipe, Text) {
  Schedule s = gpipe(chain(2, 2));
  ASSERT_EQ(s.ranks.size(), 2u);
  EXPECT_EQ(text(s.ranks[0]), "0F0 0S0>1 0F1 0D0 0S1>1 0D1");
  EXPECT_EQ(text(s.ranks[1]), "1R0<0 1R1<0 1F0 1D0 1F1 1D1");
  EXPECT_EQ(text(gpipe(chain(1, 2)).ranks[0]), "0F0 0D0 0F1 0D1");
}

TEST(Gpipe, IsSoundForEveryShapeOfPipeline) {
  for (int stages = 1; stages <= 6; ++stages)
    for (int micro_batches = 1; micro_batches <= 9; ++micro_batches)
      for (int skips = 0; skips < 4; ++skips) {
        ScheduleProblem p = chain(stages, micro_batches);
        for (int s = 2; s < stages; ++s) {
          auto& needs = p.needs[static_cast<size_t>(s)];
          if (skips == 1) needs.insert(needs.begin(), 0);  // a skip from the first stage
          if (skips == 2)
            for (int k = s - 1; k-- > 0;) needs.insert(needs.begin(), k);  // everything from everywhere
          if (skips == 3 && s == stages - 1) needs = {0};                  // a stage that nobody needs between
        }
        ASSERT_NO_THROW(verify(make_schedule("gpipe", p), p))
            << stages << " stages, " << micro_batches << " micro-batches, skips " << skips;
      }
}

TEST(Gpipe, EveryMicroBatchIsFreed) {
  ScheduleProblem p = chain(3, 4);
  for (const auto& rank : gpipe(p).ranks)
    EXPECT_EQ(std::count_if(rank.begin(), rank.end(), [](const Action& a) { return a.kind == Action::Kind::free; }), 4);
}

TEST(Gpipe, SeveralStagesOnARank) {
  ScheduleProblem p = chain(4, 3);
  p.rank_of_stage = {0, 0, 1, 1};
  EXPECT_NO_THROW(verify(gpipe(p), p));
  p.rank_of_stage = {0, 0, 0, 0};
  EXPECT_NO_THROW(verify(gpipe(p), p));
}

TEST(MakeSchedule, Names) {
  for (const char* name : {"1f1b", "interleaved", "zero-bubble-h1", "zero-bubble-h2", "pipedream"}) try {
      make_schedule(name, chain(2, 2));
      FAIL() << name;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::usage) << name;
    }
}

}  // namespace
}  // namespace fretsaw
