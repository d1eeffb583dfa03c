// Parts of outputs in their places of the whole: alone, and in sessions with data ranks and micro-batches.
#include "runtime/whole_outputs.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <thread>

#include "graph/errors.h"
#include "runtime/rank.h"
#include "tests/runtime/plans.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

// --- alone ---

std::shared_ptr<Plan> plan_of_outputs(const std::vector<PlanOutput>& outputs) {
  auto plan = std::make_shared<Plan>();
  plan->outputs = outputs;
  return plan;
}
PlanOutput output_of(const std::string& merge = "concat", int axis = 0) {
  return {"y", {}, 0, merge, axis};
}
// 7 samples: two data ranks of two micro-batches.
const StepBatches kBatches{7, {{{0, 2}, {2, 2}}, {{4, 2}, {6, 1}}}};

TensorView floats_of(Dims dims, DType dtype = DType::float32) {
  TensorView view;
  view.dtype = dtype;
  view.dims = std::move(dims);
  return view;
}
// Every part of the step with `rows` rows a sample, in this order; what is written is the number of the float in the whole.
std::vector<std::shared_ptr<void>> write_parts(WholeOutputs& wholes, const std::vector<std::pair<int, int>>& order, int64_t rows) {
  std::vector<std::shared_ptr<void>> places;
  for (auto [data, micro_batch] : order) {
    const BatchPart part = kBatches.parts[static_cast<size_t>(data)][static_cast<size_t>(micro_batch)];
    places.push_back(wholes.place(0, part, floats_of({part.count * rows, 3})));
    for (int64_t i = 0; places.back() && i < part.count * rows * 3; ++i)
      static_cast<float*>(places.back().get())[i] = static_cast<float>(part.begin * rows * 3 + i);
  }
  return places;
}
const std::vector<std::pair<int, int>> kOrder = {{1, 0}, {0, 0}, {1, 1}, {0, 1}};

TEST(WholeOutputs, PartsLieWhereTheyBelong) {
  WholeOutputs wholes(plan_of_outputs({output_of()}), nullptr);
  for (int64_t rows : {1, 4, 0}) {
    wholes.begin(kBatches);
    write_parts(wholes, kOrder, rows);
    const RuntimeValue whole = wholes.take(0);
    ASSERT_EQ(whole.kind, RuntimeValue::Kind::tensor);
    EXPECT_EQ(whole.tensor.dims, (Dims{7 * rows, 3}));
    const auto values = elements<float>(whole);
    for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], static_cast<float>(i));
  }
}

TEST(WholeOutputs, AWholeNeedsEveryPart) {
  WholeOutputs wholes(plan_of_outputs({output_of()}), nullptr);
  wholes.begin(kBatches);
  EXPECT_EQ(wholes.take(0).kind, RuntimeValue::Kind::absent);
  write_parts(wholes, {{0, 0}, {1, 0}, {1, 1}}, 1);
  EXPECT_EQ(wholes.take(0).kind, RuntimeValue::Kind::absent);
}

TEST(WholeOutputs, APartThatDoesNotFitStaysWhereItIs) {
  const std::vector<TensorView> misfits = {floats_of({3, 3}), floats_of({2, 4}),    floats_of({2}),
                                           floats_of({}),     floats_of({2, 3, 1}), floats_of({2, 3}, DType::int32)};
  for (const TensorView& misfit : misfits) {
    WholeOutputs wholes(plan_of_outputs({output_of()}), nullptr);
    wholes.begin(kBatches);
    auto places = write_parts(wholes, {{0, 0}, {1, 1}}, 1);
    ASSERT_TRUE(places[0] && places[1]);
    EXPECT_EQ(wholes.place(0, kBatches.parts[1][0], misfit), nullptr);
    EXPECT_EQ(wholes.place(0, kBatches.parts[0][1], floats_of({2, 3})), nullptr);
    EXPECT_EQ(wholes.take(0).kind, RuntimeValue::Kind::absent);
    EXPECT_EQ(static_cast<float*>(places[0].get())[5], 5);  // those that were placed are whole
    EXPECT_EQ(static_cast<float*>(places[1].get())[0], 18);
    wholes.begin(kBatches);
    EXPECT_EQ(wholes.place(0, kBatches.parts[0][0], floats_of({2, 3})), nullptr) << "tried again";
  }
}

