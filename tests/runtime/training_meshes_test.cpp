// Every way to spread training over ranks against the same steps on one.
#include <gtest/gtest.h>

#include <cmath>

#include "graph/errors.h"
#include "tests/runtime/training_runs.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kWords = 12, kWide = 8, kInner = 16, kLength = 6, kBatch = 8;
constexpr int kLayers = 4, kSteps = 4;

// Layers x += tanh(norm(x) w1 + b1) w2 between an embedding and a head that share one matrix.
Model make_text_model() {
  Model model = *new_model();
  Graph& g = *model.graph;
  unsigned seed = 1;
  const auto weight = [&](const std::string& name, const Dims& dims) { return add_weight(g, name, dims, seed++); };
  Value* words = weight("words", {kWords, kWide});
  Value* x = add_node(g, "Gather", {words, add_input(model, "ids", DType::int64, {Dim("batch"), Dim(kLength)})}, "embedded");
  for (int l = 0; l < kLayers; ++l) {
    const auto name = [&](const std::string& what) { return what + std::to_string(l); };
    Value* norm = add_node(g, "LayerNormalization", {x, weight(name("scale"), {kWide}), weight(name("shift"), {kWide})}, name("norm"));
    Value* product = add_node(g, "MatMul", {norm, weight(name("w1_"), {kWide, kInner})}, name("product"));
    Value* sum = add_node(g, "Add", {product, weight(name("b1_"), {kInner})}, name("sum"));
    Value* back = add_node(g, "MatMul", {add_node(g, "Tanh", {sum}, name("inner")), weight(name("w2_"), {kInner, kWide})}, name("back"));
    x = add_node(g, "Add", {x, add_node(g, "Add", {back, weight(name("b2_"), {kWide})}, name("shifted"))}, name("layer"));
  }
  g.outputs = {
      add_node(g, "MatMul", {x, add_node(g, "Transpose", {words}, "head", {attribute("perm", std::vector<int64_t>{1, 0})})}, "logits")};
  name_nodes_by_outputs(g);
  return model;
}

Batch batch_of(int step) {
  return some_text(kBatch, kLength, kWords, step);
}

constexpr const char *kAdamW = "adamw:lr=0.02,weight_decay=0.1", *kLoss = "softmax_cross_entropy";

struct Case {
  std::string name;
  int data = 1, pipeline = 1, tensor = 1, micro_batches = 1;
  std::string schedule = "gpipe";
  int chunks = 1, zero = 0;
  std::string recompute = "none", optimizer = kAdamW, loss = kLoss;
  int tensor_y = 1;
};

Trainer make_trainer(const Case& c, const std::string& optimizer, const std::string& precision = "fp32") {
  TrainingOptions training = with_optimizer(optimizer, precision);
  training.loss = parse_loss(c.loss);
  training.chunks = c.chunks, training.zero = c.zero, training.recompute = c.recompute;
  return trainer_of(make_text_model(), cut_of(c), training, /*clip=*/0.5);
}

class TrainingMeshes : public ::testing::TestWithParam<Case> {};

