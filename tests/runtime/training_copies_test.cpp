// Parameters in 16 bits beside the float32 ones that learn: made by the update, taken by the micro-batches.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "graph/training/training_plan.h"
#include "runtime/state_parts.h"
#include "tests/runtime/training_runs.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kWords = 12, kWide = 8, kLength = 4, kBatch = 8;
constexpr int kSteps = 3;

// Two layers x += tanh(norm(x) w + b) between an embedding and a head that share one matrix.
Model make_model() {
  Model model = *new_model();
  Graph& g = *model.graph;
  unsigned seed = 1;
  const auto weight = [&](const std::string& name, const Dims& dims) { return add_weight(g, name, dims, seed++); };
  Value* words = weight("words", {kWords, kWide});
  Value* x = add_node(g, "Gather", {words, add_input(model, "ids", DType::int64, {Dim("batch"), Dim(kLength)})}, "embedded");
  for (const std::string layer : {"0", "1"}) {
    Value* norm =
        add_node(g, "LayerNormalization", {x, weight("scale" + layer, {kWide}), weight("shift" + layer, {kWide})}, "norm" + layer);
    Value* product = add_node(g, "MatMul", {norm, weight("w" + layer, {kWide, kWide})}, "product" + layer);
    Value* sum = add_node(g, "Add", {product, weight("b" + layer, {kWide})}, "sum" + layer);
    x = add_node(g, "Add", {x, add_node(g, "Tanh", {sum}, "inner" + layer)}, "layer" + layer);
  }
  Value* head = add_node(g, "Transpose", {words}, "head", {attribute("perm", std::vector<int64_t>{1, 0})});
  g.outputs = {add_node(g, "MatMul", {x, head}, "logits")};
  name_nodes_by_outputs(g);
  return model;
}

Batch batch_of(int step) {
  return some_text(kBatch, kLength, kWords, step);
}

struct Case {
  std::string name;
  int data = 1, pipeline = 1, tensor = 1, micro_batches = 1, zero = 0;
  std::string schedule = "gpipe", recompute = "none", precision = "bf16";
};

Trainer make_trainer(const Case& c) {
  TrainingOptions training = with_optimizer("adamw:lr=0.02,weight_decay=0.1", c.precision);
  training.zero = c.zero, training.recompute = c.recompute;
  return trainer_of(make_model(), cut_of(c), training);
}

std::vector<std::string> copied(const Trainer& trainer) {
  std::vector<std::string> names;
  for (const PlanState& state : trainer.plan().plan->states)
    if (!state.rounded_from.empty()) names.push_back(state.rounded_from);
  return names;
}

// Bytes, of values on the host.
std::vector<std::byte> bytes(const RuntimeValue& value) {
  const auto* data = static_cast<const std::byte*>(value.tensor.data);
  return {data, data + value.tensor.bytes()};
}

class TrainingCopies : public ::testing::TestWithParam<Case> {};

TEST_P(TrainingCopies, AreTheParametersRounded) {
  const Case& c = GetParam();
  Case whole{"one"};
  whole.precision = c.precision;
  Trainer one = make_trainer(whole), many = make_trainer(c);
  std::vector<std::string> expected = many.plan().parameters;
  if (c.tensor > 1) std::erase(expected, "words");  // its parts are taken from the whole, which is rounded afterwards
  ASSERT_THAT(copied(many), testing::UnorderedElementsAreArray(expected));
  const DType type = c.precision == "fp16" ? DType::float16 : DType::bfloat16;
  for (int s = 0; s < kSteps; ++s) {
    for (const std::string& name : copied(many))
      EXPECT_EQ(bytes(many.parameter(copy_of(name))), bytes(rounded(many.parameter(name), type))) << name << " before step " << s;
    const StepResult wanted = one.step(batch_of(s), 0.02), got = many.step(batch_of(s), 0.02);
    EXPECT_NEAR(got.loss, wanted.loss, 5e-3 * wanted.loss) << s;
    EXPECT_FALSE(got.skipped);
  }
}

TEST_P(TrainingCopies, AreAllThatMicroBatchesTake) {
  const Trainer trainer = make_trainer(GetParam());
  for (const PlanGraph& g : trainer.plan().plan->graphs) {
    if (g.kind == "update") continue;
    for (const std::string& name : copied(trainer))
      for (const Value* v : g.model->graph->inputs) EXPECT_NE(v->name, kStateInput + name) << g.file;
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, TrainingCopies,
                         ::testing::Values(Case{"one"}, Case{.name = "half", .precision = "fp16"},
                                           Case{.name = "parts", .micro_batches = 2}, Case{.name = "recompute", .recompute = "all"},
                                           Case{.name = "tensor", .tensor = 2}, Case{.name = "pipeline", .pipeline = 2, .micro_batches = 2},
                                           Case{.name = "bubble", .pipeline = 2, .micro_batches = 4, .schedule = "zero-bubble-h1"},
                                           Case{.name = "data", .data = 2}, Case{.name = "zero1", .data = 2, .zero = 1},
                                           Case{.name = "zero2", .data = 2, .micro_batches = 2, .zero = 2},
                                           Case{.name = "zero3", .data = 2, .micro_batches = 2, .zero = 3},
                                           Case{.name = "all", .data = 2, .pipeline = 2, .tensor = 2, .micro_batches = 2, .zero = 1}),
                         [](const auto& i) { return i.param.name; });

// A data rank updates its part and rounds it; only the copies are gathered.
TEST(TrainingCopies, LetParametersBeDivided) {
  for (const int zero : {1, 2, 3}) {
    const Trainer trainer = make_trainer({.name = "divided", .data = 2, .zero = zero});
    const auto divided = [&](const std::string& name) {
      for (const PlanState& state : trainer.plan().plan->states)
        if (state.name == name) return !state.parts.empty();
      ADD_FAILURE() << "no state " << name;
      return false;
    };
    EXPECT_TRUE(divided("w0")) << zero;
    EXPECT_EQ(divided(copy_of("w0")), zero == 3) << zero;
  }
}

TEST(TrainingCopies, FollowWhatIsRestored) {
  Trainer first = make_trainer({"first"});
  first.step(batch_of(0), 0.02);
  const auto kept = first.kept();
  for (const auto& [name, value] : kept) EXPECT_FALSE(name.starts_with(copy_of(""))) << name;
  Trainer again = make_trainer({.name = "again", .data = 2, .zero = 1});
  Trainer same = make_trainer({"same"});
  again.restore(kept, 1), same.restore(kept, 1);
  EXPECT_EQ(bytes(again.parameter(copy_of("w0"))), bytes(first.parameter(copy_of("w0"))));
  const double wanted = first.step(batch_of(1), 0.02).loss;
  EXPECT_EQ(same.step(batch_of(1), 0.02).loss, wanted);
  EXPECT_NEAR(again.step(batch_of(1), 0.02).loss, wanted, 5e-3 * wanted);
}

TEST(TrainingCopies, AreNotMadeInFloat32) {
  const Trainer trainer = make_trainer({.name = "wide", .precision = "fp32"});
  EXPECT_TRUE(copied(trainer).empty());
}

}  // namespace
}  // namespace fretsaw
