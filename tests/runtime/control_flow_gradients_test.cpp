// Gradients through branches and loops: those of an If against differences, and loops as the passes they are unrolled into.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "graph/gradients.h"
#include "tests/graph/text_model.h"
#include "tests/runtime/training_runs.h"

namespace fretsaw {
namespace {

using namespace testing_plans;
using testing::ops;
using testing::parse_model;
using Inputs = std::map<std::string, RuntimeValue>;

Model model_of(const std::string& text) {
  Model model = parse_model(static_cast<int>(newest_opset()), text);
  run_passes(model, normalise_passes());
  infer_shapes(model);
  return model;
}

RuntimeValue doubles(const Dims& dims, const std::vector<double>& numbers) {
  RuntimeValue value = make_value(DType::float64, dims);
  std::copy(numbers.begin(), numbers.end(), value.tensor.as<double>());
  return value;
}
std::vector<double> random_numbers(int64_t count, unsigned seed) {
  const std::vector<float> numbers = noise(static_cast<size_t>(count), seed);
  return {numbers.begin(), numbers.end()};
}
Inputs random_inputs(const Model& model, bool condition) {
  Inputs inputs;
  unsigned seed = 1;
  for (const Value* v : model.graph->inputs) {
    const Dims dims = dims_of(*v->type.shape);
    inputs[v->name] = v->type.dtype == DType::boolean ? bool_value(condition) : doubles(dims, random_numbers(count_of(dims), seed++));
  }
  return inputs;
}
std::vector<RuntimeValue> run_model(const Model& model, const Inputs& inputs) {
  return Session(make_plan({std::make_shared<Model>(clone(model))}), {.threads = 1}).run(inputs);
}

// "" where the gradients of the model's float inputs agree with differences along a direction.
std::string failure(const std::string& text, bool condition, const std::vector<std::string>& without_gradient = {}) {
  const Model forward = model_of(text);
  Model model = clone(forward);
  std::vector<Value*> wanted;
  for (Value* v : model.graph->inputs)
    if (v->type.dtype == DType::float64) wanted.push_back(v);
  const Gradients gradients = add_gradients(model, model.graph->outputs[0], wanted);
  std::vector<const Value*> learned;
  for (Value* v : wanted) {
    const bool none = std::count(without_gradient.begin(), without_gradient.end(), v->name) > 0;
    if ((gradients.of(v) == nullptr) != none) return v->name + (none ? " has a gradient" : " has no gradient");
    if (none) continue;
    learned.push_back(v);
    model.graph->outputs.push_back(gradients.of(v));
  }
  verify(*model.graph);
  const Inputs inputs = random_inputs(forward, condition);
  const std::vector<RuntimeValue> found = run_model(model, inputs);
  for (size_t i = 0; i < learned.size(); ++i) {
    const RuntimeValue& given = inputs.at(learned[i]->name);
    const std::vector<double> g = elements<double>(found[i + 1]), x = elements<double>(given);
    const std::vector<double> d = random_numbers(std::ssize(x), 99);
    constexpr double kStep = 1e-5;
    const auto loss = [&](double step) {
      std::vector<double> moved = x;
      for (size_t k = 0; k < d.size(); ++k) moved[k] += step * d[k];
      Inputs changed = inputs;
      changed[learned[i]->name] = doubles(given.tensor.dims, moved);
      return elements<double>(run_model(forward, changed)[0])[0];
    };
    double expected = 0;
    for (size_t k = 0; k < d.size(); ++k) expected += g[k] * d[k];
    const double measured = (loss(kStep) - loss(-kStep)) / (2 * kStep);
    if (!(std::abs(measured - expected) <= 1e-6 * std::max(1.0, std::abs(measured))))
      return learned[i]->name + ": " + std::to_string(expected) + ", differences " + std::to_string(measured);
  }
  return "";
}

// Both branches take x and one weight each; w is used outside too.
constexpr const char* kBranches = R"(
  g (double[3,4] x, double[4,4] w, double[4,4] v, bool c) => (double loss) {
    h = MatMul(x, w)
    y = If(c) <then_branch = t () => (double[3,4] a) { p = MatMul(h, w)  a = Tanh(p) },
               else_branch = e () => (double[3,4] b) { q = MatMul(h, v)  r = Mul(q, h)  b = Add(r, x) }>
    z = Mul(y, h)
    loss = ReduceSum<keepdims=0>(z)
  })";

TEST(IfGradient, OfEitherBranch) {
  EXPECT_EQ(failure(kBranches, true), "");
  EXPECT_EQ(failure(kBranches, false), "");
}

TEST(IfGradient, RunsTheBranchOnceMoreAndBack) {
  Model model = model_of(kBranches);
  add_gradients(model, model.graph->outputs[0], {model.graph->inputs[2]});
  // d v comes from the else branch alone, whose product is needed for nothing else.
  EXPECT_THAT(ops(*model.graph), ::testing::HasSubstr(" If{ConstantOfShape}{Mul Gemm}"));
}

TEST(IfGradient, OfABranchThatHandsOnAndOfSeveralResults) {
  constexpr const char* kText = R"(
    g (double[4] x, double[4] w, double[4] u, bool c) => (double loss) {
      y, z = If(c) <then_branch = t () => (double[4] x, double[4] a) { a = Mul(x, w) },
                    else_branch = e () => (double[4] b, double[4] w) { b = Exp(u) }>
      s = Sin(z)
      p = Mul(y, s)
      loss = ReduceSum<keepdims=0>(p)
    })";
  EXPECT_EQ(failure(kText, true), "");
  EXPECT_EQ(failure(kText, false), "");
}

