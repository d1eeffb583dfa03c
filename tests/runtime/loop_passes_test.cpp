// Loops as the passes they are unrolled into, and lists as the rows that a loop stacks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/runtime/double_models.h"

namespace fretsaw {
namespace {

using namespace double_models;
using testing::ops;

struct LoopCase {
  std::string name, text, changed;  // the operators of the changed graph
};

void expect_the_same_results(const LoopCase& c, void (*pass)(Model&)) {
  const Model given = model_of(c.text);
  Model model = clone(given);
  pass(model);
  verify(*model.graph);
  EXPECT_EQ(ops(*model.graph), c.changed);
  const Inputs inputs = random_inputs(given, true);
  const std::vector<RuntimeValue> wanted = run_model(given, inputs), got = run_model(model, inputs);
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_EQ(got[i].tensor.dims, wanted[i].tensor.dims) << i;
    EXPECT_EQ(elements<double>(got[i]), elements<double>(wanted[i])) << i;
  }
}

class UnrolledLoop : public ::testing::TestWithParam<LoopCase> {};

TEST_P(UnrolledLoop, DoesWhatTheLoopDoes) {
  expect_the_same_results(GetParam(), [](Model& model) { unroll_loops(model); });
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

class StackedList : public ::testing::TestWithParam<LoopCase> {};

TEST_P(StackedList, HoldsWhatTheListHeld) {
  expect_the_same_results(GetParam(), stack_lists);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, StackedList,
    ::testing::Values(
        LoopCase{"Stacked",
                 R"(g (double[2,3] x, bool c) => (double[2,k,3] y, double[2,3] z) <int64 n = {3}, int64 last = {-1}> {
                      s = SequenceEmpty<dtype=11>()
                      l, v = Loop(n, c, s, x) <body = t (int64 i, bool e, seq(double) m, double[2,3] a) => (bool d, seq(double) o, double[2,3] b) {
                        d = Identity(e)  b = Cos(a)  o = SequenceInsert(m, b) }>
                      y = ConcatFromSequence<axis=1, new_axis=1>(l)  z = SequenceAt(l, last) })",
                 "Loop{Identity Cos} Transpose Gather"},
        LoopCase{"Joined",
                 R"(g (double[2,3] x, bool c) => (double[2,k] y, double[m,3] z) <int64 n = {3}> {
                      p = Neg(x)  s = SequenceConstruct(x, p)
                      v, l = Loop(n, c, x, s) <body = t (int64 i, bool e, double[2,3] a, seq(double) m) => (bool d, double[2,3] b, seq(double) o) {
                        d = Identity(e)  b = Cos(a)  o = SequenceInsert(m, b) }>
                      y = ConcatFromSequence<axis=-1>(l)  z = ConcatFromSequence<axis=0>(l) })",
                 "Neg Loop{Identity Cos} Unsqueeze Unsqueeze Concat Transpose Shape Shape Concat Reshape Shape Shape Concat Reshape"},
        LoopCase{"ThatIsCounted",
                 R"(g (double[2] x, bool c) => (double[2] y, double q) <int64 n = {9}, int64 four = {4}> {
                      s = SequenceConstruct(x)
                      l, v = Loop(n, c, s, x) <body = t (int64 i, bool e, seq(double) m, double[2] a) => (bool d, seq(double) o, double[2] b) {
                        k = SequenceLength(m)  f = CastLike(k, a)  b = Mul(a, f)  o = SequenceInsert(m, b)
                        d = If(e) <then_branch = p () => (bool g) { j = SequenceLength(o)  g = Less(j, four) },
                                   else_branch = q () => (bool h) { h = Identity(e) }> }>
                      r = SequenceLength(l)  q = CastLike(r, x)  y = Mul(v, q) })",
                 "Loop{Add Cast Mul If{Add Less}{Identity}} Unsqueeze Concat Shape Squeeze Cast Mul"},
        LoopCase{"WhoseLatestIsRead",
                 R"(g (double[2] x, bool c) => (double[k,2] y, double[m] z) <int64 n = {3}, int64 last = {-1}> {
                      e0 = SequenceEmpty<dtype=11>()  s = SequenceConstruct(x)
                      l, r = Loop(n, c, s, e0) <body = t (int64 i, bool e, seq(double) m, seq(double) p) => (bool d, seq(double) o, seq(double) q) {
                        d = Identity(e)  a = SequenceAt(m, last)  b = Cos(a)  o = SequenceInsert(m, b)
                        f = SequenceAt(o, last)  g = ReduceSum(f)  q = SequenceInsert(p, g) }>
                      y = ConcatFromSequence<axis=0, new_axis=1>(l)  z = ConcatFromSequence<axis=0>(r) })",
                 "Loop{Identity Cos ReduceSum} Unsqueeze Concat Transpose Shape Shape Concat Reshape"},
        // What changes its size stays a list, and one that a pass reads.
        LoopCase{"OfSeveralSizes",
                 R"(g (double[2] x, bool c) => (double[k] y) <int64 n = {3}> {
                      s = SequenceEmpty<dtype=11>()
                      l, v = Loop(n, c, s, x) <body = t (int64 i, bool e, seq(double) m, double[p] a) => (bool d, seq(double) o, double[q] b) {
                        d = Identity(e)  b = Concat<axis=0>(a, x)  o = SequenceInsert(m, b) }>
                      y = ConcatFromSequence<axis=0>(l) })",
                 "SequenceEmpty Loop{Identity Concat SequenceInsert} ConcatFromSequence"},
        LoopCase{"ThatIsRead",
                 R"(g (double[2] x, bool c) => (double[k] y) <int64 n = {3}, int64 zero = {0}> {
                      s = SequenceConstruct(x)
                      l = Loop(n, c, s) <body = t (int64 i, bool e, seq(double) m) => (bool d, seq(double) o) {
                        d = Identity(e)  a = SequenceAt(m, zero)  b = Cos(a)  o = SequenceInsert(m, b) }>
                      y = ConcatFromSequence<axis=0>(l) })",
                 "SequenceConstruct Loop{Identity SequenceAt Cos SequenceInsert} ConcatFromSequence"}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fretsaw
