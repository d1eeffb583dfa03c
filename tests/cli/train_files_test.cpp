// What the command train reads and writes besides checkpoints: files of data, targets, plans, and what it says of them.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "graph/io.h"
#include "tests/cli/training_data.h"

namespace fretsaw {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class TrainFilesTest : public CommandTest {
 protected:
  TrainFilesTest() : model_(write_mlp("m.onnx", 0)) { write_samples(path("data"), 16); }
  CommandResult train(const Arguments& more) const {
    Arguments all = Arguments{"train", model_, "--steps", "2"} + more;
    for (const auto& [option, value] : {std::pair<std::string, std::string>{"--batch", "8"}, {"--data", path("data")}})
      if (std::find(more.begin(), more.end(), option) == more.end()) all = all + Arguments{option, value};
    return fretsaw(all);
  }
  std::string error(const Arguments& more, int code = 3) const {
    const CommandResult result = train(more);
    EXPECT_EQ(result.exit_code, code) << result.err;
    return result.err;
  }
  std::string model_;
};

TEST_F(TrainFilesTest, TargetsAreCheckedBeforeTraining) {
  const std::string nowhere = path("nowhere/file");
  for (const char* option : {"--export", "--trace", "--log"})
    EXPECT_THAT(error({option, nowhere, "--data", path("no data either")}),
                AllOf(HasSubstr(nowhere + ": " + option), HasSubstr("no folder"), Not(HasSubstr(".part"))));
  write_text("a file", path("file"));
  for (const char* option : {"--checkpoint", "--save-gradients"})
    EXPECT_THAT(error({option, path("file/below")}), AllOf(HasSubstr(option), HasSubstr("is no folder")));
  EXPECT_THAT(error({"--export", path("data")}), HasSubstr("it is a folder"));
  const std::string before = read_text(model_);
  for (const char* option : {"--export", "--log", "--trace"}) EXPECT_THAT(error({option, model_}), HasSubstr("the model is read from"));
  EXPECT_EQ(read_text(model_), before);
  write_model(mlp(0, 4096), path("big.onnx"), {.external_above = 0, .external_name = "weights"});
  model_ = path("big.onnx");
  EXPECT_THAT(error({"--export", path("weights")}), HasSubstr("weights"));
}

TEST_F(TrainFilesTest, DataHasTheTypesOfTheModel) {
  std::vector<int64_t> x(64);
  std::filesystem::create_directory(path("whole"));
  write_array(x, "16, 4", path("whole/x.npy"));
  write_array(std::vector<int64_t>(16), "16,", path("whole/target.npy"));
  EXPECT_THAT(error({"--data", path("whole")}), AllOf(HasSubstr("x.npy"), HasSubstr("int64"), HasSubstr("takes float32")));
  EXPECT_THAT(error({"--eval", path("whole")}), HasSubstr("x.npy"));
}

TEST_F(TrainFilesTest, ArraysOfNoInputAreIgnored) {
  write_array(std::vector<float>(3), "3,", path("data/weights.npy"));
  write_text("no array", path("data/notes.npy"));
  EXPECT_EQ(train({}).exit_code, 0) << train({}).err;
}

TEST_F(TrainFilesTest, TargetsOutOfRangeNameTheModelAndTheData) {
  write_array(std::vector<int64_t>(16, 9), "16,", path("data/target.npy"));
  EXPECT_THAT(error({}), AllOf(HasSubstr("m.onnx"), HasSubstr("step 0")));
}

TEST_F(TrainFilesTest, TokensComeInTheTypeOfTheInput) {
  for (const DType type : {DType::int32, DType::int64}) {
    Model model;
    model.ir_version = 10, model.opsets[""] = 20, model.graph = std::make_shared<Graph>();
    Graph& g = *model.graph;
    Value* ids = g.add_value("ids", Type::tensor(type, Shape{Dim(std::string("n")), Dim(std::string("s"))}));
    g.inputs = {ids};
    auto table = make_tensor(DType::float32, {16, 16});
    for (int64_t i = 0; i < 256; ++i) reinterpret_cast<float*>(mutable_data(*table))[i] = static_cast<float>(i % 5) / 5;
    Node* gather = g.add_node("Gather", {g.add_constant("table", table), ids}, {"y"});
    gather->name = "gather", g.outputs = {gather->out(0)};
    gather->out(0)->type = Type::tensor(DType::float32, Shape{Dim(std::string("n")), Dim(std::string("s")), 16});
    model_ = path("tokens.onnx");
    write_model(model, model_);
    std::string tokens;
    for (int i = 0; i < 100; ++i) tokens += static_cast<char>(i * 7 % 16), tokens += '\0';
    write_text(tokens, path("t.bin"));
    const CommandResult result = train({"--data", path("t.bin"), "--sequence", "8"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
  }
}

TEST_F(TrainFilesTest, GradientsAreThoseOfTheFirstStepThatCounts) {
  std::filesystem::create_directory(path("batches"));
  for (int step = 0; step < 2; ++step) {
    auto x = make_tensor(DType::float32, {2, 4}), target = make_tensor(DType::int64, {2});
    auto* values = reinterpret_cast<float*>(mutable_data(*x));
    for (int i = 0; i < 8; ++i) values[i] = step == 0 ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(i + 1);
    std::memset(mutable_data(*target), 0, target->bytes());
    const std::string number = std::to_string(step) + ".pb";
    write_tensor_file(*x, path("batches/x_" + number)), write_tensor_file(*target, path("batches/target_" + number));
  }
  const Arguments command = {"train", model_, "--data", path("batches"), "--save-gradients", path("g")};
  ASSERT_EQ(fretsaw(command + Arguments{"--steps", "2"}).exit_code, 0);
  const TensorPtr gradient = read_tensor_file(path("g/0.pb"));
  for (int64_t i = 0; i < gradient->count(); ++i) EXPECT_TRUE(std::isfinite(reinterpret_cast<const float*>(gradient->data)[i]));
  const CommandResult skipped = fretsaw(command + Arguments{"--steps", "1", "--seed", "3"});
  EXPECT_THAT(skipped.err, AllOf(HasSubstr("every step was skipped"), HasSubstr("--seed has nothing to do")));
}

TEST_F(TrainFilesTest, OptionsThatDoNothingAreTold) {
  const std::string told = train({"--zero", "2", "--sync-batch-norm", "--devices", "0"}).err;
  EXPECT_THAT(told, AllOf(HasSubstr("--zero 2 has nothing to do"), HasSubstr("--sync-batch-norm has nothing to do"),
                          HasSubstr("--devices has nothing to do")));
  EXPECT_THAT(train({"--mesh", "data=2", "--zero", "2", "--seed", "3"}).err, Not(HasSubstr("has nothing to do")));
}

TEST_F(TrainFilesTest, MemoryHolds) {
  write_model(mlp(0, 4096), model_);
  EXPECT_THAT(error({"--memory", "400KiB"}), AllOf(HasSubstr("a rank needs"), HasSubstr("409600"), HasSubstr("--recompute")));
  EXPECT_EQ(train({"--memory", "10MiB"}).exit_code, 0);
  // The batch counts.
  write_samples(path("many"), 2048);
  EXPECT_THAT(error({"--memory", "10MiB", "--data", path("many"), "--batch", "2048"}), HasSubstr("a rank needs"));
  EXPECT_EQ(
      train({"--memory", "10MiB", "--data", path("many"), "--batch", "2048", "--micro-batches", "64", "--schedule", "1f1b"}).exit_code, 0);
  const CommandResult saved = fretsaw({"train", model_, "--memory", "10MiB", "--save-plan", path("p")});
  EXPECT_EQ(saved.exit_code, 0) << saved.err;
  EXPECT_THAT(saved.out + saved.err, HasSubstr("memory is counted with 1 for what is not known"));
}

TEST_F(TrainFilesTest, DamagedPlansNameTheField) {
  ASSERT_EQ(fretsaw({"train", model_, "--save-plan", path("p")}).exit_code, 0);
  const std::string file = path("p/training.json"), text = read_text(file);
  model_ = path("p");
  for (const auto& [from, to] : {std::pair{"\"zero\": \"0\"", "\"zero\": \"7\""},
                                 {"\"zero\": \"0\"", "\"zero\": \"many\""},
                                 {"\"precision\": \"fp32\"", "\"precision\": \"int8\""},
                                 {"\"recompute\": \"none\"", "\"recompute\": \"some\""},
                                 {"\"memory\": \"\"", "\"memory\": \"much\""}}) {
    std::string changed = text;
    ASSERT_NE(changed.find(from), std::string::npos) << from;
    changed.replace(changed.find(from), std::strlen(from), to);
    write_text(changed, file);
    const std::string name = std::string(from).substr(1, std::string(from).find('"', 1) - 1);
    EXPECT_THAT(error({}), AllOf(HasSubstr("training.json"), HasSubstr("'options." + name + "'"))) << to;
  }
}

}  // namespace
}  // namespace fretsaw
