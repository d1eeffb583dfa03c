// Training steps against gradients by hand, and the same steps on several ranks and in micro-batches.
#include "partitioner/training.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "graph/errors.h"
#include "graph/passes/narrow_floats.h"
#include "tests/runtime/training_runs.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kIn = 6, kHidden = 8, kClasses = 4, kBatch = 8;
constexpr int kSteps = 5;

std::vector<double> wide(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

// logits = tanh(x w1 + b1) w2 - b2, where -b2 could be computed anywhere
Model make_mlp() {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* x = add_input(model, "x", DType::float32, {Dim("batch"), Dim(kIn)});
  Value* w1 = g.add_constant("w1", floats({kIn, kHidden}, noise(kIn * kHidden, 1)));
  Value* b1 = g.add_constant("b1", floats({kHidden}, noise(kHidden, 2)));
  Value* w2 = g.add_constant("w2", floats({kHidden, kClasses}, noise(kHidden * kClasses, 3)));
  Value* sum = add_node(g, "Add", {add_node(g, "MatMul", {x, w1}, "product"), b1}, "sum");
  Value* hidden = add_node(g, "Tanh", {sum}, "hidden");
  Value* negative = add_node(g, "Neg", {g.add_constant("b2", floats({kClasses}, noise(kClasses, 4)))}, "negative");
  g.outputs = {add_node(g, "Add", {add_node(g, "MatMul", {hidden, w2}, "scores"), negative}, "logits")};
  int number = 0;
  for (Node* node : g.nodes) node->name = "node" + std::to_string(number++);
  return model;
}

Batch batch_of(int step) {
  return classified_noise(kIn, some_classes(kBatch, kClasses, 3, step), 100 + static_cast<unsigned>(step));
}

// The same network in double precision, by SGD with momentum and weight decay as PyTorch has it.
class ByHand {
 public:
  double step(const Batch& batch, double lr, double momentum, double decay) {
    const std::vector<double> x = wide(elements<float>(batch.at("x")));
    const std::vector<int64_t> target = elements<int64_t>(batch.at("target"));
    std::vector<double> g1(w1.size()), gb(b1.size()), g2(w2.size()), gb2(b2.size());
    double loss = 0;
    for (int64_t n = 0; n < kBatch; ++n) {
      double h[kHidden], p[kClasses], total = 0, back[kHidden] = {};
      for (int64_t j = 0; j < kHidden; ++j) {
        double sum = b1[j];
        for (int64_t i = 0; i < kIn; ++i) sum += x[n * kIn + i] * w1[i * kHidden + j];
        h[j] = std::tanh(sum);
      }
      for (int64_t k = 0; k < kClasses; ++k) {
        p[k] = -b2[k];
        for (int64_t j = 0; j < kHidden; ++j) p[k] += h[j] * w2[j * kClasses + k];
        total += p[k] = std::exp(p[k]);
      }
      loss -= std::log(p[target[n]] / total) / kBatch;
      for (int64_t k = 0; k < kClasses; ++k) {
        const double g = (p[k] / total - (k == target[n])) / kBatch;
        gb2[k] -= g;
        for (int64_t j = 0; j < kHidden; ++j) g2[j * kClasses + k] += g * h[j], back[j] += g * w2[j * kClasses + k];
      }
      for (int64_t j = 0; j < kHidden; ++j) {
        const double g = back[j] * (1 - h[j] * h[j]);
        gb[j] += g;
        for (int64_t i = 0; i < kIn; ++i) g1[i * kHidden + j] += g * x[n * kIn + i];
      }
    }
    move(w1, m1, g1, lr, momentum, decay), move(b1, mb, gb, lr, momentum, decay), move(w2, m2, g2, lr, momentum, decay);
    move(b2, mb2, gb2, lr, momentum, decay);
    return loss;
  }
  std::vector<double> w1 = wide(noise(kIn * kHidden, 1)), b1 = wide(noise(kHidden, 2)), w2 = wide(noise(kHidden * kClasses, 3)),
                      b2 = wide(noise(kClasses, 4));

 private:
  static void move(std::vector<double>& w, std::vector<double>& m, const std::vector<double>& g, double lr, double momentum, double decay) {
    m.resize(w.size());
    for (size_t i = 0; i < w.size(); ++i) m[i] = momentum * m[i] + g[i] + decay * w[i], w[i] -= lr * m[i];
  }
  std::vector<double> m1, mb, m2, mb2;
};

struct Case {
  std::string name;
  int data = 1, pipeline = 1, micro_batches = 1;
  std::string schedule = "gpipe";
};
class TrainingTest : public ::testing::TestWithParam<Case> {};

TEST_P(TrainingTest, EqualsTheStepsByHand) {
  PartitionOptions options = cut_of(GetParam());
  if (GetParam().pipeline == 2) options.cuts = {{"hidden"}};
  Trainer trainer = trainer_of(make_mlp(), options, with_optimizer("sgd:lr=0.1,momentum=0.9,weight_decay=0.01"));
  ByHand by_hand;
  for (int s = 0; s < kSteps; ++s) {
    const Batch batch = batch_of(s);
    const StepResult result = trainer.step(batch, 0.1);
    EXPECT_NEAR(result.loss, by_hand.step(batch, 0.1, 0.9, 0.01), 1e-5) << s;
    EXPECT_EQ(result.count, kBatch);
    EXPECT_FALSE(result.skipped);
  }
  const auto expect_near = [&](const std::string& name, const std::vector<double>& wanted) {
    const std::vector<float> got = elements<float>(trainer.parameter(name));
    ASSERT_EQ(got.size(), wanted.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(static_cast<double>(got[i]), wanted[i], 1e-5) << name << " " << i;
  };
  expect_near("w1", by_hand.w1), expect_near("b1", by_hand.b1), expect_near("w2", by_hand.w2), expect_near("b2", by_hand.b2);
}

INSTANTIATE_TEST_SUITE_P(Meshes, TrainingTest,
                         ::testing::Values(Case{"one"}, Case{"in_parts", 1, 1, 4}, Case{"uneven_parts", 1, 1, 3}, Case{"data", 2},
                                           Case{"uneven_data", 3}, Case{"pipeline", 1, 2, 1}, Case{"pipeline_in_parts", 1, 2, 4},
                                           Case{"pipeline_1f1b", 1, 2, 4, "1f1b"}, Case{"both", 2, 2, 2, "1f1b"}),
                         [](const auto& info) { return info.param.name; });

// logits = tanh(normalised(x w1)) w2
Model make_normalised_mlp() {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* x = add_input(model, "x", DType::float32, {Dim("batch"), Dim(kIn)});
  Value* product = add_node(g, "MatMul", {x, g.add_constant("w1", floats({kIn, kHidden}, noise(kIn * kHidden, 1)))}, "product");
  const auto row = [&](const std::string& name, float value) { return add_row(g, name, kHidden, value); };
  Value* normal = add_node(g, "BatchNormalization", {product, row("scale", 0.8f), row("shift", 0.1f), row("mean", 0.2f), row("var", 1.5f)},
                           "normal", {attribute("momentum", 0.75f)});
  Value* w2 = g.add_constant("w2", floats({kHidden, kClasses}, noise(kHidden * kClasses, 3)));
  g.outputs = {add_node(g, "MatMul", {add_node(g, "Tanh", {normal}, "hidden"), w2}, "logits")};
  int number = 0;
  for (Node* node : g.nodes) node->name = "node" + std::to_string(number++);
  return model;
}

TEST(Training, SynchronisedStatisticsAreThoseOfOneDevice) {
  const auto make = [](int data, int pipeline, bool synchronised) {
    PartitionOptions options;
    options.mesh.data = data, options.mesh.pipeline = pipeline;
    TrainingOptions training;
    training.optimizer = parse_optimizer("adamw:lr=0.05");
    training.sync_batch_norm = synchronised;
    return trainer_of(make_normalised_mlp(), options, training);
  };
  Trainer one = make(1, 1, false), same = make(2, 1, true), uneven = make(3, 1, true), staged = make(2, 2, true), apart = make(2, 1, false);
  for (int s = 0; s < kSteps; ++s) {
    const double wanted = one.step(batch_of(s), 0.05).loss;
    for (Trainer* other : {&same, &uneven, &staged}) EXPECT_NEAR(other->step(batch_of(s), 0.05).loss, wanted, 1e-4) << s;
    EXPECT_GT(std::abs(apart.step(batch_of(s), 0.05).loss - wanted), 1e-4) << s;
  }
  for (const std::string name : {"mean", "var", "scale", "w1"}) {
    const std::vector<float> wanted = elements<float>(one.parameter(name));
    for (Trainer* other : {&same, &uneven, &staged}) {
      const std::vector<float> got = elements<float>(other->parameter(name));
      for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], wanted[i], 2e-4) << name << " " << i;
    }
  }
}

