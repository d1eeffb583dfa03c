// Training data: what batches hold, in which order, and what is said of files that are wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <set>

#include "graph/io.h"
#include "runtime/training/data.h"
#include "runtime/training/read_ahead.h"
#include "runtime/training/sample_order.h"
#include "tests/error_text.h"
#include "tests/runtime/plans.h"
#include "tests/temporary_folder.h"

namespace fretsaw {
namespace {

using namespace testing_plans;
using namespace testing_files;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string open_error(const std::string& path, const DataOptions& options = {}) {
  return error_of([&] { open_data(path, options); });
}

void write_batch(const std::string& path, Dims dims, const std::vector<float>& values) {
  write_tensor_file(*floats(std::move(dims), values), path);
}

// A .npy file of version 1.
template <typename T>
void write_npy(const std::string& path, const std::string& type, const std::string& shape, const std::vector<T>& values) {
  std::string header = "{'descr': '" + type + "', 'fortran_order': False, 'shape': " + shape + ", }";
  header.append(64 - (10 + header.size() + 1) % 64, ' ');
  header += '\n';
  std::string bytes = "\x93NUMPY";
  bytes += '\1';
  bytes += '\0';
  bytes += static_cast<char>(header.size() & 255);
  bytes += static_cast<char>(header.size() >> 8);
  bytes += header;
  bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  write_bytes(path, bytes);
}

// Samples k = 0 .. count - 1: x = [k, k + 0.5], target = 10 k.
void write_arrays(const TemporaryFolder& folder, int64_t count) {
  std::vector<float> x;
  std::vector<int64_t> target;
  for (int64_t k = 0; k < count; ++k) {
    x.insert(x.end(), {static_cast<float>(k), static_cast<float>(k) + 0.5f});
    target.push_back(10 * k);
  }
  write_npy(folder / "x.npy", "<f4", "(" + std::to_string(count) + ", 2)", x);
  write_npy(folder / "target.npy", "<i8", "(" + std::to_string(count) + ",)", target);
}
// The samples of a batch, by their targets.
std::vector<int64_t> samples_of(const Batch& batch) {
  std::vector<int64_t> samples = elements<int64_t>(batch.at("target"));
  const std::vector<float> x = elements<float>(batch.at("x"));
  for (size_t i = 0; i < samples.size(); ++i) {
    samples[i] /= 10;
    EXPECT_EQ(x[2 * i], static_cast<float>(samples[i]));
    EXPECT_EQ(x[2 * i + 1], static_cast<float>(samples[i]) + 0.5f);
  }
  return samples;
}

TEST(TrainingData, BatchesUseMemoryThatEarlierOnesHaveLetGoOf) {
  const TemporaryFolder arrays, batches;
  write_arrays(arrays, 10);
  for (int s = 0; s < 2; ++s) {
    write_batch(batches / ("x_" + std::to_string(s) + ".pb"), {2}, {1, 2});
    write_batch(batches / ("target_" + std::to_string(s) + ".pb"), {2}, {3, 4});
  }
  for (const std::string& folder : {arrays.path(), batches.path()}) {
    const auto data = open_data(folder, {});
    const auto size = data->in_batches() ? 0 : 4;
    Batch held = data->next(size);
    const void* first = held.at("x").tensor.data;
    EXPECT_NE(data->next(size).at("x").tensor.data, first);
    held.clear();
    EXPECT_EQ(data->next(size).at("x").tensor.data, first);
  }
}

TEST(TrainingData, SamplesGoToTheAxisThatCountsThem) {
  const TemporaryFolder arrays, tokens;
  write_arrays(arrays, 3);
  DataOptions options;
  options.shuffle = false, options.sample_axes = {{"x", 1}};
  const auto data = open_data(arrays.path(), options);
  EXPECT_EQ(data->look("x", 5).dims, (Dims{2, 5}));
  const Batch batch = data->next(3);
  EXPECT_EQ(batch.at("x").tensor.dims, (Dims{2, 3}));
  EXPECT_THAT(elements<float>(batch.at("x")), ElementsAre(0, 1, 2, 0.5f, 1.5f, 2.5f));
  EXPECT_THAT(elements<int64_t>(batch.at("target")), ElementsAre(0, 10, 20));
  options.sample_axes = {{"target", 1}};
  EXPECT_THAT(error_of([&] { open_data(arrays.path(), options)->next(2); }), HasSubstr("has samples of 0 dimensions for 'target'"));

  const std::vector<uint16_t> numbers = {1, 2, 3, 4, 5, 6, 7};
  write_bytes(tokens / "train.bin", std::string(reinterpret_cast<const char*>(numbers.data()), 2 * numbers.size()));
  options.sequence = 3, options.sample_axes = {{"x", 1}};
  const Batch windows = open_data(tokens.path(), options)->next(2);
  EXPECT_EQ(windows.at("x").tensor.dims, (Dims{3, 2}));
  EXPECT_THAT(elements<int64_t>(windows.at("x")), ElementsAre(1, 4, 2, 5, 3, 6));
  EXPECT_THAT(elements<int64_t>(windows.at("target")), ElementsAre(2, 3, 4, 5, 6, 7));
}

// --- reading ahead ---

TEST(ReadAhead, GivesWhatTheSourceGivesWithItsPlaces) {
  const TemporaryFolder folder;
  write_arrays(folder, 10);
  const auto wanted = open_data(folder.path(), {}), source = open_data(folder.path(), {});
  std::atomic<int> prepared = 0;
  ReadAhead ahead(*source, 3, 7, [&](Batch& batch) {
    ++prepared;
    batch.erase("x");
  });
  for (int i = 0; i < 7; ++i) {
    const ReadAhead::Read read = ahead.next();
    EXPECT_GT(prepared, i);
    EXPECT_LE(prepared, i + 2) << "no further ahead than the next one";
    EXPECT_EQ(elements<int64_t>(read.batch.at("target")), elements<int64_t>(wanted->next(3).at("target")));
    EXPECT_FALSE(read.batch.contains("x"));
    EXPECT_EQ(read.after, wanted->position());
  }
}

TEST(ReadAhead, AFaultIsThrownInItsTurn) {
  const TemporaryFolder folder;
  for (int s = 0; s < 3; ++s) write_batch(folder / ("x_" + std::to_string(s) + ".pb"), {2}, {1, 2});
  const auto source = open_data(folder.path(), {});
  write_bytes(folder / "x_2.pb", "no tensor");
  ReadAhead ahead(*source, 0, 5, [](Batch&) {});
  EXPECT_EQ(ahead.next().batch.size(), 1u);
  EXPECT_EQ(ahead.next().batch.size(), 1u);
  EXPECT_THAT(error_of([&] { ahead.next(); }), HasSubstr("x_2.pb"));
}

TEST(ReadAhead, NeedNotBeReadToTheEnd) {
  const TemporaryFolder folder;
  write_arrays(folder, 10);
  const auto source = open_data(folder.path(), {});
  ReadAhead ahead(*source, 2, 1000, [](Batch&) {});
  ahead.next();
}

// --- folders of batches ---

TEST(BatchFolder, ComesInNumericOrderAgainAndAgain) {
  const TemporaryFolder folder;
  for (int s = 0; s < 11; ++s) {
    write_batch(folder / ("x_1_" + std::to_string(s) + ".pb"), {2}, {static_cast<float>(s), 0});
    write_batch(folder / ("target_" + std::to_string(s) + ".pb"), {}, {static_cast<float>(-s)});
  }
  write_bytes(folder / "info.json", "{}");
  const auto data = open_data(folder.path(), {});
  EXPECT_THAT(data->names(), ElementsAre("target", "x_1"));
  EXPECT_EQ(data->epoch_size(), 11);
  for (int64_t s = 0; s < 25; ++s) {
    EXPECT_EQ(data->position(), (DataPosition{s / 11, s % 11}));
    const Batch batch = data->next(s % 2 ? 0 : 2);
    EXPECT_EQ(elements<float>(batch.at("x_1"))[0], static_cast<float>(s % 11));
    EXPECT_EQ(elements<float>(batch.at("target"))[0], static_cast<float>(-(s % 11)));
  }
  data->seek({4, 7});
  EXPECT_EQ(elements<float>(data->next(0).at("x_1"))[0], 7);
  EXPECT_THAT(error_of([&] { data->seek({0, 12}); }), AllOf(HasSubstr(folder.path()), HasSubstr("no sample 12")));
  EXPECT_THAT(error_of([&] { data->next(3); }), AllOf(HasSubstr(".pb"), HasSubstr("not a batch of 3")));
}

TEST(BatchFolder, WhatIsWrong) {
  const TemporaryFolder folder;
  EXPECT_THAT(open_error(folder / "nothing"), AllOf(HasSubstr("does not exist"), HasSubstr("NAME.bin")));
  EXPECT_THAT(open_error(folder.path()), HasSubstr("holds no training data"));
  write_batch(folder / "x_0.pb", {1}, {1});
  write_batch(folder / "x_1.pb", {1}, {1});
  write_batch(folder / "target_0.pb", {1}, {1});
  EXPECT_THAT(open_error(folder.path()), AllOf(HasSubstr(folder.path()), HasSubstr("'target_1.pb'")));
  write_bytes(folder / "target_1.pb", "\xff\xff damaged");
  const auto data = open_data(folder.path(), {});
  data->next(0);
  EXPECT_THAT(error_of([&] { data->next(0); }), HasSubstr("target_1.pb"));
  EXPECT_THAT(error_of([&] { check_names(*data, {"x", "mask"}); }), AllOf(HasSubstr("'mask'"), HasSubstr("'target', 'x'")));
  check_names(*data, {"x"});
  write_batch(folder / "x_01.pb", {1}, {1});
  EXPECT_THAT(open_error(folder.path()), HasSubstr("twice"));
  write_arrays(folder, 2);
  EXPECT_THAT(open_error(folder.path()), HasSubstr("both .pb and .npy"));
}

TEST(BatchFolder, NoBatches) {
  const TemporaryFolder folder;
  write_batch(folder / "x.pb", {1}, {1});
  write_batch(folder / "_0.pb", {1}, {1});
  write_batch(folder / "x_-1.pb", {1}, {1});
  EXPECT_THAT(open_error(folder.path()), HasSubstr("no file named NAME_S.pb"));
}

// --- arrays ---

TEST(Arrays, EverySampleOnceAnEpoch) {
  const TemporaryFolder folder;
  write_arrays(folder, 10);
  const auto data = open_data(folder.path(), {.seed = 3});
  EXPECT_THAT(data->names(), ElementsAre("target", "x"));
  std::vector<int64_t> all;
  while (all.size() < 40)
    for (int64_t k : samples_of(data->next(4))) all.push_back(k);
  EXPECT_EQ(data->position(), (DataPosition{4, 0}));
  std::set<std::vector<int64_t>> orders;
  for (size_t epoch = 0; epoch < 4; ++epoch) {
    std::vector<int64_t> order(all.begin() + static_cast<std::ptrdiff_t>(10 * epoch),
                               all.begin() + static_cast<std::ptrdiff_t>(10 * epoch + 10));
    orders.insert(order);
    std::sort(order.begin(), order.end());
    for (int64_t k = 0; k < 10; ++k) EXPECT_EQ(order[static_cast<size_t>(k)], k);
  }
  EXPECT_EQ(orders.size(), 4u);
}

TEST(Arrays, InOrderAndWithoutWrapping) {
  const TemporaryFolder folder;
  write_arrays(folder, 5);
  const auto data = open_data(folder.path(), {.shuffle = false, .wrap = false});
  EXPECT_THAT(samples_of(data->next(3)), ElementsAre(0, 1, 2));
  EXPECT_THAT(samples_of(data->next(3)), ElementsAre(3, 4));
  EXPECT_EQ(data->position(), (DataPosition{1, 0}));
  EXPECT_THAT(samples_of(data->next(7)), ElementsAre(0, 1, 2, 3, 4));
  const auto wrapped = open_data(folder.path(), {.shuffle = false});
  EXPECT_THAT(samples_of(wrapped->next(12)), ElementsAre(0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1));
  EXPECT_THAT(error_of([&] { wrapped->next(0); }), HasSubstr("at least 1"));
}

TEST(Arrays, GoOnFromASavedPosition) {
  const TemporaryFolder folder;
  write_arrays(folder, 23);
  const DataOptions options{.seed = 9};
  const auto data = open_data(folder.path(), options), resumed = open_data(folder.path(), options);
  for (int i = 0; i < 9; ++i) data->next(7);
  resumed->seek(data->position());
  for (int i = 0; i < 9; ++i) EXPECT_EQ(samples_of(data->next(5)), samples_of(resumed->next(5)));
  const auto other = open_data(folder.path(), {.seed = 10}), again = open_data(folder.path(), options);
  EXPECT_NE(samples_of(other->next(23)), samples_of(again->next(23)));
}

TEST(Arrays, WhatIsWrong) {
  const TemporaryFolder folder;
  write_arrays(folder, 5);
  write_npy<float>(folder / "y.npy", "<f4", "(4,)", {1, 2, 3, 4});
  EXPECT_THAT(open_error(folder.path()), AllOf(HasSubstr(".npy"), HasSubstr("samples, but")));
  write_npy<float>(folder / "y.npy", "<f4", "()", {1});
  EXPECT_THAT(open_error(folder.path()), AllOf(HasSubstr("y.npy"), HasSubstr("single number")));
  write_npy<float>(folder / "y.npy", "<f4", "(0, 3)", {});
  EXPECT_THAT(open_error(folder.path()), AllOf(HasSubstr("y.npy"), HasSubstr("no samples")));
  write_npy<float>(folder / "y.npy", "<f4", "(5,)", {1, 2, 3, 4});
  EXPECT_THAT(open_error(folder.path()), AllOf(HasSubstr("y.npy"), HasSubstr("truncated")));
}

TEST(SampleOrder, IsAPermutation) {
  for (int64_t count : {1, 2, 3, 4, 5, 15, 16, 17, 64, 65, 1000}) {
    std::set<int64_t> seen;
    for (int64_t i = 0; i < count; ++i) seen.insert(shuffled_index(i, count, 5));
    EXPECT_EQ(static_cast<int64_t>(seen.size()), count);
    EXPECT_EQ(*seen.begin(), 0);
    EXPECT_EQ(*seen.rbegin(), count - 1);
  }
  const int64_t large = int64_t{1} << 40;
  EXPECT_LT(shuffled_index(large - 1, large, 1), large);
}

// Each of the six orders of three samples comes about as often.
TEST(SampleOrder, AllOrdersOccur) {
  std::map<int64_t, int> counts;
  for (uint64_t key = 0; key < 6000; ++key)
    ++counts[9 * shuffled_index(0, 3, key) + 3 * shuffled_index(1, 3, key) + shuffled_index(2, 3, key)];
  EXPECT_EQ(counts.size(), 6u);
  for (const auto& [order, count] : counts) EXPECT_NEAR(count, 1000, 200) << order;
}

// --- tokens ---

void write_tokens(const std::string& path, int count) {
  std::vector<uint16_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), uint16_t{65000});  // beyond what a signed type holds
  write_bytes(path, {reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2});
}

