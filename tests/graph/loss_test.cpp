// The nodes that a loss adds: their inputs, types, and what can't be. Their numbers: tests/runtime/loss_values_test.cpp.
#include "graph/training/loss.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/graph/text_model.h"

namespace fretsaw {
namespace {

using fretsaw::testing::ops;
using fretsaw::testing::parse_model;
using ::testing::HasSubstr;

Model model_with(const std::string& graph) {
  Model model = parse_model(20, graph);
  run_passes(model, normalise_passes());
  return model;
}
std::string error_of(const std::string& graph, const std::string& loss, const LossBatch& batch = {}) {
  Model model = model_with(graph);
  try {
    append_loss(model, parse_loss(loss), batch);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}
const std::string kTokens = "g (float[batch,8,16] x) => (float[batch,8,16] y) { y = Relu(x) }";

TEST(AppendLoss, ClassesOnTheLastAxis) {
  Model model = model_with(kTokens);
  const LossValues loss = append_loss(model, parse_loss("softmax_cross_entropy"));
  EXPECT_EQ(loss.target->name, "target");
  EXPECT_EQ(to_string(loss.target->type), "int64[batch,8]");
  EXPECT_EQ(model.graph->inputs.back(), loss.target);
  EXPECT_THAT(model.graph->outputs, ::testing::ElementsAre(::testing::_, loss.sum, loss.count, loss.loss));
  EXPECT_EQ(to_string(loss.sum->type), "float32[]");
  EXPECT_EQ(to_string(loss.count->type), "int64[]");
  EXPECT_EQ(to_string(loss.loss->type), "float32[]");
  EXPECT_EQ(loss.loss->name, "loss");
  EXPECT_TRUE(infer_shapes(model).faults.empty());
  verify(*model.graph);
}

TEST(AppendLoss, FloatsOfTheOutputsShape) {
  for (const char* kind : {"mse", "l1", "bce_with_logits"}) {
    Model model = model_with(kTokens);
    const LossValues loss = append_loss(model, parse_loss(kind));
    EXPECT_EQ(to_string(loss.target->type), "float32[batch,8,16]") << kind;
    EXPECT_TRUE(infer_shapes(model).faults.empty());
  }
}

TEST(AppendLoss, HalfPrecisionIsWidened) {
  Model model = model_with("g (float16[2,4] x) => (float16[2,4] y) { y = Relu(x) }");
  const LossValues loss = append_loss(model, parse_loss("mse"));
  EXPECT_EQ(loss.target->type.dtype, DType::float32);
  EXPECT_EQ(loss.sum->type.dtype, DType::float32);
  EXPECT_THAT(ops(*model.graph), HasSubstr("Relu Cast Sub"));
  Model wide = model_with("g (double[2,4] x) => (double[2,4] y) { y = Relu(x) }");
  EXPECT_EQ(append_loss(wide, parse_loss("softmax_cross_entropy:label_smoothing=0.1")).loss->type.dtype, DType::float64);
}

TEST(AppendLoss, NamesThatAreTaken) {
  Model model = model_with("g (float[2,4] target, float[2,4] loss) => (float[2,4] y) { y = Add(target, loss) }");
  const LossValues loss = append_loss(model, parse_loss("mse"));
  EXPECT_EQ(loss.target->name, "target_1");
  EXPECT_EQ(loss.loss->name, "loss_1");
}

TEST(AppendLoss, AnotherOutput) {
  const std::string two = "g (float[2,4] x) => (int64[2] k, float[2,4] y) { k = ArgMax<axis=1,keepdims=0>(x) y = Relu(x) }";
  Model model = model_with(two);
  EXPECT_EQ(to_string(append_loss(model, parse_loss("mse:output=y")).target->type), "float32[2,4]");
  EXPECT_THAT(error_of(two, "mse"), AllOf(HasSubstr("'k'"), HasSubstr("no floats")));
  EXPECT_THAT(error_of(two, "mse:output=z"), AllOf(HasSubstr("no output 'z'"), HasSubstr("'k', 'y'")));
}

TEST(AppendLoss, WhatCantBe) {
  const std::string scalar = "g (float[2,4] x) => (float y) { y = ReduceMean<keepdims=0>(x) }";
  EXPECT_THAT(error_of(scalar, "softmax_cross_entropy"), HasSubstr("no axis of classes"));
  EXPECT_EQ(error_of(scalar, "output"), "");
  EXPECT_EQ(error_of(scalar, "output:y,reduction=sum"), "");
  EXPECT_THAT(error_of(kTokens, "output"), HasSubstr("not a scalar"));
  EXPECT_THAT(error_of(scalar, "output", {.input = "z"}), HasSubstr("no input 'z'"));
  EXPECT_THAT(error_of(scalar, "output", {.input = "x", .axis = 2}), HasSubstr("no axis 2"));
  Model old = parse_model(13, kTokens);
  EXPECT_THROW(append_loss(old, parse_loss("mse")), Error);
}

}  // namespace
}  // namespace fretsaw
