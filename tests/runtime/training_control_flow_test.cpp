// Models with branches and loops train on several ranks as on one.
#include <gtest/gtest.h>

#include "tests/runtime/training_runs.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kWide = 6, kClasses = 5, kSteps = 4, kBatch = 8;

GraphPtr new_body(Graph& parent) {
  auto body = std::make_shared<Graph>();
  body->parent = &parent;
  return body;
}

// A recurrence over the steps of each sample, a Scan, and layers of which a parameter chooses one, with a weight of the first stage in
// both.
Model branching_model() {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* x = add_input(model, "x", DType::float32, {Dim("batch"), Dim(kSteps * kWide)});
  Value* first = add_weight(g, "first", {kWide, kWide}, 1);
  Value* shape = g.add_constant("steps", make_int64s({-1, kSteps, kWide}));
  Value* steps = add_node(g, "Transpose", {add_node(g, "Reshape", {x, shape}, "split")}, "rows", {attribute("perm", Dims{1, 0, 2})});
  Value* start = add_node(g, "Gather", {steps, g.add_constant("zero", make_int64(0))}, "start");
  GraphPtr pass = new_body(g);
  pass->inputs = {pass->add_value("before"), pass->add_value("row")};
  Value* turned = add_node(*pass, "MatMul", {pass->inputs[0], first}, "turned");
  pass->outputs = {add_node(*pass, "Tanh", {add_node(*pass, "Add", {turned, pass->inputs[1]}, "moved")}, "after")};
  Value* h = add_node(g, "Scan", {start, steps}, "state", {attribute("body", pass), attribute("num_scan_inputs", int64_t{1})});
  for (int layer = 0; layer < 3; ++layer) {
    const auto named = [&](const char* name) { return name + std::to_string(layer); };
    h = add_node(g, "Relu",
                 {add_node(g, "MatMul", {h, add_weight(g, named("w"), {kWide, kWide}, 10 + static_cast<unsigned>(layer))}, named("p"))},
                 named("h"));
    Value* gate = add_row(g, named("gate"), 1, layer == 1 ? -1.0F : 1.0F);
    Value* sum = add_node(g, "ReduceSum", {gate}, named("sum"), {attribute("keepdims", int64_t{0})});
    Value* chosen = add_node(g, "Greater", {sum, g.add_constant(named("none"), floats({}, {0}))}, named("chosen"));
    GraphPtr yes = new_body(g), no = new_body(g);
    yes->outputs = {add_node(*yes, "Add", {add_node(*yes, "MatMul", {h, first}, "q"), h}, "a")};
    no->outputs = {add_node(*no, "Mul", {add_node(*no, "MatMul", {h, add_weight(g, named("u"), {kWide, kWide}, 20)}, "r"), gate}, "b")};
    h = add_node(g, "If", {chosen}, named("y"), {attribute("then_branch", yes), attribute("else_branch", no)});
  }
  g.outputs = {add_node(g, "MatMul", {h, add_weight(g, "head", {kWide, kClasses}, 30)}, "scores")};
  name_nodes_by_outputs(g);
  return model;
}

// A loop that a parameter ends, over a weight of the first stage and the rows of a table.
Model looping_model() {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* x = add_input(model, "x", DType::float32, {Dim("batch"), Dim(kSteps * kWide)});
  Value* h = add_node(g, "Tanh", {add_node(g, "MatMul", {x, add_weight(g, "first", {kSteps * kWide, kWide}, 1)}, "p")}, "h");
  Value* turn = add_weight(g, "turn", {kWide, kWide}, 2);
  Value* table = add_weight(g, "table", {9, kWide}, 3);
  Value* limit = add_node(g, "ReduceSum", {add_row(g, "limit", 1, 3.5F)}, "ends", {attribute("keepdims", int64_t{0})});
  GraphPtr pass = new_body(g);
  pass->inputs = {pass->add_value("i"), pass->add_value("goes"), pass->add_value("before")};
  Value* moved = add_node(*pass, "MatMul", {pass->inputs[2], turn}, "turned");
  Value* row = add_node(*pass, "Gather", {table, pass->inputs[0]}, "row");
  Value* next = add_node(*pass, "Tanh", {add_node(*pass, "Add", {moved, row}, "moved")}, "next");
  Value* number = add_node(*pass, "CastLike", {pass->inputs[0], limit}, "number");
  pass->outputs = {add_node(*pass, "Less", {number, limit}, "goes_on"), next, add_node(*pass, "Mul", {next, next}, "square")};
  Node* loop = g.add_node("Loop", {g.add_constant("most", make_int64(8)), nullptr, h}, {"end", "squares"}, {attribute("body", pass)});
  Value* mean =
      add_node(g, "ReduceMean", {loop->outputs[1], g.add_constant("rows", make_int64s({0}))}, "mean", {attribute("keepdims", int64_t{0})});
  Value* sum = add_node(g, "Add", {add_node(g, "MatMul", {mean, add_weight(g, "w", {kWide, kWide}, 4)}, "q"), loop->outputs[0]}, "sum");
  g.outputs = {add_node(g, "MatMul", {sum, add_weight(g, "head", {kWide, kClasses}, 30)}, "scores")};
  name_nodes_by_outputs(g);
  return model;
}

struct TrainingCase {
  std::string name;
  int data = 1, pipeline = 1, tensor = 1, micro_batches = 1;
  std::string schedule = "1f1b", precision = "fp32", recompute = "none";
  int zero = 0;
};

std::vector<double> train(Model model, const TrainingCase& c) {
  TrainingOptions training = with_optimizer("sgd:lr=0.1", c.precision);
  training.recompute = c.recompute, training.zero = c.zero;
  Trainer trainer = trainer_of(std::move(model), cut_of(c), training);
  const Batch batch = classified_noise(kSteps * kWide, some_classes(kBatch, kClasses, 3), 5);
  return losses_of(trainer, 5, 0.1, [&](int) { return batch; });
}

class TrainingControlFlow : public ::testing::TestWithParam<TrainingCase> {
 protected:
  static void expect_as_on_one_rank(const Model& model) {
    const std::vector<double> wanted = train(clone(model), {"whole"}), got = train(clone(model), GetParam());
    EXPECT_LT(wanted.back(), wanted.front());
    expect_close(got, wanted, GetParam().precision == "fp32" ? 1e-5 : 2e-2);
  }
};

TEST_P(TrainingControlFlow, BranchesAndAScanOfKnownLength) {
  expect_as_on_one_rank(branching_model());
}
TEST_P(TrainingControlFlow, ALoopThatAParameterEnds) {
  expect_as_on_one_rank(looping_model());
}
INSTANTIATE_TEST_SUITE_P(Ways, TrainingControlFlow,
                         ::testing::Values(TrainingCase{"Pipeline", 1, 2}, TrainingCase{"FourStages", 1, 4, 1, 4},
                                           TrainingCase{"ZeroBubble", 1, 2, 1, 4, "zero-bubble-h1"}, TrainingCase{"Tensor", 1, 1, 2},
                                           TrainingCase{"Data", 2}, TrainingCase{"Bfloat16", 1, 2, 1, 2, "1f1b", "bf16"},
                                           TrainingCase{"Recompute", 1, 2, 1, 2, "1f1b", "fp32", "all"},
                                           TrainingCase{"DividedParameters", 2, 2, 1, 1, "1f1b", "fp32", "none", 3}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fretsaw
