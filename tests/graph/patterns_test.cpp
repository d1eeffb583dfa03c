// What exporters write in pieces is put together again, and only where it means the same.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/graph/text_model.h"

namespace fretsaw {
namespace {

using testing::only;
using testing::ops;
using testing::parse_model;

struct Row {
  std::string name;
  std::string graph;  // operator set 13
  std::string expected;
};

void PrintTo(const Row& row, std::ostream* out) {
  *out << row.name;
}

class PatternTest : public ::testing::TestWithParam<Row> {};

TEST_P(PatternTest, IsFoundOrLeft) {
  Model model = parse_model(13, GetParam().graph);
  run_passes(model, normalise_passes());
  infer_shapes(model);
  run_passes(model, pattern_passes());
  EXPECT_EQ(ops(*model.graph), GetParam().expected) << print_graph(*model.graph);
  EXPECT_EQ(model.graph->outputs[0]->name, "y");
  for (const Finding& f : infer_shapes(model).faults) ADD_FAILURE() << f.message;
}

const std::string kXY = "g (float[B,4] x) => (float[B,4] y) ";
const std::string kNorm = kXY + "<float[4] w = {1,2,3,4}, float[4] b = {5,6,7,8}, float two = {2}, float e = {0.00001}, float one = {1}> ";
const std::string kGelu = kXY +
                          "<float half = {0.5}, float one = {1}, float r2 = {1.4142135}, float i2 = {0.70710678}, float c = {0.79788456}, "
                          "float k = {0.044715}, float three = {3}, float two = {2}> ";
const std::string kConv =
    "g (float[1,1,3,3] x) => (float[1,2,3,3] y) <float[2,1,1,1] w = {2,3}, float[2] b = {1,1}, float[2] s = {1,2}, float[2] o = {0,1}, "
    "float[2] m = {1,2}, float[2] v = {4,9}> ";

const Row kRows[] = {
    {"layer_norm",
     kNorm + "{ u = ReduceMean<axes=[-1]>(x) d = Sub(x, u) p = Pow(d, two) q = ReduceMean<axes=[-1]>(p) a = Add(q, e) r = Sqrt(a) n = "
             "Div(d, r) t = Mul(n, w) y = Add(t, b) }",
     "LayerNormalization"},
    {"layer_norm_swapped",
     kNorm + "{ u = ReduceMean<axes=[1]>(x) d = Sub(x, u) p = Mul(d, d) q = ReduceMean<axes=[1]>(p) a = Add(e, q) r = Sqrt(a) n = Div(d, "
             "r) t = Mul(w, n) y = Add(b, t) }",
     "LayerNormalization"},
    {"layer_norm_without_bias",
     kNorm + "{ u = ReduceMean<axes=[-1]>(x) d = Sub(x, u) p = Pow(d, two) q = ReduceMean<axes=[-1]>(p) a = Add(q, e) r = Sqrt(a) n = "
             "Div(d, r) y = Mul(n, w) }",
     "LayerNormalization"},
    {"layer_norm_two_subs",
     kNorm + "{ u = ReduceMean<axes=[-1]>(x) d = Sub(x, u) d2 = Sub(x, u) p = Pow(d2, two) q = ReduceMean<axes=[-1]>(p) a = Add(q, e) r = "
             "Sqrt(a) n = Div(d, r) t = Mul(n, w) y = Add(t, b) }",
     "LayerNormalization"},
    {"layer_norm_other_axis",
     kNorm + "{ u = ReduceMean<axes=[0]>(x) d = Sub(x, u) p = Pow(d, two) q = ReduceMean<axes=[0]>(p) a = Add(q, e) r = Sqrt(a) n = Div(d, "
             "r) t = Mul(n, w) y = Add(t, b) }",
     "ReduceMean Sub Pow ReduceMean Add Sqrt Div Mul Add"},
    {"layer_norm_not_squared",
     kNorm + "{ u = ReduceMean<axes=[-1]>(x) d = Sub(x, u) p = Pow(d, one) q = ReduceMean<axes=[-1]>(p) a = Add(q, e) r = Sqrt(a) n = "
             "Div(d, r) t = Mul(n, w) y = Add(t, b) }",
     "ReduceMean Sub Pow ReduceMean Add Sqrt Div Mul Add"},
    {"layer_norm_inner_used",
     "g (float[B,4] x) => (float[B,4] y, float[B,1] a) <float[4] w = {1,2,3,4}, float two = {2}, float e = {0.00001}> "
     "{ u = ReduceMean<axes=[-1]>(x) d = Sub(x, u) p = Pow(d, two) q = ReduceMean<axes=[-1]>(p) a = Add(q, e) r = Sqrt(a) n = Div(d, r) y "
     "= Mul(n, w) }",
     "ReduceMean Sub Pow ReduceMean Add Sqrt Div Mul"},
    {"rms_norm",
     kNorm + "{ p = Pow(x, two) q = ReduceMean<axes=[-1]>(p) a = Add(q, e) r = Sqrt(a) i = Reciprocal(r) n = Mul(x, i) y = Mul(n, w) }",
     "RMSNormalization"},
    {"rms_norm_div", kNorm + "{ p = Mul(x, x) q = ReduceMean<axes=[-1]>(p) a = Add(q, e) r = Sqrt(a) n = Div(x, r) y = Mul(w, n) }",
     "RMSNormalization"},
    {"rms_norm_one_over",
     kNorm + "{ p = Mul(x, x) q = ReduceMean<axes=[-1]>(p) a = Add(q, e) r = Sqrt(a) i = Div(one, r) n = Mul(x, i) y = Mul(w, n) }",
     "RMSNormalization"},
    {"rms_norm_half",
     "g (float16[B,4] x) => (float16[B,4] y) <float16[4] w = {1,2,3,4}, float two = {2}, float e = {0.00001}> "
     "{ f = Cast<to=1>(x) p = Pow(f, two) q = ReduceMean<axes=[-1]>(p) a = Add(q, e) r = Sqrt(a) i = Reciprocal(r) n = Mul(f, i) h = "
     "Cast<to=10>(n) y = Mul(w, h) }",
     "RMSNormalization"},
    {"rms_norm_wrong_scale",
     "g (float[B,4] x) => (float[B,4] y) <float[1] w = {2}, float two = {2}, float e = {0.00001}> "
     "{ p = Pow(x, two) q = ReduceMean<axes=[-1]>(p) a = Add(q, e) r = Sqrt(a) i = Reciprocal(r) n = Mul(x, i) y = Mul(n, w) }",
     "Pow ReduceMean Add Sqrt Reciprocal Mul Mul"},
    {"rms_norm_double",
     "g (double[B,4] x) => (double[B,4] y) <double[4] w = {1,2,3,4}, double two = {2}, double e = {0.00001}> "
     "{ p = Pow(x, two) q = ReduceMean<axes=[-1]>(p) a = Add(q, e) r = Sqrt(a) i = Reciprocal(r) n = Mul(x, i) y = Mul(n, w) }",
     "Pow ReduceMean Add Sqrt Reciprocal Mul Mul"},
    {"gelu_erf", kGelu + "{ a = Div(x, r2) f = Erf(a) p = Add(f, one) m = Mul(x, p) y = Mul(m, half) }", "Gelu"},
    {"gelu_erf_half_first", kGelu + "{ h = Mul(half, x) a = Mul(i2, x) f = Erf(a) p = Add(one, f) y = Mul(h, p) }", "Gelu"},
    {"gelu_erf_half_inside", kGelu + "{ a = Div(x, r2) f = Erf(a) p = Add(f, one) m = Mul(p, half) y = Mul(x, m) }", "Gelu"},
    {"gelu_erf_divided", kGelu + "{ a = Div(x, r2) f = Erf(a) p = Add(f, one) m = Mul(x, p) y = Mul(m, half) }", "Gelu"},
    {"gelu_of_product", kGelu + "{ z = Mul(x, x) a = Div(z, r2) f = Erf(a) p = Add(f, one) m = Mul(z, p) y = Mul(m, half) }", "Mul Gelu"},
    {"gelu_wrong_number", kGelu + "{ a = Div(x, r2) f = Erf(a) p = Add(f, one) m = Mul(x, p) y = Mul(m, i2) }", "Div Erf Add Mul Mul"},
    {"gelu_tanh",
     kGelu + "{ q = Pow(x, three) s = Mul(q, k) t = Add(x, s) u = Mul(t, c) f = Tanh(u) p = Add(f, one) h = Mul(x, half) y = Mul(h, p) }",
     "Gelu"},
    {"gelu_tanh_products",
     kGelu + "{ z = Mul(x, x) q = Mul(z, x) s = Mul(k, q) t = Add(x, s) u = Mul(c, t) f = Tanh(u) p = Add(one, f) h = Mul(half, x) y = "
             "Mul(h, p) }",
     "Gelu"},
    {"gelu_tanh_bracket",
     kGelu + "{ z = Mul(x, c) q = Mul(x, k) s = Mul(q, x) t = Add(one, s) u = Mul(z, t) f = Tanh(u) p = Add(one, f) h = Mul(half, x) y = "
             "Mul(h, p) }",
     "Gelu"},
    {"gelu_tanh_square",
     kGelu + "{ q = Pow(x, two) s = Mul(q, k) t = Add(x, s) u = Mul(t, c) f = Tanh(u) p = Add(f, one) h = Mul(x, half) y = Mul(h, p) }",
     "Pow Mul Add Mul Tanh Add Mul Mul"},
    {"swish", kXY + "{ s = Sigmoid(x) y = Mul(x, s) }", "Swish"},
    {"swish_alpha", kXY + "<float a = {1.702}> { t = Mul(x, a) s = Sigmoid(t) y = Mul(s, x) }", "Swish"},
    {"sigmoid_of_other", "g (float[B,4] x, float[B,4] z) => (float[B,4] y) { s = Sigmoid(z) y = Mul(x, s) }", "Sigmoid Mul"},
    {"sigmoid_used_twice", kXY + "{ s = Sigmoid(x) t = Mul(x, s) y = Add(t, s) }", "Sigmoid Mul Add"},
    {"hard_swish", kXY + "{ s = HardSigmoid<alpha=0.16666667>(x) y = Mul(x, s) }", "HardSwish"},
    {"mish", kXY + "{ s = Softplus(x) t = Tanh(s) y = Mul(x, t) }", "Mish"},
    {"swish_in_body",
     "g (bool c, float[B,4] x) => (float[B,4] y) { y = If<then_branch = t () => (float[B,4] a) { s = Sigmoid(x) a = Mul(x, s) }, "
     "else_branch = e () => (float[B,4] b) { b = Relu(x) }>(c) }",
     "If{Swish}{Relu}"},
    {"batch_norm", kConv + "{ c = Conv(x, w, b) y = BatchNormalization(c, s, o, m, v) }", "Conv"},
    {"batch_norm_two_users", kConv + "{ c = Conv(x, w) n = BatchNormalization(c, s, o, m, v) y = Add(n, c) }",
     "Conv BatchNormalization Add"},
    {"batch_norm_relu_between", kConv + "{ c = Conv(x, w) r = Relu(c) y = BatchNormalization(r, s, o, m, v) }",
     "Conv Relu BatchNormalization"},
    {"batch_norm_weight_is_input",
     "g (float[1,1,3,3] x, float[2,1,1,1] w, float[2] s) => (float[1,2,3,3] y) { c = Conv(x, w) y = BatchNormalization(c, s, s, s, s) }",
     "Conv BatchNormalization"},
};

INSTANTIATE_TEST_SUITE_P(Models, PatternTest, ::testing::ValuesIn(kRows), [](const auto& info) { return info.param.name; });

// What makes the value that a pattern works on stays, be it an operator that the pattern has too.
struct Made {
  std::string op, text;
};
const Made kMade[] = {
    {"Add", "z = Add(x, w)"},
    {"Add", "z = Add(w, x)"},
    {"Add", "z = Add(x, one)"},
    {"Sub", "z = Sub(x, w)"},
    {"Mul", "z = Mul(x, w)"},
    {"Mul", "z = Mul(x, x)"},
    {"Div", "z = Div(x, w)"},
    {"Div", "z = Div(one, x)"},
    {"Pow", "z = Pow(x, two)"},
    {"Sqrt", "z = Sqrt(x)"},
    {"Reciprocal", "z = Reciprocal(x)"},
    {"Tanh", "z = Tanh(x)"},
    {"Erf", "z = Erf(x)"},
    {"Sigmoid", "z = Sigmoid(x)"},
    {"Softplus", "z = Softplus(x)"},
    {"Relu", "z = Relu(x)"},
};
struct Pattern {
  std::string op, text;
};
const Pattern kOfMade[] = {
    {"LayerNormalization",
     "u = ReduceMean<axes=[-1]>(z) d = Sub(z, u) p = Mul(d, d) q = ReduceMean<axes=[-1]>(p) a = Add(q, e) r = Sqrt(a) n = Div(d, r) "
     "t = Mul(n, w) y = Add(t, b)"},
    {"RMSNormalization", "p = Pow(z, two) q = ReduceMean<axes=[-1]>(p) a = Add(q, e) r = Sqrt(a) n = Div(z, r) y = Mul(w, n)"},
    {"RMSNormalization",
     "p = Pow(z, two) q = ReduceMean<axes=[-1]>(p) a = Add(q, e) r = Sqrt(a) i = Reciprocal(r) n = Mul(z, i) y = Mul(n, w)"},
    {"Gelu", "a = Div(z, r2) f = Erf(a) p = Add(f, one) m = Mul(z, p) y = Mul(m, half)"},
    {"Gelu", "h = Mul(z, half) a = Mul(z, i2) f = Erf(a) p = Add(f, one) y = Mul(h, p)"},
    {"Gelu", "q = Pow(z, three) s = Mul(q, k) t = Add(z, s) u = Mul(t, c) f = Tanh(u) p = Add(f, one) h = Mul(z, half) y = Mul(h, p)"},
    {"Gelu",
     "h = Mul(z, half) v = Mul(z, c) q = Mul(z, k) s = Mul(q, z) t = Add(s, one) u = Mul(v, t) f = Tanh(u) p = Add(f, one) y = Mul(h, p)"},
    {"Gelu",
     "h = Mul(z, half) v = Mul(z, c) q = Mul(z, k) s = Mul(q, z) t = Add(one, s) u = Mul(t, v) f = Tanh(u) p = Add(one, f) y = Mul(p, h)"},
    {"Swish", "s = Sigmoid(z) y = Mul(s, z)"},
    {"Swish", "t = Mul(z, half) s = Sigmoid(t) y = Mul(z, s)"},
    {"HardSwish", "s = HardSigmoid<alpha=0.16666667>(z) y = Mul(z, s)"},
    {"Mish", "s = Softplus(z) t = Tanh(s) y = Mul(t, z)"},
};

TEST(Patterns, LeaveWhatMakesTheirOperand) {
  const std::string head = kXY +
                           "<float[4] w = {1,2,3,4}, float[4] b = {5,6,7,8}, float two = {2}, float e = {0.00001}, float one = {1}, "
                           "float half = {0.5}, float r2 = {1.4142135}, float i2 = {0.70710678}, float c = {0.79788456}, float k = "
                           "{0.044715}, float three = {3}> { ";
  for (const Pattern& pattern : kOfMade)
    for (const Made& made : kMade) {
      const std::string text = head + made.text + " " + pattern.text + " }";
      Model model = parse_model(13, text);
      run_passes(model, normalise_passes());
      infer_shapes(model);
      ASSERT_NO_THROW(run_passes(model, pattern_passes())) << text;
      EXPECT_EQ(ops(*model.graph), made.op + " " + pattern.op) << text << "\n" << print_graph(*model.graph);
    }
}

TEST(Patterns, KeepTheirNumbers) {
  Model norm = parse_model(13, kNorm +
                                   "{ u = ReduceMean<axes=[-1]>(x) d = Sub(x, u) p = Pow(d, two) q = ReduceMean<axes=[-1]>(p) a = Add(q, "
                                   "e) r = Sqrt(a) n = Div(d, r) t = Mul(n, w) y = Add(t, b) }");
  Model gelu = parse_model(
      13,
      kGelu + "{ q = Pow(x, three) s = Mul(q, k) t = Add(x, s) u = Mul(t, c) f = Tanh(u) p = Add(f, one) h = Mul(x, half) y = Mul(h, p) }");
  Model swish = parse_model(13, kXY + "<float a = {1.702}> { t = Mul(x, a) s = Sigmoid(t) y = Mul(s, x) }");
  for (Model* m : {&norm, &gelu, &swish}) {
    run_passes(*m, normalise_passes());
    infer_shapes(*m);
    run_passes(*m, pattern_passes());
  }
  const Node& n = only(*norm.graph, "LayerNormalization");
  EXPECT_FLOAT_EQ(n.get_float("epsilon", 0), 1e-5F);
  EXPECT_EQ(n.get_int("axis", 0), -1);
  EXPECT_EQ(n.input(1)->name, "w");
  EXPECT_EQ(n.input(2)->name, "b");
  EXPECT_EQ(only(*gelu.graph, "Gelu").get_string("approximate", "none"), "tanh");
  EXPECT_FLOAT_EQ(only(*swish.graph, "Swish").get_float("alpha", 1), 1.702F);
}

TEST(FoldBatchNorm, ComputesTheWeights) {
  Model model = parse_model(13, kConv + "{ c = Conv(x, w, b) y = BatchNormalization<epsilon=0.0>(c, s, o, m, v) }");
  run_passes(model, normalise_passes());
  run_passes(model, pattern_passes());
  const Node& conv = only(*model.graph, "Conv");
  auto w = conv.input(1)->constant->as<float>();
  auto b = conv.input(2)->constant->as<float>();
  // f = s / sqrt(v) = {1/2, 2/3}; w * f = {1, 2}; (b - m) * f + o = {0, 1 - 2/3}
  EXPECT_FLOAT_EQ(w[0], 1.0F);
  EXPECT_FLOAT_EQ(w[1], 2.0F);
  EXPECT_NEAR(b[0], 0.0F, 1e-7);
  EXPECT_FLOAT_EQ(b[1], 1.0F / 3);
  EXPECT_EQ(conv.input(1)->source_name(), "w");
}

}  // namespace
}  // namespace fretsaw
