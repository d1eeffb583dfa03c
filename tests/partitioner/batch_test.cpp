// Following the batch, and making a fixed one symbolic: what is rewritten, what is refused and with which words.
#include "partitioner/batch.h"

#include <gtest/gtest.h>

#include "partitioner/partition.h"
#include "tests/graph/text_model.h"

namespace fretsaw {
namespace {

Model parsed(const std::string& graph) {
  Model model = testing::parse_model("<ir_version: 10, opset_import: [\"\" : 23]>\n" + graph);
  constants_to_initializers(model);
  infer_shapes(model);
  return model;
}

// The model after its batch was made symbolic, with the facts that said so.
struct Divided {
  Model model;
  BatchFacts facts;
};
Divided divide(const std::string& graph, const std::map<std::string, int>& axes = {}, const std::map<std::string, MergeRule>& merges = {}) {
  Divided d{parsed(graph), {}};
  d.facts = analyse_batch(d.model, axes, merges);
  make_batch_symbolic(d.model, d.facts);
  verify(*d.model.graph);
  return d;
}

std::string refusal(const std::string& graph, const std::map<std::string, MergeRule>& merges = {}) {
  try {
    divide(graph, {}, merges);
    return "accepted";
  } catch (const Error& e) {
    return e.what();
  }
}

const Value* output(const Divided& d, size_t k = 0) {
  return d.model.graph->outputs[k];
}
std::vector<int64_t> shape_operand(const Divided& d, const std::string& op) {
  return *int_values(*testing::only(*d.model.graph, op).input(1)->constant);
}

// The shape of the first output once the batch is symbolic.
struct Accepted {
  const char* graph;
  const char* type;  // of output 0
  const char* ops;
};
class BatchIsMadeSymbolic : public ::testing::TestWithParam<Accepted> {};
TEST_P(BatchIsMadeSymbolic, Type) {
  Divided d = divide(GetParam().graph);
  EXPECT_EQ(to_string(output(d)->type), GetParam().type);
  EXPECT_EQ(testing::ops(*d.model.graph), GetParam().ops);
  EXPECT_EQ(d.facts.outputs.at(output(d)->name).merge, "concat");
}
const Accepted kAccepted[] = {
    {"g (float[2,16] x) => (y) { s = Constant<value_ints=[8,-1]>() y = Reshape(x, s) }", "float32[4*batch,4]", "Reshape"},
    {"g (float[2,3,8] x) => (y) { s = Constant<value_ints=[2,3,4,-1]>() y = Reshape(x, s) }", "float32[batch,3,4,2]", "Reshape"},
    // batch 2, 2 heads: only the batch becomes symbolic
    {"g (float[2,5,2,3] x) => (y) { t = Transpose<perm=[0,2,1,3]>(x) s = Constant<value_ints=[4,5,3]>() y = Reshape(t, s) }",
     "float32[2*batch,5,3]", "Transpose Reshape"},
    // a position embedding repeated for each sample, added to something of the batch
    {"g (float[4,3,2] x, float[9,2] w) => (y) { p = Constant<value_ints=[0,1,2]>() s = Constant<value_ints=[4,3]>() e = Expand(p, s) "
     "v = Gather(w, e) y = Add(x, v) }",
     "float32[batch,3,2]", "Expand Gather Slice Add"},
    // [b, 1] joined to each sample needs as many rows as there are samples
    {"g (float[2,3] x, float[1,1] c) => (y) { s = Constant<value_ints=[2,1]>() e = Expand(c, s) y = Concat<axis=1>(e, x) }",
     "float32[batch,4]", "Expand Slice Shape Concat Expand Concat"},
    // the batch is a number in a shape whose other elements are known only when it runs
    {"g (float[2,1,s] x, float[2,s] z) => (y) { n = Shape<start=1, end=2>(z) p = Constant<value_ints=[2,3]>() t = Concat<axis=0>(p, n) "
     "y = Expand(x, t) }",
     "float32[batch,3,s]", "Shape Concat Shape Slice Concat Expand"},
    {"g (float[2,3,4,4] x) => (y) { s = Constant<value_ints=[2,3,8,8]>() y = Resize(x, , , s) }", "float32[batch,3,8,8]", "Resize"},
    {"g (float[2,3] x) => (y) { c = Concat<axis=0>(x, x) s = Constant<value_ints=[2,2]>() a, b = Split<axis=0>(c, s) y = Sub(a, b) }",
     "float32[batch,3]", "Concat Split Sub"},
    {"g (float[2,1,3] x) => (y) { y = Squeeze(x) }", "float32[batch,3]", "Squeeze"},
    // the places of maxima count over the whole tensor, and only the way back reads them
    {"g (float[2,3,4,4] x) => (y) { p, i = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x) e = Exp(p) "
     "y = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(e, i) }",
     "float32[batch,3,4,4]", "MaxPool Exp MaxUnpool"},
    // symbolic already, shapes computed
    {"g (float[n,6] x) => (y) { s = Shape<start=0, end=1>(x) r = Constant<value_ints=[2,3]>() t = Concat<axis=0>(s, r) y = Reshape(x, t) }",
     "float32[n,2,3]", "Shape Concat Reshape"},
    {"g (float[n,s,4] x) => (y) { r = Constant<value_ints=[-1,4]>() f = Reshape(x, r) t = Shape(x) y = Reshape(f, t) }", "float32[n,s,4]",
     "Reshape Shape Reshape"},
};
INSTANTIATE_TEST_SUITE_P(All, BatchIsMadeSymbolic, ::testing::ValuesIn(kAccepted));

TEST(BatchConstants, TheBatchOfAReshapeTargetIsOpened) {
  EXPECT_EQ(shape_operand(divide("g (float[2,16] x) => (y) { s = Constant<value_ints=[8,-1]>() y = Reshape(x, s) }"), "Reshape"),
            (std::vector<int64_t>{-1, 4}));
  EXPECT_EQ(shape_operand(divide("g (float[2,3,8] x) => (y) { s = Constant<value_ints=[2,3,4,-1]>() y = Reshape(x, s) }"), "Reshape"),
            (std::vector<int64_t>{-1, 3, 4, 2}));
  EXPECT_EQ(shape_operand(divide("g (float[2,3,8] x) => (y) { s = Constant<value_ints=[0,0,4,-1]>() y = Reshape(x, s) }"), "Reshape"),
            (std::vector<int64_t>{0, 0, 4, -1}));  // right for any batch as it stands
}

TEST(BatchConstants, EqualRowsBecomeOne) {
  Divided d = divide("g (float[2,2] x) => (y) <float[2,2] m = {1, 2, 1, 2}> { y = Add(x, m) }");
  const Value* m = testing::only(*d.model.graph, "Add").input(1);
  EXPECT_EQ(to_string(m->type), "float32[1,2]");
  ASSERT_TRUE(m->constant);
  EXPECT_EQ(m->constant->as<float>()[1], 2);
}

TEST(BatchConstants, SamplesFindThemselvesByConstantNumbers) {
  // h[arange(3), last] of [3, 6, 4]
  const char* graph =
      "g (float[3,6,4] h, int64[3,1] last) => (y) <int64[3,1] rows = {0, 1, 2}> { i = Concat<axis=1>(rows, last) y = GatherND(h, i) }";
  Divided d = divide(graph);
  EXPECT_EQ(to_string(output(d)->type), "float32[batch,4]");
  EXPECT_NE(
      refusal(
          "g (float[3,6,4] h, int64[3,1] last) => (y) <int64[3,1] rows = {0, 2, 1}> { i = Concat<axis=1>(rows, last) y = GatherND(h, i) }")
          .find("different constant for each sample"),
      std::string::npos);
}

// h[arange(n), argmax(scores)] of [n, 6, 4], as one Gather of rows: the places of maxima are within the sample, others may not be.
TEST(BatchConstants, SamplesFindThemselvesAtThePlaceOfAMaximum) {
  const auto picked = [](const std::string& place) {
    return "g (float[n,6,4] h, float[n,6] scores, int64[n] given) => (y) <int64[2] flat = {-1, 4}, int64 zero = {0}, int64 one = {1}, "
           "int64 six = {6}> { a = ArgMax<axis=1, keepdims=0>(scores) s = Shape<start=0, end=1>(h) b = Squeeze(s) "
           "rows = Range(zero, b, one) k = Mul(rows, six) i = Add(k, " +
           place + ") r = Reshape(h, flat) y = Gather(r, i) }";
  };
  EXPECT_EQ(to_string(output(divide(picked("a")))->type), "float32[n,4]");
  EXPECT_NE(refusal(picked("given")), "accepted");
}

// Numbers of samples as an exporter writes them before it folds constants: a Range from 0.0 cast like the size.
TEST(BatchConstants, SamplesFindThemselvesByACastRange) {
  const Divided d = divide(
      "g (float[N,3] x, int64[N] i) => (y) <float z = {0}, float o = {1}> { s = Shape<start=0, end=1>(x) n = Squeeze(s) a = Cast<to=7>(z) "
      "b = Cast<to=7>(o) r = Range(a, n, b) t = Constant<value_ints=[1]>() c = Unsqueeze(r, t) d = Unsqueeze(i, t) "
      "e = Concat<axis=1>(c, d) y = GatherND(x, e) }");
  EXPECT_EQ(d.facts.outputs.at("y").merge, "concat");
}

TEST(BatchInputs, AMaskOfTheBatchsSizeIsNoBatch) {
  Divided d = divide("g (float[4,4,4] x, float[4,4] mask) => (y) { y = Add(x, mask) }");
  ASSERT_EQ(d.facts.inputs.size(), 1u);
  EXPECT_EQ(d.facts.inputs[0].first->name, "x");
  EXPECT_EQ(to_string(d.model.graph->inputs[1]->type), "float32[4,4]");
}

TEST(BatchInputs, AnotherAxisWhenTheUserSaysSo) {
  Divided d = divide("g (float[7,4,3] x) => (y) { y = Relu(x) }", {{"x", 1}});
  EXPECT_EQ(to_string(output(d)->type), "float32[7,batch,3]");
  EXPECT_EQ(d.facts.outputs.at("y").axis, 1);
  EXPECT_THROW(divide("g (float[4] x) => (y) { y = Relu(x) }", {{"z", 0}}), Error);
  EXPECT_THROW(divide("g (float[4] x) => (y) { y = Relu(x) }", {{"x", 1}}), Error);
}

// The first axis mixes samples: of the others those of one open size are tried.
TEST(BatchInputs, ALaterAxisWhereTheFirstMixesSamples) {
  const char* time_major =
      "g (float[7,n,3] x, float[n,3] first, int64[k] other) => (y, z) { m = Softmax<axis=0>(x) y = Add(m, first) z = Neg(other) }";
  Divided d = divide(time_major);
  ASSERT_EQ(d.facts.inputs.size(), 2u);
  EXPECT_EQ(d.facts.inputs[0].second, 1);
  EXPECT_EQ(d.facts.inputs[1].second, 0);
  EXPECT_EQ(d.facts.outputs.at("y").axis, 1);
  EXPECT_EQ(d.facts.outputs.at("z").merge, "same");
  // What the user says stands, and a number of a file is no batch of another axis.
  EXPECT_THROW(divide(time_major, {{"x", 0}}), Error);
  EXPECT_NE(refusal("g (float[7,4,3] x) => (y) { y = Softmax<axis=0>(x) }").find("it looks at all samples"), std::string::npos);
}

TEST(BatchInputs, NumbersAndSymbolsOfOneBatch) {
  Divided d = divide("g (float[n,4] x, float[2,4] z) => (y) { y = Add(x, z) }");
  EXPECT_EQ(d.facts.batch, 2);
  EXPECT_EQ(to_string(output(d)->type), "float32[n,4]");
}

TEST(BatchInputs, ABatchOfOneIsLeftAlone) {
  Divided d = divide("g (float[1,4] x) => (y) { y = Relu(x) }");
  EXPECT_EQ(d.facts.batch, 1);
  EXPECT_EQ(to_string(output(d)->type), "float32[1,4]");
}

TEST(BatchOutputs, DeclaredAndProvedMerges) {
  const char* mean = "g (float[4,5] x) => (y) { y = ReduceMean<keepdims=0>(x) }";
  EXPECT_NE(refusal(mean).find("'y' (ReduceMean): output 'y' mixes the samples of the batch: the batch axis is reduced here"),
            std::string::npos)
      << refusal(mean);
  EXPECT_EQ(refusal(mean, {{"y", {"mean", 0}}}), "accepted");
  EXPECT_NE(refusal(mean, {{"y", {"sum", 0}}}).find("is a mean over the batch"), std::string::npos);
  const char* root = "g (float[4,5] x) => (y) { m = ReduceMean<keepdims=0>(x) y = Sqrt(m) }";
  EXPECT_NE(refusal(root, {{"y", {"mean", 0}}}).find("neither a sum nor a mean"), std::string::npos);
  const char* scaled = "g (float[4,5] x) => (y) { m = ReduceSum<keepdims=0>(x) c = Constant<value_float=4.0>() y = Div(m, c) }";
  EXPECT_EQ(refusal(scaled, {{"y", {"sum", 0}}}), "accepted");
  EXPECT_NE(refusal(scaled, {{"y", {"mean", 0}}}).find("is a sum over the batch"), std::string::npos);
}

// sum(x) / batch, beside another mean; not the root of it, nor what is divided by its square.
TEST(BatchOutputs, ASumByTheNumberOfSamplesIsAMean) {
  const auto divided = [](const std::string& rest) {
    return "g (float[n,5] x) => (y) { s = Shape(x) z = Constant<value_ints=[0]>() a = Gather(s, z) n1 = Squeeze(a) k = Cast<to=1>(n1) "
           "t = ReduceSum<keepdims=0>(x) " +
           rest + " }";
  };
  const std::map<std::string, MergeRule> mean = {{"y", {"mean", 0}}};
  EXPECT_EQ(refusal(divided("y = Div(t, k)"), mean), "accepted");
  EXPECT_EQ(refusal(divided("d = Div(t, k) m = ReduceMean<keepdims=0>(x) y = Add(d, m)"), mean), "accepted");
  EXPECT_NE(refusal(divided("y = Div(t, k)"), {{"y", {"sum", 0}}}), "accepted");
  const auto unproved = [&](const std::string& rest) { return divide(divided(rest), {}, mean).facts.unproved.count("y"); };
  EXPECT_EQ(unproved("y = Div(t, k)"), 0u);
  EXPECT_EQ(unproved("r = Sqrt(k) y = Div(t, r)"), 1u);
  EXPECT_EQ(unproved("q = Mul(n1, n1) k2 = Cast<to=1>(q) y = Div(t, k2)"), 1u);
  EXPECT_EQ(unproved("p = ReduceMean<keepdims=0>(x) y = Mul(p, t)"), 1u);
  EXPECT_NE(refusal(divided("e = Exp(t) y = Div(e, k)"), mean), "accepted");
}

TEST(BatchOutputs, WhatDoesNotDependOnTheBatchIsTheSame) {
  Divided d = divide("g (float[4,5] x, float s) => (y, z) { y = Relu(x) z = Exp(s) }");
  EXPECT_EQ(d.facts.outputs.at("z").merge, "same");
}

struct Refused {
  const char* graph;
  const char* says;
};
class MixedSamples : public ::testing::TestWithParam<Refused> {};
TEST_P(MixedSamples, AreRefusedByName) {
  std::string what = refusal(GetParam().graph);
  EXPECT_NE(what.find(GetParam().says), std::string::npos) << what;
}
const Refused kRefused[] = {
    {"g (float[4,6] x) => (y) { s = Constant<value_ints=[2,12]>() y = Reshape(x, s) }",
     "(Reshape): output 'y' mixes the samples of the batch: samples are torn apart"},
    {"g (float[4,5] x) => (y) { a = Constant<value_ints=[0]>() m = ReduceMean(x, a) y = Sub(x, m) }", "(ReduceMean)"},
    {"g (float[4,5] x) => (y) { y = Softmax<axis=0>(x) }", "(Softmax): output 'y' mixes the samples of the batch: it looks at all samples"},
    {"g (float[4,5] x) => (y) { t = Transpose(x) y = MatMul(t, x) }",
     "(MatMul): output 'y' mixes the samples of the batch: the batch axis is summed"},
    {"g (float[4,5] x) => (y) { t = Transpose(x) y = MatMul(x, t) }", "it brings different samples of the batch together"},
    {"g (float[4,3] x, float[3] s, float[3] b, float[3] m, float[3] v) => (y) { y, mm, vv = BatchNormalization<training_mode=1>(x, s, b, "
     "m, v) }",
     "(BatchNormalization)"},
    {"g (float[4,5] x) => (y) { s = Constant<value_ints=[0]>() e = Constant<value_ints=[2]>() y = Slice(x, s, e) }",
     "it takes some of the samples"},
    {"g (float[4,5] x) => (y) { k = Constant<value_ints=[2]>() y, i = TopK<axis=0>(x, k) }", "(TopK)"},
    {"g (float[2,2] x) => (y) <float[2,2] m = {1, 2, 3, 4}> { y = Add(x, m) }", "operand 'm' holds a different constant for each sample"},
    {"g (float[n,4] x) => (y) { s = Shape<start=0, end=1>(x) c = Cast<to=1>(s) y = Div(x, c) }", "it computes with the size of the batch"},
    {"g (float[3,4] x) => (y) { y = NonZero(x) }", "(NonZero)"},
    {"g (float[4,5] x) => (y) { s = ReduceSum<keepdims=0>(x) z = Constant<value_float=0.0>() c = Less(s, z) "
     "y = If(c) <then_branch = t () => (float[4,5] a) { a = Relu(x) }, else_branch = e () => (float[4,5] b) { b = Neg(x) }> }",
     "(ReduceSum)"},
    {"g (float[4,5] x) => (y) { y = Loop( , , x) <body = t (int64 i, bool c, float[4,5] a) => (bool d, float[4,5] b) { "
     "b = Mul(a, x) s = ReduceSum<keepdims=0>(b) z = Constant<value_float=0.0>() d = Less(s, z) }> }",
     "(Loop): output 'y' mixes the samples of the batch: whether it goes on depends on the samples of the batch"},
    {"g (float[4,5] x, float[5] h) => (y) { y = Scan<num_scan_inputs=1, body = t (float[5] a, float[5] r) => (float[5] b) { b = Add(a, r) "
     "}>(h, x) }",
     "(Scan): output 'y' mixes the samples of the batch: it goes through the samples one after another"},
    {"g (float[4,4] x) => (y) { n = Constant<value_int=2>() y = Loop(n, , x) <body = t (int64 i, bool c, float[4,4] a) => "
     "(bool d, float[4,4] b) { d = Identity(c) b = Transpose(a) }> }",
     "(Loop): output 'y' mixes the samples of the batch: what it carries does not hold the batch in one place"},
    {"g (float[2,3] x) => (y) <float[2,3] h = {1, 2, 3, 4, 5, 6}> { n = Constant<value_int=2>() y = Loop(n, , h) "
     "<body = t (int64 i, bool c, float[2,3] a) => (bool d, float[2,3] b) { d = Identity(c) b = Mul(a, x) }> }",
     "(Loop): output 'y' mixes the samples of the batch: its operand 'a' holds a different constant for each sample"},
    {"g (float[4,3,5,5] x, float[4,6,3,1,1] w) => (y) { s = Constant<value_ints=[1,12,5,5]>() a = Reshape(x, s) "
     "t = Constant<value_ints=[24,3,1,1]>() b = Reshape(w, t) c = Conv<group=4>(a, b) u = Constant<value_ints=[4,6,5,5]>() "
     "y = Reshape(c, u) }",
     "(Conv): output 'y' mixes the samples of the batch: the batch is among its groups, whose number stands in the file"},
    {"g (float[2,1,4,4] x) => (y, i) { y, i = MaxPool<kernel_shape=[2,2]>(x) }", "its indices count over the whole tensor"},
    {"g (float[2,1,5,5] x) => (y) { p, i = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x) "
     "y = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(p, i) }",
     "not known to be of the size"},
};
INSTANTIATE_TEST_SUITE_P(All, MixedSamples, ::testing::ValuesIn(kRefused));

TEST(BatchBranches, AreFollowedWhenTheConditionIsTheSameForAll) {
  Divided d = divide(
      "g (float[4,5] x, bool c) => (y) { y = If(c) <then_branch = t () => (float[4,5] a) { a = Relu(x) }, "
      "else_branch = e () => (float[4,5] b) { s = Constant<value_ints=[4,5]>() b = Reshape(x, s) }> }");
  EXPECT_EQ(d.facts.axes.at(output(d)).axis, 0);
}

// Through what is carried, and the rows that are stacked. `h` begins with equal rows: it becomes as many as there are samples.
TEST(BatchLoops, AreFollowedWhenAllSamplesTakeTheSamePasses) {
  Divided d = divide(
      "g (float[4,3,5] x, bool c) => (y) <float[4,5] h = {0,0,0,0,0, 0,0,0,0,0, 0,0,0,0,0, 0,0,0,0,0}> { n = Constant<value_int=3>() "
      "z, y = Loop(n, c, h) <body = t (int64 i, bool p, float[4,5] a) => (bool q, float[4,5] b, float[5,4] r) { "
      "q = Identity(p) e = Gather<axis=1>(x, i) f = Add(a, e) s = Constant<value_ints=[4,5]>() b = Reshape(f, s) r = Transpose(b) }> }");
  EXPECT_EQ(d.facts.axes.at(output(d)).axis, 2);
  Divided s = divide(
      "g (float[3,4,5] x, float[4,5] h) => (y) { z, y = Scan<num_scan_inputs=1, scan_input_axes=[-3], scan_output_axes=[1], "
      "body = t (float[4,5] a, float[4,5] r) => (float[4,5] b, float[4,5] o) { b = Add(a, r) o = Neg(b) }>(h, x) }",
      {{"x", 1}, {"h", 0}});
  EXPECT_EQ(s.facts.axes.at(output(s)).axis, 0);
}

// What exporters ask the model for is known before the batch is followed: the branch of a squeeze, and the scales of a Resize.
TEST(BatchOfPlan, BranchesAndScalesThatAreKnownAreNotInItsWay) {
  Model model = testing::parse_model(
      17,
      "g (float[4,1,3,2,2] x) => (float[4,3,4,4] y) <int64[1] one = {1}, float[2] a = {1,1}, float[2] b = {2,2}> "
      "{ s = Shape(x) d = Gather(s, one) c = Equal(d, one) "
      "z = If<then_branch = t () => (float p) { p = Squeeze(x, one) }, else_branch = e () => (float q) { q = Identity(x) }>(c) "
      "k = Concat<axis=0>(a, b) y = Resize(z, , k) }");
  PartitionOptions options;
  options.mesh.data = 2;
  const Plan plan = partition(std::move(model), options);
  ASSERT_EQ(plan.outputs.size(), 1u);
  EXPECT_EQ(plan.outputs[0].merge, "concat");
  EXPECT_EQ(plan.outputs[0].axis, 0);
  EXPECT_EQ(to_string(plan.outputs[0].type), "float32[batch,3,4,4]");
}

}  // namespace
}  // namespace fretsaw
