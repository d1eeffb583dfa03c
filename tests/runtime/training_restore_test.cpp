// What a trainer keeps and takes back, and running statistics of steps that are left out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "graph/errors.h"
#include "tests/error_text.h"
#include "tests/runtime/training_runs.h"

namespace fretsaw {
namespace {

using namespace testing_plans;
using namespace testing_files;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kIn = 6, kHidden = 48, kClasses = 4, kBatch = 8;

// logits = normalised(x w1) w2, whose running statistics are outputs too
Model make_model(bool gives_statistics, bool shared = false) {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* x = add_input(model, "x", DType::float32, {Dim("batch"), Dim(kIn)});
  Value* product = add_node(g, "MatMul", {x, g.add_constant("w1", floats({kIn, kHidden}, noise(kIn * kHidden, 1)))}, "product");
  const auto row = [&](const std::string& name, float value) { return add_row(g, name, kHidden, value); };
  Value *scale = row("scale", 0.8f), *shift = row("shift", 0.1f), *mean = row("mean", 0.2f), *var = row("var", 1.5f);
  Node* normal =
      g.add_node("BatchNormalization", {product, scale, shift, mean, var},
                 gives_statistics ? std::vector<std::string>{"normal", "new_mean", "new_var"} : std::vector<std::string>{"normal"});
  if (gives_statistics) normal->set("training_mode", int64_t{1});
  Value* y = normal->out(0);
  if (shared) y = add_node(g, "BatchNormalization", {y, scale, shift, mean, var}, "again");
  Value* w2 = g.add_constant("w2", floats({kHidden, kClasses}, noise(kHidden * kClasses, 3)));
  g.outputs = {add_node(g, "MatMul", {y, w2}, "logits")};
  if (gives_statistics) g.outputs.insert(g.outputs.end(), {normal->out(1), normal->out(2)});
  name_nodes_by_outputs(g);
  return model;
}

Batch make_batch(float factor = 1) {
  return classified_noise(kIn, {0, 1, 2, 3, 3, 2, 1, 0}, 7, factor);
}

TrainerOptions one_thread() {
  TrainerOptions options;
  options.session.threads = 1;
  return options;
}
TrainingPlan plan_of(const Model& model, const TrainingOptions& training = {}, const PartitionOptions& options = {}) {
  return partition_for_training(clone(model), options, training);
}

TEST(TrainerStatistics, AStepThatIsLeftOutMovesNothing) {
  for (const bool shared : {false, true}) {
    for (const int kind : {0, 1, 2}) {  // one rank, two stages, two data ranks that share statistics
      PartitionOptions options;
      if (kind == 1) options.mesh.pipeline = 2;
      if (kind == 2) options.mesh.data = 2;
      TrainingOptions training;
      training.sync_batch_norm = kind == 2;
      Trainer trainer(plan_of(make_model(false, shared), training, options), one_thread());
      EXPECT_FALSE(trainer.step(make_batch(), 0.1).skipped);
      const std::vector<float> mean = elements<float>(trainer.parameter("mean")), var = elements<float>(trainer.parameter("var"));
      EXPECT_NE(mean[0], 0.2f);
      for (const float factor : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 3e38f}) {
        EXPECT_TRUE(trainer.step(make_batch(factor), 0.1).skipped) << factor;
        for (const char* name : {"mean", "var"})
          for (const float v : elements<float>(trainer.parameter(name))) EXPECT_TRUE(std::isfinite(v)) << name << factor;
      }
      if (!shared) {
        EXPECT_EQ(elements<float>(trainer.parameter("var")), var);
      }
      EXPECT_FALSE(trainer.step(make_batch(), 0.1).skipped);
    }
  }
}

TEST(TrainerStatistics, MayBeOutputsOfTheModel) {
  const Model model = make_model(true);
  Trainer trainer(plan_of(model), one_thread());
  const double first = trainer.step(make_batch(), 0.1).loss;
  EXPECT_EQ(first, Trainer(plan_of(make_model(false)), one_thread()).step(make_batch(), 0.1).loss);
  const Model trained = trained_model(model, trainer);
  ASSERT_EQ(trained.graph->outputs.size(), 3u);
  const Node* mean = trained.graph->outputs[1]->producer;
  ASSERT_TRUE(mean && mean->is("Identity"));
  EXPECT_EQ(mean->input(0)->name, "mean");
  EXPECT_EQ(reinterpret_cast<const float*>(mean->input(0)->constant->data)[0], elements<float>(trainer.parameter("mean"))[0]);
}

TEST(TrainerRestore, TheLossScaleGoesOn) {
  TrainingOptions training;
  training.precision = "fp16";
  Trainer first(plan_of(make_model(false), training), one_thread());
  EXPECT_TRUE(first.step(make_batch(std::numeric_limits<float>::infinity()), 0.1).skipped);
  for (int s = 0; s < 3; ++s) EXPECT_FALSE(first.step(make_batch(), 0.1).skipped);
  const auto kept = first.kept();
  EXPECT_EQ(*kept.at(kLossScale).tensor.as<float>(), 32768);
  EXPECT_EQ(*kept.at("scalar:good_steps").tensor.as<int64_t>(), 3);
  Trainer second(plan_of(make_model(false), training), one_thread());
  second.restore(kept, first.updates());
  const auto again = second.kept();
  for (const char* name : {kLossScale, "scalar:good_steps"})
    EXPECT_EQ(std::memcmp(again.at(name).tensor.data, kept.at(name).tensor.data, kept.at(name).tensor.bytes()), 0) << name;
  EXPECT_EQ(second.step(make_batch(), 0.1).loss, first.step(make_batch(), 0.1).loss);
  // A checkpoint without them, as of a run in float32.
  auto without = kept;
  without.erase(kLossScale), without.erase("scalar:good_steps");
  Trainer third(plan_of(make_model(false), training), one_thread());
  third.restore(without, first.updates());
  EXPECT_EQ(*third.kept().at(kLossScale).tensor.as<float>(), 65536);
}

TEST(TrainerRestore, WhatTheRunWouldLoseIsRefused) {
  TrainingOptions all, some;
  all.optimizer = some.optimizer = parse_optimizer("adam");
  some.freeze = {"w1"};
  Trainer first(plan_of(make_model(false), all), one_thread());
  first.step(make_batch(), 0.1);
  Trainer second(plan_of(make_model(false), some), one_thread());
  EXPECT_THAT(error_of([&] { second.restore(first.kept(), 1); }), HasSubstr("'w1'"));
  std::vector<std::string> notes;
  second.restore(first.kept(), 1, {"w1"}, &notes);
  EXPECT_THAT(notes, Contains(HasSubstr("exp_avg:w1")));
  EXPECT_THAT(error_of([&] { first.restore(second.kept(), 1); }), HasSubstr("no tensor"));
}

// A weight that is rounded has no gradient. Every rank keeps its part of it nevertheless, and it is exported as it was taken back.
TEST(TrainerRestore, WeightsWithoutAGradientStayWhole) {
  const auto rounded = [](float by) {
    Model model = make_model(false);
    Graph& g = *model.graph;
    Value *y = g.outputs[0], *x = g.inputs[0], *w3 = add_weight(g, "w3", {kIn, kHidden}, 5, by);
    Value* row = add_node(g, "MatMul", {x, add_node(g, "Floor", {w3}, "floored")}, "row");
    Value* w4 = add_weight(g, "w4", {kHidden, kClasses}, 6);
    g.outputs = {add_node(g, "Add", {y, add_node(g, "MatMul", {row, w4}, "more")}, "sum")};
    name_nodes_by_outputs(g);
    return model;
  };
  struct Case {
    int data, pipeline, tensor, zero;
    std::string precision;
  };
  TrainingOptions training;
  const Model model = rounded(3), other = rounded(2);
  Trainer whole(plan_of(model, training), one_thread());
  whole.step(make_batch(), 0.1);
  const double next = Trainer(whole.plan(), one_thread()).step(make_batch(), 0.1).loss;
  for (const Case& c : {Case{1, 1, 2, 0, "fp32"}, Case{1, 2, 2, 0, "fp32"}, Case{1, 1, 3, 0, "bf16"}, Case{2, 1, 2, 3, "fp32"},
                        Case{2, 1, 1, 3, "fp32"}, Case{2, 2, 2, 1, "fp32"}}) {
    SCOPED_TRACE(std::to_string(c.data) + std::to_string(c.pipeline) + std::to_string(c.tensor) + " zero " + std::to_string(c.zero));
    training.zero = c.zero, training.precision = c.precision, training.sync_batch_norm = c.data > 1;
    Trainer trainer(plan_of(model, training, cut_of(c)), one_thread());
    EXPECT_NEAR(trainer.step(make_batch(), 0.1).loss, next, c.precision == "fp32" ? 1e-4 : 0.1);
    EXPECT_EQ(elements<float>(trainer.kept().at("w3")), elements<float>(whole.kept().at("w3")));
    Trainer again(plan_of(other, training, cut_of(c)), one_thread());
    again.restore(trainer.kept(), trainer.updates());
    EXPECT_EQ(again.step(make_batch(), 0.1).loss, trainer.step(make_batch(), 0.1).loss);
    const Model exported = trained_model(other, again);
    for (const Value* v : exported.graph->initializers()) {
      if (v->name != "w3") continue;
      const auto* first = reinterpret_cast<const float*>(v->constant->data);
      EXPECT_EQ(std::vector<float>(first, first + v->constant->count()), elements<float>(whole.kept().at("w3")));
    }
  }
}

// A graph of the way back is no stage of its own, and what is said twice is said once.
TEST(TrainingNotes, AreOfStagesAndOnce) {
  PartitionOptions options;
  options.mesh.pipeline = 2, options.mesh.tensor = 2;
  TrainingOptions training;
  training.freeze = {"w1", "w2"};
  const TrainingPlan plan = plan_of(make_model(false), training, options);
  EXPECT_THAT(plan.plan->notes, Not(Contains(HasSubstr("is used in stages"))));
  for (const std::string& note : plan.plan->notes) EXPECT_EQ(std::count(plan.plan->notes.begin(), plan.plan->notes.end(), note), 1) << note;
}

}  // namespace
}  // namespace fretsaw
