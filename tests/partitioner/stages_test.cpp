// Cutting whole models: the graphs that break partitioners, in 2 to 6 stages.
#include "partitioner/stages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "graph/errors.h"
#include "graph/io.h"
#include "partitioner/partition.h"
#include "tests/partitioner/net.h"

namespace fretsaw {
namespace {

using testing::HasSubstr;

PartitionOptions pipeline(int stages) {
  PartitionOptions options;
  options.mesh.pipeline = stages;
  return options;
}

const Graph& graph_of(const Plan& plan, int stage) {
  return *plan.graphs.at(static_cast<size_t>(stage)).model->graph;
}

bool has_value(const std::vector<Value*>& values, const std::string& name) {
  return std::any_of(values.begin(), values.end(), [&](const Value* v) { return v->name == name; });
}
const Node* node_making(const Graph& g, const std::string& name) {
  for (const Node* n : g.nodes)
    for (const Value* v : n->outputs)
      if (v && v->name == name && n->op != "Recv") return n;
  return nullptr;
}
int stage_making(const Plan& plan, const std::string& name) {
  for (const PlanGraph& g : plan.graphs)
    if (node_making(*g.model->graph, name)) return g.stage;
  return -1;
}
std::vector<const Route*> routes_of(const Plan& plan, const std::string& value) {
  std::vector<const Route*> found;
  for (const Route& r : plan.routes)
    if (r.value == value) found.push_back(&r);
  return found;
}

// What holds for every plan: graphs are sound, nothing is lost or empty, borders and routes agree, the schedule is sound.
void check_plan(const Plan& plan, const Model& source, int stages) {
  ASSERT_EQ(static_cast<int>(plan.graphs.size()), stages);
  for (const PlanGraph& g : plan.graphs) {
    ASSERT_NO_THROW(verify(*g.model->graph)) << "stage " << g.stage;
    auto computing =
        std::count_if(g.model->graph->nodes.begin(), g.model->graph->nodes.end(), [](const Node* n) { return n->domain != "ai.fretsaw"; });
    EXPECT_GT(computing, 0) << "stage " << g.stage << " is empty";
  }
  std::set<int> tags;
  for (const Route& r : plan.routes) {
    EXPECT_LT(r.from_stage, r.to_stage);
    EXPECT_TRUE(tags.insert(r.tag).second);
    EXPECT_TRUE(has_value(graph_of(plan, r.from_stage).outputs, r.from_name)) << r.from_name;
    EXPECT_TRUE(has_value(graph_of(plan, r.to_stage).inputs, r.to_name)) << r.to_name;
    const Node* send = node_making(graph_of(plan, r.from_stage), r.from_name);
    ASSERT_TRUE(send);
    EXPECT_EQ(send->op, "Send");
    EXPECT_EQ(send->get_int("peer", -1), r.to_stage);
    EXPECT_EQ(send->get_int("tag", -1), r.tag);
    EXPECT_EQ(send->input(0)->name, r.value);
  }
  ASSERT_EQ(plan.outputs.size(), source.graph->outputs.size());
  for (size_t i = 0; i < plan.outputs.size(); ++i) {
    EXPECT_EQ(plan.outputs[i].name, source.graph->outputs[i]->name);
    EXPECT_TRUE(has_value(graph_of(plan, plan.outputs[i].stage).outputs, plan.outputs[i].name));
  }
  EXPECT_NO_THROW(verify(plan.schedule, schedule_problem(plan)));
}

// Writes the plan, reads it and its pieces again, and checks the files.
void check_files(const Plan& plan) {
  namespace fs = std::filesystem;
  fs::path folder = fs::path(testing::TempDir()) / ("plan_" + std::string(testing::UnitTest::GetInstance()->current_test_info()->name()));
  fs::remove_all(folder);
  write_plan(plan, folder.string());
  Plan again = read_plan(folder.string());
  ASSERT_EQ(again.graphs.size(), plan.graphs.size());
  for (size_t i = 0; i < plan.graphs.size(); ++i) {
    EXPECT_EQ(print_graph(*again.graphs[i].model->graph), print_graph(*plan.graphs[i].model->graph));
    for (const Finding& f : check_model(*again.graphs[i].model)) EXPECT_NE(f.severity, "error") << f.node << ": " << f.message;
  }
  Model annotated = read_model((folder / "annotated.onnx").string(), {true});
  for (const Finding& f : check_model(annotated)) EXPECT_NE(f.severity, "error") << f.node << ": " << f.message;
  fs::remove_all(folder);
}

std::string error_of(const Model& model, const PartitionOptions& options) {
  try {
    partition(clone(model), options);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

Net chain(int layers, int64_t width = 64) {
  Net net;
  Value* v = net.input("x", {Dim("n"), width});
  for (int i = 0; i < layers; ++i) v = net.layer(v, "l" + std::to_string(i), width);
  net.output(v);
  return net;
}

class Stages : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(TwoToSix, Stages, testing::Range(2, 7), [](const auto& info) { return std::to_string(info.param); });

TEST_P(Stages, Chain) {
  Net net = chain(12, 256);
  Plan plan = partition(clone(net.model), pipeline(GetParam()));
  check_plan(plan, net.model, GetParam());
  check_files(plan);
  EXPECT_EQ(static_cast<int>(plan.routes.size()), GetParam() - 1);
  // Equal layers: stages differ by one layer at most.
  auto [least, most] =
      std::minmax_element(plan.stages.begin(), plan.stages.end(), [](const auto& a, const auto& b) { return a.flops < b.flops; });
  EXPECT_LE(most->flops - least->flops, 2.0 * 256 * 256 + 256 + 1);
  // No fusion group was cut.
  for (int i = 0; i < 12; ++i) EXPECT_EQ(stage_making(plan, "l" + std::to_string(i)), stage_making(plan, "l" + std::to_string(i) + ".m"));
}

// CASES 16: a skip over whole stages goes straight from its maker to its user.
TEST_P(Stages, SkipConnection) {
  Net net;
  Value* first = net.layer(net.input("x", {Dim("n"), 64}), "first", 64);
  Value* v = first;
  for (int i = 0; i < 10; ++i) v = net.layer(v, "l" + std::to_string(i), 64);
  v = net.op("Concat", {v, first}, "joined", {{"axis", int64_t{1}, "", ""}});
  net.output(net.op("MatMul", {v, net.weight("last.w", {128, 8})}, "y"));
  Plan plan = partition(clone(net.model), pipeline(GetParam()));
  check_plan(plan, net.model, GetParam());
  check_files(plan);
  bool direct = false;
  for (const Route* r : routes_of(plan, "first"))
    direct |= r->from_stage == stage_making(plan, "first") && r->to_stage == stage_making(plan, "joined");
  EXPECT_TRUE(direct);
}

// CASES 17: a weight in several stages, also through Transpose, is copied and the plan says so.
TEST_P(Stages, TiedWeight) {
  Net net;
  Value* table = net.weight("table", {64, 32});
  Value* v = net.op("Gather", {table, net.input("ids", {Dim("n")}, DType::int64)}, "embedded");
  for (int i = 0; i < 8; ++i) v = net.layer(v, "l" + std::to_string(i), 32);
  Value* turned = net.op("Transpose", {table}, "turned", {{"perm", std::vector<int64_t>{1, 0}, "", ""}});
  net.output(net.op("MatMul", {v, turned}, "logits"));
  Plan plan = partition(clone(net.model), pipeline(GetParam()));
  check_plan(plan, net.model, GetParam());
  check_files(plan);
  EXPECT_TRUE(routes_of(plan, "turned").empty());
  EXPECT_TRUE(has_value(graph_of(plan, 0).initializers(), "table"));
  EXPECT_TRUE(has_value(graph_of(plan, GetParam() - 1).initializers(), "table"));
  EXPECT_THAT(plan.notes, testing::Contains(HasSubstr("weight 'table'")));
}

// CASES 18: a diamond is cut so that stages don't depend on each other in a circle; a map that would make one is refused with it.
TEST_P(Stages, Diamond) {
  Net net;
  Value* top = net.layer(net.input("x", {Dim("n"), 32}), "top", 32);
  Value *left = top, *right = top;
  for (int i = 0; i < 4; ++i) left = net.layer(left, "left" + std::to_string(i), 32);
  for (int i = 0; i < 4; ++i) right = net.layer(right, "right" + std::to_string(i), 32);
  net.output(net.op("Add", {left, right}, "bottom"));
  check_plan(partition(clone(net.model), pipeline(GetParam())), net.model, GetParam());
}

TEST(Assignment, RefusesCircles) {
  Net net = chain(3);
  GraphIndex index(net.g);
  StageAssignment a{2, {0, 1, 2, 3, 4, 5}, {0, 0, 1, 1, 0, 0}};
  try {
    check_assignment(index, a);
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("depend on each other"));
    EXPECT_THAT(e.what(), HasSubstr("'l0'"));
    EXPECT_THAT(e.what(), HasSubstr("'l1'"));
  }
  a.stage_of = {1, 1, 1, 0, 0, 0};
  EXPECT_THROW(check_assignment(index, a), Error);
  a.stage_of = {0, 0, 0, 0, 0, 0};
  EXPECT_THROW(check_assignment(index, a), Error);  // stage 1 is empty
  a.stage_of = {0, 0, 0, 1, 1, 1};
  EXPECT_NO_THROW(check_assignment(index, a));
}

// CASES 19: more stages than groups cut groups where the bits stay; beyond that the error says how many are possible.
TEST_P(Stages, MoreStagesThanGroups) {
  Net net = chain(3);
  check_plan(partition(clone(net.model), pipeline(GetParam())), net.model, GetParam());
  EXPECT_THAT(error_of(net.model, pipeline(7)), HasSubstr("6 are possible"));
}

// Activations with series of their own are split off last, and the plan says so.
TEST(Stages, AGivenBatchIsDividedAndCountedInTheFigures) {
  Net net;
  Value* v = net.op("MatMul", {net.input("x", {Dim("n"), Dim(64)}), net.weight("w0", {64, 64})}, "m0");
  net.output(net.op("MatMul", {v, net.weight("w1", {64, 64})}, "m1"));
  PartitionOptions options = pipeline(2);
  options.micro_batches = 3;
  options.shapes["x"] = {7, 64};
  const Plan plan = partition(clone(net.model), options);
  EXPECT_EQ(plan.batch, 7);
  EXPECT_EQ(to_string(plan.inputs[0].type), "float32[n,64]");
  EXPECT_EQ(plan.stages[0].send_bytes, 3 * 64 * 4);
  EXPECT_EQ(plan.stages[0].flops, 2.0 * 3 * 64 * 64);
  options.micro_batches = 8;
  EXPECT_THAT(error_of(net.model, options), HasSubstr("a batch of 7, which does not fill 8 micro-batches"));
}

TEST(Stages, GroupsAreOpenedWhenStagesOutnumberThem) {
  Net net;
  Value* v = net.op("MatMul", {net.input("x", {4, 64}), net.weight("w0", {64, 64})}, "m0");
  v = net.op("MatMul", {net.op("Gelu", {v}, "g"), net.weight("w1", {64, 64})}, "m1");
  net.output(v);
  Plan two = partition(clone(net.model), pipeline(2));
  EXPECT_EQ(stage_making(two, "m0"), stage_making(two, "g"));
  Plan three = partition(clone(net.model), pipeline(3));
  check_plan(three, net.model, 3);
  EXPECT_THAT(error_of(net.model, pipeline(4)), HasSubstr("3 are possible"));
}

TEST_P(Stages, UnequalCosts) {
  Net net;
  Value* v = net.input("x", {64, 256});
  for (int i = 0; i < 6; ++i) v = net.layer(v, "small" + std::to_string(i), 256);
  v = net.op("MatMul", {v, net.weight("wide", {256, 4096})}, "large");
  v = net.op("MatMul", {v, net.weight("narrow", {4096, 256})}, "back");
  net.output(v);
  Plan plan = partition(clone(net.model), pipeline(GetParam()));
  check_plan(plan, net.model, GetParam());
  EXPECT_NE(stage_making(plan, "large"), stage_making(plan, "back"));
}

// CASES 20: a mask of bools needed by the last stage goes there once, as bools.
TEST_P(Stages, MaskForLater) {
  Net net;
  Value* x = net.input("x", {16, 64});
  Value* limit = net.weight("limit", {1});
  Value* mask = net.op("Greater", {net.layer(x, "score", 64), limit}, "mask");
  Value* v = x;
  for (int i = 0; i < 9; ++i) v = net.layer(v, "l" + std::to_string(i), 64);
  net.output(net.op("Where", {mask, v, limit}, "y"));
  Plan plan = partition(clone(net.model), pipeline(GetParam()));
  check_plan(plan, net.model, GetParam());
  check_files(plan);
  for (const Route* r : routes_of(plan, "mask")) {
    EXPECT_EQ(r->type.dtype, DType::boolean);
    EXPECT_EQ(r->to_stage, stage_making(plan, "y"));
  }
  EXPECT_LE(routes_of(plan, "mask").size(), 1u);
}

// CASES 21: a sequence never crosses; a cut of the user's through it names it.
TEST_P(Stages, Sequence) {
  Net net;
  Value* x = net.layer(net.input("x", {4, 64}), "before", 64);
  Value* parts = net.op("SplitToSequence", {x, net.g.add_constant("two", make_int64(2))}, "parts", {{"axis", int64_t{0}, "", ""}});
  Value* v = x;
  for (int i = 0; i < 8; ++i) v = net.layer(v, "l" + std::to_string(i), 64);
  Value* part = net.op("SequenceAt", {parts, net.input("which", {}, DType::int64)}, "part");  // one that is known is no sequence any more
  net.output(net.op("Concat", {v, part}, "y", {{"axis", int64_t{0}, "", ""}}));
  Plan plan = partition(clone(net.model), pipeline(GetParam()));
  check_plan(plan, net.model, GetParam());
  check_files(plan);
  EXPECT_EQ(stage_making(plan, "parts"), stage_making(plan, "part"));
  PartitionOptions by_user;
  by_user.cuts = {{"parts", "l3"}};
  EXPECT_THAT(error_of(net.model, by_user), HasSubstr("'parts'"));
}

// CASES 22: only the shape of h is needed later; the integers go there.
TEST(Stages, ShapeAlone) {
  Net net;
  Value* h =
      net.op("Cast", {net.op("NonZero", {net.input("x", {Dim("n"), 64})}, "where")}, "h", {{"to", int64_t{1}, "", ""}});  // [2, unknown]
  Value* narrow = net.op("ReduceSum", {h, net.ints("axes", {1})}, "narrow");                                              // [2, 1]
  Value* v = narrow;
  for (int i = 0; i < 4; ++i) v = net.op("Exp", {v}, "e" + std::to_string(i));
  Value* shape = net.op("Shape", {h}, "shape");
  net.output(net.op("Expand", {v, shape}, "y"));
  PartitionOptions options;
  options.cuts = {{"e1"}};
  Plan plan = partition(clone(net.model), options);
  check_plan(plan, net.model, 2);
  check_files(plan);
  EXPECT_TRUE(routes_of(plan, "h").empty());
  ASSERT_EQ(routes_of(plan, "shape").size(), 1u);
  EXPECT_EQ(routes_of(plan, "shape")[0]->type.dtype, DType::int64);
  EXPECT_EQ(stage_making(plan, "shape"), 0);
}

// Shape arithmetic on an input is copied to where it is needed rather than sent.
TEST(Stages, ShapesOfInputsAreCopied) {
  Net net;
  Value* x = net.input("x", {Dim("n"), 4, 16});
  Value* size = net.op("Gather", {net.op("Shape", {x}, "shape"), net.g.add_constant("zero", make_int64(0))}, "size");
  Value* target = net.op("Concat", {net.op("Unsqueeze", {size, net.ints("axis", {0})}, "size1"), net.ints("rest", {-1})}, "target",
                         {{"axis", int64_t{0}, "", ""}});
  Value* v = net.op("Reshape", {x, target}, "flat");
  for (int i = 0; i < 5; ++i) v = net.layer(v, "l" + std::to_string(i), 64);
  net.output(net.op("Reshape", {v, target}, "y"));
  Plan plan = partition(clone(net.model), pipeline(3));
  check_plan(plan, net.model, 3);
  for (const Route& r : plan.routes) EXPECT_EQ(r.type.dtype, DType::float32) << r.value;
  EXPECT_EQ(plan.routes.size(), 2u);
}

// CASES 9: an input that is an output, an initializer that is one, an unused input, an output that is used inside too.
TEST(Stages, OddBorders) {
  Net net;
  Value* x = net.input("x", {2, 16});
  net.input("unused", {3});
  Value* a = net.layer(x, "a", 16);
  Value* b = net.layer(a, "b", 16);
  Value* w = net.weight("loose", {5});
  for (Value* v : {a, x, b, w, a}) net.output(v);
  for (int stages : {1, 2, 4}) {
    Plan plan = partition(clone(net.model), pipeline(stages));
    check_plan(plan, net.model, stages);
    check_files(plan);
    ASSERT_EQ(plan.inputs.size(), 2u);
    EXPECT_TRUE(plan.inputs[1].stages.empty());
  }
}

// CASES 11: what a branch uses from outside goes with its node.
TEST(Stages, BranchesTakeWhatTheyUse) {
  Net net;
  Value* x = net.input("x", {2, 16});
  Value* cond = net.input("cond", {}, DType::boolean);
  Value* early = net.layer(x, "early", 16);
  Value* v = early;
  for (int i = 0; i < 4; ++i) v = net.layer(v, "l" + std::to_string(i), 16);
  Value* inner_weight = net.weight("inner.w", {16});
  auto branch = [&](const std::string& name, const std::string& op) {
    auto body = std::make_shared<Graph>();
    body->name = name;
    body->parent = &net.g;
    body->outputs.push_back(body->add_node(op, {early, inner_weight}, {name + ".y"})->outputs[0]);
    return body;
  };
  Value* chosen =
      net.op("If", {cond}, "chosen", {{"then_branch", branch("then", "Add"), "", ""}, {"else_branch", branch("else", "Mul"), "", ""}});
  net.output(net.op("Add", {chosen, v}, "y"));
  for (int stages : {2, 3}) {
    Plan plan = partition(clone(net.model), pipeline(stages));
    check_plan(plan, net.model, stages);
    check_files(plan);
    const Node* node = node_making(graph_of(plan, stage_making(plan, "chosen")), "chosen");
    ASSERT_TRUE(node);
    for (const Value* c : captures(*node)) EXPECT_EQ(c->graph, node->graph) << c->name;
  }
}

TEST(UserCut, WinsAndIsChecked) {
  Net net = chain(6);
  PartitionOptions options;
  options.cuts = {{"l0"}, {"l1.m"}};  // the second goes through a fusion group
  Plan plan = partition(clone(net.model), options);
  check_plan(plan, net.model, 3);
  check_files(plan);
  EXPECT_EQ(plan.mesh.pipeline, 3);
  EXPECT_EQ(stage_making(plan, "l0"), 0);
  EXPECT_EQ(stage_making(plan, "l1.m"), 1);
  EXPECT_EQ(stage_making(plan, "l1"), 2);
  EXPECT_EQ(node_making(graph_of(plan, 2), "l1")->group, -1);

  options.cuts = {{"l1"}, {"l0"}};
  EXPECT_THAT(error_of(net.model, options), HasSubstr("leaves stage 1 empty"));
  options.cuts = {{"l5"}};
  EXPECT_THAT(error_of(net.model, options), HasSubstr("last stage empty"));
  options.cuts = {{"l44"}};
  EXPECT_THAT(error_of(net.model, options), HasSubstr("did you mean 'l4'"));
  options.cuts = {{"x"}};
  EXPECT_THAT(error_of(net.model, options), HasSubstr("no node makes"));
  options.cuts = {{"l1"}};
  options.mesh.pipeline = 3;
  EXPECT_THAT(error_of(net.model, options), HasSubstr("one --cut for each boundary"));
}

TEST(Memory, LimitsStages) {
  Net net = chain(8, 64);  // eight weights of 16 KiB
  PartitionOptions options = pipeline(4);
  options.memory_bytes = 40 << 10;
  Plan plan = partition(clone(net.model), options);
  for (const StageEstimate& e : plan.stages) EXPECT_LE(e.weight_bytes + e.activation_bytes, 40 << 10);
  options.memory_bytes = 20 << 10;
  std::string error = error_of(net.model, options);
  EXPECT_THAT(error, HasSubstr("20480"));
  EXPECT_THAT(error, HasSubstr("does not fit"));
}

TEST(Options, AreChecked) {
  Net net = chain(4);
  PartitionOptions options = pipeline(2);
  options.mesh.tensor = 0;
  EXPECT_THAT(error_of(net.model, options), HasSubstr("axis is below 1"));
  options = pipeline(2);
  options.configuration = "two";
  EXPECT_THAT(error_of(net.model, options), HasSubstr("--from-annotations"));
  options = pipeline(2);
  options.schedule = "1f1b";
  EXPECT_THAT(error_of(net.model, options), HasSubstr("training"));
  options = pipeline(2);
  options.target = "no such target";
  EXPECT_THAT(error_of(net.model, options), HasSubstr("no such target"));
}

TEST(Plans, AreTheSameEveryTime) {
  Net net = chain(9);
  Plan a = partition(clone(net.model), pipeline(3)), b = partition(clone(net.model), pipeline(3));
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(print_graph(*a.graphs[i].model->graph), print_graph(*b.graphs[i].model->graph));
}

}  // namespace
}  // namespace fretsaw
