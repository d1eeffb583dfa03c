// Models with LSTM, GRU and RNN train, and cut in every way they train as on one rank.
#include <gtest/gtest.h>

#include "graph/training/training_plan.h"
#include "partitioner/training.h"
#include "runtime/training/trainer.h"
#include "tests/runtime/plans.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kWords = 20, kWide = 6, kHidden = 5, kSteps = 7, kBatch = 8, kClasses = 9;
constexpr int kUpdates = 4;

Value* weight(Graph& g, const std::string& name, const Dims& dims, unsigned seed) {
  std::vector<float> values = noise(static_cast<size_t>(count_of(dims)), seed);
  for (float& v : values) v *= 0.5f;
  return g.add_constant(name, floats(dims, values));
}

// Embedded words through both directions of an LSTM, a GRU with the order of PyTorch's gates and an RNN, of which the last state is scored.
Model recurrent_model() {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* words = add_input(model, "words", DType::int64, {Dim("batch"), Dim(kSteps)});
  Value* x = add_node(g, "Gather", {weight(g, "table", {kWords, kWide}, 1), words}, "embedded");
  x = add_node(g, "Transpose", {x}, "steps", {attribute("perm", Dims{1, 0, 2})});
  const Attribute hidden = attribute("hidden_size", kHidden);
  x = add_node(g, "LSTM",
               {x, weight(g, "lstm.w", {2, 4 * kHidden, kWide}, 2), weight(g, "lstm.r", {2, 4 * kHidden, kHidden}, 3),
                weight(g, "lstm.b", {2, 8 * kHidden}, 4)},
               "lstm", {hidden, attribute("direction", std::string("bidirectional"))});
  x = add_node(g, "Transpose", {x}, "turned", {attribute("perm", Dims{0, 2, 1, 3})});
  x = add_node(g, "Reshape", {x, g.add_constant("shape", make_int64s({0, 0, 2 * kHidden}))}, "joined");
  x = add_node(g, "GRU",
               {x, weight(g, "gru.w", {1, 3 * kHidden, 2 * kHidden}, 5), weight(g, "gru.r", {1, 3 * kHidden, kHidden}, 6),
                weight(g, "gru.b", {1, 6 * kHidden}, 7)},
               "gru", {hidden, attribute("linear_before_reset", int64_t{1})});
  x = add_node(g, "Squeeze", {x, g.add_constant("axis", make_int64s({1}))}, "states");
  Node* rnn = g.add_node("RNN", {x, weight(g, "rnn.w", {1, kHidden, kHidden}, 8), weight(g, "rnn.r", {1, kHidden, kHidden}, 9)},
                         {"", "last"}, {hidden});
  x = add_node(g, "Squeeze", {rnn->outputs[1], g.add_constant("first", make_int64s({0}))}, "state");
  g.outputs = {add_node(g, "Gemm", {x, weight(g, "head", {kHidden, kClasses}, 10), weight(g, "shift", {kClasses}, 11)}, "scores")};
  for (Node* node : g.nodes) node->name = node->out(0) ? node->out(0)->name : "rnn";
  return model;
}

struct Case {
  std::string name, precision = "fp32";
  int data = 1, pipeline = 1, tensor = 1, micro_batches = 1;
};

std::vector<double> losses_of(const Case& c) {
  PartitionOptions options;
  options.mesh.data = c.data, options.mesh.pipeline = c.pipeline, options.mesh.tensor = c.tensor, options.micro_batches = c.micro_batches;
  TrainingOptions training;
  training.optimizer = parse_optimizer("sgd:lr=0.5");
  training.loss = parse_loss("softmax_cross_entropy");
  training.precision = c.precision;
  TrainerOptions with;
  with.session.threads = 1, with.loss = training.loss;
  Trainer trainer(partition_for_training(recurrent_model(), options, training), with);
  EXPECT_EQ(trainer.plan().parameters.size(), 11u);
  std::vector<double> losses;
  for (int update = 0; update < kUpdates; ++update) {
    std::vector<int64_t> words, target;
    for (int64_t i = 0; i < kBatch * kSteps; ++i) words.push_back((i * i + 3 * i) % kWords);
    for (int64_t i = 0; i < kBatch; ++i) target.push_back((i * 5) % kClasses);
    Batch batch;
    batch["words"] = int_value({kBatch, kSteps}, words);
    batch["target"] = int_value({kBatch}, target);
    losses.push_back(trainer.step(batch, 0.5).loss);
  }
  return losses;
}

class TrainingRecurrent : public ::testing::TestWithParam<Case> {};

TEST_P(TrainingRecurrent, TrainsAsOnOneRank) {
  const std::vector<double> wanted = losses_of({"whole"}), got = losses_of(GetParam());
  EXPECT_LT(wanted.back(), wanted.front());
  for (size_t i = 0; i < wanted.size(); ++i)
    EXPECT_NEAR(got[i], wanted[i], (GetParam().precision == "fp32" ? 1e-5 : 2e-2) * wanted[i]) << i;
}
INSTANTIATE_TEST_SUITE_P(Ways, TrainingRecurrent,
                         ::testing::Values(Case{"Pipeline", "fp32", 1, 2}, Case{"MicroBatches", "fp32", 1, 2, 1, 4},
                                           Case{"Data", "fp32", 2}, Case{"Tensor", "fp32", 1, 1, 2}, Case{"Bfloat16", "bf16", 1, 2},
                                           Case{"Float16", "fp16"}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fretsaw