TEST(WholeOutputs, WhatHasNoRowsHasNoPlace) {
  for (const PlanOutput& output : {output_of("mean"), output_of("sum"), output_of("same"), output_of("concat", 1)}) {
    WholeOutputs wholes(plan_of_outputs({output}), nullptr);
    wholes.begin(kBatches);
    EXPECT_EQ(wholes.place(0, kBatches.parts[0][0], floats_of({2, 3})), nullptr);
  }
  TensorView last = floats_of({2, 8, 2, 2});
  last.layout = Layout::nhwc;
  const int64_t most = int64_t{1} << 62;
  for (const TensorView& part : {floats_of({2, 3}, DType::string), floats_of({2, 3}, DType::int4), floats_of({}), floats_of({3, 3}), last,
                                 floats_of({most, 0}), floats_of({int64_t{1} << 45, 1})}) {
    WholeOutputs wholes(plan_of_outputs({output_of()}), nullptr);
    wholes.begin(kBatches);
    EXPECT_EQ(wholes.place(0, kBatches.parts[0][0], part), nullptr);
    EXPECT_EQ(wholes.take(0).kind, RuntimeValue::Kind::absent);
  }
}

TEST(WholeOutputs, TheOnlyPartIsTheWhole) {
  WholeOutputs wholes(plan_of_outputs({output_of()}), nullptr);
  wholes.begin({1, {{{0, 1}}, {}}});
  EXPECT_EQ(wholes.place(0, {0, 1}, floats_of({1, 3})), nullptr);
  EXPECT_EQ(wholes.allocations(), 0);
}

TEST(WholeOutputs, MemoryComesBackOnceNobodyHoldsIt) {
  WholeOutputs wholes(plan_of_outputs({output_of()}), nullptr);
  const auto run = [&] {
    wholes.begin(kBatches);
    write_parts(wholes, kOrder, 1);
    return wholes.take(0);
  };
  std::vector<RuntimeValue> held = {run(), run(), run()};
  EXPECT_EQ(wholes.allocations(), 3);
  for (const RuntimeValue& a : held) {
    for (const RuntimeValue& b : held) EXPECT_EQ(&a == &b, a.tensor.data == b.tensor.data);
  }
  const void* let_go = held[1].tensor.data;
  held[1] = {};
  for (int i = 0; i < 3; ++i) EXPECT_EQ(run().tensor.data, let_go);
  EXPECT_EQ(wholes.allocations(), 3);
}

// A copy into it may be under way after the step has failed.
TEST(WholeOutputs, APlaceKeepsItsMemory) {
  WholeOutputs wholes(plan_of_outputs({output_of()}), nullptr);
  wholes.begin(kBatches);
  std::shared_ptr<void> under_way = write_parts(wholes, {{0, 0}}, 1)[0];
  const void* address = under_way.get();
  wholes.forget();
  wholes.begin(kBatches);
  write_parts(wholes, kOrder, 1);
  RuntimeValue whole = wholes.take(0);
  EXPECT_NE(whole.tensor.data, address);
  under_way.reset();
  wholes.begin(kBatches);
  EXPECT_EQ(write_parts(wholes, {{0, 0}}, 1)[0].get(), address);
  EXPECT_EQ(wholes.allocations(), 2);
}

// --- in sessions ---

// Outputs of one row a sample, one again, of three rows, with the batch on axis 1, and of as many rows as there are positive numbers.
std::shared_ptr<Model> model_of_outputs() {
  auto model = new_model();
  Graph& g = *model->graph;
  Value* x = add_input(*model, "x", DType::float32, {Dim("batch"), 6});
  Value* y = add_node(g, "Neg", {x}, "y");
  Value* rows = add_node(g, "Reshape", {y, g.add_constant("shape", make_int64s({-1, 2}))}, "rows");
  Value* turned = add_node(g, "Transpose", {x}, "turned", {attribute("perm", std::vector<int64_t>{1, 0})});
  Value* zero = g.add_constant("zero", floats({1}, {0}));
  Value* all = add_node(g, "Reshape", {x, g.add_constant("flat", make_int64s({-1}))}, "all");
  Value* positive = add_node(g, "Compress", {all, add_node(g, "Greater", {all, zero}, "is_positive")}, "positive");
  g.outputs = {y, y, rows, turned, positive};
  return model;
}
std::shared_ptr<Plan> plan_of(int data, int micro_batches, int tensor = 1) {
  auto plan = make_plan({model_of_outputs()}, micro_batches, {{"x", 0}});
  plan->mesh.data = data, plan->mesh.tensor = tensor;
  plan->outputs[3].axis = 1;
  return plan;
}
using Inputs = std::map<std::string, RuntimeValue>;
Inputs inputs_of(int64_t batch, unsigned seed) {
  return {{"x", float_value({batch, 6}, noise(static_cast<size_t>(batch * 6), seed))}};
}
void expect_same(const std::vector<RuntimeValue>& got, const std::vector<RuntimeValue>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].tensor.dims, wanted[i].tensor.dims) << i;
    EXPECT_EQ(elements<float>(got[i]), elements<float>(wanted[i])) << i;
  }
}

