// Checkpoints that are written while training goes on.
#include "runtime/training/background_checkpoints.h"

#include <gmock/gmock.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "graph/errors.h"
#include "tests/temporary_folder.h"

namespace fretsaw {
namespace {

RuntimeValue numbered(const Dims& dims, float first) {
  RuntimeValue value = make_value(DType::float32, dims);
  for (int64_t i = 0; i < value.tensor.count(); ++i) value.tensor.as<float>()[i] = first + static_cast<float>(i);
  return value;
}

std::map<std::string, RuntimeValue> some_tensors(float first) {
  std::map<std::string, RuntimeValue> tensors;
  tensors["a"] = numbered({}, first);
  tensors["b"] = numbered({40, 3}, first + 1);
  tensors["c"] = numbered({7}, first + 2);
  tensors["d"] = numbered({0, 2}, 0);
  tensors["e"] = numbered({1, 50}, first + 3);
  tensors["f"] = numbered({300}, first + 4);
  return tensors;
}

CheckpointState state_of(int64_t step) {
  CheckpointState state;
  state.step = step;
  return state;
}

class Writers : public ::testing::TestWithParam<int> {};

TEST_P(Writers, WriteSharesOfAboutTheSameSize) {
  const auto tensors = some_tensors(0);
  const auto shares = divide_tensors(tensors, GetParam());
  ASSERT_EQ(shares.size(), static_cast<size_t>(GetParam()));
  size_t total = 0, largest = 0;
  for (const auto& share : shares) {
    size_t bytes = 0;
    for (const CheckpointPiece& piece : share) bytes += bytes_of(piece.dtype, piece.shape, Layout::plain);
    total += bytes, largest = std::max(largest, bytes);
  }
  size_t all = 0, indivisible = 0;  // a tensor of one row stays whole
  for (const auto& [name, value] : tensors) {
    all += value.tensor.bytes();
    if (!value.tensor.dims.empty() && value.tensor.dims[0] == 1) indivisible = std::max(indivisible, value.tensor.bytes());
  }
  EXPECT_EQ(total, all);
  EXPECT_LE(largest, all / shares.size() + indivisible + 2 * 12);
}

TEST_P(Writers, WhatTheyWriteComesBack) {
  const testing_files::TemporaryFolder folder;
  const auto tensors = some_tensors(5);
  BackgroundCheckpoints checkpoints(folder / "c", GetParam(), 0);
  checkpoints.begin(state_of(3), some_tensors(5));
  checkpoints.finish();
  const std::vector<std::string> found = list_checkpoints(folder / "c");
  ASSERT_EQ(found.size(), 1u);
  for (int r = 0; r < GetParam(); ++r) EXPECT_TRUE(std::filesystem::exists(found[0] + "/rank" + std::to_string(r) + ".safetensors"));
  const Checkpoint read = Checkpoint::open(found[0]);
  EXPECT_EQ(read.state().step, 3);
  for (const auto& [name, value] : tensors) {
    const TensorPtr tensor = read.read(name);
    ASSERT_EQ(tensor->dims, value.tensor.dims) << name;
    EXPECT_EQ(std::memcmp(tensor->data, value.tensor.data, value.tensor.bytes()), 0) << name;
  }
}
INSTANTIATE_TEST_SUITE_P(Several, Writers, ::testing::Values(1, 2, 3, 8, 17));

TEST(BackgroundCheckpoints, OneAfterTheOther) {
  const testing_files::TemporaryFolder folder;
  BackgroundCheckpoints checkpoints(folder / "c", 2, 2);
  for (int64_t step = 1; step <= 5; ++step) checkpoints.begin(state_of(step), some_tensors(static_cast<float>(step)));
  checkpoints.finish();
  ASSERT_EQ(list_checkpoints(folder / "c").size(), 2u);
  std::vector<std::string> notes;
  const Checkpoint newest = open_newest_checkpoint(folder / "c", notes);
  EXPECT_EQ(newest.state().step, 5);
  EXPECT_EQ(reinterpret_cast<const float*>(newest.read("a")->data)[0], 5);
  EXPECT_TRUE(notes.empty());
}

TEST(BackgroundCheckpoints, AnErrorComesOutOnce) {
  const testing_files::TemporaryFolder folder;
  std::ofstream(folder / "file") << "not a folder";
  BackgroundCheckpoints checkpoints(folder / "file/c", 2, 0);
  checkpoints.begin(state_of(1), some_tensors(0));
  EXPECT_THROW(checkpoints.finish(), Error);
  checkpoints.check();
  checkpoints.begin(state_of(2), some_tensors(0));
  EXPECT_THROW(checkpoints.begin(state_of(3), some_tensors(0)), Error);
  EXPECT_THROW(
      {
        checkpoints.begin(state_of(4), some_tensors(0));
        checkpoints.finish();
      },
      Error);
}

}  // namespace
}  // namespace fretsaw
