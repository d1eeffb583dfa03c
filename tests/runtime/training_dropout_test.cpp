// Dropout while a model is trained: other masks in every step, the same ones on every mesh.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/runtime/training_runs.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kIn = 16, kHidden = 32, kBatch = 12;

// y = mean of dropped(x w1) w2, as a loss of its own
Model make_model(float ratio) {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* x = add_input(model, "x", DType::float32, {Dim("batch"), Dim(kIn)});
  Value* hidden = add_node(g, "MatMul", {x, g.add_constant("w1", floats({kIn, kHidden}, noise(kIn * kHidden, 1)))}, "hidden");
  auto yes = make_tensor(DType::boolean, {});
  *mutable_data(*yes) = std::byte{1};
  Value* dropped =
      add_node(g, "Dropout", {hidden, g.add_constant("ratio", floats({}, {ratio})), g.add_constant("training", yes)}, "dropped");
  g.outputs = {add_node(g, "MatMul", {dropped, g.add_constant("w2", floats({kHidden, 4}, noise(kHidden * 4, 2)))}, "logits")};
  name_nodes_by_outputs(g);
  return model;
}

Batch make_batch() {
  return classified_noise(kIn, some_classes(kBatch, 4), 7);
}

Trainer make_trainer(int data, int pipeline, int tensor, int micro_batches, float ratio = 0.4f, uint64_t seed = 0,
                     const std::string& recompute = "none") {
  PartitionOptions options;
  options.mesh.data = data, options.mesh.pipeline = pipeline, options.mesh.tensor = tensor, options.micro_batches = micro_batches;
  TrainingOptions training;
  training.recompute = recompute;
  TrainerOptions with;
  with.session.threads = 1, with.session.random_seed = seed;
  return Trainer(partition_for_training(make_model(ratio), options, training), with);
}

std::vector<double> losses(Trainer trainer, int steps, double rate = 0.1) {
  return losses_of(trainer, steps, rate, [](int) { return make_batch(); });
}

void expect_same(const std::vector<double>& got, const std::vector<double>& wanted) {
  for (size_t s = 0; s < wanted.size(); ++s) EXPECT_NEAR(got[s], wanted[s], 1e-5) << "step " << s;
}

TEST(TrainingDropout, MasksAreTheSameOnEveryMesh) {
  const std::vector<double> wanted = losses(make_trainer(1, 1, 1, 1), 4);
  expect_same(losses(make_trainer(1, 1, 1, 3), 4), wanted);
  expect_same(losses(make_trainer(2, 1, 1, 1), 4), wanted);
  expect_same(losses(make_trainer(5, 1, 1, 1), 4), wanted);  // parts of 3, 3, 2, 2, 2
  expect_same(losses(make_trainer(1, 2, 1, 2), 4), wanted);
  expect_same(losses(make_trainer(1, 1, 2, 1), 4), wanted);
  expect_same(losses(make_trainer(2, 2, 2, 2), 4), wanted);
  expect_same(losses(make_trainer(2, 1, 1, 2, 0.4f, 0, "all"), 4), wanted);
}

TEST(TrainingDropout, EveryStepAndSeedHasItsOwn) {
  const std::vector<double> still = losses(make_trainer(1, 1, 1, 1), 4, /*rate=*/0);
  for (size_t s = 1; s < still.size(); ++s) EXPECT_NE(still[s], still[0]) << s;  // nothing but the masks has changed
  EXPECT_EQ(losses(make_trainer(1, 1, 1, 1), 4, 0), still);
  EXPECT_NE(losses(make_trainer(1, 1, 1, 1, 0.4f, 5), 4, 0)[0], still[0]);
  const std::vector<double> none = losses(make_trainer(1, 1, 1, 1, 0.0f), 2, 0);
  EXPECT_EQ(none[0], none[1]);
}

// The gradient of w1 is zero in the columns that a mask of one sample drops; of many, about `ratio` of the places are.
TEST(TrainingDropout, TheRatioIsTheShareThatGoes) {
  Trainer trainer = make_trainer(1, 1, 1, 1);
  Batch one;
  one["x"] = float_value({1, kIn}, std::vector<float>(kIn, 1.0f)), one["target"] = int_value({1}, {2});
  int dropped = 0;
  constexpr int kSteps = 100;
  for (int s = 0; s < kSteps; ++s) {
    trainer.step(one, 0);
    const std::vector<float> gradient = elements<float>(trainer.gradient("w1"));
    for (int64_t j = 0; j < kHidden; ++j) dropped += gradient[static_cast<size_t>(j)] == 0;
  }
  const double share = dropped / static_cast<double>(kSteps * kHidden), deviation = std::sqrt(0.4 * 0.6 / (kSteps * kHidden));
  EXPECT_NEAR(share, 0.4, 4 * deviation);
}

TEST(TrainingDropout, AResumedRunDrawsTheNextMasks) {
  const std::vector<double> wanted = losses(make_trainer(1, 1, 1, 1), 5);
  Trainer first = make_trainer(1, 1, 1, 1);
  for (int s = 0; s < 2; ++s) first.step(make_batch(), 0.1);
  Trainer second = make_trainer(2, 1, 1, 2);
  second.restore(first.kept(), first.updates());
  for (size_t s = 2; s < 5; ++s) EXPECT_NEAR(second.step(make_batch(), 0.1).loss, wanted[s], 1e-5) << s;
}

}  // namespace
}  // namespace fretsaw
