// The command train, on small models and arrays made here.
#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>

#include "tests/cli/training_data.h"

namespace fretsaw {
namespace {

using ::testing::HasSubstr;

TEST_F(CommandTest, TrainLearnsAndExports) {
  const std::string model = write_mlp("m.onnx", 0), data = path("data");
  write_samples(data, 64);
  const std::vector<std::string> train = {"train", model,         "--data",        data,     "--batch", "16",    "--epochs",
                                          "20",    "--optimizer", "adamw:lr=0.02", "--seed", "3",       "--json"};
  const auto with = [&](std::vector<std::string> more) {
    std::vector<std::string> all = train;
    all.insert(all.end(), more.begin(), more.end());
    return fretsaw(all);
  };
  const CommandResult one = with({"--export", path("trained.onnx"), "--save-gradients", path("gradients"), "--log", path("log.jsonl")});
  ASSERT_EQ(one.exit_code, 0) << one.err;
  const std::vector<double> losses = one.json()["losses"];
  ASSERT_EQ(losses.size(), 80u);
  EXPECT_LT(losses.back(), losses.front() / 2);
  EXPECT_TRUE(std::filesystem::exists(path("gradients/1.pb")));
  const std::string log = read_text(path("log.jsonl"));
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 80);
  EXPECT_EQ(fretsaw({"run", path("trained.onnx"), "--random", "1"}).exit_code, 0);
  const CommandResult several = with({"--mesh", "data=2,pipeline=2", "--micro-batches", "2", "--schedule", "1f1b"});
  ASSERT_EQ(several.exit_code, 0) << several.err;
  const std::vector<double> again = several.json()["losses"];
  for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(again[i], losses[i], 1e-3) << i;
}

TEST_F(CommandTest, TrainGoesOnFromACheckpoint) {
  const std::string model = write_mlp("m.onnx", 0), data = path("data");
  std::filesystem::create_directory(data);
  std::vector<float> x;
  std::vector<int64_t> target;
  for (int i = 0; i < 40; ++i) {
    for (int k = 0; k < 4; ++k) x.push_back(static_cast<float>((i * 53 + k * 11) % 31 - 15) / 15);
    target.push_back(i % 2);
  }
  write_array(x, "40, 4", data + "/x.npy"), write_array(target, "40,", data + "/target.npy");
  const auto losses = [&](std::vector<std::string> more) {
    std::vector<std::string> all = {"train", model, "--data", data, "--batch", "8", "--optimizer", "adamw:lr=0.01", "--json"};
    all.insert(all.end(), more.begin(), more.end());
    const CommandResult result = fretsaw(all);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.exit_code ? std::vector<double>() : result.json()["losses"].get<std::vector<double>>();
  };
  const std::vector<double> whole = losses({"--steps", "12"});
  ASSERT_EQ(losses({"--steps", "7", "--checkpoint", path("c"), "--every", "3"}), std::vector<double>(whole.begin(), whole.begin() + 7));
  const std::vector<double> rest(whole.begin() + 7, whole.end());
  EXPECT_EQ(losses({"--steps", "12", "--resume", path("c")}), rest);
  const std::vector<std::vector<std::string>> meshes = {
      {"--mesh", "data=2,pipeline=2"}, {"--mesh", "tensor=2"}, {"--mesh", "data=2", "--zero", "3"}};
  for (const auto& mesh : meshes) {
    std::vector<std::string> resumed = {"--steps", "12", "--resume", path("c")};
    resumed.insert(resumed.end(), mesh.begin(), mesh.end());
    const std::vector<double> cut = losses(resumed);
    ASSERT_EQ(cut.size(), rest.size());
    for (size_t i = 0; i < rest.size(); ++i) EXPECT_NEAR(cut[i], rest[i], 1e-5) << mesh[1];
  }
  const CommandResult again = fretsaw({"train", model, "--data", data, "--batch", "8", "--steps", "1", "--checkpoint", path("c")});
  EXPECT_EQ(again.exit_code, 2);
  EXPECT_THAT(again.err, HasSubstr("--resume"));
  const CommandResult other =
      fretsaw({"train", model, "--data", data, "--batch", "8", "--steps", "12", "--optimizer", "sgd:momentum=0.9", "--resume", path("c")});
  EXPECT_EQ(other.exit_code, 3) << other.err;
  EXPECT_THAT(other.err, HasSubstr("momentum_buffer"));
}

TEST_F(CommandTest, TrainSaysWhatItCannotDo) {
  const std::string model = write_mlp("m.onnx", 0);
  std::filesystem::create_directory(path("data"));
  write_array(std::vector<float>(8), "2, 4", path("data/x.npy"));
  const auto error = [&](std::vector<std::string> more) {
    std::vector<std::string> all = {"train", model, "--data", path("data"), "--batch", "2"};
    all.insert(all.end(), more.begin(), more.end());
    const CommandResult result = fretsaw(all);
    EXPECT_NE(result.exit_code, 0);
    return result.err;
  };
  EXPECT_THAT(error({}), HasSubstr("target"));  // which the data lacks
  EXPECT_THAT(error({"--loss", "hinge"}), HasSubstr("softmax_cross_entropy"));
  EXPECT_THAT(error({"--freeze", "*"}), HasSubstr("no parameter is left to train"));
  EXPECT_THAT(error({"--schedule", "widest"}), HasSubstr("1f1b"));
}

}  // namespace
}  // namespace fretsaw
