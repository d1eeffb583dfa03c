// The normalising passes other than the upgrade: functions, constants, identities, the runner.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>

#include "tests/graph/text_model.h"

namespace fretsaw {
namespace {

using testing::only;
using testing::ops;
using testing::parse_model;

struct Row {
  std::string name;
  std::string model;
  std::string expected;
};

void PrintTo(const Row& row, std::ostream* out) {
  *out << row.name;
}

class NormaliseTest : public ::testing::TestWithParam<Row> {};

TEST_P(NormaliseTest, GivesOneForm) {
  Model model = parse_model(GetParam().model);
  std::vector<std::string> outputs;
  for (const Value* v : model.graph->outputs) outputs.push_back(v->name);
  run_passes(model, normalise_passes());
  EXPECT_EQ(ops(*model.graph), GetParam().expected) << print_graph(*model.graph);
  EXPECT_TRUE(model.functions.empty());
  for (size_t i = 0; i < outputs.size(); ++i) EXPECT_EQ(model.graph->outputs[i]->name, outputs[i]);
  for (const Finding& f : infer_shapes(model).faults) ADD_FAILURE() << f.message;
}

const std::string kOld = "<ir_version: 8, opset_import: [\"\" : 17]>\n";
const std::string kWithFunctions = "<ir_version: 8, opset_import: [\"\" : 17, \"f\" : 1]>\n";

const std::string kBranches = "If<then_branch = t () => (float[2] a) { a = Relu(x) }, else_branch = e () => (float[2] b) { b = Exp(x) }>";
const std::string kSqueeze =
    "<int64[1] i = {1}, int64[1] one = {1}> { s = Shape(x) d = Gather(s, i) c = Equal(d, one) "
    "y = If<then_branch = t () => (float a) { a = Squeeze(x, one) }, else_branch = e () => (float b) { b = Identity(x) }>(c) }";

const Row kRows[] = {
    // Constants in all forms, at every level.
    {"constant_forms",
     kOld + "g (float[2] x) => (float[2] y) { a = Constant<value_float=2.0>() b = Constant<value_floats=[1.0,2.0]>() c = "
            "Constant<value=float[2] {3,4}>() "
            "p = Add(x, a) q = Add(p, b) y = Add(q, c) }",
     "Add Add Add"},
    {"constant_ints", kOld + "g (float[4] x) => (float[2,2] y) { s = Constant<value_ints=[2,2]>() y = Reshape(x, s) }", "Reshape"},
    {"constant_in_body",
     kOld + "g (bool c, float[2] x) => (float[2] y) { y = If<then_branch = t () => (float[2] a) { k = Constant<value_float=1.0>() a = "
            "Add(x, k) }, "
            "else_branch = e () => (float[2] b) { b = Constant<value=float[2] {3,4}>() }>(c) }",
     "If{Add}{}"},
    {"constant_as_output", kOld + "g (float[2] x) => (float[2] y, float[2] z) { y = Relu(x) z = Constant<value=float[2] {3,4}>() }",
     "Relu"},
    // Sequences whose elements are known.
    {"split_by_sizes",
     kOld + "g (float[N,5] x) => (float[N,3] y) <int64[2] s = {2,3}, int64 i = {-1}> { q = SplitToSequence<axis=1>(x, s) "
            "a = SequenceAt(q, i) y = Relu(a) }",
     "Split Relu"},
    {"split_in_equal_parts",
     kOld +
         "g (float[5,2] x) => (float[1,2] y) <int64 s = {2}, int64 i = {2}> { q = SplitToSequence(x, s) a = SequenceAt(q, i) y = Relu(a) }",
     "Split Relu"},
    {"split_in_rows",
     kOld + "g (float[3,2] x) => (float[2] y, float[2] z) <int64 i = {1}, int64 j = {0}> { q = SplitToSequence<keepdims=0>(x) "
            "a = SequenceAt(q, i) y = Relu(a) z = SequenceAt(q, j) }",
     "Split Squeeze Squeeze Relu"},
    {"split_of_unknown_size",
     kOld +
         "g (float[N,2] x) => (float[M,2] y) <int64 s = {2}, int64 i = {0}> { q = SplitToSequence(x, s) a = SequenceAt(q, i) y = Relu(a) }",
     "SplitToSequence SequenceAt Relu"},
    {"split_taken_beyond",
     kOld +
         "g (float[4,2] x) => (float[2,2] y) <int64 s = {2}, int64 i = {2}> { q = SplitToSequence(x, s) a = SequenceAt(q, i) y = Relu(a) }",
     "SplitToSequence SequenceAt Relu"},
    {"split_taken_by_input",
     kOld + "g (float[4,2] x, int64 i) => (float[2,2] y) <int64 s = {2}> { q = SplitToSequence(x, s) y = SequenceAt(q, i) }",
     "SplitToSequence SequenceAt"},
    {"split_and_joined",
     kOld + "g (float[4,2] x) => (float[2,4] y) <int64 s = {2}> { q = SplitToSequence(x, s) y = ConcatFromSequence<axis=1>(q) }",
     "Split Concat"},
    {"element_of_constructed",
     kOld + "g (float[2] x, float[3] z) => (float[3] y) <int64 i = {1}> { q = SequenceConstruct(x, z) a = SequenceAt(q, i) y = Relu(a) }",
     "Relu"},
    {"constructed_and_stacked",
     kOld + "g (float[2] x, float[2] z) => (float[2,2] y) { q = SequenceConstruct(x, z) y = ConcatFromSequence<axis=0, new_axis=1>(q) }",
     "Unsqueeze Unsqueeze Concat"},
    {"sequence_that_is_used_whole",
     kOld +
         "g (float[2] x, float[2] z) => (float[2] y, seq(float[2]) q) <int64 i = {0}> { q = SequenceConstruct(x, z) a = SequenceAt(q, i) "
         "y = Relu(a) }",
     "SequenceConstruct Relu"},
    {"sequence_that_is_counted",
     kOld +
         "g (float[2] x, float[2] z) => (float[2] y) { q = SequenceConstruct(x, z) n = SequenceLength(q) m = Cast<to=1>(n) y = Add(x, m) }",
     "Cast Add"},
    {"sequence_that_is_edited",
     kOld + "g (float[2] x, float[2] z, float[2] w) => (float[6] y) <int64 i = {-1}, int64 first = {0}> { e = SequenceEmpty() "
            "a = SequenceInsert(e, x) b = SequenceInsert(a, z) c = SequenceInsert(b, w, i) d = SequenceErase(c, first) "
            "f = SequenceInsert(d, x, first) k = SequenceErase(f) y = ConcatFromSequence<axis=0>(k) }",
     "Concat"},
    {"sequence_that_is_edited_at_an_open_place",
     kOld + "g (float[2] x, int64 i) => (float[4] y) { e = SequenceConstruct(x, x) c = SequenceInsert(e, x, i) d = SequenceErase(c) "
            "y = ConcatFromSequence<axis=0>(d) }",
     "SequenceConstruct SequenceInsert SequenceErase ConcatFromSequence"},
    // Branches whose condition is known.
    {"branch_of_constant", kOld + "g (float[2] x) => (float[2] y) <bool c = {1}> { y = " + kBranches + "(c) }", "Relu"},
    {"other_branch_of_constant", kOld + "g (float[2] x) => (float[2] y) <bool c = {0}> { y = " + kBranches + "(c) }", "Exp"},
    {"branch_of_default", kOld + "g (float[2] x, bool c = {1}) => (float[2] y) { y = " + kBranches + "(c) }", "If{Relu}{Exp}"},
    {"branch_of_size", kOld + "g (float[2,1,3] x) => (float[2,3] y) " + kSqueeze, "Squeeze"},
    {"other_branch_of_size", kOld + "g (float[2,4,3] x) => (float[2,4,3] y) " + kSqueeze, "Identity"},
    {"branch_of_symbolic_size", kOld + "g (float[2,N,3] x) => (float y) " + kSqueeze, "Shape Gather Equal If{Squeeze}{Identity}"},
    {"branch_of_turned_sizes",
     kOld +
         "g (float[2] x) => (float[2] y) <int64[4] k = {1,2,3,4}, int64[2] two = {-1,2}, int64[1] z = {0}, int64[1] m = {-1}, "
         "int64[1] low = {-9223372036854775807}, int64[1] three = {3}> "
         "{ r = Reshape(k, two) s = Slice(r, m, low, z, m) t = Transpose<perm=[1,0]>(s) f = Reshape(t, m) d = Gather(f, z) "
         "c = Equal(d, three) y = " +
         kBranches + "(c) }",
     "Relu"},
    {"branch_after_branch",
     kOld + "g (float[2,1,3] x) => (float[2,3] y) <bool c = {1}, int64[1] i = {1}, int64[1] one = {1}> "
            "{ z = If<then_branch = t () => (float[2,1,3] a) { a = Relu(x) }, else_branch = e () => (float[2,3,1] b) { b = Transpose<perm=["
            "0,2,1]>(x) }>(c) s = Shape(z) d = Gather(s, i) q = Equal(d, one) "
            "y = If<then_branch = t () => (float[2,3] a) { a = Squeeze(z, one) }, else_branch = e () => (float[2,3] b) { b = ReduceSum<"
            "keepdims=0>(z, i) }>(q) }",
     "Relu Squeeze"},
    {"branch_in_branch",
     kOld + "g (bool u, float[2] x) => (float[2] y) <bool c = {1}> { y = If<then_branch = t () => (float[2] p) { p = " + kBranches +
         "(c) }, else_branch = e () => (float[2] q) { q = Neg(x) }>(u) }",
     "If{Relu}{Neg}"},
    {"branch_that_hands_on",
     kOld + "g (float[2] x) => (float[2] y, float[2] z) <bool c = {1}> { r = Relu(x) y, z = If<then_branch = t () => (float[2] a, float[2] "
            "b) { a = Identity(r) b = Identity(r) }, else_branch = e () => (float[2] p, float[2] q) { p = Exp(x) q = Neg(x) }>(c) }",
     "Relu Identity"},
    {"branch_of_a_pass",  // the size that the body asks for grows from pass to pass
     kOld +
         "g (float[1] x) => (float[N] y) <int64 n = {3}, bool c = {1}, int64[1] z = {0}, int64[1] one = {1}> "
         "{ y = Loop<body = b (int64 i, bool k, float[M] v) => (bool l, float[M2] w) { l = Identity(k) s = Shape(v) d = Gather(s, z) "
         "q = Equal(d, one) w = If<then_branch = t () => (float[A] a) { a = Concat<axis=0>(v, v) }, else_branch = e () => (float[B] f) { "
         "f = Concat<axis=0>(v, v, v) }>(q) }>(n, c, x) }",
     "Loop{Identity Shape Gather Equal If{Concat}{Concat}}"},
    // Identities. Output names stay.
    {"identity_between", kOld + "g (float[2] x) => (float[2] y) { a = Relu(x) b = Identity(a) c = Identity(b) y = Exp(c) }", "Relu Exp"},
    {"identity_to_output", kOld + "g (float[2] x) => (float[2] y) { a = Relu(x) y = Identity(a) }", "Relu"},
    {"identity_to_output_used_inside",
     kOld + "g (float[2] x) => (float[2] y, float[2] z) { a = Relu(x) b = Exp(a) y = Identity(a) z = Add(b, y) }", "Relu Exp Add"},
    {"identity_of_input", kOld + "g (float[2] x) => (float[2] y) { y = Identity(x) }", "Identity"},
    {"identity_of_weight", kOld + "g (float[2] x) => (float[2] y) <float[2] w = {1,2}> { v = Identity(w) y = Mul(x, v) }", "Mul"},
    {"identity_of_weight_to_output",
     kOld + "g (float[2] x) => (float[2] y, float[2] z) <float[2] w = {1,2}> { z = Identity(w) y = Mul(x, w) }", "Identity Mul"},
    {"two_outputs_of_one_value", kOld + "g (float[2] x) => (float[2] y, float[2] z) { y = Relu(x) z = Identity(y) }", "Relu Identity"},
    {"identity_in_body",
     kOld + "g (bool c, float[2] x) => (float[2] y) { y = If<then_branch = t () => (float[2] a) { k = Relu(x) a = Identity(k) }, "
            "else_branch = e () => (float[2] b) { b = Identity(x) }>(c) }",
     "If{Relu}{Identity}"},
    {"identity_captured",
     kOld + "g (bool c, float[2] x) => (float[2] y) { i = Identity(x) y = If<then_branch = t () => (float[2] a) { a = Relu(i) }, "
            "else_branch = e () => (float[2] b) { b = Exp(i) }>(c) }",
     "If{Relu}{Exp}"},
    {"dropout", kOld + "g (float[2] x) => (float[2] y) { a, m = Dropout(x) y = Relu(a) }", "Relu"},
    {"dropout_mask_used", kOld + "g (float[2] x) => (float[2] y, bool[2] m) { a, m = Dropout(x) y = Relu(a) }", "Dropout Relu"},
    {"dropout_in_training", kOld + "g (float[2] x) => (float[2] y) <float r = {0.5}, bool t = {1}> { a = Dropout(x, r, t) y = Relu(a) }",
     "Dropout Relu"},
    {"cast_like_of_same_type", kOld + "g (float[2] x, float[3] z) => (float[2] y) { a = Relu(x) b = CastLike(a, z) y = Exp(b) }",
     "Relu Exp"},
    {"cast_like_of_another_type", kOld + "g (float[2] x, double[3] z) => (double[2] y) { a = Relu(x) b = CastLike(a, z) y = Exp(b) }",
     "Relu Cast Exp"},
    {"cast_like_a_size", kOld + "g (float[n] x, float[2] z) => (int64[2] y) { a = Relu(z) s = Shape(x) q = Squeeze(s) y = CastLike(a, q) }",
     "Relu Cast"},
    {"cast_to_same_type", kOld + "g (float[2] x) => (float[2] y) { a = Relu(x) b = Cast<to=1>(a) y = Exp(b) }", "Relu Exp"},
    {"cast_to_other_type", kOld + "g (float[2] x) => (int64[2] y) { a = Relu(x) y = Cast<to=7>(a) }", "Relu Cast"},
    // Dead nodes go; inputs stay.
    {"dead_node", kOld + "g (float[2] x, float[2] unused) => (float[2] y) { d = Exp(x) y = Relu(x) }", "Relu"},
    // Functions.
    {"function",
     kWithFunctions + "g (float[2] x) => (float[2] y) { y = f.twice(x) }\n"
                      "<opset_import: [\"\" : 17], domain: \"f\"> twice (a) => (b) { t = Relu(a) b = Add(t, a) }",
     "Relu Add"},
    {"function_twice",
     kWithFunctions + "g (float[2] x) => (float[2] y) { m = f.twice(x) y = f.twice(m) }\n"
                      "<opset_import: [\"\" : 17], domain: \"f\"> twice (a) => (b) { t = Relu(a) b = Add(t, a) }",
     "Relu Add Relu Add"},
    {"function_nested",
     kWithFunctions + "g (float[2] x) => (float[2] y) { y = f.outer(x) }\n"
                      "<opset_import: [\"\" : 17, \"f\" : 1], domain: \"f\"> outer (a) => (b) { t = f.inner(a) b = Exp(t) }\n"
                      "<opset_import: [\"\" : 17], domain: \"f\"> inner (a) => (b) { b = Relu(a) }",
     "Relu Exp"},
    {"function_only_in_branch",
     kWithFunctions + "g (bool c, float[2] x) => (float[2] y) { y = If<then_branch = t () => (float[2] a) { a = f.act(x) }, else_branch = "
                      "e () => (float[2] b) { b = Exp(x) }>(c) }\n"
                      "<opset_import: [\"\" : 17], domain: \"f\"> act (a) => (b) { b = Relu(a) }",
     "If{Relu}{Exp}"},
    {"function_of_older_opset",
     kWithFunctions + "g (float[1,2] x) => (float[2] y) { y = f.drop(x) }\n"
                      "<opset_import: [\"\" : 11], domain: \"f\"> drop (a) => (b) { b = Squeeze<axes=[0]>(a) }",
     "Squeeze"},
    {"function_attributes",
     kWithFunctions + "g (float[1,2] x) => (float[2] y) { y = f.drop<where=[0]>(x) }\n"
                      "<opset_import: [\"\" : 11], domain: \"f\"> drop <where>(a) => (b) { b = Squeeze<axes: ints = @where>(a) }",
     "Squeeze"},
    {"function_hands_input_on",
     kWithFunctions + "g (float[2] x) => (float[2] y) { y = f.same(x) }\n"
                      "<opset_import: [\"\" : 17], domain: \"f\"> same (a) => (a) { }",
     "Identity"},
    {"function_without_optional_input",
     kWithFunctions + "g (float[2] x) => (float[2] y) { y = f.limit(x) }\n"
                      "<opset_import: [\"\" : 17], domain: \"f\"> limit (a, low, high) => (b) { b = Clip(a, low, high) }",
     "Clip"},
    {"function_with_body_over_input",
     kWithFunctions + "g (bool c, float[2] x) => (float[2] y) { y = f.choose(c, x) }\n"
                      "<opset_import: [\"\" : 17], domain: \"f\"> choose (c, a) => (b) { b = If<then_branch = t () => (float[2] p) { p = "
                      "Relu(a) }, else_branch = e () => (float[2] q) { q = Exp(a) }>(c) }",
     "If{Relu}{Exp}"},
    {"function_constant_by_attribute",
     kWithFunctions +
         "g (float[2] x) => (float[2] y) { y = f.plus<k=2.0>(x) }\n"
         "<opset_import: [\"\" : 17], domain: \"f\"> plus <k>(a) => (b) { c = Constant<value_float: float = @k>() b = Add(a, c) }",
     "Add"},
};

INSTANTIATE_TEST_SUITE_P(Models, NormaliseTest, ::testing::ValuesIn(kRows), [](const auto& info) { return info.param.name; });

TEST(InlineFunctions, KeepsDefaultsAndNames) {
  Model model = parse_model(kWithFunctions +
                            "g (float[2] x) => (float[2] y) { t = f.leak(x) y = f.leak<slope=0.5>(t) }\n"
                            "<opset_import: [\"\" : 17], domain: \"f\"> leak <slope: float = 0.25>(a) => (b) { t = LeakyRelu<alpha: float "
                            "= @slope>(a) b = Exp(t) }");
  run_passes(model, normalise_passes());
  ASSERT_EQ(ops(*model.graph), "LeakyRelu Exp LeakyRelu Exp");
  EXPECT_EQ(model.graph->nodes[0]->get_float("alpha", 0), 0.25F);
  EXPECT_EQ(model.graph->nodes[2]->get_float("alpha", 0), 0.5F);
  std::set<std::string> names;
  for (const Node* node : model.graph->nodes) EXPECT_TRUE(names.insert(node->outputs[0]->name).second) << node->outputs[0]->name;
  EXPECT_EQ(model.graph->nodes[1]->outputs[0]->name, "t");
}

TEST(InlineFunctions, RefusesRecursion) {
  Model model = parse_model(kWithFunctions +
                            "g (float[2] x) => (float[2] y) { y = f.a(x) }\n"
                            "<opset_import: [\"\" : 17, \"f\" : 1], domain: \"f\"> a (x) => (y) { y = f.b(x) }\n"
                            "<opset_import: [\"\" : 17, \"f\" : 1], domain: \"f\"> b (x) => (y) { y = f.a(x) }");
  try {
    run_passes(model, normalise_passes());
    FAIL() << "recursion was accepted";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("calls itself"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("inline-functions"), std::string::npos) << e.what();
  }
}

TEST(InlineFunctions, RefusesBodiesThatDoubleWithoutBound) {
  std::string text = kWithFunctions + "g (float[2] x) => (float[2] y) { y = f.f0(x) }\n";
  for (int i = 0; i < 40; ++i) {
    std::string inner = i == 39 ? "Relu" : "f.f" + std::to_string(i + 1);
    text += "<opset_import: [\"\" : 17, \"f\" : 1], domain: \"f\"> f" + std::to_string(i) + " (x) => (y) { t = " + inner +
            "(x) y = " + inner + "(t) }\n";
  }
  Model model = parse_model(text);
  EXPECT_THROW(inline_functions(model), Error);
}

TEST(Constants, AreDenseWhenSparse) {
  onnx::ModelProto proto;
  ASSERT_TRUE(onnx::OnnxParser((kOld + "g (float[2,2] x) => (float[2,2] y) { s = Constant() y = Add(x, s) }").c_str()).Parse(proto).IsOK());
  auto* a = proto.mutable_graph()->mutable_node(0)->add_attribute();
  a->set_name("sparse_value");
  a->set_type(onnx::AttributeProto::SPARSE_TENSOR);
  auto* sparse = a->mutable_sparse_tensor();
  sparse->add_dims(2);
  sparse->add_dims(2);
  sparse->mutable_values()->set_data_type(onnx::TensorProto::FLOAT);
  sparse->mutable_values()->add_dims(1);
  sparse->mutable_values()->add_float_data(5);
  sparse->mutable_indices()->set_data_type(onnx::TensorProto::INT64);
  sparse->mutable_indices()->add_dims(1);
  sparse->mutable_indices()->add_int64_data(2);
  FileCache files;
  Model model = model_from_proto(proto, "", files, {});
  constants_to_initializers(model);
  auto values = only(*model.graph, "Add").input(1)->constant->as<float>();
  EXPECT_EQ(std::vector<float>(values.begin(), values.end()), (std::vector<float>{0, 0, 5, 0}));
}

// What fold_shapes leaves, and the type of the first output.
struct FoldRow {
  std::string name, graph, ops, type;
};
void PrintTo(const FoldRow& row, std::ostream* out) {
  *out << row.name;
}
class FoldShapesTest : public ::testing::TestWithParam<FoldRow> {};
TEST_P(FoldShapesTest, GivesConstants) {
  Model model = parse_model(kOld + GetParam().graph);
  run_passes(model, normalise_passes());
  run_passes(model, {{"fold-shapes", fold_shapes}});
  infer_shapes(model);
  EXPECT_EQ(ops(*model.graph), GetParam().ops) << print_graph(*model.graph);
  EXPECT_EQ(to_string(model.graph->outputs[0]->type), GetParam().type);
}

const std::string kImage = "g (float[B,3,4,6] x) => (float[B,C,H,W] y) ";
const FoldRow kFoldRows[] = {
    {"scales_joined", kImage + "<float[2] a = {1,1}, float[2] b = {2,3}> { c = Concat<axis=0>(a, b) y = Resize(x, , c) }", "Resize",
     "float32[B,3,8,18]"},
    {"scales_of_sizes",
     kImage + "<float[2] a = {1,1}, float[2] t = {12,12}, int64[1] two = {2}, int64[1] four = {4}> { s = Shape(x) p = Slice(s, two, four) "
              "f = Cast<to=1>(p) r = Div(t, f) c = Concat<axis=0>(a, r) y = Resize(x, , c) }",
     "Resize", "float32[B,3,12,12]"},
    {"scales_of_scaled_sizes",
     kImage +
         "<float one = {1}, float half = {1.5}, int64[1] z = {0}, int64 i = {2}> { s = Shape(x) h = Gather(s, i) f = Cast<to=1>(h) m = "
         "Mul(f, half) n = Floor(m) r = Div(n, f) u = Unsqueeze(r, z) o = Unsqueeze(one, z) c = Concat<axis=0>(o, o, u, o) y = Resize(x, "
         ", c) }",
     "Resize", "float32[B,3,6,6]"},
    {"size_after_scales",
     kImage +
         "<float[2] a = {1,1}, float[2] b = {2,2}, int64[1] w = {-1}, int64[1] two = {2}, int64[1] four = {4}> { c = Concat<axis=0>(a, "
         "b) r = Resize(x, , c) s = Shape(r) p = Slice(s, two, four) t = Concat<axis=0>(w, p) y = Reshape(r, t) }",
     "Resize Reshape", "float32[?,8,12]"},
    {"scales_given",
     "g (float[B,3,4,6] x, float[2] b) => (float[B,C,H,W] y) <float[2] a = {1,1}> { c = Concat<axis=0>(a, b) y = Resize(x, , c) }",
     "Concat Resize", "float32[B,C,H,W]"},
    {"scales_of_unknown_size",
     "g (float[B,3,H,H] x) => (float[P,Q,R,S] y) <float[3] a = {1,1,1}, float[1] t = {12}, int64[1] two = {2}> { s = Shape(x) p = "
     "Gather(s, "
     "two) f = Cast<to=1>(p) r = Div(t, f) c = Concat<axis=0>(a, r) y = Resize(x, , c) }",
     "Shape Gather Cast Div Concat Resize", "float32[P,Q,R,S]"},
};
INSTANTIATE_TEST_SUITE_P(Models, FoldShapesTest, ::testing::ValuesIn(kFoldRows), [](const auto& info) { return info.param.name; });

// ONNX asks for scalars, and its own function of AffineGrid gives Range a size of shape [1].
TEST(InferShapes, RangeTakesTensorsOfOneElement) {
  Model model = parse_model(
      kOld + "g () => (int64[N] y) <int64 zero = {0}, int64[1] limit = {4}, int64[1] step = {1}> { y = Range(zero, limit, step) }");
  EXPECT_TRUE(infer_shapes(model).faults.empty());
  EXPECT_EQ(to_string(model.graph->outputs[0]->type), "int64[4]");
}

TEST(RunPasses, TimesNamesAndLeavesOut) {
  Model model = parse_model(kOld + "g (float[2] x) => (float[2] y) { a = Identity(x) y = Relu(a) }");
  setenv("FRETSAW_DISABLE_PASSES", "remove-identities,other", 1);
  auto timings = run_passes(model, normalise_passes());
  unsetenv("FRETSAW_DISABLE_PASSES");
  EXPECT_EQ(ops(*model.graph), "Identity Relu");
  EXPECT_EQ(timings.size(), normalise_passes().size() - 1);
  timings = run_passes(model, normalise_passes());
  EXPECT_EQ(timings.back().name, "remove-identities");
  EXPECT_EQ(timings.back().nodes_before, 2u);
  EXPECT_EQ(timings.back().nodes_after, 1u);
  EXPECT_NE(print_graph(*model.graph).find("%y: float32[2] = Relu(%x)"), std::string::npos) << print_graph(*model.graph);
}

TEST(RunPasses, NamesThePassThatBreaksTheGraph) {
  Model model = parse_model(kOld + "g (float[2] x) => (float[2] y) { a = Exp(x) y = Relu(a) }");
  try {
    run_passes(model, {{"swap", [](Model& m) { std::swap(m.graph->nodes[0], m.graph->nodes[1]); }}});
    FAIL() << "a broken graph was accepted";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("swap"), std::string::npos) << e.what();
  }
}

TEST(Normalise, TakesLinearTime) {
  Model model;
  model.ir_version = 8;
  model.opsets[""] = 11;
  model.graph = std::make_shared<Graph>();
  Graph& g = *model.graph;
  Value* v = g.add_value("x", Type::tensor(DType::float32, Shape{Dim(1), Dim(4)}));
  g.inputs.push_back(v);
  for (int i = 0; i < 25000; ++i) {
    std::string k = std::to_string(i);
    v = g.add_node("Unsqueeze", {v}, {"u" + k}, {{"axes", std::vector<int64_t>{0}}})->outputs[0];
    v = g.add_node("Squeeze", {v}, {"s" + k}, {{"axes", std::vector<int64_t>{0}}})->outputs[0];
    v = g.add_node("Identity", {v}, {"i" + k})->outputs[0];
    v = g.add_node("Clip", {v}, {"c" + k}, {{"max", 6.0F}})->outputs[0];
  }
  g.outputs.push_back(v);
  auto start = std::chrono::steady_clock::now();
  run_passes(model, normalise_passes());
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  EXPECT_EQ(g.nodes.size(), 75000u);
  EXPECT_LT(seconds, 10.0);  // 100,000 nodes; quadratic work would take minutes
}

}  // namespace
}  // namespace fretsaw