TEST(Tokens, OneBehindTheOther) {
  const TemporaryFolder folder;
  write_tokens(folder / "train.bin", 11);  // three windows of 3, and one more token
  const auto data = open_data(folder.path(), {.shuffle = false, .sequence = 3, .tokens = "input_ids", .next_tokens = "labels"});
  EXPECT_THAT(data->names(), ElementsAre("input_ids", "labels"));
  EXPECT_EQ(data->epoch_size(), 3);
  const Batch batch = data->next(2);
  EXPECT_EQ(batch.at("input_ids").tensor.dims, (Dims{2, 3}));
  EXPECT_THAT(elements<int64_t>(batch.at("input_ids")), ElementsAre(65000, 65001, 65002, 65003, 65004, 65005));
  EXPECT_THAT(elements<int64_t>(batch.at("labels")), ElementsAre(65001, 65002, 65003, 65004, 65005, 65006));
  EXPECT_THAT(elements<int64_t>(data->next(2).at("input_ids")), ElementsAre(65006, 65007, 65008, 65000, 65001, 65002));
  EXPECT_EQ(data->position(), (DataPosition{1, 1}));
}

TEST(Tokens, AtRandomPlaces) {
  const TemporaryFolder folder;
  write_tokens(folder / "text.bin", 40);
  const DataOptions options{.seed = 1, .sequence = 8};
  const auto data = open_data(folder / "text.bin", options);
  std::set<int64_t> places;
  for (int i = 0; i < 100; ++i) {
    const Batch batch = data->next(4);
    const auto x = elements<int64_t>(batch.at("x")), target = elements<int64_t>(batch.at("target"));
    for (size_t k = 0; k < x.size(); ++k) EXPECT_EQ(target[k], x[k] + 1);
    for (size_t k = 0; k < x.size(); k += 8) {
      EXPECT_EQ(x[k + 7], x[k] + 7);
      places.insert(x[k] - 65000);
    }
  }
  EXPECT_EQ(places.size(), 32u);  // 0 .. 31: 31 + 8 is the last token
  EXPECT_EQ(*places.rbegin(), 31);
  const auto resumed = open_data(folder / "text.bin", options);
  resumed->seek(data->position());
  EXPECT_EQ(elements<int64_t>(resumed->next(3).at("x")), elements<int64_t>(data->next(3).at("x")));
}

