// What the commands say where they are used wrongly, or given what they cannot take.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include "graph/io.h"
#include "tests/cli/command.h"

namespace fretsaw {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

TEST_F(CommandTest, WrongUsageExitsWith2AndOneLine) {
  const std::string model = write_mlp("m.onnx", 0);
  const std::vector<std::vector<std::string>> cases = {
      {},
      {"frobnicate"},
      {"run", model, "--no-such-option"},
      {"run"},
      {"run", model, "--micro-batches", "0"},
      {"run", model, "--precision", "fp12"},
      {"run", model, "--devices", "0,x"},
      {"run", model, "--device", "tpu"},
      {"run", model, "--random", "1", "--inputs", "here"},
      {"run", model, "--shape", "x"},
      {"run", model, "--shape", "x=a,b"},
      {"run", model, "--random", "1", "--shape", "z=1"},
      {"partition", model},
      {"partition", model, "-o", path("p"), "--mesh", "pipeline"},
      {"partition", model, "-o", path("p"), "--mesh", "pipeline=0"},
      {"partition", model, "-o", path("p"), "--mesh", "rows=2"},
      {"partition", model, "-o", path("p"), "--mesh", "spatial=2"},
      {"partition", model, "-o", path("p"), "--shard", "w1=tensor"},
      {"partition", model, "-o", path("p"), "--configuration", "two"},
      {"partition", model, "-o", path("p"), "--schedule", "random"},
      {"partition", model, "-o", path("p"), "--memory", "much"},
      {"partition", model, "-o", path("p"), "--merge", "y=maximum"},
      {"model", "mlp"},
      {"model", "no-such-model", "-o", path("x.onnx")},
      {"model", "mlp", "-o", path("x.onnx"), "--set", "colour=red"},
      {"train", model},
      {"merge", path("p")},
  };
  for (const auto& arguments : cases) {
    const CommandResult result = fretsaw(arguments);
    const std::string shown = testing::PrintToString(arguments);
    EXPECT_EQ(result.exit_code, 2) << shown << result.err;
    EXPECT_THAT(result.err, StartsWith("fretsaw: error: ")) << shown;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << shown << result.err;
    EXPECT_EQ(result.out, "") << shown;
  }
}

TEST_F(CommandTest, EmptyValuesAreRefused) {
  const std::string model = write_mlp("m.onnx", 0);
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"train", model, "--data", path("d"), "--export", ""}, "--export"},
      {{"train", model, "--data", path("d"), "--resume", ""}, "--resume"},
      {{"train", model, "--data", ""}, "--data"},
      {{"train", model, "--shape", ""}, "--shape"},
      {{"run", model, "--trace="}, "--trace"},
      {{"run", model, "--random", ""}, "--random"},
      {{"run", ""}, "model"},
      {{"partition", model, "-o", ""}, "--output"},
      {{"merge", "", "-o", path("x.onnx")}, "plan"},
  };
  for (const auto& [arguments, option] : cases) {
    const CommandResult result = fretsaw(arguments);
    EXPECT_EQ(result.exit_code, 2) << testing::PrintToString(arguments) << result.err;
    EXPECT_THAT(result.err, HasSubstr(option + ": ")) << testing::PrintToString(arguments);
  }
}

TEST_F(CommandTest, NumbersOutOfRangeAreToldInFewWords) {
  const std::string model = write_mlp("m.onnx", 0);
  const std::vector<std::vector<std::string>> cases = {
      {"run", "--random", "-1"},      {"run", "--random-weights", "99999999999999999999999"},
      {"train", "--seed", "-1"},      {"train", "--seed", "99999999999999999999999"},
      {"train", "--seed", "1.5"},     {"train", "--clip", "inf"},
      {"train", "--bucket-mb", "-1"}, {"train", "--bucket-mb", "0"},
      {"run", "--rtol", "-1"},
  };
  for (const auto& arguments : cases) {
    const CommandResult result = fretsaw({arguments[0], model, arguments[1], arguments[2]});
    EXPECT_EQ(result.exit_code, 2) << testing::PrintToString(arguments) << result.err;
    EXPECT_THAT(result.err, HasSubstr(arguments[1] + ": "));
    EXPECT_THAT(result.err, HasSubstr(arguments[2]));
    EXPECT_LT(result.err.size(), 160U) << result.err;
  }
}

TEST_F(CommandTest, WhatIsNotSupportedSaysSo) {
  const std::string model = write_mlp("m.onnx", 0);
  EXPECT_THAT(fretsaw({"partition", model, "-o", path("p"), "--mesh", "spatial=2"}).err, HasSubstr("is not supported: "));
  const CommandResult cuda = fretsaw({"run", model, "--device", "cuda", "--devices", "99"});  // nowhere that many
  EXPECT_EQ(cuda.exit_code, 4);
  EXPECT_THAT(cuda.err, StartsWith("fretsaw: error: "));
}