TEST(IfGradient, OfBranchesInBranches) {
  constexpr const char* kText = R"(
    g (double[4] x, double[4] w, bool c) => (double loss) {
      n = Not(c)
      y = If(c) <then_branch = t () => (double[4] a) {
                   a = If(n) <then_branch = tt () => (double[4] p) { p = Mul(x, x) },
                              else_branch = te () => (double[4] q) { k = Mul(x, w)  q = Tanh(k) }> },
                 else_branch = e () => (double[4] b) { b = Mul(w, w) }>
      loss = ReduceSum<keepdims=0>(y)
    })";
  EXPECT_EQ(failure(kText, true), "");
  EXPECT_EQ(failure(kText, false), "");
}

// Attention with a learned mask has no rule: it becomes the function that ONNX defines, in a branch too.
TEST(IfGradient, OperatorsWithoutARuleBecomeFunctions) {
  constexpr const char* kText = R"(
    g (double[1,2,3,4] x, double[3,3] m, bool c) => (double loss) {
      y = If(c) <then_branch = t () => (double[1,2,3,4] a) { a = Attention(x, x, x, m) },
                 else_branch = e () => (double[1,2,3,4] b) { b = Neg(x) }>
      loss = ReduceSum<keepdims=0>(y)
    })";
  EXPECT_EQ(failure(kText, true), "");
  EXPECT_EQ(failure(kText, false), "");
}

TEST(IfGradient, ABranchOfConstantsLearnsNothing) {
  constexpr const char* kText = R"(
    g (double[2] x, double[2] w, bool c) => (double loss) <double[2] k = {3, 4}> {
      y = If(c) <then_branch = t () => (double[2] a) { a = Neg(k) }, else_branch = e () => (double[2] b) { b = Exp(k) }>
      z = Mul(y, x)
      loss = ReduceSum<keepdims=0>(z)
    })";
  EXPECT_EQ(failure(kText, true, {"w"}), "");
}

// --- loops ---

struct LoopCase {
  std::string name, text, unrolled;  // the operators of the unrolled graph
};

class UnrolledLoop : public ::testing::TestWithParam<LoopCase> {};

