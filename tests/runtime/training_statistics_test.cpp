// Running statistics of BatchNormalization: those that nodes share, and those of half precision.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/runtime/training_runs.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kIn = 6, kHidden = 8, kBatch = 8;

// logits = normalised(tanh(normalised(x w1)) w2): both by the same running statistics, or the first one alone.
Model make_model(float size, bool twice) {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* x = add_input(model, "x", DType::float32, {Dim("batch"), Dim(kIn)});
  const auto row = [&](const std::string& name, float value) { return add_row(g, name, kHidden, value); };
  Value *scale = row("scale", 0.8f), *shift = row("shift", 0.1f), *mean = row("mean", 0.2f), *var = row("var", 1.5f);
  const auto normalised = [&](Value* v, const std::string& name) {
    return add_node(g, "BatchNormalization", {v, scale, shift, mean, var}, name, {attribute("momentum", 0.75f)});
  };
  Value* hidden = add_node(
      g, "Tanh", {normalised(add_node(g, "MatMul", {x, add_weight(g, "w1", {kIn, kHidden}, 1, size)}, "product"), "normal")}, "hidden");
  Value* logits = add_node(g, "MatMul", {hidden, g.add_constant("w2", floats({kHidden, kHidden}, noise(kHidden * kHidden, 3)))}, "scores");
  g.outputs = {twice ? normalised(logits, "logits") : logits};
  name_nodes_by_outputs(g);
  return model;
}

Batch make_batch() {
  return classified_noise(kIn, {0, 3, 1, 4, 1, 5, 7, 2}, 100);
}

using Numbers = std::vector<double>;

Numbers product(const Numbers& a, const std::vector<float>& b, int64_t inner) {
  Numbers made(static_cast<size_t>(kBatch * kHidden));
  for (int64_t n = 0; n < kBatch; ++n)
    for (int64_t j = 0; j < kHidden; ++j)
      for (int64_t i = 0; i < inner; ++i)
        made[static_cast<size_t>(n * kHidden + j)] +=
            a[static_cast<size_t>(n * inner + i)] * static_cast<double>(b[static_cast<size_t>(i * kHidden + j)]);
  return made;
}

// The running statistics, which a layer moves by ONNX's rule; its result.
struct Running {
  Numbers mean = Numbers(kHidden, static_cast<double>(0.2f)), var = Numbers(kHidden, 1.5);

  Numbers move(const Numbers& x) {
    Numbers y = x;
    for (size_t j = 0; j < kHidden; ++j) {
      double sum = 0, squares = 0;
      for (size_t n = 0; n < kBatch; ++n) sum += x[n * kHidden + j] / kBatch;
      for (size_t n = 0; n < kBatch; ++n) squares += std::pow(x[n * kHidden + j] - sum, 2) / kBatch;
      mean[j] = 0.75 * mean[j] + 0.25 * sum, var[j] = 0.75 * var[j] + 0.25 * squares;
      for (size_t n = 0; n < kBatch; ++n) y[n * kHidden + j] = (x[n * kHidden + j] - sum) / std::sqrt(squares + 1e-5) * 0.8 + 0.1;
    }
    return y;
  }
};

void expect_statistics(const Trainer& trainer, const Running& wanted, double tolerance) {
  const std::vector<float> mean = elements<float>(trainer.parameter("mean")), var = elements<float>(trainer.parameter("var"));
  for (size_t j = 0; j < kHidden; ++j) {
    EXPECT_NEAR(static_cast<double>(mean[j]), wanted.mean[j], tolerance * (1 + std::abs(wanted.mean[j]))) << j;
    EXPECT_NEAR(static_cast<double>(var[j]), wanted.var[j], tolerance * (1 + wanted.var[j])) << j;
  }
}

struct Case {
  std::string name;
  int data = 1, pipeline = 1;
  std::string precision = "fp32";
};
class SharedStatisticsTraining : public ::testing::TestWithParam<Case> {};

// As modules that are called twice do in PyTorch.
TEST_P(SharedStatisticsTraining, MoveOnceForEachNodeInTheirOrder) {
  PartitionOptions options = cut_of(GetParam());
  if (GetParam().pipeline == 2) options.cuts = {{"hidden"}};
  TrainingOptions training;
  training.sync_batch_norm = GetParam().data > 1;
  training.precision = GetParam().precision;
  Trainer trainer = trainer_of(make_model(1, true), options, training);
  trainer.step(make_batch(), 0);
  trainer.step(make_batch(), 0);
  Running wanted;
  const std::vector<float> x = elements<float>(make_batch().at("x"));
  for (int step = 0; step < 2; ++step) {
    Numbers hidden = wanted.move(product({x.begin(), x.end()}, noise(kIn * kHidden, 1), kIn));
    for (double& h : hidden) h = std::tanh(h);
    wanted.move(product(hidden, noise(kHidden * kHidden, 3), kHidden));
  }
  expect_statistics(trainer, wanted, GetParam().precision == "fp32" ? 1e-5 : 2e-2);
}

INSTANTIATE_TEST_SUITE_P(Meshes, SharedStatisticsTraining,
                         ::testing::Values(Case{"one"}, Case{"pipeline", 1, 2}, Case{"synchronised", 2}, Case{"half", 1, 1, "fp16"},
                                           Case{"half_pipeline", 1, 2, "bf16"}, Case{"half_synchronised", 2, 1, "fp16"}),
                         [](const auto& info) { return info.param.name; });

