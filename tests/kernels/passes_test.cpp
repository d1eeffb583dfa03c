// What passes make of a graph gives the same numbers: patterns against the pieces, function bodies against kernels.
#include "graph/passes.h"

#include <gtest/gtest.h>
#include <onnx/defs/parser.h>

#include "graph/io/reading.h"
#include "tests/kernels/interpreter.h"
#include "tests/kernels/test_data.h"

namespace fretsaw::testing {
namespace {

Model model_of(int64_t opset, const std::string& graph) {
  onnx::ModelProto proto;
  std::string text = "<ir_version: 8, opset_import: [\"\" : " + std::to_string(opset) + "]>\n" + graph;
  auto status = onnx::OnnxParser(text.c_str()).Parse(proto);
  if (!status.IsOK()) throw std::runtime_error(status.ErrorMessage());
  FileCache files;
  return model_from_proto(proto, "", files, {});
}

// Values between -2 and 2, the same in every run.
std::vector<RuntimeValue> inputs_of(const Model& model) {
  std::vector<RuntimeValue> inputs;
  uint32_t state = 12345;
  for (const Value* v : model.graph->inputs) {
    RuntimeValue& value = inputs.emplace_back(make_value(DType::float32, dims_of(*v->type.shape, 3)));
    for (float& x : value.tensor.span<float>()) {
      state = state * 1664525 + 1013904223;
      x = static_cast<float>(state >> 8) / static_cast<float>(1 << 22) - 2;
    }
  }
  return inputs;
}

void expect_equal(const Interpreter& a, const Interpreter& b, const std::vector<RuntimeValue>& inputs) {
  auto wanted = a.run(inputs), got = b.run(inputs);
  ASSERT_EQ(wanted.size(), got.size());
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_EQ(difference(got[i], wanted[i], {1e-5, 1e-6}), "");
}

struct Row {
  std::string name, graph, op;
};

void PrintTo(const Row& row, std::ostream* out) {
  *out << row.name;
}

class PatternNumbers : public ::testing::TestWithParam<Row> {};

TEST_P(PatternNumbers, AreThoseOfThePieces) {
  Model model = model_of(13, GetParam().graph);
  auto inputs = inputs_of(model);
  Model fused = clone(model);
  run_passes(fused, normalise_passes());
  run_passes(fused, pattern_passes());
  ASSERT_EQ(fused.graph->nodes.size(), 1u) << print_graph(*fused.graph);
  ASSERT_EQ(fused.graph->nodes[0]->op, GetParam().op);
  expect_equal(Interpreter(model), Interpreter(fused), inputs);
}

const std::string kXY = "g (float[5,4] x) => (float[5,4] y) ";
const std::string kNumbers =
    kXY +
    "<float[4] w = {1,2,3,4}, float[4] b = {5,6,7,8}, float two = {2}, float e = {0.001}, float half = {0.5}, float one = {1}, "
    "float r2 = {1.4142135}, float c = {0.79788456}, float k = {0.044715}, float three = {3}> ";

const Row kPatterns[] = {
    {"layer_norm",
     kNumbers + "{ u = ReduceMean<axes=[-1]>(x) d = Sub(x, u) p = Pow(d, two) q = ReduceMean<axes=[-1]>(p) a = Add(q, e) r = Sqrt(a) "
                "n = Div(d, r) t = Mul(n, w) y = Add(t, b) }",
     "LayerNormalization"},
    {"rms_norm",
     kNumbers + "{ p = Pow(x, two) q = ReduceMean<axes=[-1]>(p) a = Add(q, e) r = Sqrt(a) i = Reciprocal(r) n = Mul(x, i) y = Mul(n, w) }",
     "RMSNormalization"},
    {"gelu_erf", kNumbers + "{ a = Div(x, r2) f = Erf(a) p = Add(f, one) m = Mul(x, p) y = Mul(m, half) }", "Gelu"},
    {"gelu_tanh",
     kNumbers +
         "{ q = Pow(x, three) s = Mul(q, k) t = Add(x, s) u = Mul(t, c) f = Tanh(u) p = Add(f, one) h = Mul(x, half) y = Mul(h, p) }",
     "Gelu"},
    {"swish", kXY + "{ s = Sigmoid(x) y = Mul(x, s) }", "Swish"},
    {"swish_alpha", kNumbers + "{ t = Mul(x, r2) s = Sigmoid(t) y = Mul(s, x) }", "Swish"},
    {"hard_swish", kXY + "{ s = HardSigmoid<alpha=0.16666667>(x) y = Mul(x, s) }", "HardSwish"},
    {"mish", kXY + "{ s = Softplus(x) t = Tanh(s) y = Mul(x, t) }", "Mish"},
    {"conv_batch_norm",
     "g (float[1,2,3,3] x) => (float[1,2,3,3] y) <float[2,2,1,1] w = {2,3,4,5}, float[2] b = {1,1}, float[2] s = {1,2}, float[2] o = "
     "{0,1}, "
     "float[2] m = {1,2}, float[2] v = {4,9}> { c = Conv(x, w, b) y = BatchNormalization(c, s, o, m, v) }",
     "Conv"},
};

INSTANTIATE_TEST_SUITE_P(Models, PatternNumbers, ::testing::ValuesIn(kPatterns), [](const auto& info) { return info.param.name; });

class FunctionNumbers : public ::testing::TestWithParam<Row> {};

TEST_P(FunctionNumbers, AreThoseOfTheKernel) {
  Model model = model_of(newest_opset(), GetParam().graph);
  auto inputs = inputs_of(model);
  Model body = clone(model);
  infer_shapes(body);
  decompose_to_functions(body, [](const Node& node) { return node.op != GetParam().op; });
  ASSERT_GT(body.graph->nodes.size(), 1u) << print_graph(*body.graph);
  expect_equal(Interpreter(model), Interpreter(body), inputs);
}

const Row kFunctions[] = {
    {"gelu", kXY + "{ y = Gelu(x) }", "Gelu"},
    {"swish", kXY + "{ y = Swish<alpha=0.5>(x) }", "Swish"},
    {"softmax", kXY + "{ y = Softmax<axis=0>(x) }", "Softmax"},
    {"hard_swish", kXY + "{ y = HardSwish(x) }", "HardSwish"},
    {"shrink", kXY + "{ y = Shrink<lambd=0.5, bias=0.25>(x) }", "Shrink"},
    {"layer_norm", "g (float[5,4] x, float[4] w, float[4] b) => (float[5,4] y) { y = LayerNormalization(x, w, b) }", "LayerNormalization"},
    {"rms_norm", "g (float[5,4] x, float[4] w) => (float[5,4] y) { y = RMSNormalization(x, w) }", "RMSNormalization"},
    {"group_norm", "g (float[2,4,3] x, float[4] w, float[4] b) => (float[2,4,3] y) { y = GroupNormalization<num_groups=2>(x, w, b) }",
     "GroupNormalization"},
    {"reduce_l2", "g (float[5,4] x) => (float[5,1] y) <int64[1] a = {1}> { y = ReduceL2(x, a) }", "ReduceL2"},
};

INSTANTIATE_TEST_SUITE_P(Operators, FunctionNumbers, ::testing::ValuesIn(kFunctions), [](const auto& info) { return info.param.name; });

// An old model and the newest form of it, written by hand.
struct UpgradeRow {
  std::string name;
  int64_t opset;
  std::string old_graph, new_graph;
};

void PrintTo(const UpgradeRow& row, std::ostream* out) {
  *out << row.name;
}

class UpgradeNumbers : public ::testing::TestWithParam<UpgradeRow> {};

TEST_P(UpgradeNumbers, AreThoseOfTheNewestForm) {
  Model old_model = model_of(GetParam().opset, GetParam().old_graph);
  auto inputs = inputs_of(old_model);
  expect_equal(Interpreter(model_of(newest_opset(), GetParam().new_graph)), Interpreter(old_model), inputs);
}

const UpgradeRow kUpgrades[] = {
    {"softmax", 11, "g (float[2,3,4] x) => (float[2,3,4] y) { y = Softmax(x) }",
     "g (float[2,3,4] x) => (float[2,3,4] y) <int64[2] a = {2,12}, int64[3] b = {2,3,4}> { t = Reshape(x, a) u = Softmax(t) y = Reshape(u, "
     "b) }"},
    {"resize_down", 10, "g (float[1,1,4,4] x) => (float[1,1,2,2] y) <float[4] s = {1,1,0.6,0.6}> { y = Resize(x, s) }",
     "g (float[1,1,4,4] x) => (float[1,1,2,2] y) <int64[2] i = {0,2}> { t = Gather<axis=2>(x, i) y = Gather<axis=3>(t, i) }"},
    {"upsample", 7, "g (float[1,1,2,2] x) => (float[1,1,4,4] y) { y = Upsample<scales=[1.0,1.0,2.0,2.0]>(x) }",
     "g (float[1,1,2,2] x) => (float[1,1,4,4] y) <int64[4] i = {0,0,1,1}> { t = Gather<axis=2>(x, i) y = Gather<axis=3>(t, i) }"},
    {"group_norm", 18,
     "g (float[2,4,3] x) => (float[2,4,3] y) <float[2] s = {1,2}, float[2] b = {3,4}> { y = GroupNormalization<num_groups=2>(x, s, b) }",
     "g (float[2,4,3] x) => (float[2,4,3] y) <float[4] s = {1,1,2,2}, float[4] b = {3,3,4,4}> { y = GroupNormalization<num_groups=2>(x, s, "
     "b) }"},
    {"batch_norm_not_spatial", 7,
     "g (float[2,1,2] x) => (float[2,1,2] y) <float[1,2] s = {1,2}, float[1,2] v = {4,9}> { y = BatchNormalization<spatial=0, "
     "epsilon=0.0>(x, s, s, s, v) }",
     "g (float[2,1,2] x) => (float[2,1,2] y) <float[2] s = {1,2}, float[2] d = {2,3}> { a = Sub(x, s) b = Div(a, d) c = Mul(b, s) y = "
     "Add(c, s) }"},
};

INSTANTIATE_TEST_SUITE_P(Models, UpgradeNumbers, ::testing::ValuesIn(kUpgrades), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fretsaw::testing