TEST_P(UnrolledLoop, DoesWhatTheLoopDoes) {
  const LoopCase& c = GetParam();
  const Model given = model_of(c.text);
  Model model = clone(given);
  unroll_loops(model);
  verify(*model.graph);
  EXPECT_EQ(ops(*model.graph), c.unrolled);
  const Inputs inputs = random_inputs(given, true);
  const std::vector<RuntimeValue> wanted = run_model(given, inputs), got = run_model(model, inputs);
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_EQ(got[i].tensor.dims, wanted[i].tensor.dims) << i;
    EXPECT_EQ(elements<double>(got[i]), elements<double>(wanted[i])) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, UnrolledLoop,
    ::testing::Values(
        LoopCase{"CarriedAndRows",
                 R"(g (double[2] x, double[2] w) => (double[2] y, double[3,2] r) <int64 n = {3}> {
                      y, r = Loop(n, , x) <body = t (int64 i, bool c, double[2] a) => (bool d, double[2] b, double[2] s) {
                        d = Identity(c)  b = Mul(a, w)  s = Neg(a) }> })",
                 "Mul Neg Mul Neg Mul Neg Identity Unsqueeze Unsqueeze Unsqueeze Concat"},
        LoopCase{"OfTheNumberOfThePass",
                 R"(g (double[3,2] x) => (double[2] y) <int64 n = {2}, bool go = {1}, int64 zero = {0}> {
                      f = Gather(x, zero)
                      y = Loop(n, go, f) <body = t (int64 i, bool c, double[2] a) => (bool d, double[2] b) {
                        e = Gather(x, i)  b = Sub(e, a)  d = Identity(c) }> })",
                 "Gather Gather Sub Gather Sub Identity"},
        LoopCase{"NoPass",
                 R"(g (double[2] x) => (double[2] y) <int64 n = {0}> {
                      z = Loop(n, , x) <body = t (int64 i, bool c, double[2] a) => (bool d, double[2] b) { d = Identity(c)  b = Exp(a) }>
                      y = Neg(z) })",
                 "Neg"},
        LoopCase{"EndsByACondition",
                 R"(g (double[2] x) => (double[2] y) <int64 n = {9}, double most = {3}> {
                      y = Loop(n, , x) <body = t (int64 i, bool c, double[2] a) => (bool d, double[2] b) {
                        b = Exp(a)  s = ReduceMax<keepdims=0>(b)  d = Less(s, most) }> })",
                 "Loop{Exp ReduceMax Less}"},
        // As `while` is written: the condition follows from a counter that the loop carries.
        LoopCase{
            "AsLongAsACounterIsBelow",
            R"(g (double[2] x) => (double[2] y) <int64 n = {9223372036854775807}, bool go = {1}, int64 z = {0}, int64 two = {2}, int64 end = {5}> {
                      k, y = Loop(n, go, z, x) <body = t (int64 i, bool c, int64 p, double[2] a) => (bool d, int64 q, double[2] b) {
                        w = CastLike(two, p)  q = Add(p, w)  l = Less(q, end)  d = And(c, l)  b = Exp(a) }> })",
            "Exp Exp Exp Identity"},
        LoopCase{"ACounterThatMayRunFurtherThanTheLimit",
                 R"(g (double[2] x) => (double[2] y) <int64 n = {2}, bool go = {1}, int64 end = {1}> {
                      y = Loop(n, go, x) <body = t (int64 i, bool c, double[2] a) => (bool d, double[2] b) {
                        l = Greater(i, end)  d = Not(l)  b = Exp(a) }> })",
                 "Exp Exp Identity"},
        LoopCase{"LoopInALoop",
                 R"(g (double[2] x) => (double[2] y) <int64 n = {2}> {
                      z = Loop(n, , x) <body = t (int64 i, bool c, double[2] a) => (bool d, double[2] b) {
                        b = Loop(n, c, a) <body = u (int64 j, bool e, double[2] p) => (bool f, double[2] q) { f = Identity(e)  q = Sin(p) }>
                        d = Identity(c) }>
                      y = Neg(z) })",
                 "Sin Sin Sin Sin Neg"},
        LoopCase{"AListThatIsAppendedTo",
                 R"(g (double[2] x) => (double[3,2] y) <int64 n = {3}> {
                      s = SequenceEmpty<dtype=11>()
                      z, l = Loop(n, , x, s) <body = t (int64 i, bool c, double[2] a, seq(double) m) => (bool d, double[2] b, seq(double) o) {
                        d = Identity(c)  b = Cos(a)  o = SequenceInsert(m, b) }>
                      y = ConcatFromSequence<axis=0, new_axis=1>(l) })",
                 "Cos Cos Cos Unsqueeze Unsqueeze Unsqueeze Concat"},
        LoopCase{"ABranchOfThePass",
                 R"(g (double[2] x) => (double[2] y) <int64 n = {3}, int64 one = {1}> {
                      z = Loop(n, , x) <body = t (int64 i, bool c, double[2] a) => (bool d, double[2] b) {
                        w = Equal(i, one)
                        b = If(w) <then_branch = p () => (double[2] e) { e = Sin(a) }, else_branch = q () => (double[2] f) { f = Cos(a) }>
                        d = Identity(c) }>
                      y = Neg(z) })",
                 "Cos Sin Cos Neg"},
        LoopCase{
            "ScanFromTheEnd",
            R"(g (double[2] h, double[4,3,2] x, double[3] z) => (double[2] last, double[2,3] all, double[3] back) <int64[1] rows = {0}> {
                      last, all, back = Scan<num_scan_inputs=2, scan_input_axes=[1,0], scan_input_directions=[1,0], scan_output_axes=[1,0],
                                             scan_output_directions=[0,1],
                        body = t (double[2] a, double[4,2] b, double e) => (double[2] c, double[2] d, double f) {
                          k = ReduceSum<keepdims=0>(b, rows)  c = Mul(k, a)  d = Neg(k)  f = Exp(e) }>(h, x, z) })",
            "Split Squeeze Squeeze Squeeze Split Squeeze Squeeze Squeeze ReduceSum Mul Neg Exp ReduceSum Mul Neg Exp ReduceSum Mul Neg "
            "Exp Identity Unsqueeze Unsqueeze Unsqueeze Concat Unsqueeze Unsqueeze Unsqueeze Concat"}),
    [](const auto& info) { return info.param.name; });