TEST(Tokens, WhatIsWrong) {
  const TemporaryFolder folder;
  write_bytes(folder / "odd.bin", "abc");
  write_tokens(folder / "short.bin", 8);
  EXPECT_THAT(open_error(folder / "odd.bin", {.sequence = 1}), AllOf(HasSubstr("odd.bin"), HasSubstr("uint16")));
  EXPECT_THAT(open_error(folder / "short.bin", {.sequence = 8}), AllOf(HasSubstr("8 tokens"), HasSubstr("sequence of 8")));
  EXPECT_THAT(open_error(folder / "short.bin"), HasSubstr("length of a sequence"));
  EXPECT_THAT(open_error(folder / "short.bin", {.sequence = 2, .next_tokens = "x"}), HasSubstr("name two"));
  write_bytes(folder / "text.txt", "hello");
  EXPECT_THAT(open_error(folder / "text.txt"), AllOf(HasSubstr("text.txt"), HasSubstr("no training data")));
}

TEST(BatchFolder, HasNoGaps) {
  const TemporaryFolder folder;
  for (const int step : {0, 1, 3}) write_batch(folder / ("x_" + std::to_string(step) + ".pb"), {1}, {1});
  EXPECT_THAT(open_error(folder.path()), HasSubstr("batches up to 1 and from 3 on"));
}

