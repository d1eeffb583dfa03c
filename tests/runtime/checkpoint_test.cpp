// Checkpoints: complete or absent, in pieces, kept and found.
#include "runtime/training/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <numeric>
#include <thread>

#include "runtime/training/boxes.h"
#include "tests/error_text.h"
#include "tests/runtime/plans.h"
#include "tests/temporary_folder.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;
using namespace testing_plans;
using namespace testing_files;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A checkpoint of one tensor "w" = [step], by one rank.
std::string write_small(const std::string& root, int64_t step, int keep = 0) {
  CheckpointWriter writer(root, {.step = step});
  writer.write("rank0", {whole_piece("w", float_value({1}, {static_cast<float>(step)}).tensor)});
  return writer.commit(keep);
}
std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

TEST(Boxes, CoverOnce) {
  EXPECT_TRUE(covers_once({4, 6}, std::vector<Box>{{{0, 0}, {2, 6}}, {{2, 3}, {2, 3}}, {{2, 0}, {2, 3}}}));
  EXPECT_FALSE(covers_once({4, 6}, std::vector<Box>{{{0, 0}, {2, 6}}, {{2, 0}, {2, 3}}}));  // a hole
  EXPECT_FALSE(covers_once({4, 6}, std::vector<Box>{{{0, 0}, {2, 6}}, {{1, 0}, {2, 6}}}));  // an overlap and a hole
  EXPECT_FALSE(covers_once({4, 6}, std::vector<Box>{{{0, 0}, {4, 6}}, {{1, 0}, {1, 1}}}));  // too much
  EXPECT_TRUE(covers_once({}, std::vector<Box>{{{}, {}}}));
  EXPECT_FALSE(covers_once({}, std::vector<Box>{}));
  EXPECT_TRUE(covers_once({0, 3}, std::vector<Box>{}));
  EXPECT_FALSE(lies_in({{1}, {4}}, {4}));
  EXPECT_FALSE(lies_in({{-1}, {2}}, {4}));
  EXPECT_FALSE(lies_in({{INT64_MAX}, {INT64_MAX}}, {4}));
  EXPECT_FALSE(lies_in({{0}, {4}}, {4, 1}));
}

TEST(Boxes, CopyWhatIsCommon) {
  std::vector<int32_t> from(2 * 3 * 4), to(3 * 2 * 2, -1);
  const Box source{{1, 0, 0}, {2, 3, 4}}, target{{0, 1, 2}, {3, 2, 2}};
  const auto value = [](int64_t i, int64_t j, int64_t k) { return static_cast<int32_t>(100 * i + 10 * j + k); };
  for (size_t i = 0; i < from.size(); ++i)
    from[i] = value(1 + static_cast<int64_t>(i) / 12, static_cast<int64_t>(i) / 4 % 3, static_cast<int64_t>(i) % 4);
  copy_common(source, reinterpret_cast<const std::byte*>(from.data()), target, reinterpret_cast<std::byte*>(to.data()), 4);
  EXPECT_THAT(to, ElementsAre(-1, -1, -1, -1, value(1, 1, 2), value(1, 1, 3), value(1, 2, 2), value(1, 2, 3), value(2, 1, 2),
                              value(2, 1, 3), value(2, 2, 2), value(2, 2, 3)));
  int32_t scalar = 0;
  const int32_t seven = 7;
  copy_common({}, reinterpret_cast<const std::byte*>(&seven), {}, reinterpret_cast<std::byte*>(&scalar), 4);
  EXPECT_EQ(scalar, 7);
}

TEST(Checkpoints, StateAndTensorsComeBack) {
  const TemporaryFolder root;
  CheckpointState state{.step = 200, .seed = UINT64_MAX, .data = {3, 64}, .more = {{"loss_scale", "65536"}}};
  CheckpointWriter writer(root.path(), state);
  writer.write("rank0",
               {whole_piece("fc.weight", float_value({2, 2}, {1, 2, 3, 4}).tensor), whole_piece("step", int_value({}, {200}).tensor)});
  writer.write("rank1", {whole_piece("exp_avg:fc.weight", float_value({2, 2}, {5, 6, 7, 8}).tensor)});
  const std::string folder = writer.commit(0);
  EXPECT_EQ(folder, root / "step-000000200");
  const Checkpoint checkpoint = Checkpoint::open(folder);
  EXPECT_EQ(checkpoint.state().step, 200);
  EXPECT_EQ(checkpoint.state().seed, UINT64_MAX);
  EXPECT_EQ(checkpoint.state().data, (DataPosition{3, 64}));
  EXPECT_EQ(checkpoint.state().more, state.more);
  EXPECT_THAT(checkpoint.names(), ElementsAre("exp_avg:fc.weight", "fc.weight", "step"));
  EXPECT_THAT(checkpoint.read("fc.weight")->as<float>(), ElementsAre(1, 2, 3, 4));
  EXPECT_NE(checkpoint.read("fc.weight")->file, nullptr);  // mapped
  EXPECT_THAT(checkpoint.read("fc.weight", {1, 0}, {1, 2})->as<float>(), ElementsAre(3, 4));
  EXPECT_THAT(checkpoint.read("step")->as<int64_t>(), ElementsAre(200));
  EXPECT_THAT(error_of([&] { checkpoint.read("fc.bias"); }), AllOf(HasSubstr(folder), HasSubstr("'fc.bias'")));
  EXPECT_THAT(error_of([&] { checkpoint.read("fc.weight", {1, 0}, {2, 2}); }), HasSubstr("reaches beyond"));
}

