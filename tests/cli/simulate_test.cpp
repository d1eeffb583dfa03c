// simulate without a plan: pictures, figures and formulas of training schedules.
#include <gmock/gmock.h>

#include "tests/cli/command.h"

namespace fretsaw {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::StartsWith;

TEST_F(CommandTest, SimulateDrawsSchedules) {
  const struct {
    std::vector<std::string> arguments;
    const char *first, *last;  // lines of the first and of the last rank
  } cases[] = {
      {{"gpipe", "--pipeline", "2", "--micro-batches", "2"},
       "rank 0   F0 F1          B0--- B1---\n",  //
       "rank 1      F0 F1 B0--- B1---\n"},
      {{"1f1b", "--pipeline", "3", "--micro-batches", "3", "--times", "2,1,1"},
       "rank 0   F0 F1 F2       B0    B1    B2\n",
       "rank 2         F0 B0 F1 B1 F2 B2\n"},
      {{"interleaved", "--pipeline", "2", "--micro-batches", "2", "--times", "2,1,1"},
       "rank 0   F0a F1a F0b F1b     B0b     B1b B0a B1a\n",
       "rank 1       F0a F1a F0b B0b F1b B1b B0a B1a\n"},
      {{"zero-bubble-h1", "--pipeline", "3", "--micro-batches", "4"},
       "rank 0   F0 F1 F2       B0 W0 F3 B1 W1 B2 W2 B3 W3\n",
       "rank 2         F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3\n"},
      {{"zero-bubble-h2", "--pipeline", "2", "--micro-batches", "4"},
       "rank 0   F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3\n",
       "rank 1      F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3\n"},
  };
  for (const auto& c : cases) {
    std::vector<std::string> arguments = {"simulate", "--schedule"};
    arguments.insert(arguments.end(), c.arguments.begin(), c.arguments.end());
    const CommandResult result = fretsaw(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.out, StartsWith(c.first));
    EXPECT_THAT(result.out, HasSubstr(c.last));
  }
  // Too wide for labels: letters to scale.
  const std::string wide = fretsaw({"simulate", "--schedule", "1f1b", "--micro-batches", "200"}).out;
  EXPECT_THAT(wide, StartsWith("rank 0   F"));
  EXPECT_LT(wide.find('\n'), 260U);
}

TEST_F(CommandTest, SimulateComparesWithTheFormula) {
  const json h1 =
      fretsaw({"simulate", "--schedule", "zero-bubble-h1", "--pipeline", "4", "--micro-batches", "8", "--times", "3,4,2", "--json"}).json();
  EXPECT_EQ(h1["schedule"], "zero-bubble-h1");
  EXPECT_TRUE(h1["formula"]["exact"]);
  EXPECT_DOUBLE_EQ(h1["formula"]["idle_us"], 3 * (3 + 4 - 2));
  EXPECT_DOUBLE_EQ(h1["step_us"], 8 * 9 + 15);
  EXPECT_NEAR(h1["step_idle_share"], 15.0 / 87, 1e-9);
  EXPECT_EQ(h1["formula"]["peak_micro_batches"], json::array({4, 4, 4, 4}));
  ASSERT_EQ(h1["ranks"].size(), 4U);
  for (const json& rank : h1["ranks"]) EXPECT_EQ(rank["peak_micro_batches"], 4);
  const json interleaved = fretsaw({"simulate", "--schedule", "interleaved", "--pipeline", "4", "--micro-batches", "6", "--json"}).json();
  EXPECT_EQ(interleaved["chunks"], 2);
  EXPECT_FALSE(interleaved["formula"]["exact"]);
}

TEST_F(CommandTest, SimulateRefusesWhatSaysNothing) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{}, "--schedule"},
      {{path("plan"), "--schedule", "1f1b"}, "a plan or a schedule"},
      {{path("plan"), "--chunks", "2"}, "--chunks"},
      {{"--schedule", "2f2b"}, "'2f2b'"},
      {{"--schedule", "1f1b", "--chunks", "2"}, "interleaved"},
      {{"--schedule", "1f1b", "--times", "1,2"}, "'1,2'"},
      {{"--schedule", "1f1b", "--times", "1,2,0"}, "'1,2,0'"},
      {{"--schedule", "1f1b", "--times", "1,2,3,4"}, "'1,2,3,4'"},
      {{"--schedule", "1f1b", "--times", "1,2,nan"}, "'1,2,nan'"},
      {{"--schedule", "1f1b", "--pipeline", "1000", "--micro-batches", "1000"}, "ask for fewer"},
      {{"--schedule", "1f1b", "--pipeline", "0"}, "--pipeline"},
  };
  for (auto [arguments, named] : cases) {
    arguments.insert(arguments.begin(), "simulate");
    const CommandResult result = fretsaw(arguments);
    EXPECT_EQ(result.exit_code, 2) << testing::PrintToString(arguments) << result.err;
    EXPECT_THAT(result.err, StartsWith("fretsaw: error: "));
    EXPECT_THAT(result.err, HasSubstr(named)) << testing::PrintToString(arguments);
  }
}

}  // namespace
}  // namespace fretsaw