// What is not asked for is not looked at.
TEST(TrainingData, FilesOfOtherNames) {
  const TemporaryFolder arrays, batches;
  write_arrays(arrays, 4);
  write_npy<float>(arrays / "more.npy", "<f4", "(3,)", {1, 2, 3});
  write_bytes(arrays / "broken.npy", "no array");
  write_batch(batches / "x_0.pb", {2}, {1, 2}), write_batch(batches / "x_1.pb", {2}, {3, 4}), write_batch(batches / "more_1.pb", {1}, {1});
  DataOptions options;
  EXPECT_THAT(open_error(batches.path(), options), HasSubstr("more_0.pb"));
  options.inputs = {"x", "target"};
  const auto data = open_data(arrays.path(), options);
  EXPECT_THAT(data->names(), ElementsAre("broken", "more", "target", "x"));
  EXPECT_EQ(data->epoch_size(), 4);
  EXPECT_EQ(data->next(2).size(), 2u);
  EXPECT_EQ(open_data(batches.path(), options)->epoch_size(), 2);
}

TEST(TrainingData, TypesAreHeldAgainstThoseOfInputs) {
  const TemporaryFolder folder;
  write_arrays(folder, 4);
  const auto data = open_data(folder.path(), {});
  EXPECT_EQ(error_of([&] { check_types(*data, {{"x", DType::float32}, {"target", DType::int64}}); }), "");
  const std::string error = error_of([&] { check_types(*data, {{"x", DType::float32}, {"target", DType::int32}}); });
  EXPECT_THAT(error, HasSubstr("target.npy: holds int64"));
  EXPECT_THAT(error, HasSubstr("takes int32"));
  EXPECT_EQ(data->look("x", 3).dims, (Dims{3, 2}));
}

TEST(Tokens, ComeInTheTypeThatIsAskedFor) {
  const TemporaryFolder folder;
  std::string tokens;
  for (int i = 0; i < 9; ++i) tokens += static_cast<char>(i), tokens += '\1';
  write_bytes(folder / "t.bin", tokens);
  DataOptions options;
  options.sequence = 4, options.shuffle = false, options.token_type = DType::int32;
  const Batch batch = open_data(folder / "t.bin", options)->next(2);
  EXPECT_EQ(elements<int32_t>(batch.at("x")), (std::vector<int32_t>{256, 257, 258, 259, 260, 261, 262, 263}));
  EXPECT_EQ(elements<int64_t>(batch.at("target"))[0], 257);
}

}  // namespace
}  // namespace fretsaw
