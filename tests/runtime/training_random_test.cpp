// Random numbers while a model is trained: others in every step, the same ones on every mesh.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "graph/errors.h"
#include "graph/training/training_plan_file.h"
#include "tests/error_text.h"
#include "tests/runtime/training_runs.h"
#include "tests/temporary_folder.h"

namespace fretsaw {
namespace {

using namespace testing_plans;
using namespace testing_files;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kIn = 16, kHidden = 32, kClasses = 4, kBatch = 12;
constexpr int kSteps = 100;

using Noise = std::function<Value*(Graph&, Value*)>;

// logits = noise(x w1) w2
Model make_model(const Noise& noisy) {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* x = add_input(model, "x", DType::float32, {Dim("batch"), Dim(kIn)});
  Value* hidden = add_node(g, "MatMul", {x, g.add_constant("w1", floats({kIn, kHidden}, noise(kIn * kHidden, 1)))}, "hidden");
  Value* w2 = g.add_constant("w2", floats({kHidden, kClasses}, noise(kHidden * kClasses, 2)));
  g.outputs = {add_node(g, "MatMul", {noisy(g, hidden), w2}, "logits")};
  name_nodes_by_outputs(g);
  return model;
}

Batch make_batch() {
  return classified_noise(kIn, some_classes(kBatch, kClasses), 7);
}

struct Mesh3 {
  int data = 1, pipeline = 1, tensor = 1, micro_batches = 1;
};
Trainer make_trainer(const Model& model, const Mesh3& mesh, uint64_t seed = 0, const TrainingOptions& training = {}) {
  TrainerOptions with;
  with.session.threads = 1, with.session.random_seed = seed;
  return Trainer(partition_for_training(clone(model), cut_of(mesh), training), with);
}
std::vector<double> losses(Trainer trainer, int steps, double rate) {
  return losses_of(trainer, steps, rate, [](int) { return make_batch(); });
}

// Every step draws its own, by the seed; no part of the batch, and no rank, draws others.
void expect_counted(const Model& model) {
  const std::vector<double> still = losses(make_trainer(model, {}), 3, 0);
  EXPECT_NE(still[0], still[1]);
  EXPECT_NE(still[1], still[2]);
  EXPECT_EQ(losses(make_trainer(model, {}), 3, 0), still);
  for (const uint64_t seed : {uint64_t{5}, uint64_t{1} << 40}) EXPECT_NE(losses(make_trainer(model, {}, seed), 1, 0)[0], still[0]) << seed;
  const std::vector<double> moved = losses(make_trainer(model, {}), 3, 0.1);
  for (const Mesh3& mesh : {Mesh3{1, 1, 1, 3}, Mesh3{2}, Mesh3{5}, Mesh3{1, 2, 1, 2}, Mesh3{1, 1, 2}, Mesh3{2, 2, 1, 2}}) {
    const std::vector<double> got = losses(make_trainer(model, mesh), 3, 0.1);
    for (size_t s = 0; s < got.size(); ++s)
      EXPECT_NEAR(got[s], moved[s], 1e-5) << mesh.data << mesh.pipeline << mesh.tensor << mesh.micro_batches << " step " << s;
  }
  for (const char* precision : {"bf16", "fp16"}) {  // the same numbers as in float32
    TrainingOptions training;
    training.precision = precision;
    const std::vector<double> got = losses(make_trainer(model, {}, 0, training), 3, 0);
    for (size_t s = 0; s < got.size(); ++s) EXPECT_NEAR(got[s], still[s], 0.03 * still[s]) << precision << " step " << s;
  }
}

TEST(TrainingRandom, NormalNumbersLikeAValue) {
  expect_counted(make_model([](Graph& g, Value* x) {
    return add_node(g, "Add", {x, add_node(g, "RandomNormalLike", {x}, "n", {attribute("scale", 0.5f), attribute("mean", 0.1f)})}, "sum");
  }));
}

TEST(TrainingRandom, UniformNumbersLikeAValue) {
  expect_counted(make_model([](Graph& g, Value* x) {
    return add_node(g, "Mul", {x, add_node(g, "RandomUniformLike", {x}, "u", {attribute("low", -1.0f), attribute("high", 2.0f)})}, "times");
  }));
}

// A plan that was written to a folder and read again draws the same.
TEST(TrainingRandom, APlanInAFolderDrawsTheSame) {
  const Model model = make_model([](Graph& g, Value* x) {
    return add_node(g, "Add", {x, add_node(g, "RandomNormalLike", {x}, "n")}, "sum");
  });
  const TemporaryFolder folder;
  for (const Mesh3& mesh : {Mesh3{1, 1, 1, 1}, Mesh3{2, 2, 2, 2}}) {
    const std::string name = folder / ("plan" + std::to_string(mesh.data));
    write_training_plan(partition_for_training(clone(model), cut_of(mesh), {}), {"softmax_cross_entropy", "sgd", {}}, name);
    TrainerOptions with;
    with.session.threads = 1;
    EXPECT_EQ(losses(Trainer(read_training_plan(name).training, with), 3, 0.1), losses(make_trainer(model, mesh), 3, 0.1));
  }
}

// Stochastic depth as PyTorch's exporter writes it: whole samples are left out.
TEST(TrainingRandom, SamplesLeftOutByAThreshold) {
  expect_counted(make_model([](Graph& g, Value* x) {
    Value* size = add_node(g, "Shape", {x}, "size", {attribute("end", int64_t{1})});
    Value* zeros = add_node(
        g, "ConstantOfShape",
        {add_node(g, "Concat", {size, g.add_constant("one", make_int64s({1}))}, "sizes", {attribute("axis", int64_t{0})})}, "zeros");
    Value* drawn = add_node(g, "RandomUniformLike", {zeros}, "drawn", {attribute("dtype", int64_t{1})});
    Value* kept = add_node(g, "Less", {drawn, g.add_constant("share", floats({}, {0.7f}))}, "kept");
    return add_node(g, "Mul", {x, add_node(g, "Cast", {kept}, "factor", {attribute("to", int64_t{1})})}, "times");
  }));
}

// Gumbel noise: log(-log(u)) of u rounded to 1 would be infinite.
TEST(TrainingRandom, LogarithmsOfNumbers) {
  expect_counted(make_model([](Graph& g, Value* x) {
    Value* drawn = add_node(g, "RandomUniformLike", {x}, "drawn", {attribute("low", 0.01f), attribute("high", 0.9999f)});
    Value* minus = add_node(g, "Neg", {add_node(g, "Log", {drawn}, "log")}, "minus");
    return add_node(g, "Sub", {x, add_node(g, "Log", {minus}, "gumbel")}, "sum");
  }));
}

// What has no samples is the same for all of them.
TEST(TrainingRandom, NumbersOfAShapeOfTheirOwn) {
  expect_counted(make_model([](Graph& g, Value* x) {
    Value* row = add_node(g, "RandomNormal", {}, "row", {attribute("shape", std::vector<int64_t>{1, kHidden})});
    return add_node(g, "Add", {x, row}, "sum");
  }));
  expect_counted(make_model([](Graph& g, Value* x) {
    Value* row = add_node(g, "RandomUniformLike", {g.add_constant("c", floats({kHidden}, noise(kHidden, 4)))}, "row");
    return add_node(g, "Add", {x, row}, "sum");
  }));
}

TEST(TrainingRandom, ChoicesByProbability) {
  expect_counted(make_model([](Graph& g, Value* x) {
    return add_node(g, "Mul", {x, add_node(g, "Bernoulli", {add_node(g, "Sigmoid", {x}, "p")}, "b")}, "times");
  }));
}

// Ratio and mode may be computed.
TEST(TrainingRandom, DropoutsOfComputedRatioAndMode) {
  const auto model = [](float ratio, float mode) {
    return make_model([&](Graph& g, Value* x) {
      Value* half = add_node(g, "Abs", {add_node(g, "Neg", {g.add_constant("ratio", floats({}, {ratio}))}, "minus")}, "computed");
      Value* zero = g.add_constant("zero", floats({}, {0}));
      Value* yes = add_node(g, "Greater", {add_node(g, "Add", {g.add_constant("mode", floats({}, {mode})), zero}, "m"), zero}, "yes");
      return add_node(g, "Dropout", {x, half, yes}, "dropped");
    });
  };
  TrainingOptions training;
  training.freeze = {"ratio", "mode", "zero"};
  const std::vector<double> still = losses(make_trainer(model(0.4f, 1), {}, 0, training), 2, 0);
  EXPECT_NE(still[0], still[1]);
  EXPECT_NEAR(losses(make_trainer(model(0.4f, 1), {1, 1, 1, 3}, 0, training), 2, 0)[1], still[1], 1e-5);
  const std::vector<double> off = losses(make_trainer(model(0.4f, -1), {}, 0, training), 2, 0);
  EXPECT_EQ(off[0], off[1]);
  EXPECT_EQ(off[0], losses(make_trainer(make_model([](Graph&, Value* x) { return x; }), {}), 1, 0)[0]);
}

// The samples of what is dropped lie in its second dimension.
TEST(TrainingRandom, SamplesInAnotherDimension) {
  for (const char* op : {"Dropout", "Bernoulli", "RandomNormalLike"}) {
    expect_counted(make_model([&](Graph& g, Value* x) {
      auto yes = make_tensor(DType::boolean, {});
      *mutable_data(*yes) = std::byte{1};
      Value* turned = add_node(g, "Transpose", {x}, "turned", {attribute("perm", std::vector<int64_t>{1, 0})});
      Value* changed = nullptr;
      if (op == std::string("Dropout"))
        changed = add_node(g, op, {turned, g.add_constant("ratio", floats({}, {0.4f})), g.add_constant("yes", yes)}, "changed");
      else if (op == std::string("Bernoulli"))
        changed = add_node(g, "Mul", {turned, add_node(g, op, {add_node(g, "Sigmoid", {turned}, "p")}, "b")}, "changed");
      else
        changed = add_node(g, "Add", {turned, add_node(g, op, {turned}, "n")}, "changed");
      return add_node(g, "Transpose", {changed}, "back", {attribute("perm", std::vector<int64_t>{1, 0})});
    }));
  }
}

// The loss is the mean of w times the numbers.
TEST(TrainingRandom, TheNumbersAreThoseOfTheirDistribution) {
  const auto mean_of = [](const std::string& op, std::vector<Attribute> attributes, float probability) {
    Model model = *new_model();
    Graph& g = *model.graph;
    Value* x = add_input(model, "x", DType::float32, {Dim("batch"), Dim(kIn)});
    Value* like =
        op == "Bernoulli"
            ? add_node(g, "Clip", {x, g.add_constant("p", floats({}, {probability})), g.add_constant("q", floats({}, {probability}))}, "ps")
            : x;
    Value* numbers = add_node(g, op, {like}, "numbers", std::move(attributes));
    Value* scaled = add_node(g, "Mul", {numbers, g.add_constant("w", floats({}, {1}))}, "scaled");
    g.outputs = {add_node(g, "ReduceMean", {scaled}, "mean", {attribute("keepdims", int64_t{0})})};
    name_nodes_by_outputs(g);
    TrainingOptions training;
    training.loss = parse_loss("output");
    training.train = {"w"};
    Trainer trainer = make_trainer(model, {}, 0, training);
    Batch batch = make_batch();
    batch.erase("target");
    double sum = 0;
    for (int s = 0; s < kSteps; ++s) sum += trainer.step(batch, 0).loss;
    return sum / kSteps;
  };
  const double deviation = 1 / std::sqrt(static_cast<double>(kSteps * kBatch * kIn));
  EXPECT_NEAR(mean_of("RandomNormalLike", {attribute("scale", 2.0f), attribute("mean", 3.0f)}, 0), 3, 5 * 2 * deviation);
  EXPECT_NEAR(mean_of("RandomUniformLike", {attribute("low", 2.0f), attribute("high", 4.0f)}, 0), 3, 5 * 0.58 * deviation);
  EXPECT_NEAR(mean_of("Bernoulli", {}, 0.3f), 0.3, 5 * 0.46 * deviation);
}

TEST(TrainingRandom, WhatWouldDrawTheSameIsRefused) {
  const Model model = make_model([](Graph& g, Value* x) {
    Value* chosen = add_node(g, "Multinomial", {x}, "chosen", {attribute("dtype", int64_t{7})});
    return add_node(g, "Add", {x, add_node(g, "Cast", {chosen}, "c", {attribute("to", int64_t{1})})}, "sum");
  });
  EXPECT_THAT(error_of([&] { make_trainer(model, {}); }), AllOf(HasSubstr("'chosen' (Multinomial)"), HasSubstr("in every step")));
}

}  // namespace
}  // namespace fretsaw
