// Fusion groups, and operators that become their function bodies.
#include <gtest/gtest.h>

#include "tests/graph/text_model.h"

namespace fretsaw {
namespace {

using testing::ops;
using testing::parse_model;

struct Row {
  std::string name;
  std::string graph;
  std::string expected;  // the group of each node, "-" for none
};

void PrintTo(const Row& row, std::ostream* out) {
  *out << row.name;
}

std::string groups(const Graph& graph) {
  std::string text;
  for (const Node* node : graph.nodes) text += (text.empty() ? "" : " ") + (node->group < 0 ? "-" : std::to_string(node->group));
  return text;
}

class GroupTest : public ::testing::TestWithParam<Row> {};

TEST_P(GroupTest, Marks) {
  Model model = parse_model(newest_opset(), GetParam().graph);
  infer_shapes(model);
  mark_groups(model);
  EXPECT_EQ(groups(*model.graph), GetParam().expected) << print_graph(*model.graph);
}

const std::string kConv = "g (float[1,2,4,4] x) => (float[1,2,4,4] y) <float[2,2,1,1] w = {1,2,3,4}, float[2,2,1,1] v = {1,2,3,4}> ";

const Row kRows[] = {
    {"conv_relu", kConv + "{ a = Conv(x, w) y = Relu(a) }", "0 0"},
    {"alone", kConv + "{ a = Relu(x) y = Conv(a, w) }", "- -"},
    {"two_groups", kConv + "{ a = Conv(x, w) b = Relu(a) c = Conv(b, v) y = Relu(c) }", "0 0 1 1"},
    {"used_twice", kConv + "{ a = Conv(x, w) b = Relu(a) y = Add(a, b) }", "- - -"},
    {"squared", kConv + "{ a = Conv(x, w) y = Mul(a, a) }", "- -"},
    {"is_an_output",
     "g (float[1,2,4,4] x) => (float[1,2,4,4] y, float[1,2,4,4] a) <float[2,2,1,1] w = {1,2,3,4}> { a = Conv(x, w) y = Relu(a) }", "- -"},
    {"residual", kConv + "{ a = Conv(x, w) b = Relu(a) c = Conv(b, v) d = Add(c, x) y = Relu(d) }", "0 0 1 1 1"},
    // Of two convolutions that meet, the later one takes the Add.
    {"two_convolutions", kConv + "{ a = Conv(x, w) b = Conv(x, v) c = Add(a, b) y = Relu(c) }", "- 0 0 0"},
    {"operand_made_later", kConv + "{ a = Conv(x, w) b = Exp(x) y = Add(a, b) }", "- - -"},
    {"operand_made_before", kConv + "{ b = Exp(x) a = Conv(x, w) y = Add(a, b) }", "- 0 0"},
    {"not_elementwise", kConv + "{ a = Conv(x, w) b = Transpose(a) y = Relu(b) }", "- - -"},
    {"matmul_bias_gelu",
     "g (float[B,4] x) => (float[B,2] y) <float[4,2] w = {1,2,3,4,5,6,7,8}, float[2] b = {1,2}> { a = MatMul(x, w) c = Add(a, b) y = "
     "Gelu(c) }",
     "0 0 0"},
};

INSTANTIATE_TEST_SUITE_P(Models, GroupTest, ::testing::ValuesIn(kRows), [](const auto& info) { return info.param.name; });

TEST(MarkGroups, KeepsMarks) {
  Model model = parse_model(newest_opset(), kConv + "{ a = Conv(x, w) b = Relu(a) c = Conv(b, v) y = Relu(c) }");
  infer_shapes(model);
  model.graph->nodes[0]->group = model.graph->nodes[1]->group = 7;
  mark_groups(model);
  EXPECT_EQ(groups(*model.graph), "7 7 - -");
}

TEST(MarkGroups, KeepsThatThereAreNone) {
  // A stage of a cut model in which no group begins: it must not get groups that the whole model does not have.
  Model model = parse_model(newest_opset(), kConv + "{ a = Conv(x, w) b = Conv(x, v) y = Add(a, b) }");
  mark_groups(model);  // types are not known yet: nothing to mark, and that stays
  infer_shapes(model);
  mark_groups(model);
  EXPECT_EQ(groups(*model.graph), "- - -");
}

std::string decomposed(const std::string& graph, const std::set<std::string>& without_kernel) {
  Model model = parse_model(newest_opset(), graph);
  infer_shapes(model);
  decompose_to_functions(model, [&](const Node& node) { return !without_kernel.count(node.op); });
  verify(*model.graph);
  EXPECT_EQ(model.graph->outputs[0]->name, "y");
  for (const Finding& f : infer_shapes(model).faults) ADD_FAILURE() << f.message;
  for (const Node* node : model.graph->nodes) EXPECT_FALSE(without_kernel.count(node->op)) << print_graph(*model.graph);
  return ops(*model.graph);
}

TEST(Decompose, UsesTheBodyOnnxDefines) {
  EXPECT_EQ(decomposed("g (float[2] x) => (float[2] y) { y = Swish(x) }", {"Swish"}), "CastLike Mul Sigmoid Mul");
  EXPECT_EQ(decomposed("g (float[2] x) => (float[2] y) { y = Relu(x) }", {}), "Relu");
  // The body depends on an attribute and on types.
  EXPECT_NE(decomposed("g (float[2] x) => (float[2] y) { y = Gelu<approximate=\"tanh\">(x) }", {"Gelu"}).find("Tanh"), std::string::npos);
  EXPECT_NE(
      decomposed("g (float[2,4] x, float[4] w) => (float[2,4] y) { y = RMSNormalization(x, w) }", {"RMSNormalization"}).find("ReduceMean"),
      std::string::npos);
}

TEST(Decompose, GoesOnUntilKernelsAreThere) {
  std::string text = decomposed("g (float[2,4] x) => (float[2,4] y) { y = LogSoftmax(x) }", {"LogSoftmax", "ReduceLogSumExp"});
  EXPECT_FALSE(text.empty());
  decomposed("g (float[2,4] x, float[4] w) => (float[2,4] y) { y = LayerNormalization(x, w) }", {"LayerNormalization"});
}

TEST(Decompose, TakesTheBodyOfSequenceMapAlong) {
  std::string text = decomposed(
      "g (seq(float[2]) s, float[2] z) => (seq(float[2]) y) { y = SequenceMap<body = b (float[2] a) => (float[2] c) { c = Add(a, z) }>(s) "
      "}",
      {"SequenceMap"});
  EXPECT_NE(text.find("Loop{"), std::string::npos) << text;
  EXPECT_NE(text.find("Add"), std::string::npos) << text;
}

TEST(Decompose, LeavesWhatHasNoBody) {
  Model model = parse_model(newest_opset(), "g (float[2] x) => (float[2] y) { y = Exp(x) }");
  decompose_to_functions(model, [](const Node&) { return false; });
  EXPECT_EQ(ops(*model.graph), "Exp");
}

}  // namespace
}  // namespace fretsaw
