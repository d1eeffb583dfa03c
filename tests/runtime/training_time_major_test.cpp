// A model whose samples lie along the second axis of its input and its targets trains as on one rank, however the batch is divided.
#include <gtest/gtest.h>

#include "tests/runtime/training_runs.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kSteps = 5, kWide = 6, kClasses = 7, kBatch = 8;

// Each step looks at the mean of all steps of its sample.
Model time_major_model() {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* x = add_input(model, "x", DType::float32, {Dim(kSteps), Dim("batch"), Dim(kWide)});
  for (const std::string layer : {"0", "1"}) {
    const auto seed = static_cast<unsigned>(10 * (layer == "1"));
    Value* own = add_node(g, "MatMul", {x, add_weight(g, "own" + layer, {kWide, kWide}, seed + 1)}, "own_product" + layer);
    Value* mean = add_node(g, "ReduceMean", {x, g.add_constant("time" + layer, make_int64s({0}))}, "mean" + layer);
    Value* all = add_node(g, "MatMul", {mean, add_weight(g, "all" + layer, {kWide, kWide}, seed + 2)}, "all_product" + layer);
    x = add_node(g, "Tanh", {add_node(g, "Add", {own, all}, "sum" + layer)}, "layer" + layer);
  }
  g.outputs = {add_node(g, "MatMul", {x, add_weight(g, "head", {kWide, kClasses}, 30)}, "scores")};
  name_nodes_by_outputs(g);
  return model;
}

struct Case {
  std::string name;
  int data = 1, pipeline = 1, tensor = 1, micro_batches = 1;
  int zero = 0;
};

std::vector<double> train(const Case& c) {
  TrainingOptions training = with_optimizer("sgd:lr=0.5");
  training.zero = c.zero;
  Trainer trainer = trainer_of(time_major_model(), cut_of(c), training);
  for (const PlanInput& input : trainer.plan().plan->inputs) EXPECT_EQ(input.batch_axis, 1) << input.name;
  Batch batch;
  batch["x"] = float_value({kSteps, kBatch, kWide}, noise(static_cast<size_t>(kSteps * kBatch * kWide), 3));
  batch["target"] = int_value({kSteps, kBatch}, some_classes(kSteps * kBatch, kClasses, 5));
  return losses_of(trainer, 4, 0.5, [&](int) { return batch; });
}

class TimeMajor : public ::testing::TestWithParam<Case> {};

TEST_P(TimeMajor, TrainsAsOnOneRank) {
  const std::vector<double> wanted = train({"whole"}), got = train(GetParam());
  EXPECT_LT(wanted.back(), wanted.front());
  expect_close(got, wanted, 1e-5);
}
INSTANTIATE_TEST_SUITE_P(Ways, TimeMajor,
                         ::testing::Values(Case{"Data", 2}, Case{"MicroBatches", 1, 1, 1, 4}, Case{"Pipeline", 1, 2, 1, 2},
                                           Case{"AllAxes", 2, 2, 2, 2}, Case{"DividedParameters", 2, 1, 1, 1, 3}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fretsaw