// A tensor that four ranks hold in quarters is read whole and in thirds.
TEST(Checkpoints, AnotherMesh) {
  const TemporaryFolder root;
  std::vector<float> whole(6 * 4);
  std::iota(whole.begin(), whole.end(), 0.0f);
  CheckpointWriter writer(root.path(), {.step = 1});
  std::vector<std::thread> ranks;
  for (int64_t r = 0; r < 4; ++r)
    ranks.emplace_back([&, r] {
      std::vector<float> quarter;
      const Dims start = {r / 2 * 3, r % 2 * 2};
      for (int64_t i = 0; i < 3; ++i)
        for (int64_t k = 0; k < 2; ++k) quarter.push_back(whole[static_cast<size_t>((start[0] + i) * 4 + start[1] + k)]);
      std::vector<CheckpointPiece> pieces = {{"w", DType::float32, {6, 4}, start, {1, 2}, quarter.data()},
                                             {"w", DType::float32, {6, 4}, {start[0] + 1, start[1]}, {2, 2}, quarter.data() + 2}};
      writer.write("rank" + std::to_string(r), pieces);
    });
  for (std::thread& rank : ranks) rank.join();
  const Checkpoint checkpoint = Checkpoint::open(writer.commit(0));
  EXPECT_EQ(checkpoint.shape("w"), (Dims{6, 4}));
  EXPECT_THAT(checkpoint.read("w")->as<float>(), ::testing::ElementsAreArray(whole));
  for (int64_t r = 0; r < 3; ++r)
    EXPECT_THAT(checkpoint.read("w", {2 * r, 0}, {2, 4})->as<float>(), ::testing::ElementsAreArray(whole.data() + 8 * r, 8));
}

TEST(Checkpoints, PiecesThatDoNotFit) {
  const TemporaryFolder root;
  const float zeros[4] = {};
  {
    CheckpointWriter writer(root.path(), {.step = 1});
    writer.write("rank0", {{"w", DType::float32, {4}, {0}, {2}, zeros}});
    EXPECT_THAT(error_of([&] { writer.commit(0); }), HasSubstr("'w' of a checkpoint is not covered once"));
    EXPECT_THAT(error_of([&] { writer.write("rank1", {{"w", DType::float32, {4}, {3}, {2}, zeros}}); }), HasSubstr("reaches beyond"));
    EXPECT_THAT(error_of([&] { writer.write("rank2", {{"w", DType::float32, {5}, {2}, {2}, zeros}}); }), HasSubstr("different types"));
    EXPECT_THAT(error_of([&] { writer.write("rank0", {}); }), HasSubstr("written twice"));
  }
  EXPECT_TRUE(names_in(root.path()).empty());  // absent
}

TEST(Checkpoints, TheLastAreKept) {
  const TemporaryFolder root;
  for (int64_t step : {1, 2, 10, 9}) write_small(root.path(), step);
  EXPECT_EQ(names_in(root.path()).size(), 4u);
  write_small(root.path(), 11, 2);
  EXPECT_THAT(names_in(root.path()), ElementsAre("step-000000010", "step-000000011"));
  write_small(root.path(), 3, 1);  // what was just written stays
  EXPECT_THAT(names_in(root.path()), ElementsAre("step-000000003", "step-000000011"));
}

TEST(Checkpoints, TheSameStepAgain) {
  const TemporaryFolder root;
  write_small(root.path(), 5);
  CheckpointWriter writer(root.path(), {.step = 5, .seed = 77});
  writer.write("other", {whole_piece("v", float_value({1}, {3}).tensor)});
  writer.commit(0);
  EXPECT_EQ(Checkpoint::open(root / "step-000000005").state().seed, 77u);
  EXPECT_THAT(names_in(root / "step-000000005"), ElementsAre("manifest.json", "other.safetensors"));
}

