// What partitioning for training changes in a forward graph before it is cut: operators without a gradient become functions, rows of
// classes whole packs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "graph/communication_schemas.h"
#include "graph/training/pad_classes.h"
#include "graph/training/training_plan.h"
#include "tests/runtime/training_runs.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kWide = 8, kLength = 6, kBatch = 8;
constexpr int kSteps = 3;

// Two layers of attention whose scores get a bias that learns, in the operator's own form.
Model attention_model(int64_t classes) {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* x = add_input(model, "x", DType::float32, {Dim("batch"), Dim(kLength), Dim(kWide)});
  for (const std::string layer : {"0", "1"}) {
    const auto seed = static_cast<unsigned>(10 * (layer == "1"));
    std::vector<Value*> operands;
    for (const char* part : {"q", "k", "v"})
      operands.push_back(
          add_node(g, "MatMul", {x, add_weight(g, part + layer, {kWide, kWide}, seed + operands.size())}, part + ("of" + layer)));
    operands.push_back(add_weight(g, "bias" + layer, {kLength, kLength}, seed + 5));
    Value* y = add_node(g, "Attention", operands, "attended" + layer,
                        {attribute("q_num_heads", int64_t{2}), attribute("kv_num_heads", int64_t{2})});
    x = add_node(g, "Add", {x, y}, "layer" + layer);
  }
  g.outputs = {add_node(
      g, "Add", {add_node(g, "MatMul", {x, add_weight(g, "head", {kWide, classes}, 30)}, "product"), add_weight(g, "shift", {classes}, 31)},
      "scores")};
  name_nodes_by_outputs(g);
  return model;
}

struct Case {
  std::string name, precision = "fp32";
  int pipeline = 1, tensor = 1, micro_batches = 1;
  int64_t classes = 12;
};

Trainer make_trainer(const Case& c) {
  return trainer_of(attention_model(c.classes), cut_of(c), with_optimizer("sgd:lr=0.1", c.precision));
}

std::vector<double> losses_with(Trainer& trainer, int64_t classes) {
  const auto batch_of = [&](int step) {
    Batch batch;
    batch["x"] =
        float_value({kBatch, kLength, kWide}, noise(static_cast<size_t>(kBatch * kLength * kWide), 40u + static_cast<unsigned>(step)));
    batch["target"] = int_value({kBatch, kLength}, some_classes(kBatch * kLength, classes, 7, step));
    return batch;
  };
  return losses_of(trainer, kSteps, 0.1, batch_of);
}

class TrainingFunctions : public ::testing::TestWithParam<Case> {};

TEST_P(TrainingFunctions, AttentionWithABiasThatLearnsTrainsAsOnOneRank) {
  Trainer whole = make_trainer({"whole"}), trainer = make_trainer(GetParam());
  const std::vector<double> wanted = losses_with(whole, 12), got = losses_with(trainer, 12);
  EXPECT_EQ(count_nodes(trainer, "Attention"), 0);
  EXPECT_LT(wanted.back(), wanted.front());
  expect_close(got, wanted, GetParam().precision == "fp32" ? 1e-5 : 2e-2);
  const std::vector<std::string>& learning = trainer.plan().parameters;
  EXPECT_EQ(std::count(learning.begin(), learning.end(), "bias1"), 1);
}
INSTANTIATE_TEST_SUITE_P(Ways, TrainingFunctions,
                         ::testing::Values(Case{"Pipeline", "fp32", 2}, Case{"Tensor", "fp32", 1, 2}, Case{"Bfloat16", "bf16"},
                                           Case{"Bfloat16Pipeline", "bf16", 2, 1, 2}, Case{"Float16", "fp16"}),
                         [](const auto& info) { return info.param.name; });

// One rank pads the rows of 1027 scores, tensor ranks compute the loss by operators that do not.
TEST(PaddedClasses, GiveTheStepsOfTheScoresAsTheyAre) {
  Case padded{"padded", "bf16"}, plain{"plain", "bf16", 1, 2};
  padded.classes = plain.classes = 1027;
  Trainer a = make_trainer(padded), b = make_trainer(plain);
  const auto pads = [](const Trainer& trainer) {
    for (const PlanGraph& graph : trainer.plan().plan->graphs)
      for (const Node* node : graph.model->graph->nodes)
        if (node->has("classes")) return true;
    return false;
  };
  EXPECT_TRUE(pads(a));
  EXPECT_FALSE(pads(b));
  expect_close(losses_with(a, 1027), losses_with(b, 1027), 5e-3);
  for (const char* name : {"head", "shift", "q1"}) {
    const std::vector<float> got = elements<float>(a.parameter(name)), wanted = elements<float>(b.parameter(name));
    ASSERT_EQ(got.size(), wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i) ASSERT_NEAR(got[i], wanted[i], 2e-3) << name << " " << i;
  }
}

// The product's weights and bias get columns of zeros; scores that others take, whole packs and float32 stay as they are.
TEST(PaddedClasses, WhereTheyAreOfOneLossAlone) {
  struct Form {
    DType type;
    int64_t classes, wanted;
    bool turned, shown;
  };
  for (const Form& f : {Form{DType::bfloat16, 1027, 1088, false, false}, Form{DType::float16, 1027, 1088, true, false},
                        Form{DType::bfloat16, 1032, 1032, false, false}, Form{DType::bfloat16, 1027, 1027, true, true},
                        Form{DType::float32, 1027, 1027, false, false}, Form{DType::bfloat16, 27, 27, false, false}}) {
    Model model = *new_model();
    Graph& g = *model.graph;
    Value* x = add_input(model, "x", f.type, {Dim(4), Dim(6), Dim(kWide)});
    Value* w = add_input(model, "w", f.type, {f.turned ? Dim(f.classes) : Dim(kWide), f.turned ? Dim(kWide) : Dim(f.classes)});
    Value* turned = f.turned ? add_node(g, "Transpose", {w}, "turned") : w;
    Value* product = add_node(g, "MatMul", {x, turned}, "product");
    Value* sum = add_node(g, "Add", {add_input(model, "b", f.type, {Dim(f.classes)}), product}, "sum");
    Value* rows = add_node(g, "Reshape", {sum, g.add_constant("shape", make_int64s({-1, f.classes}))}, "rows");
    Value* target = add_input(model, "target", DType::int64, {Dim(24)});
    Node* loss = g.add_node("CrossEntropy", {rows, target}, {"loss"}, {}, kCommunicationDomain);
    g.outputs = {loss->outputs[0]};
    if (f.shown) g.outputs.push_back(sum);
    infer_shapes(model);
    EXPECT_EQ(pad_classes(model), f.wanted != f.classes);
    EXPECT_EQ(pad_classes(model), 0);  // once is enough
    infer_shapes(model);
    EXPECT_EQ(to_string(rows->type), to_string(Type::tensor(f.type, Shape{Dim(24), Dim(f.wanted)})));
    EXPECT_EQ(loss->get_int("classes", -1), f.wanted != f.classes ? f.classes : -1);
    EXPECT_EQ(w->type.shape->at(f.turned ? 0 : 1).value, f.classes);
  }
}

}  // namespace
}  // namespace fretsaw
