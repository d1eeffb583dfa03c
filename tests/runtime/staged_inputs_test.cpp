// Inputs that come to a device ahead of their step: which bytes are found there, for how long, and that a rank takes them from there.
#include "runtime/staged_inputs.h"

#include <gtest/gtest.h>

#include "runtime/rank.h"
#include "tests/runtime/host_backed_device.h"
#include "tests/runtime/plans.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kRows = 32, kColumns = 2048;  // 256 KiB

RuntimeValue rows_of(float first) {
  std::vector<float> values(static_cast<size_t>(kRows * kColumns));
  for (size_t i = 0; i < values.size(); ++i) values[i] = first + static_cast<float>(i % 97);
  return float_value({kRows, kColumns}, values);
}
StagedInputs::Piece piece_of(const RuntimeValue& value) {
  return {static_cast<const std::byte*>(value.tensor.data), value.tensor.bytes(), value.owner};
}
StagedInputs make_staged() {
  return {std::make_shared<HostBackedDevice>(), std::make_shared<AllocationCount>()};
}
const std::byte* data_of(const RuntimeValue& value) {
  return static_cast<const std::byte*>(value.tensor.data);
}

TEST(StagedInputs, PartsAreFoundByTheirAddress) {
  StagedInputs staged = make_staged();
  const RuntimeValue x = rows_of(1), other = rows_of(2);
  staged.stage({piece_of(x)});
  const size_t bytes = x.tensor.bytes(), row = bytes / kRows;
  const void* whole = staged.find(data_of(x), bytes);
  ASSERT_TRUE(whole);
  EXPECT_NE(whole, x.tensor.data);
  EXPECT_EQ(std::memcmp(whole, x.tensor.data, bytes), 0);
  EXPECT_EQ(staged.find(data_of(x) + row, 3 * row), static_cast<const std::byte*>(whole) + row);
  EXPECT_FALSE(staged.find(data_of(x) + row, bytes)) << "more than was staged";
  EXPECT_FALSE(staged.find(data_of(other), bytes));
}

TEST(StagedInputs, WhatAStepHasFoundIsForgottenWithIt) {
  StagedInputs staged = make_staged();
  const RuntimeValue first = rows_of(1), second = rows_of(2);
  staged.stage({piece_of(first)});
  EXPECT_GT(first.owner.use_count(), 1) << "its memory is held, or something else could come to lie there";
  const void* memory = staged.find(data_of(first), first.tensor.bytes());
  staged.stage({piece_of(second)});  // while the step that found the first runs
  EXPECT_EQ(std::memcmp(memory, first.tensor.data, first.tensor.bytes()), 0);
  staged.forget();
  EXPECT_EQ(first.owner.use_count(), 1);
  EXPECT_FALSE(staged.find(data_of(first), first.tensor.bytes()));
  EXPECT_TRUE(staged.find(data_of(second), second.tensor.bytes()));
}

TEST(StagedInputs, WhatNoStepLooksForMakesRoom) {
  StagedInputs staged = make_staged();
  std::vector<RuntimeValue> values;
  for (int i = 0; i < 4; ++i) {
    values.push_back(rows_of(static_cast<float>(i)));
    staged.stage({piece_of(values.back())});
  }
  EXPECT_EQ(values[0].owner.use_count(), 1);
  EXPECT_EQ(values[1].owner.use_count(), 1);
  EXPECT_TRUE(staged.find(data_of(values[2]), values[2].tensor.bytes()));
  EXPECT_TRUE(staged.find(data_of(values[3]), values[3].tensor.bytes()));
}

TEST(StagedInputs, AWarmOneAsksForNoMemory) {
  const auto count = std::make_shared<AllocationCount>();
  StagedInputs staged(std::make_shared<HostBackedDevice>(), count);
  for (int i = 0; i < 6; ++i) {
    const RuntimeValue x = rows_of(static_cast<float>(i));
    staged.stage({piece_of(x)});
    EXPECT_TRUE(staged.find(data_of(x), x.tensor.bytes()));
    staged.forget();
  }
  EXPECT_EQ(count->allocations.load(), 1);
}

// Counts what goes from the host to it.
class CountingDevice : public HostBackedDevice {
 public:
  void upload(void* to, const void* from, size_t bytes) override {
    if (bytes >= size_t{16} << 10) ++uploads;
    HostBackedDevice::upload(to, from, bytes);
  }
  int uploads = 0;
};

std::shared_ptr<Plan> doubling_plan(int micro_batches) {
  auto model = new_model();
  Value* x = add_input(*model, "x", DType::float32, {Dim("batch"), Dim(kColumns)});
  model->graph->outputs = {add_node(*model->graph, "Add", {x, x}, "y")};
  return make_plan({model}, micro_batches);
}

TEST(StagedInputs, ARankTakesItsMicroBatchesFromThere) {
  for (int micro_batches : {1, 4}) {
    const std::shared_ptr<Plan> plan = doubling_plan(micro_batches);
    const auto device = std::make_shared<CountingDevice>(), beside = std::make_shared<CountingDevice>();
    Rank rank(plan, {}, 0, 0, 0, 1, [] { return 0.0; }, {device, nullptr, nullptr, [&] { return beside; }});
    const auto world = make_thread_communicators(1);
    int step_number = 0;
    for (const bool asks : {true, true, true, false, true}) {
      const bool stages = asks && step_number++ >= 2;  // not before the first steps have taken the memory they need
      device->uploads = beside->uploads = 0;
      const std::map<std::string, RuntimeValue> given = {{"x", rows_of(stages ? 3.f : 5.f)}};
      StepInputs step;
      step.inputs = check_inputs(*plan, given, {false});
      step.batches = divide_batch(*plan, step.inputs);
      if (asks) rank.stage_inputs(step);
      rank.run_step(step, *world[0]);
      EXPECT_EQ(device->uploads, stages ? 0 : micro_batches);
      EXPECT_EQ(beside->uploads, stages ? 1 : 0);
      const std::vector<float> x = elements<float>(given.at("x"));
      for (int m = 0; m < micro_batches; ++m) {
        const std::vector<float> y = elements<float>(*rank.output(0, m));
        const size_t begin = static_cast<size_t>(m) * y.size();
        ASSERT_EQ(y.size() * static_cast<size_t>(micro_batches), x.size());
        for (size_t i = 0; i < y.size(); ++i) ASSERT_EQ(y[i], 2 * x[begin + i]);
      }
      rank.forget_step();
    }
  }
}

}  // namespace
}  // namespace fretsaw