TEST(Training, ASynchronisedRankWithoutSamplesIsAnError) {
  PartitionOptions options;
  options.mesh.data = 3;
  TrainingOptions training;
  training.sync_batch_norm = true;
  Trainer trainer(partition_for_training(make_normalised_mlp(), options, training), {});
  Batch two;
  two["x"] = float_value({2, kIn}, noise(2 * kIn, 1)), two["target"] = int_value({2}, {0, 1});
  EXPECT_THROW(trainer.step(two, 0.1), Error);
  EXPECT_NO_THROW(trainer.step(batch_of(0), 0.1));
}

// Momentum 0.75 of what was there, and of the batch's mean and population variance the rest.
TEST(Training, RunningStatisticsMoveAsOnnxSays) {
  Trainer trainer(partition_for_training(make_normalised_mlp(), {}, {}), {});
  const Batch batch = batch_of(0);
  const std::vector<double> x = wide(elements<float>(batch.at("x"))), w = wide(noise(kIn * kHidden, 1));
  trainer.step(batch, 0.1);
  const std::vector<float> mean = elements<float>(trainer.parameter("mean")), var = elements<float>(trainer.parameter("var"));
  for (int64_t j = 0; j < kHidden; ++j) {
    double sum = 0, squares = 0;
    for (int64_t n = 0; n < kBatch; ++n) {
      double value = 0;
      for (int64_t i = 0; i < kIn; ++i) value += x[static_cast<size_t>(n * kIn + i)] * w[static_cast<size_t>(i * kHidden + j)];
      sum += value / kBatch, squares += value * value / kBatch;
    }
    EXPECT_NEAR(static_cast<double>(mean[static_cast<size_t>(j)]), 0.75 * 0.2 + 0.25 * sum, 1e-5);
    EXPECT_NEAR(static_cast<double>(var[static_cast<size_t>(j)]), 0.75 * 1.5 + 0.25 * (squares - sum * sum), 1e-5);
  }
}

