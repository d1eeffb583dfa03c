// Plans that train, written and read by the command.
#include <gmock/gmock.h>

#include <filesystem>

#include "graph/io.h"
#include "tests/cli/training_data.h"

namespace fretsaw {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST_F(CommandTest, TrainFromAPlanIsTrainingTheModel) {
  const std::string model = write_mlp("m.onnx", 0);
  write_samples(path("data"), 32);
  const Arguments run = {"--data", path("data"), "--batch", "8", "--steps", "6", "--seed", "2", "--json"};
  const Arguments learning = {"--loss", "softmax_cross_entropy:label_smoothing=0.1", "--optimizer", "adamw:lr=0.02,weight_decay=0.1"};
  const Arguments meshes[] = {{},
                              {"--mesh", "data=2,tensor=2"},
                              {"--mesh", "pipeline=2", "--schedule", "zero-bubble-h1", "--micro-batches", "4"},
                              {"--mesh", "data=2,pipeline=2", "--zero", "3", "--micro-batches", "2", "--schedule", "1f1b"},
                              {"--precision", "fp16", "--recompute", "all", "--freeze", "w1"}};
  int number = 0;
  for (const Arguments& mesh : meshes) {
    const std::string plan = path("plan" + std::to_string(number++));
    const CommandResult saved = fretsaw(Arguments{"train", model, "--save-plan", plan} + learning + mesh);
    ASSERT_EQ(saved.exit_code, 0) << saved.err;
    EXPECT_THAT(saved.out, AllOf(HasSubstr("backward"), HasSubstr("exp_avg_sq"), HasSubstr("wrote " + plan)));
    const CommandResult whole = fretsaw(Arguments{"train", model, "--export", path("a.onnx")} + learning + mesh + run);
    const CommandResult cut = fretsaw(Arguments{"train", plan, "--export", path("b.onnx")} + run);
    ASSERT_EQ(whole.exit_code, 0) << whole.err;
    ASSERT_EQ(cut.exit_code, 0) << cut.err;
    EXPECT_EQ(cut.json()["losses"].size(), 6u);
    EXPECT_EQ(cut.json()["losses"], whole.json()["losses"]);
    EXPECT_EQ(cut.json()["ranks"].size(), whole.json()["ranks"].size());
    EXPECT_EQ(read_text(path("a.onnx")), read_text(path("b.onnx")));
    // What the plan was made with may be said again.
    EXPECT_EQ(fretsaw(Arguments{"train", plan} + learning + mesh + run).json()["losses"], whole.json()["losses"]);
  }
}

TEST_F(CommandTest, TrainSavesAPlanAndGoesOn) {
  const std::string model = write_mlp("m.onnx", 0), plan = path("plan");
  write_samples(path("data"), 16);
  const Arguments run = {"--data", path("data"), "--batch", "8", "--json"};
  const CommandResult first = fretsaw(Arguments{"train", model, "--save-plan", plan, "--steps", "4", "--checkpoint", path("c")} + run);
  ASSERT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(first.json()["losses"].size(), 4u);
  const CommandResult rest = fretsaw(Arguments{"train", plan, "--steps", "7", "--resume", path("c")} + run);
  const CommandResult undisturbed = fretsaw(Arguments{"train", model, "--steps", "7"} + run);
  ASSERT_EQ(rest.exit_code, 0) << rest.err;
  const auto losses = undisturbed.json()["losses"].get<std::vector<double>>();
  EXPECT_EQ(rest.json()["losses"].get<std::vector<double>>(), std::vector<double>(losses.begin() + 4, losses.end()));
  const CommandResult evaluated = fretsaw(Arguments{"train", plan, "--steps", "2", "--eval", path("data")} + run);
  ASSERT_EQ(evaluated.exit_code, 0) << evaluated.err;
  EXPECT_EQ(evaluated.json()["evals"].size(), 1u);
}

TEST_F(CommandTest, TrainHoldsThePlanToItsOptions) {
  const std::string model = write_mlp("m.onnx", 0), plan = path("plan");
  write_samples(path("data"), 16);
  ASSERT_EQ(fretsaw({"train", model, "--save-plan", plan, "--mesh", "data=2", "--optimizer", "adam:lr=0.1"}).exit_code, 0);
  const auto error = [&](const Arguments& command, int code) {
    const CommandResult result = fretsaw(command);
    EXPECT_EQ(result.exit_code, code) << result.err;
    return result.err;
  };
  const Arguments train = {"train", plan, "--data", path("data"), "--batch", "8", "--steps", "1"};
  EXPECT_THAT(error(train + Arguments{"--mesh", "pipeline=2"}, 2), HasSubstr("data=2,pipeline=1,tensor=1"));
  EXPECT_THAT(error(train + Arguments{"--optimizer", "sgd"}, 2), AllOf(HasSubstr("adam:lr=0.1"), HasSubstr("--lr")));
  const Arguments others[] = {{"--loss", "mse"},      {"--zero", "1"},         {"--micro-batches", "2"},
                              {"--schedule", "1f1b"}, {"--precision", "bf16"}, {"--recompute", "all"},
                              {"--freeze", "w1"},     {"--train", "w1"},       {"--sync-batch-norm"},
                              {"--memory", "1GiB"},   {"--shape", "x=8,4"},    {"--chunks", "2", "--schedule", "interleaved"}};
  for (const Arguments& other : others)
    EXPECT_THAT(error(train + other, 2), AllOf(HasSubstr(other[0]), HasSubstr("the plan was made"))) << other[0];
  EXPECT_THAT(error(train + Arguments{"--save-plan", path("again")}, 2), HasSubstr("a plan already"));
  EXPECT_THAT(error({"train", plan}, 2), HasSubstr("--data is missing"));
  EXPECT_THAT(error({"train", model, "--save-plan", path("p"), "--export", path("e.onnx")}, 2), HasSubstr("--data is missing"));
  EXPECT_THAT(error({"train", model, "--save-plan", plan}, 2), HasSubstr("--overwrite"));
  EXPECT_EQ(fretsaw({"train", model, "--save-plan", plan, "--overwrite"}).exit_code, 0);
  const std::string inference = path("inference");
  ASSERT_EQ(fretsaw({"partition", model, "-o", inference}).exit_code, 0);
  EXPECT_THAT(error({"train", inference, "--data", path("data")}, 3), HasSubstr("does not train"));
  for (const Arguments& command :
       {Arguments{"run", plan, "--random", "1"}, Arguments{"bench", plan}, Arguments{"merge", plan, "-o", path("o.onnx")}})
    EXPECT_THAT(error(command, 2), HasSubstr("fretsaw train"));
  // The model is needed for what comes of it, and must be the same.
  EXPECT_EQ(fretsaw(train).exit_code, 0);
  write_model(mlp(0, 6), model);
  EXPECT_THAT(error(train + Arguments{"--export", path("e.onnx")}, 3), HasSubstr("has changed"));
  std::filesystem::remove(model);
  EXPECT_THAT(error(train + Arguments{"--eval", path("data")}, 3), HasSubstr("not there any more"));
  EXPECT_EQ(fretsaw(train).exit_code, 0);
}

TEST_F(CommandTest, InspectAndSimulateShowTrainingPlans) {
  const std::string model = path("m.onnx"), plan = path("plan");
  ASSERT_EQ(fretsaw({"model", "mlp", "-o", model, "--set", "layers=4", "--set", "hidden=32", "--set", "classes=8"}).exit_code, 0);
  ASSERT_EQ(fretsaw({"train", model, "--save-plan", plan, "--mesh", "data=2,pipeline=2,tensor=2", "--schedule", "zero-bubble-h1",
                     "--micro-batches", "4", "--zero", "1", "--optimizer", "adam"})
                .exit_code,
            0);
  const auto json = fretsaw({"inspect", plan, "--json"}).json();
  EXPECT_EQ(json["training"]["optimizer"], "adam");
  EXPECT_EQ(json["training"]["parameters"], 8);
  EXPECT_EQ(json["schedule"], "zero-bubble-h1");
  std::map<std::string, int> kinds;
  for (const auto& graph : json["graphs"]) ++kinds[graph["kind"]];
  // Of two stages on two tensor ranks; updates differ on data ranks too.
  EXPECT_EQ(kinds, (std::map<std::string, int>{{"forward", 4}, {"backward", 4}, {"weights", 4}, {"reduce", 4}, {"update", 8}}));
  std::map<std::string, nlohmann::json> states;
  for (const auto& state : json["states"]) states[state["kind"]] = state;
  constexpr int kBytes = (3 * (32 * 32 + 32) + 32 * 8 + 8) * 4;  // of all parameters
  EXPECT_EQ(states["parameter"]["count"], 8);
  EXPECT_EQ(states["parameter"]["bytes"], kBytes);
  EXPECT_EQ(states["exp_avg"]["bytes"], kBytes);
  EXPECT_EQ(states["exp_avg"]["part_bytes"].get<int>() * 2, states["parameter"]["part_bytes"].get<int>());
  ASSERT_EQ(json["ranks"].size(), 8u);
  int64_t first = 0;  // of data rank 0
  for (size_t r = 0; r < 8; ++r) {
    EXPECT_EQ(json["ranks"][r]["graphs"].size(), 5u) << r;
    EXPECT_GT(json["ranks"][r]["state_bytes"], 0) << r;
    if (r < 4) first += json["ranks"][r]["state_bytes"].get<int64_t>();
  }
  // Parameters and sums of gradients are there whole; gradients and two moments divided over two data ranks.
  EXPECT_GE(2 * first, (2 * 2 + 3) * kBytes);
  const CommandResult text = fretsaw({"inspect", plan, "--dot", path("plan.dot")});
  ASSERT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(text.out, AllOf(HasSubstr("trains 8 parameters"), HasSubstr("weights"), HasSubstr("update"), HasSubstr("tensor, data")));
  EXPECT_EQ(fretsaw({"inspect", plan, "--nodes"}).exit_code, 0);

  const auto played = fretsaw({"simulate", plan, "--json"}).json();
  ASSERT_EQ(played["ranks"].size(), 2u);
  EXPECT_GT(played["time_us"], 0);
  EXPECT_EQ(played["ranks"][0]["actions"].back()["action"], "8U0");  // six graphs of micro-batches, two that reduce
  EXPECT_THAT(fretsaw({"simulate", plan}).out, AllOf(HasSubstr("F0"), HasSubstr("W0")));
}

}  // namespace
}  // namespace fretsaw