// A variance that float16 does not hold.
TEST(StatisticsTraining, OfHalfPrecisionStayInFloat32) {
  constexpr float kSize = 500;
  for (const std::string precision : {"fp16", "bf16"}) {
    TrainingOptions training;
    training.precision = precision;
    Trainer trainer = trainer_of(make_model(kSize, false), {}, training);
    EXPECT_FALSE(trainer.step(make_batch(), 0).skipped);
    Running wanted;
    const std::vector<float> x = elements<float>(make_batch().at("x"));
    wanted.move(product({x.begin(), x.end()}, noise(kIn * kHidden, 1, kSize), kIn));
    EXPECT_GT(*std::max_element(wanted.var.begin(), wanted.var.end()), 65504);
    expect_statistics(trainer, wanted, 2e-2);
  }
}

// --- layers that stay as in inference ---

// logits = trained(tanh(frozen(x w1)) w2): `frozen` as a BatchNormalization out of training, or as what that is.
Model half_frozen(bool written_out) {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* x = add_input(model, "x", DType::float32, {Dim("batch"), Dim(kIn)});
  const auto row = [&](const std::string& name, float value) { return add_row(g, name, kHidden, value); };
  Value *scale = row("scale", 0.8f), *shift = row("shift", 0.1f), *product = nullptr, *normal = nullptr;
  product = add_node(g, "MatMul", {x, add_weight(g, "w1", {kIn, kHidden}, 1)}, "product");
  if (written_out) {
    Value* centred = add_node(g, "Sub", {product, row("mean", 0.2f)}, "centred");
    Value* factor = add_node(g, "Div", {scale, row("root", std::sqrt(1.5f + 1e-5f))}, "factor");
    normal = add_node(g, "Add", {add_node(g, "Mul", {centred, factor}, "scaled"), shift}, "normal");
  } else {
    normal = add_node(g, "BatchNormalization", {product, scale, shift, row("mean", 0.2f), row("var", 1.5f)}, "normal");
  }
  Value* scores = add_node(g, "MatMul", {add_node(g, "Tanh", {normal}, "hidden"), add_weight(g, "w2", {kHidden, kHidden}, 3)}, "scores");
  g.outputs = {add_node(g, "BatchNormalization", {scores, row("scale2", 1), row("shift2", 0), row("mean2", 0), row("var2", 1)}, "logits",
                        {attribute("training_mode", int64_t{1})})};
  name_nodes_by_outputs(g);
  return model;
}

TEST(StatisticsTraining, ALayerOutOfTrainingBesideOthersInTrainingStaysSo) {
  const auto run = [](bool written_out, int pipeline, int tensor) {
    TrainingOptions training = with_optimizer("sgd:lr=0.05,momentum=0.9");
    if (written_out) training.freeze = {"mean", "root"};
    PartitionOptions options;
    options.mesh.pipeline = pipeline, options.mesh.tensor = tensor;
    Trainer trainer = trainer_of(half_frozen(written_out), options, training);
    const std::vector<std::string>& learned = trainer.plan().parameters;
    for (const char* name : {"mean", "var", "root"}) EXPECT_EQ(std::count(learned.begin(), learned.end(), name), 0) << name;
    EXPECT_EQ(std::count(learned.begin(), learned.end(), "scale"), 1);
    return losses_of(trainer, 4, 0.05, [](int) { return make_batch(); });
  };
  const std::vector<double> wanted = run(true, 1, 1);
  for (const auto& [pipeline, tensor] : {std::pair{1, 1}, {2, 1}, {1, 2}}) expect_close(run(false, pipeline, tensor), wanted, 1e-5);
}

// With statistics of its own operand, which are no running ones.
TEST(StatisticsTraining, OfALayerThatComputesThem) {
  const auto run = [](bool own) {
    Model model = *new_model();
    Graph& g = *model.graph;
    Value* x = add_input(model, "x", DType::float32, {Dim("batch"), Dim(kIn)});
    Value* product = add_node(g, "MatMul", {x, add_weight(g, "w1", {kIn, kHidden}, 1)}, "product");
    Value *mean = add_row(g, "mean", kHidden, 0), *var = add_row(g, "var", kHidden, 1);
    if (own) {
      Value* axes = g.add_constant("axes", make_int64s({0}));
      const Attribute flat = attribute("keepdims", int64_t{0});
      mean = add_node(g, "ReduceMean", {product, axes}, "batch_mean", {flat});
      Value* centred = add_node(g, "Sub", {product, mean}, "centred");
      var = add_node(g, "ReduceMean", {add_node(g, "Mul", {centred, centred}, "squares"), axes}, "batch_var", {flat});
    }
    g.outputs = {add_node(g, "BatchNormalization",
                          {product, add_row(g, "scale", kHidden, 0.8f), add_row(g, "shift", kHidden, 0.1f), mean, var}, "logits")};
    name_nodes_by_outputs(g);
    Trainer trainer = trainer_of(std::move(model), {}, with_optimizer("sgd:lr=0.05"));
    return losses_of(trainer, 4, 0.05, [](int) { return make_batch(); });
  };
  expect_close(run(true), run(false), 1e-5);
}

}  // namespace
}  // namespace fretsaw
