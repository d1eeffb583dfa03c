// Models with LSTM, GRU and RNN train, and cut in every way they train as on one rank.
#include <gtest/gtest.h>

#include "graph/training/training_plan.h"
#include "tests/runtime/training_runs.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kWords = 20, kWide = 6, kHidden = 5, kSteps = 7, kBatch = 8, kClasses = 9;
constexpr int kUpdates = 4;

// Embedded words through both directions of an LSTM, a GRU with the order of PyTorch's gates and an RNN, of which the last state is scored.
Model recurrent_model() {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* words = add_input(model, "words", DType::int64, {Dim("batch"), Dim(kSteps)});
  Value* x = add_node(g, "Gather", {add_weight(g, "table", {kWords, kWide}, 1), words}, "embedded");
  x = add_node(g, "Transpose", {x}, "steps", {attribute("perm", Dims{1, 0, 2})});
  const Attribute hidden = attribute("hidden_size", kHidden);
  x = add_node(g, "LSTM",
               {x, add_weight(g, "lstm.w", {2, 4 * kHidden, kWide}, 2), add_weight(g, "lstm.r", {2, 4 * kHidden, kHidden}, 3),
                add_weight(g, "lstm.b", {2, 8 * kHidden}, 4)},
               "lstm", {hidden, attribute("direction", std::string("bidirectional"))});
  x = add_node(g, "Transpose", {x}, "turned", {attribute("perm", Dims{0, 2, 1, 3})});
  x = add_node(g, "Reshape", {x, g.add_constant("shape", make_int64s({0, 0, 2 * kHidden}))}, "joined");
  x = add_node(g, "GRU",
               {x, add_weight(g, "gru.w", {1, 3 * kHidden, 2 * kHidden}, 5), add_weight(g, "gru.r", {1, 3 * kHidden, kHidden}, 6),
                add_weight(g, "gru.b", {1, 6 * kHidden}, 7)},
               "gru", {hidden, attribute("linear_before_reset", int64_t{1})});
  x = add_node(g, "Squeeze", {x, g.add_constant("axis", make_int64s({1}))}, "states");
  Node* rnn = g.add_node("RNN", {x, add_weight(g, "rnn.w", {1, kHidden, kHidden}, 8), add_weight(g, "rnn.r", {1, kHidden, kHidden}, 9)},
                         {"", "last"}, {hidden});
  x = add_node(g, "Squeeze", {rnn->outputs[1], g.add_constant("first", make_int64s({0}))}, "state");
  g.outputs = {add_node(g, "Gemm", {x, add_weight(g, "head", {kHidden, kClasses}, 10), add_weight(g, "shift", {kClasses}, 11)}, "scores")};
  for (Node* node : g.nodes) node->name = node->out(0) ? node->out(0)->name : "rnn";
  return model;
}

struct Case {
  std::string name, precision = "fp32";
  int data = 1, pipeline = 1, tensor = 1, micro_batches = 1;
};

std::vector<double> train(const Case& c) {
  Trainer trainer = trainer_of(recurrent_model(), cut_of(c), with_optimizer("sgd:lr=0.5", c.precision));
  EXPECT_EQ(trainer.plan().parameters.size(), 11u);
  std::vector<int64_t> words;
  for (int64_t i = 0; i < kBatch * kSteps; ++i) words.push_back((i * i + 3 * i) % kWords);
  Batch batch;
  batch["words"] = int_value({kBatch, kSteps}, words);
  batch["target"] = int_value({kBatch}, some_classes(kBatch, kClasses, 5));
  return losses_of(trainer, kUpdates, 0.5, [&](int) { return batch; });
}

class TrainingRecurrent : public ::testing::TestWithParam<Case> {};

TEST_P(TrainingRecurrent, TrainsAsOnOneRank) {
  const std::vector<double> wanted = train({"whole"}), got = train(GetParam());
  EXPECT_LT(wanted.back(), wanted.front());
  expect_close(got, wanted, GetParam().precision == "fp32" ? 1e-5 : 2e-2);
}
INSTANTIATE_TEST_SUITE_P(Ways, TrainingRecurrent,
                         ::testing::Values(Case{"Pipeline", "fp32", 1, 2}, Case{"MicroBatches", "fp32", 1, 2, 1, 4},
                                           Case{"Data", "fp32", 2}, Case{"Tensor", "fp32", 1, 1, 2}, Case{"Bfloat16", "bf16", 1, 2},
                                           Case{"Float16", "fp16"}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fretsaw
