// The factor that float16 losses begin with, and which scalars are no parameters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "graph/training/loss_scale.h"
#include "tests/runtime/training_runs.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kIn = 4, kClasses = 1000, kBatch = 64;

Model make_classifier() {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* x = add_input(model, "x", DType::float32, {Dim("batch"), Dim(kIn)});
  Value* product = add_node(g, "MatMul", {x, add_weight(g, "w", {kIn, kClasses}, 1, 0.1f)}, "product");
  g.outputs = {add_node(g, "Add", {product, g.add_constant("b", floats({kClasses}, std::vector<float>(kClasses)))}, "logits")};
  name_nodes_by_outputs(g);
  return model;
}

// The gradients of the target's bias point all the same way.
Batch one_target() {
  return classified_noise(kIn, std::vector<int64_t>(kBatch, 5), 7);
}

Trainer make_trainer(const std::string& precision, const std::string& loss = "softmax_cross_entropy", int micro_batches = 1) {
  PartitionOptions options;
  options.micro_batches = micro_batches;
  TrainingOptions training;
  training.precision = precision, training.loss = parse_loss(loss);
  return trainer_of(make_classifier(), options, training);
}

TEST(LossScaleTraining, IsOfTheMeanAndNotOfTheSum) {
  Trainer wide = make_trainer("fp32");
  const StepResult wanted = wide.step(one_target(), 0.1);
  for (int micro_batches : {1, 4}) {
    Trainer narrow = make_trainer("fp16", "softmax_cross_entropy", micro_batches);
    const StepResult got = narrow.step(one_target(), 0.1);
    EXPECT_FALSE(got.skipped);
    EXPECT_NEAR(got.gradient_norm, wanted.gradient_norm, 0.01 * wanted.gradient_norm);
    EXPECT_NEAR(got.loss, wanted.loss, 0.01 * wanted.loss);
  }
}

TEST(LossScaleTraining, OfASumIsTheFactorItself) {
  Trainer trainer = make_trainer("fp16", "softmax_cross_entropy:reduction=sum");
  EXPECT_TRUE(trainer.step(one_target(), 0.1).skipped);
}

// Whatever the batches of the steps before were.
TEST(LossScaleTraining, IsKeptAsTheFactor) {
  Trainer first = make_trainer("fp16"), second = make_trainer("fp16");
  first.step(one_target(), 0.1);
  const auto kept = first.kept();
  EXPECT_EQ(elements<float>(kept.at(kLossScale)), std::vector<float>{65536});
  second.restore(kept, first.updates());
  EXPECT_EQ(first.step(one_target(), 0.1).loss, second.step(one_target(), 0.1).loss);
  EXPECT_EQ(elements<float>(second.kept().at(kLossScale)), std::vector<float>{65536});
}

TEST(LossScaleTraining, IsDividedByAPowerOfTwo) {
  LossScale scale;
  EXPECT_EQ(scale.seed(1), 65536);
  EXPECT_EQ(scale.seed(0), 65536);
  EXPECT_EQ(scale.seed(64), 1024);
  EXPECT_EQ(scale.seed(65), 512);
}

// y = clip((x w)^e, low, high)
Model make_powers() {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* x = add_input(model, "x", DType::float32, {Dim("batch"), Dim(kIn)});
  const auto number = [&](const std::string& name, float value) { return g.add_constant(name, floats({}, {value})); };
  Value* product = add_node(g, "MatMul", {x, g.add_constant("w", floats({kIn, kIn}, noise(kIn * kIn, 1)))}, "product");
  Value* scaled = add_node(g, "Mul", {product, number("factor", 1.5f)}, "scaled");
  Value* power = add_node(g, "Pow", {scaled, number("e", 2)}, "power");
  g.outputs = {add_node(g, "Clip", {power, number("low", -2), number("high", 2)}, "y")};
  name_nodes_by_outputs(g);
  return model;
}

TEST(TrainedParameters, ExponentsAndBoundsAreNamedOrStay) {
  using ::testing::ElementsAre;
  using ::testing::UnorderedElementsAre;
  TrainingOptions training;
  training.loss = parse_loss("mse");
  for (const std::string precision : {"fp32", "bf16"}) {
    training.precision = precision;
    training.train = {};
    const TrainingPlan plan = partition_for_training(make_powers(), {}, training);
    EXPECT_THAT(plan.parameters, UnorderedElementsAre("w", "factor"));
    for (const char* name : {"'e'", "'low'", "'high'"})
      EXPECT_THAT(plan.plan->notes, ::testing::Contains(::testing::HasSubstr(std::string(name) + " is an exponent or a bound")));
    training.train = {"w", "e", "low"};
    EXPECT_THAT(partition_for_training(make_powers(), {}, training).parameters, UnorderedElementsAre("w", "e", "low"));
  }
  training.train = {}, training.freeze = {"factor", "low"};
  const TrainingPlan frozen = partition_for_training(make_powers(), {}, training);
  EXPECT_THAT(frozen.parameters, ElementsAre("w"));
  EXPECT_THAT(frozen.plan->notes, ::testing::Not(::testing::Contains(::testing::HasSubstr("'low'"))));
}

}  // namespace
}  // namespace fretsaw
