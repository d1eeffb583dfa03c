// Where in a program outputs are final, and what is there when a run tells of it.
#include <gtest/gtest.h>

#include <cmath>

#include "runtime/program.h"
#include "tests/runtime/host_backed_device.h"
#include "tests/runtime/plans.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kCount = 96;

double no_time() {
  return 0;
}

// next = a + x, or what `sum` makes of them; `after` adds nodes behind it, whose last value is a second output.
class OneSum {
 public:
  using Sum = std::function<Value*(Graph&, Value* a, Value* x)>;
  using After = std::function<Value*(Graph&, Value* a, Value* next)>;
  OneSum(bool on_device, const Sum& sum, const After& after) : on_device_(on_device) {
    model_ = new_model();
    Graph& g = *model_->graph;
    Value* a = add_input(*model_, "a", DType::float32, {kCount});
    Value* x = add_input(*model_, "x", DType::float32, {kCount});
    Value* next = sum ? sum(g, a, x) : add_node(g, "Add", {a, x}, "next");
    g.outputs = {next, after(g, a, next)};
    infer_shapes(*model_);
    context_.now_us = no_time;
    cache_ = std::make_unique<ProgramCache>(model_, g.inputs, false);
    if (on_device) {
      context_.device = std::make_shared<HostBackedDevice>();
      context_.device_memory = std::make_unique<RankMemory>(context_.device.get());
      BindingSpec binding;
      binding.binds = true, binding.kept = {0, -1};
      cache_->bind(std::move(binding));
      copy_pooled(context_.device_memory->pool, float_value({kCount}, std::vector<float>(kCount, 1)), state_, context_.device.get());
    } else {
      state_ = float_value({kCount}, std::vector<float>(kCount, 1));
    }
    cache_->await({{0}});
    context_.reached = [this](Program& program, const Milestone& milestone) {
      ++reached;
      EXPECT_EQ(milestone.outputs, std::vector<size_t>{0});
      EXPECT_LT(milestone.step + 1, program.steps.size()) << "not before the end";
      const RuntimeValue& made = on_device_ ? state_ : program.values[static_cast<size_t>(program.outputs[0])];
      seen = elements<float>(made);
      if (on_device_) made.tensor.as<float>()[0] = 1000;  // as others do who go on with it
    };
  }

  // The state afterwards.
  std::vector<float> run() {
    const RuntimeValue x = float_value({kCount}, std::vector<float>(kCount, 0.5f));
    const RuntimeValue* inputs[] = {&state_, &x};
    reached = 0;
    cache_->run(inputs, outputs_, context_, 0);
    state_ = outputs_[0];
    return elements<float>(state_);
  }
  std::vector<float> other() const { return elements<float>(outputs_[1]); }
  int reached = 0;
  std::vector<float> seen;

 private:
  bool on_device_;
  std::shared_ptr<Model> model_;
  RankContext context_;
  std::unique_ptr<ProgramCache> cache_;
  RuntimeValue state_;
  std::vector<RuntimeValue> outputs_ = std::vector<RuntimeValue>(2);
};

Value* negated_twice(Graph& g, Value* a, Value*) {
  return add_node(g, "Exp", {add_node(g, "Neg", {a}, "negative")}, "other");
}
// It takes neither the state nor its new value.
Value* of_nothing(Graph& g, Value*, Value*) {
  Value* c = g.add_constant("c", floats({kCount}, std::vector<float>(kCount, 2)));
  return add_node(g, "Exp", {add_node(g, "Mul", {g.inputs[1], c}, "twice")}, "other");
}
Value* summed_up(Graph& g, Value* a, Value* x) {
  return add_node(g, "CumSum", {add_node(g, "Add", {a, x}, "sum"), g.add_constant("axis", make_int64(0))}, "next");
}

TEST(Milestones, AreReachedBeforeTheEndFromTheSecondRunOn) {
  for (const bool on_device : {false, true}) {
    OneSum one(on_device, nullptr, of_nothing);
    EXPECT_EQ(one.run()[3], 1.5f);
    EXPECT_EQ(one.reached, 0) << "a first run may have to be repeated";
    EXPECT_EQ(one.run()[3], 2);
    EXPECT_EQ(one.reached, 1);
    EXPECT_EQ(one.seen[3], 2);
  }
}

// Whoever goes on with the value beside the rest of the program finds his own work there afterwards.
TEST(Milestones, WhatIsKeptLiesInItsPlace) {
  for (const auto& sum : {OneSum::Sum(), OneSum::Sum(summed_up)}) {
    OneSum one(true, sum, of_nothing);
    const float first = one.run()[0];
    EXPECT_EQ(first, 1.5f);
    EXPECT_EQ(one.run()[0], 1000);
    EXPECT_EQ(one.reached, 1);
    EXPECT_EQ(one.seen[0], 2);
    EXPECT_EQ(one.run()[0], 1000);
    EXPECT_EQ(one.seen[0], 1000.5f);
  }
}

// The old value's place is not touched as long as it is read.
TEST(Milestones, StandBehindWhatReadsTheOldValue) {
  OneSum one(true, nullptr, [](Graph& g, Value* a, Value* next) {
    return add_node(g, "Exp", {add_node(g, "Sub", {next, a}, "moved")}, "other");
  });
  one.run();
  for (int run = 0; run < 2; ++run) {
    one.run();
    EXPECT_EQ(one.reached, 1);
    EXPECT_NEAR(one.other()[0], std::exp(0.5f), 1e-4f);
  }
  OneSum negative(true, nullptr, negated_twice);
  negative.run(), negative.run();
  EXPECT_NEAR(negative.other()[5], std::exp(-1.5f), 1e-4f);
}

}  // namespace
}  // namespace fretsaw
