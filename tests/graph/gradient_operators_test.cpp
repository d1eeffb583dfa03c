// The gradient operators of ai.fretsaw: their factor rules, inferred shapes and arithmetic.
#include "graph/gradient_operators.h"

#include <gtest/gtest.h>

#include "graph/catalogue.h"
#include "graph/communication_schemas.h"
#include "graph/factors.h"
#include "tests/graph/text_model.h"

namespace fretsaw {
namespace {

struct Case {
  const char* inputs;  // of the graph, in ONNX's text form; then its constants
  const char* node;
  const char* type;  // of the first output
  const char* rule;
  double flops;
};

class GradientOperators : public ::testing::TestWithParam<Case> {};

TEST_P(GradientOperators, RuleShapeAndFlops) {
  register_communication_schemas();
  const Case& c = GetParam();
  Model model = testing::parse_model("<ir_version: 10, opset_import: [\"\" : 23, \"ai.fretsaw\" : 1]>\ng (" + std::string(c.inputs) +
                                     " { y = ai.fretsaw." + c.node + " }");
  const ShapeFacts facts = infer_shapes(model);
  for (const Finding& fault : facts.faults) ADD_FAILURE() << fault.message;
  const Node& node = *model.graph->nodes.back();
  EXPECT_EQ(to_string(node.out(0)->type), c.type);
  EXPECT_EQ(to_string(factor_rule(node)), c.rule);
  EXPECT_EQ(flops_of(node), c.flops);
}

const Case kCases[] = {
    {"float[2,3,4] x) => (y) <int64[2] s = {3, 1}>", "SumTo(x, s)", "float32[3,1]", "i0 i1 i2, 1 -> i1 1 | sum i0 i2", 24},
    {"float[n,3] x, int64[2] s) => (y)", "SumTo(x, s)", "float32[?,?]", "unknown: what it sums over is found out while it runs", 3},
    {"float[2,3,5] g, int64[2,3] i) => (y) <int64[2] s = {9, 5}>", "GatherGrad(g, i, s)", "float32[9,5]",
     "i0 i1 d1, i0 i1, 1 -> v d1 | sum i0 i1 | whole v", 30},
    {"float[4,n,5] g, int64[n] i) => (y) <int64[3] s = {4, 9, 5}>", "GatherGrad<axis=1>(g, i, s)", "float32[4,9,5]",
     "d0 i0 d2, i0, 1 -> d0 v d2 | sum i0 | whole v", 20},
    {"float[2,6,4,4] g, float[6,3,3,3] w) => (y) <int64[4] s = {2, 3, 6, 6}>", "ConvGradInput(g, w, s)", "float32[2,3,6,6]",
     "n o y2 y3, o c k2 k3, 1 -> n c x2' x3' | sum o | whole y2 y3 k2 k3 x2' x3'", 10368},
    {"float[2,6,4,4] g, float[2,4,6,6] x) => (y)", "ConvGradWeight<kernel_shape=[3,3], group=2>(g, x)", "float32[6,2,3,3]",
     "n (g o) y2 y3, n (g c) x2 x3 -> (g o) c k2' k3' | sum n | whole y2 y3 x2 x3 k2' k3'", 6912},
    {"float[b,6,4] g, float[b,4,6] x) => (y)", "ConvGradWeight<kernel_shape=[3]>(g, x)", "float32[6,4,3]",
     "n o y2, n c x2 -> o c k2' | sum n | whole y2 x2 k2'", 576},
    {"float[2,3,4,4] g, float[2,3,8,8] x) => (y)", "MaxPoolGrad<kernel_shape=[2,2], strides=[2,2]>(g, x)", "float32[2,3,8,8]",
     "n c y2 y3, n c x2 x3 -> n c x2' x3' | whole y2 y3 x2 x3 x2' x3'", 384},
    {"float[2,3,4,4] g) => (y) <int64[4] s = {2, 3, 8, 8}>", "AveragePoolGrad<kernel_shape=[2,2], strides=[2,2]>(g, s)", "float32[2,3,8,8]",
     "n c y2 y3, 1 -> n c x2' x3' | whole y2 y3 x2' x3'", 384},
    {"float[2,3,4] g, float[2,3,4] x, float[3] s) => (y)", "BatchNormalizationGrad(g, x, s)", "float32[2,3,4]",
     "j0 c j2, j0 c j2, c -> j0 c j2 | whole j0 j2", 24},
    {"float[2,3,4] g, float[2,3,4] x, float[4] s) => (y)", "LayerNormalizationGrad(g, x, s)", "float32[2,3,4]",
     "i0 i1 j2, i0 i1 j2, j2 -> i0 i1 j2 | whole j2", 24},
    {"float[b,3,4] g, float[b,3,4] x) => (y)", "LayerNormalizationGradScale(g, x)", "float32[4]",
     "i0 i1 j2, i0 i1 j2 -> j2 | sum i0 i1 | whole j2", 12},
    {"float[2,3,4] g, float[2,3,4] x, float[3,4] s) => (y)", "RMSNormalizationGrad<axis=1>(g, x, s)", "float32[2,3,4]",
     "i0 j1 j2, i0 j1 j2, j1 j2 -> i0 j1 j2 | whole j1 j2", 24},
    {"float[2,3,4] g, float[2,3,4] x) => (y)", "RMSNormalizationGradScale<axis=-2>(g, x)", "float32[3,4]",
     "i0 j1 j2, i0 j1 j2 -> j1 j2 | sum i0 | whole j1 j2", 24},
    {"float g, float[4,9] x, int64[4] l) => (y)", "SoftmaxCrossEntropyLossGrad(g, x, l)", "float32[4,9]",
     "., i0 c, i0 -> i0 c | whole i0 c", 36},
    {"float g, float[4,9] x, int64[4] l, float[9] w) => (y)", "SoftmaxCrossEntropyLossGrad<reduction=\"sum\">(g, x, l, w)", "float32[4,9]",
     "., i0 c, i0, c -> i0 c | whole c", 36},
    {"float[4,5] g, float[4,9,5] x, int64[4,5] l) => (y)", "NegativeLogLikelihoodLossGrad<reduction=\"none\">(g, x, l)", "float32[4,9,5]",
     "i0 i2, i0 c i2, i0 i2 -> i0 c i2 | whole c", 180},
    {"float[5,2,3] x, float[1,16,3] w, float[1,16,4] r, float[5,1,2,4] h, float[5,1,2,4] g) => (y)",
     "LSTMGrad<hidden_size=4>(x, w, r, , , , , , h, g)", "float32[5,2,3]", "unknown: the operator has no factor rule", 7200},
    {"float[2,5,3] x, float[1,12,3] w, float[1,12,4] r, float[2,5,1,4] h, float[2,5,1,4] g) => (y)",
     "GRUGrad<hidden_size=4, layout=1>(x, w, r, , , , h, g)", "float32[2,5,3]", "unknown: the operator has no factor rule", 5400},
    {"float[5,b,3] x, float[1,4,3] w, float[1,4,4] r, float[5,1,b,4] h, float[1,b,4] g) => (y)",
     "RNNGrad<hidden_size=4>(x, w, r, , , , h, , g)", "float32[5,b,3]", "unknown: the operator has no factor rule", 900},
    {"float[2,n,4] g, float[2,n,4] x) => (y) <int64 a = {-2}>", "CumProdGrad<reverse=1>(g, x, a)", "float32[2,n,4]",
     "i0 w1 i2, i0 w1 i2, . -> i0 w1 i2 | whole w1", 8},
    {"float[2,4] g, float[2,4] x, int64 a) => (y)", "CumProdGrad(g, x, a)", "float32[2,4]", "unknown: its axis is computed while it runs",
     8},
    {"float[b,5] g, float[b,5,3,3] x) => (y)", "DetGrad(g, x)", "float32[b,5,3,3]", "i0 i1, i0 i1 w2 w3 -> i0 i1 w2 w3 | whole w2 w3", 270},
    {"float[b,7,12] q, float[b,7,6] k, float[b,7,4] v, float[b,7,8] g) => (y)",
     "LinearAttentionGrad<update_rule=\"linear\", q_num_heads=4, kv_num_heads=2>(q, k, v, , , , g)", "float32[b,7,12]",
     "b x01 x02, b x11 x12, b x21 x22, ., ., ., b x61 x62 -> b y1' y2' | whole x01 x02 x11 x12 x21 x22 x61 x62 y1' y2'", 1008},
    {"float[3,2,2,2] g, float[1,2,8,8] x, float[3,5] r) => (y)", "MaxRoiPoolGrad<pooled_shape=[2,2]>(g, x, r)", "float32[1,2,8,8]",
     "unknown: the operator has no factor rule", 128},
};
INSTANTIATE_TEST_SUITE_P(All, GradientOperators, ::testing::ValuesIn(kCases));

TEST(Communication, GradientOperatorsAreNone) {
  Graph graph;
  EXPECT_TRUE(communicates(*graph.add_node("AllReduce", {}, {}, {}, kCommunicationDomain)));
  EXPECT_FALSE(communicates(*graph.add_node("SumTo", {}, {}, {}, kCommunicationDomain)));
  EXPECT_FALSE(communicates(*graph.add_node("AllReduce", {}, {})));
}

}  // namespace
}  // namespace fretsaw
