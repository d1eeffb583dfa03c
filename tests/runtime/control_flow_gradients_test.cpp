// Gradients through branches and loops, against differences.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "graph/gradients.h"
#include "tests/runtime/double_models.h"

namespace fretsaw {
namespace {

using namespace double_models;
using testing::ops;

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

TEST(LoopGradient, IsNoneWhereOnlyTheConditionLearns) {
  Model model = model_of(
      R"(g (double[2] x, double[2] w) => (double loss) <int64 n = {3}, double[2] k = {1, 2}> {
           y = Loop(n, , k) <body = t (int64 i, bool e, double[2] a) => (bool d, double[2] b) {
             b = Sin(a)  m = ReduceMax<keepdims=0>(w)  s = ReduceMax<keepdims=0>(b)  d = Less(s, m) }>
           z = Mul(x, y)  loss = ReduceSum<keepdims=0>(z) })");
  const Gradients gradients = add_gradients(model, model.graph->outputs[0], {model.graph->inputs[0], model.graph->inputs[1]});
  EXPECT_NE(gradients.of(model.graph->inputs[0]), nullptr);
  EXPECT_EQ(gradients.of(model.graph->inputs[1]), nullptr);
  EXPECT_EQ(ops(*model.graph), "Loop{Sin ReduceMax ReduceMax Less} Mul ReduceSum Expand Mul Mul");  // those of x and y
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

}  // namespace
}  // namespace fretsaw