TEST_F(CommandTest, FilesAtFaultExitWith3AndAreNamed) {
  const std::string model = write_mlp("m.onnx", 0);
  write_text("not a model", path("bad.onnx"));
  write_text("not a tensor", path("bad.pb"));
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"inspect", path("absent.onnx")}, "absent.onnx"},
      {{"check", path("bad.onnx")}, "bad.onnx"},
      {{"run", path("bad.onnx")}, "bad.onnx"},
      {{"partition", path("bad.onnx"), "-o", path("p")}, "bad.onnx"},
      {{"partition", model, "-o", path("p"), "--from-annotations"}, "m.onnx"},
      {{"simulate", path("absent")}, "absent"},
      {{"merge", path("absent"), "-o", path("x.onnx")}, "absent"},
      {{"run", model, "--inputs", path("absent")}, "absent"},
      {{"run", model, "--input", "x=" + path("bad.pb")}, "bad.pb"},
      {{"run", model, "--input", "z=" + path("bad.pb")}, "'z'"},
      {{"run", model, "--random", "1", "--expect", path("absent")}, "output_0.pb"},
  };
  for (const auto& [arguments, named] : cases) {
    const CommandResult result = fretsaw(arguments);
    EXPECT_EQ(result.exit_code, 3) << testing::PrintToString(arguments) << result.err;
    EXPECT_THAT(result.err, StartsWith("fretsaw: error: "));
    EXPECT_THAT(result.err, HasSubstr(named));
  }
}

TEST_F(CommandTest, OddPathsAreNoInternalErrors) {
  const std::string model = write_mlp("m.onnx", 0), circle = path("circle"), fifo = path("fifo");
  std::filesystem::create_symlink("circle", circle);
  std::filesystem::create_directories(path("folder/output_0.pb"));
  write_text("", path("empty"));
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  const std::string long_name = path(std::string(300, 'n'));
  for (const std::string& odd : {circle, fifo, path("empty"), long_name, path("empty") + "/below"}) {
    const std::vector<std::vector<std::string>> cases = {
        {"partition", model, "-o", odd, "--mesh", "pipeline=2"},
        {"run", model, "--inputs", odd},
        {"run", model, "--random", "1", "--output", odd},
        {"train", model, "--data", odd},
        {"train", model, "--data", path("folder"), "--resume", odd},
    };
    for (const auto& arguments : cases) {
      const CommandResult result = fretsaw(arguments);
      EXPECT_TRUE(result.exit_code == 2 || result.exit_code == 3) << testing::PrintToString(arguments) << result.err;
      EXPECT_THAT(result.err, HasSubstr(odd)) << testing::PrintToString(arguments);
      EXPECT_THAT(result.err, Not(HasSubstr("internal error")));
    }
  }
  for (const std::string& odd : {circle, long_name})
    for (const char* command : {"inspect", "check", "run", "train", "bench", "simulate"})
      EXPECT_THAT(fretsaw({command, odd}).err, Not(HasSubstr("internal error"))) << command;
  const std::vector<std::vector<std::string>> folders = {{"partition", model, "-o", path("p"), "--target", path("folder")},
                                                         {"run", model, "--random", "1", "--expect", path("folder")}};
  for (const auto& arguments : folders)
    EXPECT_THAT(fretsaw(arguments).err, AllOf(HasSubstr(path("folder")), Not(HasSubstr("internal error"))));
}

TEST_F(CommandTest, StreamsAreWrittenToAsTheyAre) {
  const std::string model = write_mlp("m.onnx", 1), fifo = path("fifo");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  const int reader = open(fifo.c_str(), O_RDONLY | O_NONBLOCK);
  const CommandResult run = fretsaw({"run", model, "--random", "1", "--trace", fifo});
  std::string text(65536, '\0');
  text.resize(static_cast<size_t>(std::max<ssize_t>(read(reader, text.data(), text.size()), 0)));
  close(reader);
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(std::filesystem::is_fifo(fifo));
  EXPECT_THAT(text, HasSubstr("traceEvents"));
}

TEST_F(CommandTest, ErrorsWhileRunningNameTheFileAndTheNode) {
  Model model = mlp(1);
  model.graph->nodes[1]->op = "NoSuchOperator";
  write_model(model, path("bad.onnx"));
  const CommandResult run = fretsaw({"run", path("bad.onnx"), "--random", "1"});
  EXPECT_EQ(run.exit_code, 3);
  EXPECT_THAT(run.err, HasSubstr("bad.onnx: node 'relu' (NoSuchOperator): "));
  EXPECT_THAT(fretsaw({"frobnicate"}).err, HasSubstr("'frobnicate'"));
}

TEST_F(CommandTest, ErrorsAreJsonWithJson) {
  const json error = fretsaw({"inspect", path("absent.onnx"), "--json"}).json();
  EXPECT_EQ(error["error"]["code"], 3);
  EXPECT_THAT(error["error"]["message"], HasSubstr("absent.onnx"));
  EXPECT_EQ(fretsaw({"run", "--json"}).json()["error"]["code"], 2);
}

}  // namespace
}  // namespace fretsaw