TEST(WholeOutputsOfRanks, AreThoseWhosePartsLieOneBehindTheOther) {
  const auto plan = plan_of(2, 2);
  const Inputs inputs = inputs_of(7, 1);
  WholeOutputs wholes(plan, nullptr);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int d = 0; d < 2; ++d) ranks.push_back(std::make_unique<Rank>(plan, SessionOptions{}, d, 0, 0, 1, [] { return 0.0; }));
  auto communicators = make_thread_communicators(2, std::chrono::seconds(20));
  StepInputs step{check_inputs(*plan, inputs, {false}), {}, &wholes};
  step.batches = divide_batch(*plan, step.inputs);
  wholes.begin(step.batches);
  std::vector<std::thread> threads;
  for (size_t r = 0; r < 2; ++r) threads.emplace_back([&, r] { ranks[r]->run_step(step, *communicators[r]); });
  for (auto& thread : threads) thread.join();
  const auto wanted = Session(plan_of(1, 1), {.threads = 1}).run(inputs);
  for (size_t i = 0; i < wanted.size(); ++i) {
    const RuntimeValue whole = wholes.take(i);
    ASSERT_EQ(whole.kind == RuntimeValue::Kind::tensor, i < 3) << i;
    if (i >= 3) continue;
    EXPECT_EQ(whole.tensor.dims, wanted[i].tensor.dims) << i;
    EXPECT_EQ(elements<float>(whole), elements<float>(wanted[i])) << i;
  }
}

TEST(WholeOutputsOfSessions, EqualThoseOfOneRank) {
  for (int data : {1, 2, 3}) {
    for (int micro_batches : {1, 2, 3}) {
      for (int tensor : {1, 2}) {
        Session whole(plan_of(1, 1), {.threads = 1}), parts(plan_of(data, micro_batches, tensor), {.threads = 1});
        for (int64_t batch : {9, 10, 64, 9, 9}) {
          const Inputs inputs = inputs_of(batch, static_cast<unsigned>(batch));
          expect_same(parts.run(inputs), whole.run(inputs));
        }
      }
    }
  }
}

TEST(WholeOutputsOfSessions, FewerSamplesThanRanks) {
  Session whole(plan_of(1, 1), {.threads = 1}), parts(plan_of(3, 1), {.threads = 1});
  for (int64_t batch : {1, 2, 3, 1}) expect_same(parts.run(inputs_of(batch, 1)), whole.run(inputs_of(batch, 1)));
}

TEST(WholeOutputsOfSessions, MayBeKept) {
  Session whole(plan_of(1, 1), {.threads = 1}), parts(plan_of(2, 2), {.threads = 1});
  std::vector<std::vector<RuntimeValue>> kept;
  for (unsigned step = 0; step < 4; ++step) kept.push_back(parts.run(inputs_of(8, step)));
  for (unsigned step = 0; step < 4; ++step) expect_same(kept[step], whole.run(inputs_of(8, step)));
  EXPECT_NE(kept[0][0].tensor.data, kept[0][1].tensor.data);
}

TEST(WholeOutputsOfSessions, WarmStepsAllocateNothing) {
  for (int micro_batches : {1, 3}) {
    Session session(plan_of(2, micro_batches), {.threads = 1});
    const Inputs inputs = inputs_of(12, 1);
    for (int i = 0; i < 2; ++i) session.run(inputs);
    for (int i = 0; i < 5; ++i) {
      auto outputs = session.run(inputs);
      EXPECT_EQ(session.allocations_in_last_step(), 0) << "step " << i;
    }
  }
}

TEST(WholeOutputsOfSessions, AFailedStepLeavesNothingBehind) {
  std::atomic<int> failing{-1};
  SessionOptions options{.threads = 1};
  options.before_forward = [&](int rank, int micro_batch) {
    if (rank == failing && micro_batch == 1) throw Error("the device fell off", "", ErrorCode::device);
  };
  Session whole(plan_of(1, 1), {.threads = 1}), parts(plan_of(2, 2), options);
  const std::vector<RuntimeValue> kept = parts.run(inputs_of(8, 1));
  parts.run(inputs_of(8, 2));
  for (int rank : {0, 1, 0, 1}) {
    failing = rank;
    EXPECT_THROW(parts.run(inputs_of(8, 3)), Error);
    failing = -1;
    expect_same(parts.run(inputs_of(8, 4)), whole.run(inputs_of(8, 4)));
    EXPECT_EQ(parts.allocations_in_last_step(), 0);
  }
  expect_same(kept, whole.run(inputs_of(8, 1)));
}

}  // namespace
}  // namespace fretsaw
