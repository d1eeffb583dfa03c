// The text form of actions, and what the verifier refuses.
#include "graph/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "graph/errors.h"

namespace fretsaw {
namespace {

// "0F0 0S0>1 | 1R0<0 1F0": one list a rank.
Schedule parse(const std::string& text) {
  Schedule schedule;
  schedule.name = "test";
  schedule.ranks.emplace_back();
  std::istringstream in(text);
  for (std::string word; in >> word;) {
    if (word == "|")
      schedule.ranks.emplace_back();
    else
      schedule.ranks.back().push_back(parse_action(word));
  }
  return schedule;
}

TEST(Action, TextGoesThereAndBack) {
  for (const char* text : {"0F0", "12B3", "1W7", "0S1>2", "2R1<0", "3G0", "4U0", "0D15"}) EXPECT_EQ(to_string(parse_action(text)), text);
  Action send = parse_action("0S1>2");
  EXPECT_EQ(send.kind, Action::Kind::send);
  EXPECT_EQ(send.stage, 0);
  EXPECT_EQ(send.micro_batch, 1);
  EXPECT_EQ(send.peer, 2);
}

TEST(Action, RefusesOtherText) {
  for (const char* text : {"", "F", "0F", "F0", "0X1", "0S1", "0S1<2", "2R1>0", "0F1 ", "0F1>2", "-1F0", "0F-1", "0S1>", "99999999999F0"})
    EXPECT_THROW(parse_action(text), Error) << text;
}

struct Case {
  const char* name;
  const char* schedule;
  const char* fault;  // part of the error; "" when the schedule is sound
};

class TwoStages : public testing::TestWithParam<Case> {};

TEST_P(TwoStages, AreVerified) {
  ScheduleProblem problem{2, 2, {{}, {0}}, {0, 1}};
  const Case& c = GetParam();
  if (std::string(c.fault).empty()) {
    EXPECT_NO_THROW(verify(parse(c.schedule), problem));
    return;
  }
  try {
    verify(parse(c.schedule), problem);
    FAIL() << c.name << ": not refused";
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), testing::HasSubstr(c.fault)) << c.name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Schedules, TwoStages,
    testing::Values(Case{"sound", "0F0 0S0>1 0F1 0S1>1 | 1R0<0 1F0 1R1<0 1F1", ""},
                    Case{"sound, with frees", "0F0 0S0>1 0D0 0F1 0S1>1 0D1 | 1R0<0 1R1<0 1F0 1D0 1F1 1D1", ""},
                    Case{"no receive", "0F0 0S0>1 0F1 0S1>1 | 1R0<0 1F0 1F1", "never does 1R1<0"},
                    Case{"no send", "0F0 0S0>1 0F1 | 1R0<0 1F0 1R1<0 1F1", "never does 0S1>1"},
                    Case{"no forward", "0F0 0S0>1 0F1 0S1>1 | 1R0<0 1F0 1R1<0", "never does 1F1"},
                    Case{"sent before it is made", "0S0>1 0F0 0F1 0S1>1 | 1R0<0 1F0 1R1<0 1F1", "before it is made"},
                    Case{"used before it is received", "0F0 0S0>1 0F1 0S1>1 | 1F0 1R0<0 1R1<0 1F1", "before it is received"},
                    Case{"done twice", "0F0 0F0 0S0>1 0F1 0S1>1 | 1R0<0 1F0 1R1<0 1F1", "is done twice"},
                    Case{"sent twice", "0F0 0S0>1 0S0>1 0F1 0S1>1 | 1R0<0 1F0 1R1<0 1F1", "is done twice"},
                    Case{"wrong rank", "0F0 0S0>1 0F1 0S1>1 1F0 | 1R0<0 1R1<0 1F1", "belongs to rank 1"},
                    Case{"unknown micro-batch", "0F0 0S0>1 0F1 0S1>1 0F2 | 1R0<0 1F0 1R1<0 1F1", "a micro-batch that there is not"},
                    Case{"unknown stage", "0F0 0S0>1 0F1 0S1>1 2F0 | 1R0<0 1F0 1R1<0 1F1", "a stage that there is not"},
                    Case{"nobody needs it", "0F0 0S0>1 0F1 0S1>1 | 1R0<0 1F0 1S0>0 1R1<0 1F1", "nobody needs"},
                    Case{"freed before it is sent", "0F0 0D0 0S0>1 0F1 0S1>1 | 1R0<0 1F0 1R1<0 1F1", "after it was freed"},
                    Case{"freed before it is made", "0D0 0F0 0S0>1 0F1 0S1>1 | 1R0<0 1F0 1R1<0 1F1", "frees what was not made"},
                    // Micro-batch 1 is sent first, but its receive is posted only after micro-batch 0 arrived.
                    Case{"deadlock", "0F0 0F1 0S1>1 0S0>1 | 1R0<0 1F0 1R1<0 1F1", "waits for ever"}));

TEST(Verify, NeedsNoSendWithinARank) {
  ScheduleProblem problem{2, 1, {{}, {0}}, {0, 0}};
  EXPECT_NO_THROW(verify(parse("0F0 1F0 0D0 1D0"), problem));
  EXPECT_THROW(verify(parse("1F0 0F0"), problem), Error);
  EXPECT_THROW(verify(parse("0F0 0D0 1F0"), problem), Error);
  EXPECT_THROW(verify(parse("0F0 0S0>1 1R0<0 1F0"), problem), Error);
}

TEST(Verify, FollowsSkips) {
  ScheduleProblem problem{3, 1, {{}, {0}, {0, 1}}, {0, 1, 2}};
  EXPECT_NO_THROW(verify(parse("0F0 0S0>1 0S0>2 | 1R0<0 1F0 1S0>2 | 2R0<0 2R0<1 2F0"), problem));
  EXPECT_THROW(verify(parse("0F0 0S0>1 | 1R0<0 1F0 1S0>2 | 2R0<1 2F0"), problem), Error);
}

TEST(Verify, WantsAListForEveryRank) {
  EXPECT_THROW(verify(parse("0F0"), ScheduleProblem{2, 1, {{}, {}}, {0, 1}}), Error);
}

}  // namespace
}  // namespace fretsaw
