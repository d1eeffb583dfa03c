// Outputs that several ranks fetch from their GPUs into one whole.
#include <gtest/gtest.h>

#include <atomic>

#include "graph/errors.h"
#include "kernels/cuda/devices.h"
#include "tests/runtime/plans.h"

namespace fretsaw {
namespace {

using namespace testing_plans;
using Inputs = std::map<std::string, RuntimeValue>;

constexpr int64_t kWidth = 1000;

// One row a sample, four rows a sample, and the batch on axis 1.
std::shared_ptr<Plan> plan_of(int data, int micro_batches) {
  auto model = new_model();
  Graph& g = *model->graph;
  Value* x = add_input(*model, "x", DType::float32, {Dim("batch"), kWidth});
  Value* y = add_node(g, "Abs", {x}, "y");
  Value* rows = add_node(g, "Reshape", {y, g.add_constant("shape", make_int64s({-1, kWidth / 4}))}, "rows");
  g.outputs = {y, rows, add_node(g, "Transpose", {x}, "turned", {attribute("perm", std::vector<int64_t>{1, 0})})};
  auto plan = make_plan({model}, micro_batches, {{"x", 0}});
  plan->mesh.data = data;
  plan->outputs[2].axis = 1;
  return plan;
}
Inputs inputs_of(int64_t batch, unsigned seed) {
  return {{"x", float_value({batch, kWidth}, noise(static_cast<size_t>(batch * kWidth), seed))}};
}
void expect_same(const std::vector<RuntimeValue>& got, const std::vector<RuntimeValue>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].tensor.dims, wanted[i].tensor.dims) << i;
    EXPECT_TRUE(elements<float>(got[i]) == elements<float>(wanted[i])) << i;
  }
}

// Two GPUs, or twice the only one; empty where there is none.
std::vector<int> two_devices() {
  const size_t found = cuda_devices().size();
  if (found == 0) return {};
  return found > 1 ? std::vector<int>{0, 1} : std::vector<int>{0, 0};
}

TEST(WholeOutputsOnDevices, EqualThoseOfTheCpu) {
  const std::vector<int> devices = two_devices();
  if (devices.empty()) GTEST_SKIP() << "no CUDA device";
  Session wanted(plan_of(1, 1), {.threads = 1});
  for (int data : {1, 2}) {
    for (int micro_batches : {1, 3}) {
      Session session(plan_of(data, micro_batches), {.device = "cuda", .devices = devices});
      std::vector<std::vector<RuntimeValue>> kept;
      for (unsigned step = 0; step < 4; ++step) kept.push_back(session.run(inputs_of(64, step)));
      for (unsigned step = 0; step < 4; ++step) expect_same(kept[step], wanted.run(inputs_of(64, step)));
      expect_same(session.run(inputs_of(7, 1)), wanted.run(inputs_of(7, 1)));
      kept.clear();
      for (int step = 0; step < 3; ++step) {
        session.run(inputs_of(64, 9));
        EXPECT_EQ(session.allocations_in_last_step(), 0) << "step " << step;
      }
    }
  }
}

// On one GPU, after whose failures a session goes on.
TEST(WholeOutputsOnDevices, AFailedStepLeavesNothingBehind) {
  if (two_devices().empty()) GTEST_SKIP() << "no CUDA device";
  std::atomic<int> failing{-1};
  SessionOptions options{.device = "cuda", .devices = {0, 0}};
  options.before_forward = [&](int rank, int micro_batch) {
    if (rank == failing && micro_batch == 2) throw Error("the device fell off", "", ErrorCode::device);
  };
  Session wanted(plan_of(1, 1), {.threads = 1}), session(plan_of(2, 3), options);
  const std::vector<RuntimeValue> kept = session.run(inputs_of(64, 1));
  for (int rank : {0, 1, 0, 1}) {
    failing = rank;
    EXPECT_THROW(session.run(inputs_of(64, 2)), Error);
    failing = -1;
    expect_same(session.run(inputs_of(64, 3)), wanted.run(inputs_of(64, 3)));
  }
  expect_same(kept, wanted.run(inputs_of(64, 1)));
}

}  // namespace
}  // namespace fretsaw
