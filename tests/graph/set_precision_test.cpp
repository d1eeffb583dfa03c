// Models in float16 and bfloat16: what changes type, what stays float32, and where Casts stand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "graph/passes/narrow_floats.h"
#include "tests/graph/text_model.h"

namespace fretsaw {
namespace {

using testing::only;
using testing::ops;
using testing::parse_model;

struct Row {
  std::string name;
  std::string graph;          // operator set 20; inputs and outputs x, y are kept
  std::string expected;       // operators of the float16 model
  std::string bfloat16 = "";  // where it is another
};

void PrintTo(const Row& row, std::ostream* out) {
  *out << row.name;
}

Model normalised(const std::string& graph) {
  Model model = parse_model(20, graph);
  run_passes(model, normalise_passes());
  return model;
}

// Element types are those that inference finds, and no fault is left.
void expect_sound(Model& model) {
  verify(*model.graph);
  std::vector<std::pair<const Value*, DType>> given;
  std::function<void(const Graph&)> note = [&](const Graph& graph) {
    for (const Value& v : graph.all_values())
      if (v.producer && v.type.is_tensor()) given.emplace_back(&v, v.type.dtype);
    for (const Node* node : graph.nodes)
      for (const GraphPtr& body : bodies(*node)) note(*body);
  };
  note(*model.graph);
  for (const Finding& f : infer_shapes(model, {.keep_hints = false}).faults) ADD_FAILURE() << f.message;
  for (const auto& [v, dtype] : given)
    EXPECT_TRUE(!v->type.is_tensor() || v->type.dtype == dtype)
        << v->name << " is " << name_of(v->type.dtype) << ", said to be " << name_of(dtype);
}

class PrecisionTest : public ::testing::TestWithParam<Row> {};

TEST_P(PrecisionTest, ChangesWhatCanChange) {
  for (DType type : {DType::float16, DType::bfloat16}) {
    Model model = normalised(GetParam().graph);
    set_precision(model, type, {.keep = {"x", "y"}});
    const bool other = type == DType::bfloat16 && !GetParam().bfloat16.empty();
    EXPECT_EQ(ops(*model.graph), other ? GetParam().bfloat16 : GetParam().expected) << print_graph(*model.graph);
    EXPECT_EQ(model.graph->outputs[0]->name, "y");
    expect_sound(model);
  }
}

const std::string kXY = "g (float[2,4] x) => (float[2,4] y) <float[4,4] w = {1,2,3,4, 5,6,7,8, 9,8,7,6, 5,4,3,2}, float[4] b = {1,2,3,4}> ";

const Row kRows[] = {
    {"layer", kXY + "{ m = MatMul(x, w) a = Add(m, b) y = Relu(a) }", "Cast MatMul Add Relu Cast"},
    {"input_used_twice", kXY + "{ m = MatMul(x, w) y = Add(m, x) }", "Cast MatMul Add Cast"},
    {"output_used_inside", "g (float[2,4] x) => (float[2,4] y, float[2,4] z) { y = Relu(x) z = Tanh(y) }", "Cast Relu Cast Tanh"},
    {"float64_stays", "g (double[2,4] x) => (double[2,4] y) <double two = {2}> { y = Mul(x, two) }", "Mul"},
    {"integers_stay", "g (int64[2,4] x) => (int64[2,4] y) <int64 two = {2}> { y = Mul(x, two) }", "Mul"},
    {"cast_to_float", "g (bool[2,4] x) => (float[2,4] y) <float two = {2}> { f = Cast<to=1>(x) y = Mul(f, two) }", "Cast Mul Cast"},
    {"casts_between_floats", kXY + "{ h = Cast<to=10>(x) r = Relu(h) f = Cast<to=1>(r) y = MatMul(f, w) }", "Cast Relu MatMul Cast",
     "Cast Relu Cast MatMul Cast"},
    {"resize", "g (float[1,1,2,2] x) => (float[1,1,4,4] y) <float[4] s = {1,1,2,2}> { r = Relu(x) y = Resize(r, , s) }",
     "Cast Relu Resize Cast"},
    {"quantised",
     "g (float[2,4] x) => (float[2,4] y) <float[4,4] w = {1,2,3,4, 5,6,7,8, 9,8,7,6, 5,4,3,2}, float s = {0.1}, uint8 z = {3}> { r = "
     "Relu(x) q = QuantizeLinear(r, s, z) d = DequantizeLinear(q, s, z) y = MatMul(d, "
     "w) }",
     "Cast Relu Cast QuantizeLinear DequantizeLinear Cast MatMul Cast"},
    {"no_form_for_bfloat16", kXY + "{ r = Relu(x) s = Shrink(r) y = Tanh(s) }", "Cast Relu Shrink Tanh Cast",
     "Cast Relu Cast Shrink Cast Tanh Cast"},
    {"positions",
     "g (int64[1,4] i, float[1,4] x) => (float[1,4] y) <float f = {0.01}> { p = Cast<to=1>(i) a = Mul(p, f) c = Cos(a) y = Mul(x, c) }",
     "Cast Cast Mul Cos Cast Mul Cast"},
    {"mask_of_integers",
     "g (int64[1,4] i, float[1,4] x) => (float[1,4] y) <float one = {1}, float low = {-3.4e38}> { p = Cast<to=1>(i) a = Sub(one, p) m = "
     "Mul(a, low) y = Add(x, m) }",
     "Cast Cast Sub Mul Clip Cast Add Cast", "Cast Cast Sub Mul Cast Add Cast"},
    {"embedding", "g (int64[2,1] x) => (float[2,1,4] y) <float[3,4] w = {1,2,3,4, 5,6,7,8, 9,8,7,6}> { e = Gather(w, x) y = Relu(e) }",
     "Gather Relu Cast"},
    {"range", "g (float[5] x) => (float[5] y) <float a = {0}, float b = {5}, float c = {1}> { r = Range(a, b, c) y = Add(x, r) }",
     "Cast Range Cast Add Cast"},
    {"made_by_attribute",
     "g (int64[2] s, float[2,4] x) => (float[2,4] y) { a = ConstantOfShape(s) b = RandomNormal<shape=[2,4]>() c = EyeLike<dtype=1>(x) d = "
     "Add(a, "
     "b) e = Add(d, c) y = Add(e, x) }",
     "Cast ConstantOfShape RandomNormal EyeLike Add Add Add Cast"},
    {"statistics",
     "g (float[2,4] x) => (float[2,4] y) <float[4] w = {1,2,3,4}> { n, m, d = LayerNormalization(x, w) s = Mul(n, m) y = Add(s, d) }",
     "Cast LayerNormalization Cast Cast Mul Add Cast"},
    {"shape_of_input", "g (float[2,4] x) => (int64[2] y) { y = Shape(x) }", "Shape"},
    {"branches",
     "g (bool c, float[2] x) => (float[2] y) <float two = {2}> { r = Relu(x) y = If<then_branch = t () => (float[2] a) { a = Mul(r, two) "
     "}, "
     "else_branch = e () => (float[2] b) { b = Identity(x) }>(c) }",
     "Cast Relu If{Mul}{Identity} Cast"},
    {"loop",
     "g (int64 n, bool c, float[2] x) => (float[2] y) { y = Loop<body = b (int64 i, bool k, float[2] v) => (bool l, float[2] w) { l = "
     "Identity(k) f = Cast<to=1>(i) w = Add(v, f) }>(n, c, x) }",
     "Cast Loop{Identity Cast Cast Add} Cast"},
    {"sequence", "g (float[2] x, int64 i) => (float[2] y) { r = Relu(x) s = SequenceConstruct(r, x) y = SequenceAt(s, i) }",
     "Cast Relu SequenceConstruct SequenceAt Cast", "Cast Relu Cast SequenceConstruct SequenceAt"},
};

INSTANTIATE_TEST_SUITE_P(Models, PrecisionTest, ::testing::ValuesIn(kRows), [](const auto& info) { return info.param.name; });

TEST(Precision, WhatIsNotKnownStays) {
  Model model = normalised(kXY + "{ m = MatMul(x, w) c = other.Thing(m) n = MatMul(c, w) y = Relu(n) }");
  set_precision(model, DType::float16, {.keep = {"x", "y"}});
  EXPECT_EQ(ops(*model.graph), "Cast MatMul Cast other.Thing MatMul Relu");
  EXPECT_EQ(model.graph->nodes[1]->input(1)->constant->dtype, DType::float16);
  EXPECT_EQ(model.graph->nodes[4]->input(1)->constant->dtype, DType::float32);
}

TEST(Precision, BordersOfStagesChangeType) {
  Model model = parse_model(
      "<ir_version: 8, opset_import: [\"\" : 20, \"ai.fretsaw\" : 1]>\n"
      "g (float[2,4] h, float[2,4] x) => (float[2,4] s, float[2,4] y) { r = ai.fretsaw.Recv<peer=0, tag=0>(h) m = Add(r, x) a = "
      "ai.fretsaw.AllReduce<axis=\"tensor\", group_size=2>(m) s = ai.fretsaw.Send<peer=2, tag=1>(a) y = Relu(a) }");
  set_precision(model, DType::float16, {.keep = {"x", "y"}});
  EXPECT_EQ(ops(*model.graph), "Cast ai.fretsaw.Recv Add ai.fretsaw.AllReduce ai.fretsaw.Send Relu Cast");
  EXPECT_EQ(model.graph->inputs[0]->type.dtype, DType::float16);
  EXPECT_EQ(model.graph->outputs[0]->type.dtype, DType::float16);
  EXPECT_EQ(model.graph->inputs[1]->type.dtype, DType::float32);
  EXPECT_EQ(model.graph->outputs[1]->type.dtype, DType::float32);
  expect_sound(model);
}

std::vector<uint16_t> halves(const Tensor& t) {
  auto bits = t.as<uint16_t>();
  return {bits.begin(), bits.end()};
}

TEST(Precision, RoundsConstants) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> numbers = {1,   -2,   65504,         65519, 65520,          -3.4e38F,
                                      inf, -inf, 5.9604645e-8F, 2e-8F, 1.00048828125F, 1.00146484375F};
  std::vector<uint16_t> half(numbers.size()), bfloat(numbers.size());
  narrow_floats(DType::float16, numbers.data(), half.data(), numbers.size());
  narrow_floats(DType::bfloat16, numbers.data(), bfloat.data(), numbers.size());
  EXPECT_THAT(half, ::testing::ElementsAre(0x3c00, 0xc000, 0x7bff, 0x7bff, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x0001, 0x0000, 0x3c00, 0x3c02));
  EXPECT_THAT(std::vector<uint16_t>(bfloat.begin(), bfloat.begin() + 8),
              ::testing::ElementsAre(0x3f80, 0xc000, 0x4780, 0x4780, 0x4780, 0xff80 - 1, 0x7f80, 0xff80));
  const float nan = std::nanf("");
  narrow_floats(DType::float16, &nan, half.data(), 1);
  EXPECT_GT(half[0] & 0x7fff, 0x7c00);
}

TEST(Precision, SharedConstantsAreConvertedOnce) {
  Model model = normalised(kXY + "{ m = MatMul(x, w) y = MatMul(m, w) }");
  Value* twin = model.graph->add_constant("twin", model.graph->nodes[0]->input(1)->constant);
  model.graph->nodes[1]->inputs[1] = twin;
  set_precision(model, DType::float16, {.keep = {"x", "y"}});
  std::vector<const Tensor*> weights;
  for (const Node* node : model.graph->nodes)
    if (node->is("MatMul")) weights.push_back(node->input(1)->constant.get());
  ASSERT_EQ(weights.size(), 2U);
  EXPECT_EQ(weights[0], weights[1]);
  EXPECT_EQ(weights[0]->dtype, DType::float16);
  EXPECT_EQ(halves(*weights[0])[1], 0x4000);
}

TEST(Precision, ConstantsOfBothTypesAreTwo) {
  Model model = normalised(
      "g (float[1,4] x, uint8[1,4] i) => (float[1,4] y) <float s = {0.1}> { d = DequantizeLinear(i, s) m = Mul(x, s) y = Add(m, d) }");
  set_precision(model, DType::float16, {.keep = {"x", "y"}});
  EXPECT_EQ(only(*model.graph, "DequantizeLinear").input(1)->constant->dtype, DType::float32);
  EXPECT_EQ(only(*model.graph, "Mul").input(1)->constant->dtype, DType::float16);
  EXPECT_EQ(only(*model.graph, "DequantizeLinear").input(1)->source_name(), "s");
  expect_sound(model);
}

TEST(Precision, LargeConstantsWaitForTheirReader) {
  Model model = normalised("g (float[1,512] x, float[512,256] w) => (float[1,256] y) { y = MatMul(x, w) }");
  auto wide = make_tensor(DType::float32, {512, 256});
  for (int64_t i = 0; i < wide->count(); ++i) {
    const auto number = static_cast<float>(i % 1000);
    std::memcpy(mutable_data(*wide) + i * 4, &number, 4);
  }
  Graph& graph = *model.graph;
  Value* w = graph.inputs[1];
  graph.inputs.pop_back();
  w->constant = wide;
  set_precision(model, DType::bfloat16, {.keep = {"x", "y"}, .lazy = true});
  const Tensor& t = *w->constant;
  ASSERT_TRUE(t.generate);
  ASSERT_EQ(t.data, nullptr);
  std::vector<uint16_t> wanted(static_cast<size_t>(t.count()));
  narrow_floats(DType::bfloat16, wide->as<float>().data(), wanted.data(), wanted.size());
  std::vector<std::byte> bytes(t.bytes());
  t.generate(0, bytes);
  EXPECT_EQ(std::memcmp(bytes.data(), wanted.data(), bytes.size()), 0);
  std::vector<std::byte> odd(7);
  t.generate(2001, odd);  // a reader may stop anywhere
  EXPECT_EQ(std::memcmp(odd.data(), bytes.data() + 2001, odd.size()), 0);
}

TEST(Precision, OutputsThatAreNotKeptHaveTheType) {
  Model model = normalised(
      "g (float[5] p) => (float[5] q, float[5] r) <float a = {0}, float b = {5}, float c = {1}> { q = Range(a, b, c) r = "
      "Add(p, q) }");
  set_precision(model, DType::bfloat16);
  EXPECT_EQ(ops(*model.graph), "Range Cast Cast Add");
  EXPECT_EQ(model.graph->inputs[0]->type.dtype, DType::bfloat16);
  for (const Value* v : model.graph->outputs) EXPECT_EQ(v->type.dtype, DType::bfloat16) << v->name;
  expect_sound(model);
}

TEST(Precision, OtherTypesAreRefused) {
  Model model = normalised(kXY + "{ y = Relu(x) }");
  EXPECT_THROW(set_precision(model, DType::float64), Error);
}

}  // namespace
}  // namespace fretsaw