TEST(Checkpoints, TheNewestThatIsWhole) {
  const TemporaryFolder root;
  std::vector<std::string> notes;
  EXPECT_TRUE(list_checkpoints(root / "nothing").empty());
  EXPECT_THAT(error_of([&] { open_newest_checkpoint(root.path(), notes); }), AllOf(HasSubstr(root.path()), HasSubstr("no checkpoint")));
  for (int64_t step : {1, 2, 3, 4}) write_small(root.path(), step);
  EXPECT_EQ(open_newest_checkpoint(root.path(), notes).state().step, 4);
  EXPECT_EQ(open_newest_checkpoint(root / "step-000000002", notes).state().step, 2);
  EXPECT_TRUE(notes.empty());
  fs::remove(root / "step-000000004/rank0.safetensors");
  fs::resize_file(root / "step-000000003/rank0.safetensors", 70);
  EXPECT_EQ(open_newest_checkpoint(root.path(), notes).state().step, 2);
  EXPECT_THAT(notes, ElementsAre(AllOf(HasSubstr("step-000000004/rank0.safetensors"), HasSubstr("missing")),
                                 AllOf(HasSubstr("step-000000003/rank0.safetensors"), HasSubstr("not complete"))));
  fs::remove(root / "step-000000002/manifest.json");
  notes.clear();
  EXPECT_EQ(open_newest_checkpoint(root.path(), notes).state().step, 1);
}

TEST(Checkpoints, DamagedManifests) {
  const TemporaryFolder root;
  const std::string folder = write_small(root.path(), 1), path = folder + "/manifest.json";
  const std::string sound = read_bytes_of(path);
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string text = sound;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    write_bytes(path, text.replace(at, from.size(), to));
    return error_of([&] { Checkpoint::open(folder); });
  };
  EXPECT_EQ(changed("\"format\": 1", "\"format\": 1"), "");
  EXPECT_THAT(changed("\"format\": 1", "\"format\": 2"), AllOf(HasSubstr(path), HasSubstr("format 2")));
  EXPECT_THAT(changed("\"step\"", "\"stop\""), AllOf(HasSubstr(path), HasSubstr("step")));
  EXPECT_THAT(changed("\"seed\": 0", "\"seed\": \"x\""), HasSubstr("damaged"));
  EXPECT_THAT(changed("{", ""), HasSubstr("damaged"));
  EXPECT_THAT(changed("rank0.safetensors", "../rank0.safetensors"), HasSubstr("not in its folder"));
  EXPECT_THAT(changed("\"key\": \"w\"", "\"key\": \"v\""), HasSubstr("'v' that is not in"));
  EXPECT_THAT(changed("float32", "float64"), HasSubstr("does not fit"));
  EXPECT_THAT(changed("float32", "float"), HasSubstr("not known"));
  for (size_t size = 0; size + 2 < sound.size(); size += 7) {
    write_bytes(path, sound.substr(0, size));
    EXPECT_NE(error_of([&] { Checkpoint::open(folder); }), "") << size;
  }
}

// A process that is killed while it writes checkpoints, at any moment: what it has committed is whole, and the next writer clears up.
TEST(Checkpoints, KilledWhileWriting) {
  const TemporaryFolder root;
  write_small(root.path(), 0);
  for (int attempt = 0; attempt < 10; ++attempt) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      try {
        for (int64_t step = 1;; ++step) write_small(root.path(), step, 2);
      } catch (...) {
        ::_exit(1);
      }
    }
    ::usleep(static_cast<useconds_t>(3000 + 1700 * attempt));
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status));
    std::vector<std::string> notes;
    const Checkpoint newest = open_newest_checkpoint(root.path(), notes);
    EXPECT_TRUE(notes.empty());
    EXPECT_THAT(newest.read("w")->as<float>(), ElementsAre(static_cast<float>(newest.state().step)));
  }
  write_small(root.path(), 1 << 20, 1);
  EXPECT_THAT(names_in(root.path()), ElementsAre("step-001048576"));
}

// A container gives its processes the same numbers again.
TEST(Checkpoint, RemovesWhatAnEarlierProcessOfItsNumberLeft) {
  const TemporaryFolder folder;
  const std::string left = ".step-000000002.part" + std::to_string(getpid()) + ".1";
  fs::create_directory(folder / left);
  CheckpointWriter alive(folder.path(), {.step = 5});
  write_small(folder.path(), 3);
  EXPECT_FALSE(fs::exists(folder / left));
  alive.write("rank0", {whole_piece("w", float_value({1}, {5}).tensor)});
  alive.commit(0);
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-000000003", "step-000000005"));
}

TEST(Checkpoint, KnowsThoseAfterAStep) {
  const TemporaryFolder folder;
  for (const int64_t step : {2, 4, 6}) write_small(folder.path(), step);
  EXPECT_THAT(checkpoints_after(folder.path(), 2), ElementsAre(folder / "step-000000004", folder / "step-000000006"));
  write_bytes(folder / "step-000000006/manifest.json", "{");
  EXPECT_THAT(checkpoints_after(folder.path(), 2), ElementsAre(folder / "step-000000004"));
  EXPECT_THAT(checkpoints_after(folder / "nowhere", 2), ElementsAre());
}

TEST(Checkpoint, MakesFoldersThatAreNotThere) {
  const TemporaryFolder folder;
  write_small(folder / "a/b/c", 1);
  EXPECT_EQ(list_checkpoints(folder / "a/b/c").size(), 1u);
}

}  // namespace
}  // namespace fretsaw