TEST(Training, ANumberThatIsNotFiniteSkipsTheStep) {
  Trainer trainer(partition_for_training(make_mlp(), {}, {}), {});
  Batch bad = batch_of(0);
  bad.at("x").tensor.as<float>()[3] = INFINITY;
  bad.at("x").tensor.as<float>()[4] = NAN;
  const std::vector<float> before = elements<float>(trainer.parameter("w1"));
  EXPECT_TRUE(trainer.step(bad, 0.1).skipped);
  EXPECT_EQ(elements<float>(trainer.parameter("w1")), before);
  EXPECT_FALSE(trainer.step(batch_of(0), 0.1).skipped);
  EXPECT_EQ(trainer.updates(), 1);
  EXPECT_NE(elements<float>(trainer.parameter("w1")), before);
}

TEST(Training, FrozenParametersStay) {
  TrainingOptions training;
  training.freeze = {"w1", "b*"};
  const TrainingPlan plan = partition_for_training(make_mlp(), {}, training);
  EXPECT_EQ(plan.parameters, std::vector<std::string>{"w2"});
  training.freeze = {"*"};
  EXPECT_THROW(partition_for_training(make_mlp(), {}, training), Error);
}

TEST(Training, AParameterWithoutAGradientStaysAndIsNamed) {
  Model model = make_mlp();
  Graph& g = *model.graph;
  Value* steps = add_node(g, "Floor", {g.add_constant("stuck", floats({kClasses}, noise(kClasses, 9)))}, "steps");
  g.outputs = {add_node(g, "Add", {g.outputs[0], steps}, "shifted")};
  for (Node* node : g.nodes) node->name = node->outputs[0]->name;
  Trainer trainer(partition_for_training(clone(model), {}, {}), {});
  const std::vector<std::string>& trained = trainer.plan().parameters;
  EXPECT_EQ(std::count(trained.begin(), trained.end(), "stuck"), 0);
  const std::vector<std::string>& notes = trainer.plan().plan->notes;
  EXPECT_TRUE(std::any_of(notes.begin(), notes.end(), [](const std::string& n) { return n.find("stuck") != std::string::npos; }));
  EXPECT_FALSE(trainer.step(batch_of(0), 0.1).skipped);
  EXPECT_EQ(elements<float>(trainer.parameter("stuck")), noise(kClasses, 9));
}

TEST(Training, TheTrainedModelHasTheNewValues) {
  const Model source = make_mlp();
  Trainer trainer(partition_for_training(clone(source), {}, {}), {});
  trainer.step(batch_of(0), 0.1);
  const Model trained = trained_model(source, trainer);
  for (const Value* v : trained.graph->initializers()) {
    const auto got = v->constant->as<float>();
    EXPECT_EQ(std::vector<float>(got.begin(), got.end()), elements<float>(trainer.parameter(v->name))) << v->name;
  }
}

// A file in 16 bits: its gradients are given out in float32.
TEST(Training, GradientsOfParametersInHalfPrecision) {
  for (const DType type : {DType::float16, DType::bfloat16}) {
    Model model = *new_model();
    Graph& g = *model.graph;
    Value* x = add_input(model, "x", type, {Dim("batch"), Dim(2)});
    g.outputs = {add_node(g, "MatMul", {x, g.add_constant("w", float_tensor(type, {2, 1}, {0.5, -1}))}, "y")};
    TrainingOptions training = with_optimizer("sgd:lr=0.1");
    training.loss = parse_loss("mse");
    Trainer trainer = trainer_of(std::move(model), {}, training);
    Batch batch;
    const auto given = [&](const Dims& dims, const std::vector<double>& numbers) {
      const TensorPtr tensor = float_tensor(type, dims, numbers);
      RuntimeValue value = make_value(type, dims);
      std::memcpy(value.tensor.data, tensor->data, value.tensor.bytes());
      return value;
    };
    batch["x"] = given({2, 2}, {1, 2, -1, 4});
    batch["target"] = float_value({2, 1}, {0, 0});
    trainer.step(batch, 0);  // y = -1.5, -4.5: the gradient is the mean of 2 y x
    EXPECT_EQ(trainer.gradient("w").tensor.dtype, DType::float32);
    EXPECT_EQ(elements<float>(trainer.gradient("w")), (std::vector<float>{3, -21}));
  }
}

}  // namespace
}  // namespace fretsaw
