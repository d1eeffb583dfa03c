// Attention, rotary embeddings and products with one input are put together, and only where the operators mean the same.
#include <gtest/gtest.h>

#include "graph/device_operators.h"
#include "tests/graph/attention_models.h"
#include "tests/graph/strided_models.h"
#include "tests/graph/text_model.h"

namespace fretsaw {
namespace {

using testing::only;
using testing::ops;
using testing::parse_model;
using testing::PatternModel;

Model inferred(const std::string& graph, int opset = 20) {
  Model model = parse_model(opset, graph);
  run_passes(model, normalise_passes());
  infer_shapes(model);
  return model;
}

// The types that the pass gave are those that inference finds.
void expect_sound(Model& model) {
  verify(*model.graph);
  std::vector<std::pair<const Value*, Type>> given;
  for (const Value& v : model.graph->all_values())
    if (v.producer) given.emplace_back(&v, v.type);
  for (const Finding& f : infer_shapes(model, {.keep_hints = false}).faults) ADD_FAILURE() << f.message;
  for (const auto& [v, type] : given)
    EXPECT_TRUE(v->type.kind == Type::Kind::unknown || v->type == type) << v->name << " " << to_string(type) << " " << to_string(v->type);
}

class AttentionTest : public ::testing::TestWithParam<PatternModel> {};
TEST_P(AttentionTest, IsFoundOrLeft) {
  Model model = inferred(GetParam().graph);
  fuse_attention(model);
  EXPECT_EQ(ops(*model.graph), GetParam().expected) << print_graph(*model.graph);
  expect_sound(model);
}
INSTANTIATE_TEST_SUITE_P(Models, AttentionTest, ::testing::ValuesIn(testing::attention_models()),
                         [](const auto& info) { return info.param.name; });

class RotaryTest : public ::testing::TestWithParam<PatternModel> {};
TEST_P(RotaryTest, IsFoundOrLeft) {
  Model model = inferred(GetParam().graph);
  fuse_rotary(model);
  EXPECT_EQ(ops(*model.graph), GetParam().expected) << print_graph(*model.graph);
  expect_sound(model);
}
INSTANTIATE_TEST_SUITE_P(Models, RotaryTest, ::testing::ValuesIn(testing::rotary_models()),
                         [](const auto& info) { return info.param.name; });

const Node& attention_of(Model& model) {
  fuse_attention(model);
  return only(*model.graph, "Attention");
}

Model named(const std::string& name) {
  for (const PatternModel& model : testing::attention_models())
    if (model.name == name) return inferred(model.graph);
  throw Error("no model has the name " + name);
}

TEST(Attention, KeepsItsNumbers) {
  Model both = named("both_scaled_through_three_dimensions");
  const Node& flat = attention_of(both);
  EXPECT_FLOAT_EQ(flat.get_float("scale", 0), 0.5F);
  EXPECT_EQ(flat.get_int("q_num_heads", 0), 3);
  EXPECT_EQ(flat.get_int("kv_num_heads", 0), 3);
  EXPECT_EQ(flat.input(0)->name, "x");
  EXPECT_EQ(flat.input(1)->name, "z");
  EXPECT_EQ(flat.input(2)->name, "w");
  EXPECT_EQ(flat.input(3), nullptr);
  Model grouped = named("grouped_expand");
  EXPECT_EQ(attention_of(grouped).get_int("kv_num_heads", 0), 2);
  Model one_head = named("one_head_of_keys");
  EXPECT_EQ(attention_of(one_head).input(1)->name, "k");
  Model capped = named("softcap");
  EXPECT_FLOAT_EQ(attention_of(capped).get_float("softcap", 0), 2);
  EXPECT_FLOAT_EQ(only(*capped.graph, "Attention").get_float("scale", 0), 0.5F);
  Model half = named("half_with_float_softmax");
  EXPECT_EQ(attention_of(half).get_int("softmax_precision", 0), 1);
}

TEST(Attention, ReadsConstantMasks) {
  Model causal = named("mask_causal"), offset = named("mask_constant"), zero = named("mask_is_zero"), choice = named("choice_constant"),
        empty = named("choice_constant_with_empty_row"), two = named("masks_two");
  EXPECT_EQ(attention_of(causal).get_int("is_causal", 0), 1);
  EXPECT_EQ(only(*causal.graph, "Attention").input(3), nullptr);
  EXPECT_EQ(attention_of(offset).get_int("is_causal", 0), 0);
  EXPECT_EQ(only(*offset.graph, "Attention").input(3)->name, "c");
  EXPECT_EQ(attention_of(zero).input(3), nullptr);
  EXPECT_EQ(attention_of(choice).input(3)->type.dtype, DType::boolean);
  EXPECT_EQ(attention_of(empty).input(3)->type.dtype, DType::float32);  // with booleans the row would have no weights
  EXPECT_EQ(attention_of(two).get_int("is_causal", 0), 1);
  EXPECT_EQ(only(*two.graph, "Attention").input(3)->name, "d");
}

TEST(Attention, LayersShareTheirMask) {
  Model model = inferred(
      "g (float[1,2,3,4] q, float[1,2,3,4] k, float[1,2,3,4] v, bool[3,3] c) => (float[1,2,3,4] y) <float low = {-1e9}> { kt = "
      "Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) m = Where(c, s, low) p = Softmax<axis=-1>(m) a = MatMul(p, v) s2 = MatMul(a, kt) m2 "
      "= Where(c, s2, low) p2 = Softmax<axis=-1>(m2) y = MatMul(p2, v) }");
  fuse_attention(model);
  EXPECT_EQ(ops(*model.graph), "Where Attention Attention");
}

class StridedTest : public ::testing::TestWithParam<PatternModel> {};
TEST_P(StridedTest, ReadsViewsOrIsLeft) {
  Model model = inferred(GetParam().graph, 24);
  stride_attention(model);
  EXPECT_EQ(ops(*model.graph), GetParam().expected) << print_graph(*model.graph);
  expect_sound(model);
}
INSTANTIATE_TEST_SUITE_P(Models, StridedTest, ::testing::ValuesIn(testing::strided_models()),
                         [](const auto& info) { return info.param.name; });

Model strided(const std::string& name) {
  for (const PatternModel& pattern : testing::strided_models())
    if (pattern.name == name) {
      Model model = inferred(pattern.graph, 24);
      stride_attention(model);
      return model;
    }
  throw Error("no model has the name " + name);
}

TEST(StridedAttention, SaysWhereElementsLie) {
  Model model = strided("positions_first");
  const Node& node = only(*model.graph, "StridedAttention");
  const AttentionViews views = read_attention_views(node);
  EXPECT_EQ(views.q, (HeadsView{2, 3, 5, 4, 0, 36, 4, 72}));
  EXPECT_EQ(views.k, (HeadsView{2, 3, 5, 4, 12, 36, 4, 72}));
  EXPECT_EQ(views.v, (HeadsView{2, 3, 5, 4, 24, 36, 4, 72}));
  EXPECT_EQ(views.y, (HeadsView{2, 3, 5, 4, 0, 12, 4, 24}));
  EXPECT_EQ(views.shape, (Dims{10, 12}));
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(node.input(i)->name, "x");
}

TEST(StridedAttention, KeepsMaskAndNumbers) {
  Model model = strided("split_rows_masked");
  const Node& node = only(*model.graph, "StridedAttention");
  EXPECT_EQ(node.input(3)->name, "m");
  EXPECT_EQ(node.get_int("is_causal", 0), 1);
  EXPECT_FLOAT_EQ(node.get_float("scale", 0), 0.3F);
}

TEST(StridedAttention, IsNotForCaches) {
  Model model = inferred(
      "g (float[2,5,36] x, float[2,3,6,4] pk, float[2,3,6,4] pv) => (float[2,5,12] y, float[2,3,11,4] k2, float[2,3,11,4] v2) { q, k, v = "
      "Split<axis=2, num_outputs=3>(x) y, k2, v2 = Attention<q_num_heads=3, kv_num_heads=3>(q, k, v, , pk, pv) }",
      24);
  stride_attention(model);
  EXPECT_EQ(ops(*model.graph), "Split Attention");
}

TEST(StridedAttention, RefusesViewsThatDoNotFit) {
  Model model = strided("split_rows");
  Node node = only(*model.graph, "StridedAttention");
  node.set("k_dims", std::vector<int64_t>{2, 3, 5, 8});
  EXPECT_THROW(read_attention_views(node), Error);
  node.set("k_dims", std::vector<int64_t>{2, 3, 5});
  EXPECT_THROW(read_attention_views(node), Error);
}

TEST(Transposes, ThatMoveNothingAreViews) {
  Model model = inferred(
      "g (float[1,3,1,4] x) => (float[3,1,4,1] a, float[4,1,3,1] b) { a = Transpose<perm=[1,0,3,2]>(x) b = Transpose<perm=[3,0,1,2]>(x) }");
  transposes_to_reshapes(model);
  EXPECT_EQ(ops(*model.graph), "Reshape Transpose");
  expect_sound(model);
}

class TurnedTest : public ::testing::TestWithParam<PatternModel> {};
TEST_P(TurnedTest, RowsMoveToAttention) {
  Model model = inferred(GetParam().graph, 24);
  turn_rows(model);
  sink_reshapes(model);
  stride_attention(model);
  EXPECT_EQ(ops(*model.graph), GetParam().expected) << print_graph(*model.graph);
  expect_sound(model);
}
INSTANTIATE_TEST_SUITE_P(Models, TurnedTest, ::testing::ValuesIn(testing::turned_models()),
                         [](const auto& info) { return info.param.name; });

TEST(TurnRows, LeavesAttentionWithCaches) {
  Model model = inferred(
      "g (float[2,5,4] x, float[5,2,1,2] pk, float[5,2,1,2] pv) => (float[5,2,4] y) <float[4,4] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}> { t "
      "= "
      "Transpose<perm=[1,0,2]>(x) q = MatMul(t, w) y = Attention<q_num_heads=2, kv_num_heads=2>(q, q, q, , pk, pv) }",
      24);
  turn_rows(model);
  EXPECT_EQ(ops(*model.graph), "Transpose MatMul Attention");
}

// Rows of a product as exporters show them, and what follows.
Model rows_model(const std::string& body, const std::string& inputs = "") {
  Model model =
      inferred("g (float[2,3,2] x" + inputs +
               ") => (float[2,3,4] y) <float[2,4] w = {1,2,3,4,5,6,7,8}, float[4] b = {1,2,3,4}, int64[2] flat = {6,2}, int64[3] full "
               "= {2,3,4}, float[3,4] table = {1,2,3,4,5,6,7,8,9,1,2,3}> { r = Reshape(x, flat) " +
               body + " }");
  sink_reshapes(model);
  expect_sound(model);
  return model;
}

TEST(SinkReshapes, LetsActivationsFollowProducts) {
  EXPECT_EQ(ops(*rows_model("p = Gemm(r, w, b) s = Reshape(p, full) y = Gelu<approximate=\"tanh\">(s)").graph),
            "Reshape Gemm Gelu Reshape");
  EXPECT_EQ(ops(*rows_model("p = MatMul(r, w) q = Add(p, b) s = Reshape(q, full) y = Relu(s)").graph), "Reshape MatMul Add Relu Reshape");
  EXPECT_EQ(ops(*rows_model("p = MatMul(r, w) s = Reshape(p, full) q = Add(b, s) y = Relu(q)").graph), "Reshape MatMul Add Relu Reshape");
}

TEST(SinkReshapes, ShowsResidualsAsRows) {
  Model model = rows_model("p = Gemm(r, w, b) s = Reshape(p, full) y = Add(z, s)", ", float[2,3,4] z");
  EXPECT_EQ(ops(*model.graph), "Reshape Gemm Reshape Add Reshape");
  const Node& add = only(*model.graph, "Add");
  EXPECT_EQ(add.input(0)->type, Type::tensor(DType::float32, Shape{6, 4}));
  EXPECT_EQ(add.input(1)->name, "p");
}

TEST(SinkReshapes, JoinsWhatRemains) {
  Model model = inferred(
      "g (float[2,3,2] x) => (float[2,3,2] y) <float[2,2] w = {1,2,3,4}, int64[2] flat = {6,2}, int64[2] copied = {-1,2}, int64[3] full = "
      "{2,3,2}> { r = Reshape(x, flat) p = Gemm(r, w) s = Reshape(p, full) a = Relu(s) t = Reshape(a, copied) q = Gemm(t, w) u = "
      "Reshape(q, "
      "full) y = Relu(u) }");
  sink_reshapes(model);
  EXPECT_EQ(ops(*model.graph), "Reshape Gemm Relu Gemm Relu Reshape");
  expect_sound(model);
}

TEST(SinkReshapes, LeavesOthers) {
  const std::pair<const char*, const char*> cases[] = {
      {"p = Gemm(r, w) s = Reshape(p, full) a = Relu(s) y = Add(a, s)", "Reshape Gemm Reshape Relu Add"},  // shown to two
      {"p = Gemm(r, w) s = Reshape(p, full) y = Add(s, table)", "Reshape Gemm Reshape Add"},  // an operand that needs the dimensions
      {"p = Gemm(r, w) l = Relu(p) s = Reshape(p, full) t = Relu(s) k = Reshape(l, full) y = Add(t, k)",  // the rows are used elsewhere
       "Reshape Gemm Relu Reshape Relu Reshape Add"},
      {"a = Relu(x) c = Reshape(a, flat) p = MatMul(c, w) y = Reshape(p, full)", "Relu Reshape MatMul Reshape"},  // before the product
      {"p = Gemm(r, w) s = Reshape(p, full) d = Tanh(z) y = Mul(s, d)", "Reshape Gemm Reshape Tanh Mul"},  // a step beside the product
  };
  for (const auto& [body, expected] : cases) EXPECT_EQ(ops(*rows_model(body, ", float[2,3,4] z").graph), expected);
}

// What is read or left transposed, with the flags that come out.
TEST(TurnProducts, ReadsAndLeavesMatricesWhereTheyLie) {
  struct Case {
    const char *graph, *expected;
    int64_t trans_a, trans_b;
  };
  const Case cases[] = {
      {"g (float[2,3,5] x, float[4,5] w) => (float[2,3,4] y) { t = Transpose<perm=[1,0]>(w) y = MatMul(x, t) }", "Reshape Gemm Reshape", 0,
       1},
      {"g (float[6,5] x, float[4,5] w) => (float[6,4] y) { t = Transpose(w) y = MatMul(x, t) }", "Gemm", 0, 1},
      {"g (float[5,6] x, float[4,5] w) => (float[6,4] y) { s = Transpose(x) t = Transpose(w) y = Gemm(s, t) }", "Gemm", 1, 1},
      {"g (float[6,5] x, float[5,4] w) => (float[6,4] y) { t = Transpose(w) y = Gemm<transB=1>(x, t) }", "Gemm", 0, 0},
      {"g (float[6,5] x, float[6,4] w) => (float[4,5] y) { p = Gemm<transA=1>(x, w) y = Transpose(p) }", "Gemm", 1, 0},
      {"g (float[6,5] x, float[4,5] w) => (float[4,6] y) { p = Gemm<transB=1>(x, w) y = Transpose(p) }", "Gemm", 0, 1},
      // The product is used as it is, too; a bias has a place in its columns; a batch is no matrix.
      {"g (float[6,5] x, float[5,4] w) => (float[4,6] y, float[6,4] p) { p = Gemm(x, w) y = Transpose(p) }", "Gemm Transpose", 0, 0},
      {"g (float[6,5] x, float[5,4] w, float[4] b) => (float[4,6] y) { p = Gemm(x, w, b) y = Transpose(p) }", "Gemm Transpose", 0, 0},
      {"g (float[2,3,5] x, float[2,4,5] w) => (float[2,3,4] y) { t = Transpose<perm=[0,2,1]>(w) y = MatMul(x, t) }", "Transpose MatMul", -1,
       -1},
  };
  for (const Case& c : cases) {
    Model model = inferred(c.graph);
    turn_products(model);
    EXPECT_EQ(ops(*model.graph), c.expected) << c.graph;
    expect_sound(model);
    for (const Node* node : model.graph->nodes) {
      if (!node->is("Gemm")) continue;
      EXPECT_EQ(node->get_int("transA", 0), c.trans_a) << c.graph;
      EXPECT_EQ(node->get_int("transB", 0), c.trans_b) << c.graph;
    }
  }
}

TEST(MeansToPoolings, OverAllCells) {
  Model model = inferred(
      "g (float[2,8,3,5] x) => (float[2,8,1,1] a, float[2,8] b) <int64[2] last = {-1,2}, int64[2] cells = {2,3}> "
      "{ a = ReduceMean<keepdims=1>(x, last) b = ReduceMean<keepdims=0>(x, cells) }");
  recognise_for_devices(model);
  EXPECT_EQ(ops(*model.graph), "GlobalAveragePool GlobalAveragePool Reshape");
  expect_sound(model);
}

TEST(MeansToPoolings, LeavesOthers) {
  Model model = inferred(
      "g (float[2,8,3,5] x, int64[2,8,3,5] n, float[2,8] m) => (float[2,8,3,1] a, float[2,1,1,1] b, int64[2,8,1,1] c, float[2,1] d) "
      "<int64[1] one = {3}, int64[3] three = {1,2,3}, int64[2] cells = {2,3}, int64[1] last = {1}> "
      "{ a = ReduceMean(x, one) b = ReduceMean(x, three) c = ReduceMean(n, cells) d = ReduceMean(m, last) }");
  recognise_for_devices(model);
  EXPECT_EQ(ops(*model.graph), "ReduceMean ReduceMean ReduceMean ReduceMean");
}

const std::string kProducts =
    "g (float[2,3,2] x) => (float[2,3,2] a, float[2,3,3] b, float[2,3,1] c) <float[2,2] u = {1,2,3,4}, float[2,3] v = {5,6,7,8,9,10}, "
    "float[2,1] w = {11,12}, float[2] bu = {1,2}, float[1] bw = {3}> ";

std::vector<float> floats(const Value* v) {
  auto values = v->constant->as<float>();
  return {values.begin(), values.end()};
}

TEST(MergeProducts, JoinsMatrices) {
  Model model = inferred(kProducts + "{ a = MatMul(x, u) b = MatMul(x, v) c = MatMul(x, w) }");
  merge_products(model);
  EXPECT_EQ(ops(*model.graph), "MatMul Split");
  EXPECT_EQ(floats(model.graph->nodes[0]->input(1)), (std::vector<float>{1, 2, 5, 6, 7, 11, 3, 4, 8, 9, 10, 12}));
  expect_sound(model);
}

TEST(MergeProducts, JoinsBiases) {
  Model model = inferred(kProducts + "{ d = MatMul(x, u) a = Add(d, bu) b = MatMul(x, v) e = MatMul(x, w) c = Add(bw, e) }");
  merge_products(model);
  EXPECT_EQ(ops(*model.graph), "MatMul Add Split");
  EXPECT_EQ(floats(model.graph->nodes[1]->input(1)), (std::vector<float>{1, 2, 0, 0, 0, 3}));
  expect_sound(model);
}

TEST(MergeProducts, JoinsGemms) {
  Model model = inferred(
      "g (float[3,2] x) => (float[3,2] a, float[3,1] b) <float[2,2] u = {1,2,3,4}, float[1,2] v = {5,6}, float[2] bu = {1,2}> { a = "
      "Gemm<transB=1>(x, u, bu) b = Gemm<transB=1>(x, v) }");
  merge_products(model);
  EXPECT_EQ(ops(*model.graph), "Gemm Split");
  EXPECT_EQ(floats(model.graph->nodes[0]->input(1)), (std::vector<float>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(floats(model.graph->nodes[0]->input(2)), (std::vector<float>{1, 2, 0}));
  expect_sound(model);
}

TEST(MergeProducts, JoinsBiasesThatAreRows) {
  Model model = inferred(
      "g (float[3,2] x) => (float[3,2] a, float[3,1] b) <float[2,2] u = {1,2,3,4}, float[2,1] v = {5,6}, float[1,2] bu = {1,2}, "
      "float[1,1] bv = {3}> { a = Gemm(x, u, bu) b = Gemm(x, v, bv) }");
  merge_products(model);
  EXPECT_EQ(ops(*model.graph), "Gemm Split");
  EXPECT_EQ(model.graph->nodes[0]->input(2)->constant->dims, (Dims{3}));
  EXPECT_EQ(floats(model.graph->nodes[0]->input(2)), (std::vector<float>{1, 2, 3}));
  expect_sound(model);
}

TEST(MergeProducts, TheSameMatricesMayBeJoinedBothWays) {
  Model straight = inferred(
      "g (float[3,2] x) => (float[3,2] a, float[3,2] b) <float[2,2] u = {1,2,3,4}, float[2,2] v = {5,6,7,8}> "
      "{ a = MatMul(x, u) b = MatMul(x, v) }");
  Model turned = inferred(
      "g (float[3,2] x) => (float[3,2] a, float[3,2] b) <float[2,2] u = {1,2,3,4}, float[2,2] v = {5,6,7,8}> "
      "{ a = Gemm<transB=1>(x, u) b = Gemm<transB=1>(x, v) }");
  for (size_t i : {0, 1}) turned.graph->nodes[i]->inputs[1]->constant = straight.graph->nodes[i]->inputs[1]->constant;
  MergedWeights kept;
  merge_products(straight, {}, &kept);
  merge_products(turned, {}, &kept);
  EXPECT_EQ(straight.graph->nodes[0]->input(1)->constant->dims, (Dims{2, 4}));
  EXPECT_EQ(turned.graph->nodes[0]->input(1)->constant->dims, (Dims{4, 2}));
}

const std::string kRotations =
    "(float[8,2] cos, float[8,2] sin, int64[1,1] at) => (float[1,1,8] a, float[1,1,4] b, float[1,1,4] c) <int64[3] sizes = {8,4,4}> ";

TEST(JoinRotations, OfNeighbouringParts) {
  for (const std::string body : {"{ q, k, c = Split<axis=-1>(x, sizes) a = RotaryEmbedding<num_heads=2>(q, cos, sin, at) "
                                 "b = RotaryEmbedding<num_heads=1>(k, cos, sin, at) }",
                                 "{ q, k, c = Split<axis=2>(x, sizes) b = RotaryEmbedding<num_heads=1>(k, cos, sin, at) "
                                 "a = RotaryEmbedding<num_heads=2>(q, cos, sin, at) }"}) {
    Model model = inferred("g (float[1,1,16] x, " + kRotations.substr(1) + body, 24);
    join_rotations(model);
    EXPECT_EQ(ops(*model.graph), "Split RotaryEmbedding Split");
    EXPECT_EQ(model.graph->nodes[1]->get_int("num_heads", 0), 3);
    EXPECT_EQ(model.graph->nodes[2]->out(0)->name, "a");
    EXPECT_EQ(model.graph->nodes[2]->out(1)->name, "b");
    expect_sound(model);
  }
}

TEST(JoinRotations, LeavesOthers) {
  const std::string split = "q, k, c = Split<axis=-1>(x, sizes) ";
  const std::string rotations = "a = RotaryEmbedding<num_heads=2>(q, cos, sin, at) b = RotaryEmbedding<num_heads=1>(k, cos, sin, at) ";
  for (const auto& [x, body] : std::vector<std::pair<std::string, std::string>>{
           {"float[1,1,16] x",
            split + "a = RotaryEmbedding<num_heads=2>(q, cos, sin, at) b = RotaryEmbedding<num_heads=1>(k, sin, cos, at) "},
           {"float[1,1,16] x",
            split + "a = RotaryEmbedding<num_heads=2>(q, cos, sin, at) b = RotaryEmbedding<num_heads=1, interleaved=1>(k, cos, sin, at) "},
           {"float[1,1,16] x", split + "a = RotaryEmbedding<num_heads=2>(q, cos, sin, at) b = Relu(k) "},
           {"float[1,1,8] y", "x = Concat<axis=2>(y, y) " + split + "a = Add(q, y) b = RotaryEmbedding<num_heads=1>(k, cos, sin, at) "}}) {
    Model model = inferred("g (" + x + ", " + kRotations.substr(1) + "{ " + body + "}", 24);
    const std::string before = ops(*model.graph);
    join_rotations(model);
    EXPECT_EQ(ops(*model.graph), before);
  }
  const std::string two =
      "g (float[1,2,16] x, float[8,2] cos, float[8,2] sin, int64[1,2] at) => (float[1,2,8] a, float[1,2,4] b, "
      "float[1,2,4] c) <int64[3] sizes = {8,4,4}> { " +
      split + rotations + "}";
  Model model = inferred(two, 24);
  join_rotations(model);
  EXPECT_EQ(ops(*model.graph), "Split RotaryEmbedding RotaryEmbedding");
}

TEST(TransposesToReshapes, LeavesEmptyTensors) {
  Model model = inferred("g (float[2,1,0,4] x) => (float[2,0,1,4] y) { y = Transpose<perm=[0,2,1,3]>(x) }");
  transposes_to_reshapes(model);
  EXPECT_EQ(ops(*model.graph), "Transpose");
}

TEST(MergeProducts, LeavesOthers) {
  for (const std::string body :
       {"{ a = MatMul(x, u) b = MatMul(a, v) c = MatMul(b, z) }", "{ a = MatMul(x, u) y = Relu(x) b = MatMul(y, v) c = MatMul(a, w) }"}) {
    Model model = inferred("g (float[2,3,2] x, float[3,1] z) => (float[2,3,2] a, float[2,3,3] b, float[2,3,1] c)" +
                           kProducts.substr(kProducts.find(" <")) + body);
    const std::string before = ops(*model.graph);
    merge_products(model);
    EXPECT_EQ(ops(*model.graph), before);
  }
  Model model = inferred(kProducts + "{ a = MatMul(x, u) b = MatMul(x, v) c = MatMul(x, w) }");
  merge_products(model, {.tiles = 0});
  EXPECT_EQ(ops(*model.graph), "MatMul MatMul MatMul");
}

TEST(MergeProducts, KeepsMatricesForTheNextGraph) {
  Model model = inferred(kProducts + "{ a = MatMul(x, u) b = MatMul(x, v) c = MatMul(x, w) }"), again = clone(model);
  MergedWeights kept;
  merge_products(model, {}, &kept);
  merge_products(again, {}, &kept);
  EXPECT_EQ(model.graph->nodes[0]->input(1)->constant, again.graph->nodes[0]->input(1)->constant);
}

}  // namespace
}  // namespace fretsaw