// --- loops that stay loops ---

struct LoopGradientCase {
  std::string name, text;
  std::vector<std::string> without_gradient;
};

class GradientOfALoop : public ::testing::TestWithParam<LoopGradientCase> {};

// With the condition `c`, and without it: no pass.
TEST_P(GradientOfALoop, AgreesWithDifferences) {
  EXPECT_EQ(failure(GetParam().text, true, GetParam().without_gradient), "");
  EXPECT_EQ(failure(GetParam().text, false, GetParam().without_gradient), "");
}

INSTANTIATE_TEST_SUITE_P(
    Cases, GradientOfALoop,
    ::testing::Values(
        LoopGradientCase{"UntilItIsLarge",
                         R"(g (double[2,3] x, double[3,3] w, bool c) => (double loss) <int64 n = {9}, double most = {40}> {
                              y = Loop(n, c, x) <body = t (int64 i, bool e, double[2,3] a) => (bool d, double[2,3] b) {
                                p = MatMul(a, w)  q = Sin(p)  r = Mul(q, a)  b = Add(r, a)  s = ReduceSumSquare<keepdims=0>(b)
                                d = Less(s, most) }>
                              z = Mul(y, y)  loss = ReduceSum<keepdims=0>(z) })"},
        LoopGradientCase{"WhatIsStacked",
                         R"(g (double[2] x, double[2] w, bool c) => (double loss) <int64 n = {3}, double most = {1000}> {
                              y, r = Loop(n, c, x) <body = t (int64 i, bool e, double[2] a) => (bool d, double[2] b, double[2] s) {
                                b = Mul(a, w)  s = Exp(b)  m = ReduceMax<keepdims=0>(s)  d = Less(m, most) }>
                              k = Mul(r, r)  v = ReduceSum<keepdims=0>(k)  u = ReduceSum<keepdims=0>(y)  loss = Add(u, v) })"},
        LoopGradientCase{"RowsOfOuterValues",
                         R"(g (double[4,2] x, double[3,4,2] z, double[2] h, bool c) => (double loss) <int64 n = {3}, double most = {1000}> {
                              y = Loop(n, c, h) <body = t (int64 i, bool e, double[2] a) => (bool d, double[2] b) {
                                p = Gather(x, i)  q = Gather<axis=1>(z, i)  f = ReduceSum<keepdims=0>(q)  k = Mul(a, p)  l = Mul(k, f)
                                b = Add(a, l)  m = ReduceMax<keepdims=0>(b)  d = Less(m, most) }>
                              loss = ReduceSum<keepdims=0>(y) })"},
        // The rows' places follow from what is carried, and come twice.
        LoopGradientCase{"RowsOfACountThatIsCarried",
                         R"(g (double[4,2] x, double[2] h, bool c) => (double loss)
                              <int64 n = {3}, int64[2] k = {3, 1}, double most = {1000}> {
                              o, y = Loop(n, c, k, h) <body = t (int64 i, bool e, int64[2] u, double[2] a) => (bool d, int64[2] v, double[2] b) {
                                p = Gather(x, u)  q = ReduceProd<keepdims=0>(p)  f = Mul(q, a)  b = Add(f, a)  v = Sub(u, i)
                                m = ReduceMax<keepdims=0>(b)  d = Less(m, most) }>
                              loss = ReduceSum<keepdims=0>(y) })"},
        // Two values change places in each pass; one is handed on; a counter is carried and multiplied.
        LoopGradientCase{"SeveralCarried",
                         R"(g (double[2] x, double[2] w, double[2] v, bool c) => (double loss)
                              <int64 n = {4}, int64 one = {1}, double most = {1000}> {
                              k, p, q, r = Loop(n, c, one, x, w, v)
                                <body = t (int64 i, bool e, int64 s, double[2] a, double[2] b, double[2] f)
                                       => (bool d, int64 u, double[2] b, double[2] g, double[2] f) {
                                u = Add(s, one)  m = CastLike(u, a)  g = Mul(a, m)  h = ReduceMax<keepdims=0>(g)  d = Less(h, most) }>
                              y = Mul(p, q)  o = Mul(y, r)  loss = ReduceSum<keepdims=0>(o) })"},
        LoopGradientCase{"InALoop",
                         R"(g (double[2] x, double[2] w, double[3,2] z, bool c) => (double loss) <int64 n = {2}, double most = {1000}> {
                              y = Loop(n, c, x) <body = t (int64 i, bool e, double[2] a) => (bool d, double[2] b) {
                                s = Gather(z, i)
                                b = Loop(n, e, a) <body = u (int64 j, bool f, double[2] p) => (bool g, double[2] q) {
                                  k = Mul(p, w)  l = Gather(z, j)  o = Mul(l, s)  q = Add(k, o)  m = ReduceMax<keepdims=0>(q)
                                  g = Less(m, most) }>
                                h = ReduceMax<keepdims=0>(b)  d = Less(h, most) }>
                              v = Mul(y, y)  loss = ReduceSum<keepdims=0>(v) })"},
        LoopGradientCase{"OfBranches",
                         R"(g (double[2] x, double[2] w, double[2] v, bool c) => (double loss)
                              <int64 n = {3}, int64 one = {1}, double most = {1000}> {
                              y = Loop(n, c, x) <body = t (int64 i, bool e, double[2] a) => (bool d, double[2] b) {
                                f = Equal(i, one)
                                b = If(f) <then_branch = p () => (double[2] k) { k = Mul(a, w) },
                                           else_branch = q () => (double[2] l) { o = Mul(a, a)  l = Mul(o, v) }>
                                m = ReduceMax<keepdims=0>(b)  d = Less(m, most) }>
                              loss = ReduceSum<keepdims=0>(y) })"},
        LoopGradientCase{"InABranch",
                         R"(g (double[2] x, double[2] w, bool c) => (double loss) <int64 n = {3}, double most = {1000}> {
                              y = If(c) <then_branch = p () => (double[2] k) {
                                  k = Loop(n, , x) <body = t (int64 i, bool e, double[2] a) => (bool d, double[2] b) {
                                    f = Mul(a, w)  b = Sin(f)  m = ReduceMax<keepdims=0>(b)  d = Less(m, most) }> },
                                else_branch = q () => (double[2] l) { l = Mul(x, w) }>
                              loss = ReduceSum<keepdims=0>(y) })"},
        // w is needed by the passes that go on alone; v not at all.
        LoopGradientCase{"OfTheConditionAlone",
                         R"(g (double[2] x, double[2] w, double[2] v, bool c) => (double loss) <int64 n = {5}> {
                              y, o = Loop(n, c, x, v) <body = t (int64 i, bool e, double[2] a, double[2] f) => (bool d, double[2] b, double[2] g) {
                                b = Sin(a)  g = Mul(f, a)  s = ReduceSum<keepdims=0>(g)  m = ReduceMax<keepdims=0>(w)  d = Less(s, m) }>
                              loss = ReduceSum<keepdims=0>(y) })",
                         {"w", "v"}},
        LoopGradientCase{"Scan",
                         R"(g (double[2] h, double[4,3,2] x, double[3] z, double[2] w, bool c) => (double loss) <int64[1] rows = {0}> {
                              last, all, back = Scan<num_scan_inputs=2, scan_input_axes=[1,0], scan_input_directions=[1,0],
                                                     scan_output_axes=[1,0], scan_output_directions=[0,1],
                                body = t (double[2] a, double[4,2] b, double e) => (double[2] r, double[2] d, double f) {
                                  k = ReduceProd<keepdims=0>(b, rows)  l = Mul(k, a)  r = Add(l, w)  d = Mul(k, e)  f = Exp(e) }>(h, x, z)
                              lu = ReduceSum<keepdims=0>(last)  al = Mul(all, all)  au = ReduceSum<keepdims=0>(al)
                              zb = Mul(back, z)  bu = ReduceSum<keepdims=0>(zb)
                              s = Add(lu, au)  loss = Add(s, bu) })"}),
    [](const auto& info) { return info.param.name; });