TEST_P(TrainingMeshes, GivesTheSameStepsAsOneRank) {
  const Case& c = GetParam();
  Case whole{"one"};
  whole.loss = c.loss;
  Trainer one = make_trainer(whole, c.optimizer), many = make_trainer(c, c.optimizer);
  EXPECT_EQ(one.plan().parameters.size(), many.plan().parameters.size());
  for (int s = 0; s < kSteps; ++s) {
    const StepResult wanted = one.step(batch_of(s), 0.02), got = many.step(batch_of(s), 0.02);
    EXPECT_NEAR(got.loss, wanted.loss, 1e-5) << s;
    EXPECT_NEAR(got.gradient_norm, wanted.gradient_norm, 1e-4 * wanted.gradient_norm) << s;
    EXPECT_EQ(got.count, wanted.count);
    for (const std::string& name : one.plan().parameters) {
      const std::vector<float> a = elements<float>(one.gradient(name)), b = elements<float>(many.gradient(name));
      ASSERT_EQ(a.size(), b.size()) << name;
      for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 2e-5) << name << " " << i << " step " << s;
    }
  }
  // What a checkpoint holds is whole, whatever the mesh.
  const auto wanted = one.kept(), got = many.kept();
  ASSERT_EQ(wanted.size(), got.size());
  for (const auto& [name, value] : wanted) {
    ASSERT_TRUE(got.contains(name)) << name;
    EXPECT_EQ(got.at(name).tensor.dims, value.tensor.dims) << name;
    const std::vector<float> a = elements<float>(value), b = elements<float>(got.at(name));
    for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 2e-4) << name << " " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Ways, TrainingMeshes,
    ::testing::Values(Case{"tensor", 1, 1, 2}, Case{"tensor_of_three", 1, 1, 3}, Case{"tensor_of_four_in_parts", 1, 1, 4, 2},
                      Case{.name = "tensor_lamb", .tensor = 2, .optimizer = "lamb:lr=0.02,weight_decay=0.1"},
                      // One rank computes the loss by CrossEntropy, tensor ranks by operators that are divided along the classes.
                      Case{.name = "tensor_smoothed", .tensor = 2, .loss = "softmax_cross_entropy:label_smoothing=0.2"},
                      Case{.name = "tensor_ignoring",
                           .tensor = 2,
                           .micro_batches = 3,
                           .loss = "softmax_cross_entropy:ignore_index=5,label_smoothing=0.1"},
                      Case{.name = "tensor_summed", .tensor = 2, .loss = "softmax_cross_entropy:reduction=sum"},
                      Case{"interleaved", 1, 2, 1, 4, "interleaved", 2}, Case{"interleaved_uneven", 1, 2, 1, 3, "interleaved", 2},
                      Case{"zero_bubble_h1", 1, 2, 1, 4, "zero-bubble-h1"}, Case{"zero_bubble_h2", 1, 4, 1, 8, "zero-bubble-h2"},
                      Case{"zero_1", 2, 1, 1, 2, "gpipe", 1, 1}, Case{"zero_2", 2, 1, 1, 2, "gpipe", 1, 2},
                      Case{"zero_3", 2, 1, 1, 2, "gpipe", 1, 3}, Case{"zero_3_of_four", 4, 1, 1, 1, "gpipe", 1, 3},
                      Case{.name = "zero_1_lamb", .data = 2, .zero = 1, .optimizer = "lamb:lr=0.02,weight_decay=0.1"},
                      Case{"zero_2_with_pipeline", 2, 2, 1, 2, "1f1b", 1, 2}, Case{"zero_3_with_all", 2, 2, 2, 2, "1f1b", 1, 3},
                      Case{"zero_3_zero_bubble", 2, 2, 1, 4, "zero-bubble-h1", 1, 3}, Case{"all_axes", 2, 2, 2, 2, "1f1b"},
                      Case{"tensor_interleaved", 1, 2, 2, 4, "interleaved", 2}, Case{.name = "recompute", .recompute = "all"},
                      Case{"recompute_with_all", 2, 2, 2, 2, "1f1b", 1, 1, "all"},
                      Case{"recompute_zero_bubble", 1, 2, 1, 4, "zero-bubble-h2", 1, 0, "all"},
                      Case{"recompute_zero_3", 2, 1, 1, 2, "gpipe", 1, 3, "all"}, Case{.name = "grid", .tensor = 4, .tensor_y = 2},
                      Case{.name = "grid_uneven", .tensor = 6, .micro_batches = 2, .tensor_y = 3},
                      Case{.name = "grid_lamb", .tensor = 4, .optimizer = "lamb:lr=0.02,weight_decay=0.1", .tensor_y = 2},
                      Case{"grid_zero_1", 2, 1, 4, 1, "gpipe", 1, 1, "none", kAdamW, kLoss, 2},
                      Case{"grid_with_all", 2, 2, 4, 2, "zero-bubble-h1", 1, 3, "all", kAdamW, kLoss, 2}),
    [](const auto& info) { return info.param.name; });

TEST(TrainingMeshes, AnotherMeshGoesOnFromWhatOneKept) {
  const std::string optimizer = "adamw:lr=0.02";
  Trainer uninterrupted = make_trainer({"one"}, optimizer);
  Trainer first = make_trainer({"first", 2, 1, 2, 2, "gpipe", 1, 3}, optimizer);
  for (int s = 0; s < 2; ++s) uninterrupted.step(batch_of(s), 0.02), first.step(batch_of(s), 0.02);
  Trainer second = make_trainer({"second", 1, 2, 2, 4, "zero-bubble-h1"}, optimizer);
  second.restore(first.kept(), first.updates());
  for (int s = 2; s < 5; ++s) EXPECT_NEAR(second.step(batch_of(s), 0.02).loss, uninterrupted.step(batch_of(s), 0.02).loss, 1e-4) << s;
}

// The gradient that comes out of recomputed blocks is the same to the last bit; fewer values pass from forward to backward graphs.
TEST(TrainingMeshes, RecomputationKeepsLess) {
  const auto kept = [](const Trainer& trainer) {
    size_t routes = 0;
    for (const Route& r : trainer.plan().plan->routes) routes += r.from_stage == 0 && r.to_stage == 1;
    return routes;
  };
  Trainer plain = make_trainer({"plain"}, "sgd"), again = make_trainer({.name = "again", .recompute = "all"}, "sgd");
  EXPECT_LT(kept(again), kept(plain));
  plain.step(batch_of(0), 0.1), again.step(batch_of(0), 0.1);
  for (const std::string& name : plain.plan().parameters)
    EXPECT_EQ(elements<float>(again.gradient(name)), elements<float>(plain.gradient(name))) << name;
}

