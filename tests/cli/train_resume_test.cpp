// Training that goes on from a checkpoint, and what it refuses to go on from.
#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "graph/io.h"
#include "runtime/training/checkpoint.h"
#include "tests/cli/training_data.h"

namespace fretsaw {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class TrainResumeTest : public CommandTest {
 protected:
  TrainResumeTest() : model_(write_mlp("m.onnx", 0)) { write_samples(path("data"), 40); }
  Arguments train(const Arguments& more) const {
    return Arguments{"train", model_, "--data", path("data"), "--batch", "8", "--optimizer", "adam:lr=0.05"} + more;
  }
  CommandResult done(const Arguments& more) const {
    CommandResult result = fretsaw(train(more) + Arguments{"--json"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result;
  }
  std::vector<double> losses(const Arguments& more) const {
    const CommandResult result = done(more);
    return result.exit_code ? std::vector<double>() : result.json()["losses"].get<std::vector<double>>();
  }
  std::string error(const Arguments& more, int code) const {
    const CommandResult result = fretsaw(train(more));
    EXPECT_EQ(result.exit_code, code) << result.err;
    return result.err;
  }
  static std::string weight(const std::string& file, const std::string& name) {
    const Model model = read_model(file);
    for (const Value* v : model.graph->initializers())
      if (v->name == name) return {reinterpret_cast<const char*>(v->constant->data), v->constant->bytes()};
    return "";
  }
  std::string model_;
};

TEST_F(TrainResumeTest, WhatIsFrozenNowKeepsWhatItLearned) {
  const std::vector<double> whole = losses({"--steps", "8"});
  done({"--steps", "6", "--checkpoint", path("c"), "--export", path("six.onnx")});
  const CommandResult frozen = done({"--steps", "8", "--resume", path("c"), "--freeze", "w1", "--export", path("eight.onnx")});
  const auto rest = frozen.json()["losses"].get<std::vector<double>>();
  ASSERT_EQ(rest.size(), 2u);
  EXPECT_EQ(rest[0], whole[6]);
  EXPECT_EQ(weight(path("eight.onnx"), "w1"), weight(path("six.onnx"), "w1"));
  EXPECT_NE(weight(path("eight.onnx"), "w1"), weight(model_, "w1"));
  EXPECT_NE(weight(path("eight.onnx"), "w2"), weight(path("six.onnx"), "w2"));
  EXPECT_THAT(frozen.err, AllOf(HasSubstr("note: what the optimizer had is dropped"), HasSubstr("w1")));
  // A plan has the file's value.
  ASSERT_EQ(fretsaw({"train", model_, "--save-plan", path("plan"), "--freeze", "w1", "--optimizer", "adam:lr=0.05"}).exit_code, 0);
  const CommandResult plan =
      fretsaw({"train", path("plan"), "--data", path("data"), "--batch", "8", "--steps", "8", "--resume", path("c")});
  EXPECT_EQ(plan.exit_code, 3);
  EXPECT_THAT(plan.err, AllOf(HasSubstr("'w1'"), HasSubstr("in place of a plan")));
  EXPECT_THAT(error({"--steps", "8", "--resume", path("c"), "--save-plan", path("other")}, 2), HasSubstr("--save-plan"));
}

TEST_F(TrainResumeTest, TheSeedIsTheCheckpoints) {
  const std::vector<double> whole = losses({"--steps", "8", "--seed", "7"});
  EXPECT_NE(whole, losses({"--steps", "8"}));
  losses({"--steps", "4", "--seed", "7", "--checkpoint", path("c")});
  const std::vector<double> rest(whole.begin() + 4, whole.end());
  EXPECT_EQ(losses({"--steps", "8", "--resume", path("c")}), rest);
  EXPECT_EQ(losses({"--steps", "8", "--resume", path("c"), "--seed", "7"}), rest);
  EXPECT_THAT(error({"--steps", "8", "--resume", path("c"), "--seed", "8"}, 2), AllOf(HasSubstr("--seed 8"), HasSubstr("seed 7")));
}

TEST_F(TrainResumeTest, TheCheckpointsOfAnotherBranchAreNotTakenForItsOwn) {
  losses({"--steps", "5", "--checkpoint", path("c"), "--every", "1", "--keep", "0"});
  const std::string third = path("c/step-000000003");
  EXPECT_THAT(error({"--steps", "6", "--resume", third, "--checkpoint", path("c")}, 2),
              AllOf(HasSubstr("step-000000004, step-000000005"), HasSubstr("step 3")));
  EXPECT_EQ(list_checkpoints(path("c")).size(), 5u);
  const CommandResult elsewhere = done({"--steps", "6", "--resume", third, "--checkpoint", path("other")});
  EXPECT_THAT(elsewhere.err, Not(HasSubstr("--checkpoint")));
  EXPECT_EQ(list_checkpoints(path("other")).size(), 1u);
  // What can't be read is nobody's next checkpoint.
  write_text("{", path("c/step-000000005/manifest.json"));
  EXPECT_EQ(losses({"--steps", "6", "--resume", path("c"), "--checkpoint", path("c")}).size(), 2u);
  EXPECT_THAT(done({"--steps", "7", "--resume", path("c")}).err, HasSubstr("writes no checkpoints"));
}

TEST_F(TrainResumeTest, TheLogGoesOn) {
  const auto lines = [&] {
    const std::string text = read_text(path("log.jsonl"));
    return std::count(text.begin(), text.end(), '\n');
  };
  losses({"--steps", "3", "--checkpoint", path("c"), "--log", path("log.jsonl"), "--eval", path("data")});
  EXPECT_EQ(lines(), 4);
  EXPECT_THAT(read_text(path("log.jsonl")), HasSubstr("{\"step\":3,\"eval_loss\""));
  error({"--steps", "6", "--resume", path("nowhere"), "--log", path("log.jsonl")}, 3);
  EXPECT_EQ(lines(), 4);
  losses({"--steps", "6", "--resume", path("c"), "--log", path("log.jsonl")});
  EXPECT_EQ(lines(), 7);
  losses({"--steps", "2", "--log", path("log.jsonl")});
  EXPECT_EQ(lines(), 2);
  if (!std::filesystem::exists("/dev/full")) return;
  EXPECT_THAT(error({"--steps", "2", "--log", "/dev/full"}, 3), AllOf(HasSubstr("/dev/full"), HasSubstr("cannot be written")));
}

TEST_F(TrainResumeTest, ManifestsAreChecked) {
  losses({"--steps", "2", "--checkpoint", path("c")});
  const std::string manifest = path("c/step-000000002/manifest.json"), text = read_text(manifest);
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    EXPECT_NE(changed.find(from), std::string::npos) << from;
    changed.replace(changed.find(from), from.size(), to);
    write_text(changed, manifest);
    return error({"--steps", "4", "--resume", path("c/step-000000002")}, 3);
  };
  EXPECT_THAT(with("\"updates\": \"2\"", "\"updates\": \"two\""), AllOf(HasSubstr("manifest.json"), HasSubstr("more.updates")));
  EXPECT_THAT(with("\"step\": 2", "\"step\": -2"), AllOf(HasSubstr("manifest.json"), HasSubstr("'step'"), HasSubstr("remove")));
  EXPECT_THAT(with("\"seed\": 0", "\"seed\": 0.5"), HasSubstr("'seed'"));
  EXPECT_THAT(with("\"step\": 2", "\"stop\": 2"),
              AllOf(HasSubstr("manifest.json: is damaged: key 'step' not found"), Not(HasSubstr("json."))));
  EXPECT_THAT(with("{", ""), AllOf(HasSubstr("manifest.json: is damaged: it is cut off, or no JSON"), Not(HasSubstr("json."))));
}

TEST_F(TrainResumeTest, CheckpointsThatAreNotWholeAreTold) {
  losses({"--steps", "3", "--checkpoint", path("c"), "--every", "1", "--keep", "0"});
  write_text("{", path("c/step-000000003/manifest.json"));
  EXPECT_TRUE(std::filesystem::remove(path("c/step-000000002/manifest.json")));
  const CommandResult resumed = done({"--steps", "4", "--resume", path("c")});
  EXPECT_EQ(resumed.json()["steps"], 3);
  EXPECT_THAT(resumed.err, AllOf(HasSubstr("note: a checkpoint is left out: " + path("c/step-000000003/manifest.json") + ": is damaged"),
                                 HasSubstr("note: a checkpoint is left out: " + path("c/step-000000002/manifest.json") + ": is missing")));
  EXPECT_THAT(error({"--steps", "4", "--resume", path("c/step-000000002")}, 3), HasSubstr("manifest.json: is missing"));
}

TEST_F(TrainResumeTest, ASchedulesEndIsTold) {
  losses({"--steps", "4", "--lr", "linear", "--checkpoint", path("c")});
  const CommandResult longer = done({"--steps", "8", "--lr", "linear", "--resume", path("c")});
  EXPECT_THAT(longer.err, AllOf(HasSubstr("ends at step 8"), HasSubstr("step 4")));
  EXPECT_THAT(done({"--steps", "8", "--lr", "linear:total=4", "--resume", path("c")}).err, Not(HasSubstr("schedule")));
}

TEST_F(TrainResumeTest, NothingLeftToDoIsToldWithWhatIsWritten) {
  losses({"--steps", "3", "--checkpoint", path("c")});
  const CommandResult result = fretsaw(train({"--steps", "3", "--resume", path("c"), "--export", path("e.onnx")}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("nothing is left to do"), HasSubstr("wrote " + path("e.onnx"))));
  EXPECT_TRUE(std::filesystem::exists(path("e.onnx")));
}

// A checkpoint of the step at hand, then the end; the run that goes on makes the same steps as one that was left alone.
TEST_F(TrainResumeTest, ASignalEndsItWithACheckpoint) {
  const Arguments long_run = {"--steps", "1000000", "--lr", "0.001", "--threads", "1"};
  for (const auto& [signal, code] : {std::pair{SIGINT, 130}, std::pair{SIGTERM, 143}}) {
    const std::string folder = path("c" + std::to_string(code)), log = path("log" + std::to_string(code));
    const CommandResult stopped = fretsaw_signalled(
        train(long_run + Arguments{"--checkpoint", folder, "--log", log, "--export", path("never.onnx"), "--json"}), signal, log);
    ASSERT_EQ(stopped.exit_code, code) << stopped.err;
    const int64_t done = stopped.json()["stopped_after"];
    EXPECT_THAT(stopped.err, AllOf(HasSubstr(signal == SIGINT ? "SIGINT" : "SIGTERM"), HasSubstr("--resume " + folder)));
    ASSERT_EQ(list_checkpoints(folder).size(), 1u);
    EXPECT_EQ(Checkpoint::open(list_checkpoints(folder)[0]).state().step, done);
    EXPECT_FALSE(std::filesystem::exists(path("never.onnx")));
    const std::vector<double> next = losses({"--steps", std::to_string(done + 1), "--lr", "0.001", "--resume", folder});
    ASSERT_EQ(next.size(), 1u);
    EXPECT_EQ(next[0], losses({"--steps", std::to_string(done + 1), "--lr", "0.001"}).back());
  }
  const CommandResult without = fretsaw_signalled(train(long_run + Arguments{"--log", path("log")}), SIGTERM, path("log"));
  EXPECT_EQ(without.exit_code, 128 + SIGTERM);
  EXPECT_THAT(without.err, Not(HasSubstr("stopped by")));
}

}  // namespace
}  // namespace fretsaw