// The gradient of a Gather from an outer value is put in its place once, behind the loop, and the record holds what the way back needs.
TEST(LoopGradient, StacksRowsAndRecordsWhatItNeeds) {
  Model model = model_of(
      R"(g (double[4,2] x, double[2] h, double[2] w) => (double loss) <int64 n = {3}, double most = {9}> {
           y = Loop(n, , h) <body = t (int64 i, bool e, double[2] a) => (bool d, double[2] b) {
             p = Gather(x, i)  q = Mul(a, w)  b = Add(p, q)  m = ReduceMax<keepdims=0>(b)  d = Less(m, most) }>
           loss = ReduceSum<keepdims=0>(y) })");
  add_gradients(model, model.graph->outputs[0], {model.graph->inputs[0], model.graph->inputs[1]});
  EXPECT_EQ(ops(*model.graph),
            "Loop{Gather Mul Add ReduceMax Less Identity} ReduceSum Expand Shape Squeeze Sub Loop{Mul Identity Identity Sub Identity} "
            "ai.fretsaw.GatherGrad");
}

TEST(LoopGradient, RefusesWhatChangesItsSize) {
  Model model = model_of(
      R"(g (double[2] x) => (double loss) <int64 n = {3}, double most = {9}> {
           y = Loop(n, , x) <body = t (int64 i, bool e, double[k] a) => (bool d, double[l] b) {
             b = Concat<axis=0>(a, x)  m = ReduceMax<keepdims=0>(b)  d = Less(m, most) }>
           loss = ReduceSum<keepdims=0>(y) })");
  try {
    add_gradients(model, model.graph->outputs[0], {model.graph->inputs[0]});
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), ::testing::HasSubstr("may change from pass to pass"));
    EXPECT_EQ(e.op(), "Loop");
  }
}

