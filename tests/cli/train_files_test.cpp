// What the command train reads and writes besides checkpoints: files of data, targets, plans, and what it says of them.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <set>

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

TEST_F(TrainFilesTest, NothingIsWrittenOverTheDataOrTwice) {
  const std::string before = read_text(path("data/x.npy"));
  std::filesystem::create_symlink(path("data/x.npy"), path("link"));
  std::filesystem::create_directory(path("g"));
  write_samples(path("other"), 8);
  for (const char* option : {"--export", "--log", "--trace"}) {
    for (const std::string& file : {path("data/x.npy"), path("data/../data/x.npy"), path("link")})
      EXPECT_THAT(error({option, file}), AllOf(HasSubstr(file + ": " + option), HasSubstr("the data is read from"))) << file;
    EXPECT_THAT(error({"--eval", path("other"), option, path("other/target.npy")}), HasSubstr("the data is read from"));
  }
  EXPECT_EQ(read_text(path("data/x.npy")), before);
  for (const Arguments& twice : {Arguments{"--log", path("same"), "--trace", path("same")},
                                 {"--export", path("same"), "--log", path("g/../same")},
                                 {"--export", path("same"), "--log", path("same.data")},
                                 {"--log", path("g/7.pb"), "--save-gradients", path("g")},
                                 {"--checkpoint", path("c"), "--save-gradients", path("c/")},
                                 {"--save-plan", path("p"), "--checkpoint", path("p/c")}})
    EXPECT_THAT(error(twice), HasSubstr("writes there too")) << testing::PrintToString(twice);
  EXPECT_FALSE(std::filesystem::exists(path("same")));
  EXPECT_EQ(train({"--log", path("g/log.jsonl"), "--checkpoint", path("g")}).exit_code, 0);
  ASSERT_EQ(mkfifo(path("fifo").c_str(), 0600), 0);
  const int reader = open(path("fifo").c_str(), O_RDONLY | O_NONBLOCK);
  EXPECT_EQ(train({"--log", path("fifo"), "--trace", path("fifo")}).exit_code, 0);
  close(reader);
  ASSERT_EQ(fretsaw({"train", model_, "--save-plan", path("p")}).exit_code, 0);
  model_ = path("p");
  EXPECT_THAT(error({"--trace", path("p/plan.json")}), HasSubstr("the model is read from"));
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
  EXPECT_THAT(fretsaw(command + Arguments{"--steps", "2"}).err, Not(HasSubstr("every step was skipped")));
  const CommandResult skipped = fretsaw(command + Arguments{"--steps", "1", "--seed", "3"});
  EXPECT_THAT(skipped.err, AllOf(HasSubstr("wrote nothing: every step was skipped"), HasSubstr("--seed has nothing to do"),
                                 HasSubstr("warning: every step was skipped: the loss or a gradient was never finite")));
}

TEST_F(TrainFilesTest, GradientsOfAnEarlierRunDoNotStay) {
  std::filesystem::create_directory(path("g"));
  for (const char* file : {"g/2.pb", "g/01.pb", "g/notes.pb", "g/2.pb.old"}) write_text("earlier", path(file));
  ASSERT_EQ(train({"--save-gradients", path("g")}).exit_code, 0);
  std::set<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(path("g"))) files.insert(entry.path().filename().string());
  EXPECT_EQ(files, (std::set<std::string>{"0.pb", "1.pb", "notes.pb", "2.pb.old"}));
}

TEST_F(TrainFilesTest, ABatchThatDoesNotFitIsNamed) {
  const auto write = [&](DType type, const Dims& dims) {
    std::filesystem::create_directory(path("batches"));
    for (const char* step : {"0", "1"}) {
      auto x = make_tensor(DType::float32, {2, 4}), target = make_tensor(DType::int64, {2});
      if (std::string(step) == "1") x = make_tensor(type, dims);
      std::memset(mutable_data(*x), 0, x->bytes()), std::memset(mutable_data(*target), 0, target->bytes());
      write_tensor_file(*x, path("batches/x_" + std::string(step) + ".pb"));
      write_tensor_file(*target, path("batches/target_" + std::string(step) + ".pb"));
    }
    return fretsaw({"train", model_, "--data", path("batches"), "--steps", "2"});
  };
  EXPECT_EQ(write(DType::float32, {2, 4}).exit_code, 0);
  EXPECT_THAT(write(DType::float64, {2, 4}).err, AllOf(HasSubstr("x_1.pb: holds float64[2,4]"), HasSubstr("takes float32[batch,4]")));
  EXPECT_THAT(write(DType::float32, {2, 3}).err, HasSubstr("x_1.pb: holds float32[2,3]"));
  EXPECT_THAT(write(DType::float32, {8}).err, HasSubstr("x_1.pb: holds float32[8]"));
}

TEST_F(TrainFilesTest, APrecisionThatChangesNothingIsTold) {
  Model model;
  model.ir_version = 10, model.opsets[""] = 20, model.graph = std::make_shared<Graph>();
  Graph& g = *model.graph;
  const Dim n(std::string("n"));
  g.inputs = {g.add_value("x", Type::tensor(DType::float64, Shape{n, 4}))};
  auto w = make_tensor(DType::float64, {4, 2});
  std::memset(mutable_data(*w), 0, w->bytes());
  Node* node = g.add_node("MatMul", {g.inputs[0], g.add_constant("w", w)}, {"y"});
  node->out(0)->type = Type::tensor(DType::float64, Shape{n, 2});
  g.outputs = {node->out(0)};
  write_model(model, path("wide.onnx"));
  std::filesystem::create_directory(path("batches"));
  for (const auto& [name, dims] : {std::pair<std::string, Dims>{"x", {2, 4}}, {"target", {2, 2}}}) {
    auto values = make_tensor(DType::float64, dims);
    std::memset(mutable_data(*values), 0, values->bytes());
    write_tensor_file(*values, path("batches/" + name + "_0.pb"));
  }
  const Arguments command = {"train", path("wide.onnx"), "--data", path("batches"), "--loss", "mse", "--steps", "1"};
  const CommandResult trained = fretsaw(command + Arguments{"--precision", "bf16"});
  EXPECT_EQ(trained.exit_code, 0) << trained.err;
  EXPECT_THAT(trained.err, HasSubstr("--precision bf16 has nothing to do"));
  EXPECT_THAT(fretsaw({"run", path("wide.onnx"), "--random", "1", "--precision", "fp16"}).out,
              HasSubstr("--precision fp16 has nothing to do"));
  EXPECT_THAT(fretsaw(command).err, Not(HasSubstr("--precision")));
  EXPECT_THAT(train({"--precision", "bf16"}).err, Not(HasSubstr("--precision")));
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
