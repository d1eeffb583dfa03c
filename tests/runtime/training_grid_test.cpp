// Two tensor axes: running statistics, plans in files, checkpoints of another mesh.
#include <gtest/gtest.h>

#include "tests/runtime/training_runs.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kIn = 12, kHidden = 8, kClasses = 6, kBatch = 8;
constexpr int kLayers = 4;

std::string named(const char* name, int layer) {
  return name + std::to_string(layer);
}

// Products with a norm by the batch's statistics behind each.
Model norm_model() {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* x = add_input(model, "x", DType::float32, {Dim("batch"), Dim(kIn)});
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto row = [&](const char* name, float value) { return add_row(g, named(name, layer), kHidden, value); };
    const Dims dims = {layer == 0 ? kIn : kHidden, kHidden};
    x = add_node(g, "MatMul", {x, add_weight(g, named("w", layer), dims, static_cast<unsigned>(layer + 1))}, named("product", layer));
    x = add_node(g, "BatchNormalization", {x, row("scale", 1), row("shift", 0.1F), row("mean", 0), row("var", 1)}, named("normal", layer),
                 {attribute("training_mode", int64_t{1})});
    x = add_node(g, "Tanh", {x}, named("hidden", layer));
  }
  g.outputs = {add_node(g, "MatMul", {x, add_weight(g, "head", {kHidden, kClasses}, 9)}, "logits")};
  name_nodes_by_outputs(g);
  return model;
}

struct Case {
  std::string name;
  int pipeline = 1, tensor = 1, micro_batches = 1, tensor_y = 1;
};

class GridStatistics : public ::testing::TestWithParam<Case> {};

TEST_P(GridStatistics, MoveAsOnOneRank) {
  const auto trained = [](const Case& c) {
    Trainer trainer = trainer_of(norm_model(), cut_of(c), with_optimizer("sgd:lr=0.1"));
    for (int step = 0; step < 3; ++step)
      trainer.step(classified_noise(kIn, some_classes(kBatch, kClasses, 5), 40 + static_cast<unsigned>(step)), 0.1);
    return trainer;
  };
  Case whole{"whole"};
  whole.micro_batches = GetParam().micro_batches;
  const Trainer wanted = trained(whole), got = trained(GetParam());
  for (int layer = 0; layer < kLayers; ++layer) {
    for (const char* name : {"mean", "var", "w", "scale"}) {
      const std::vector<float> a = elements<float>(wanted.parameter(named(name, layer))),
                               b = elements<float>(got.parameter(named(name, layer)));
      ASSERT_EQ(a.size(), b.size());
      for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 2e-4F) << named(name, layer) << " " << i;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Ways, GridStatistics,
                         ::testing::Values(Case{"Grid", 1, 4, 1, 2}, Case{"GridAndPipeline", 2, 4, 2, 2},
                                           Case{"GridAndFourStages", 4, 4, 2, 2}, Case{"TensorAndFourStages", 4, 2, 2}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fretsaw