// --- training ---

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

struct TrainingCase {
  std::string name;
  int data = 1, pipeline = 1, tensor = 1, micro_batches = 1;
  std::string schedule = "1f1b", precision = "fp32", recompute = "none";
  int zero = 0;
};

std::vector<double> train(const TrainingCase& c) {
  TrainingOptions training = with_optimizer("sgd:lr=0.1", c.precision);
  training.recompute = c.recompute, training.zero = c.zero;
  Trainer trainer = trainer_of(branching_model(), cut_of(c), training);
  const Batch batch = classified_noise(kSteps * kWide, some_classes(kBatch, kClasses, 3), 5);
  return losses_of(trainer, 5, 0.1, [&](int) { return batch; });
}

class TrainingBranches : public ::testing::TestWithParam<TrainingCase> {};

TEST_P(TrainingBranches, TrainAsOnOneRank) {
  const std::vector<double> wanted = train({"whole"}), got = train(GetParam());
  EXPECT_LT(wanted.back(), wanted.front());
  expect_close(got, wanted, GetParam().precision == "fp32" ? 1e-5 : 2e-2);
}
INSTANTIATE_TEST_SUITE_P(Ways, TrainingBranches,
                         ::testing::Values(TrainingCase{"Pipeline", 1, 2}, TrainingCase{"FourStages", 1, 4, 1, 4},
                                           TrainingCase{"ZeroBubble", 1, 2, 1, 4, "zero-bubble-h1"}, TrainingCase{"Tensor", 1, 1, 2},
                                           TrainingCase{"Data", 2}, TrainingCase{"Bfloat16", 1, 2, 1, 2, "1f1b", "bf16"},
                                           TrainingCase{"Recompute", 1, 2, 1, 2, "1f1b", "fp32", "all"},
                                           TrainingCase{"DividedParameters", 2, 2, 1, 1, "1f1b", "fp32", "none", 3}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fretsaw