// Rounding to 8 bits of fraction leaves losses within a percent; parameters are float32 tensors all the same.
TEST(TrainingMeshes, HalfPrecisionFollowsFloat32) {
  Trainer wide = make_trainer({"wide"}, "sgd:lr=0.05,momentum=0.9");
  Trainer narrow = make_trainer({"narrow"}, "sgd:lr=0.05,momentum=0.9", "bf16");
  Trainer half = make_trainer({"half", 1, 1, 2}, "sgd:lr=0.05,momentum=0.9", "fp16");
  int64_t steps = 0;
  for (int s = 0; s < kSteps; ++s) {
    const double wanted = wide.step(batch_of(s), 0.05).loss;
    EXPECT_NEAR(narrow.step(batch_of(s), 0.05).loss, wanted, 0.01 * wanted) << s;
    StepResult result = half.step(batch_of(s), 0.05);
    for (steps = 0; result.skipped && steps < 20; ++steps) result = half.step(batch_of(s), 0.05);  // until the loss's scale fits
    EXPECT_FALSE(result.skipped);
    EXPECT_NEAR(result.loss, wanted, 0.01 * wanted) << s;
  }
  EXPECT_EQ(half.parameter("words").tensor.dtype, DType::float32);
  EXPECT_EQ(half.updates(), kSteps);
}

// Ranks whose parts are of other sizes keep the same values nevertheless.
TEST(TrainingMeshes, UnevenRanksComputeTheSameAgain) {
  for (const char* precision : {"fp32", "bf16", "fp16"})
    for (const int tensor : {3, 5, 6, 7})
      for (const int pipeline : {1, 2}) {
        Trainer whole = make_trainer({.name = "one"}, "sgd:lr=0.05", precision);
        Trainer parts =
            make_trainer({.name = "parts", .pipeline = pipeline, .tensor = tensor, .recompute = "all"}, "sgd:lr=0.05", precision);
        const double wanted = whole.step(batch_of(0), 0.05).loss;
        EXPECT_NEAR(parts.step(batch_of(0), 0.05).loss, wanted, 0.01 * wanted) << precision << tensor << pipeline;
      }
}

TEST(TrainingMeshes, WhatCanNotBeIsSaid) {
  const auto expect_refused = [](Case c, const std::string& part) {
    try {
      make_trainer(c, "sgd");
      FAIL() << c.name;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  };
  expect_refused({"chunks", 1, 2, 1, 4, "1f1b", 2}, "one chunk a rank");
  expect_refused({.name = "zero", .zero = 4}, "--zero 4");
  expect_refused({.name = "recompute", .recompute = "some"}, "--recompute some");
  Trainer three = make_trainer({"three", 4, 1, 1, 1, "gpipe", 1, 3}, "sgd");
  Batch two;
  two["ids"] = int_value({2, kLength}, std::vector<int64_t>(2 * kLength, 1)),
  two["target"] = int_value({2, kLength}, std::vector<int64_t>(2 * kLength, 2));
  EXPECT_THROW(three.step(two, 0.1), Error);  // ranks that meet in every micro-batch need a sample each
}

// A transpose that several stages share is made in the first of them. The way back takes the matrix itself, as the last update left it.
TEST(TrainingMeshes, StagesShareATransposedMatrix) {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* turned =
      add_node(g, "Transpose", {add_weight(g, "w", {kInner, kInner}, 1)}, "turned", {attribute("perm", std::vector<int64_t>{1, 0})});
  Value* x = add_input(model, "x", DType::float32, {Dim("batch"), Dim(kInner)});
  for (const char* name : {"a", "b", "c", "d"})
    x = add_node(g, "Tanh", {add_node(g, "MatMul", {x, turned}, name + std::string("_product"))}, name);
  g.outputs = {x};
  name_nodes_by_outputs(g);
  const auto weights_of = [&](const Case& c, const std::string& precision) {
    TrainingOptions training = with_optimizer("sgd:lr=0.5", precision);
    training.chunks = c.chunks, training.zero = c.zero, training.recompute = c.recompute;
    Trainer trainer = trainer_of(clone(model), cut_of(c), training);
    for (int s = 0; s < kSteps; ++s) trainer.step(classified_noise(kInner, some_classes(kBatch, kInner), static_cast<unsigned>(s)), 0.5);
    return elements<float>(trainer.parameter("w"));
  };
  for (const char* precision : {"fp32", "bf16"}) {
    const std::vector<float> wanted = weights_of({"one"}, precision);
    for (const Case& c :
         {Case{"", 1, 2, 1, 2}, Case{"", 1, 4, 1, 1}, Case{"", 1, 2, 1, 4, "interleaved", 2}, Case{"", 1, 3, 1, 4, "zero-bubble-h2"},
          Case{"", 2, 2, 1, 2, "1f1b", 1, 3}, Case{"", 1, 2, 2, 2, "gpipe", 1, 0, "all"}, Case{"", 2, 2, 1, 1, "zero-bubble-h1", 1, 1}}) {
      const std::vector<float> got = weights_of(c, precision);
      const float tolerance = precision == std::string("fp32") ? 2e-5f : 0.02f;
      for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], wanted[i], tolerance) << precision << c.pipeline << c.schedule << i;
    }
  }
}

}  // namespace
}  // namespace fretsaw
