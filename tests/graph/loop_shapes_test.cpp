// The types that inference gives to what loops carry and stack.
#include <gtest/gtest.h>

#include "graph/passes.h"
#include "tests/graph/text_model.h"

namespace fretsaw {
namespace {

struct Case {
  const char* name;
  const char* text;
  const char* carried;  // the type of the body's first carried value, and of output 0
  const char* rows;     // of output 1; "" where there is none
};

class LoopShapes : public ::testing::TestWithParam<Case> {};

TEST_P(LoopShapes, AreWhatAllPassesHaveInCommon) {
  const Case& c = GetParam();
  Model model = testing::parse_model(static_cast<int>(newest_opset()), c.text);
  run_passes(model, normalise_passes());
  const ShapeFacts facts = infer_shapes(model);
  EXPECT_TRUE(facts.faults.empty()) << facts.faults[0].message;
  const Graph& body = *testing::only(*model.graph, "Loop").get_graph("body");
  EXPECT_EQ(to_string(body.inputs[2]->type), c.carried);
  EXPECT_EQ(to_string(model.graph->outputs[0]->type), c.carried);
  const std::string rows = model.graph->outputs.size() > 1 ? to_string(model.graph->outputs[1]->type) : "";
  EXPECT_EQ(rows, c.rows);
}

INSTANTIATE_TEST_SUITE_P(Cases, LoopShapes,
                         ::testing::Values(Case{"Keeps",
                                                R"(g (float[b,3] x, int64 n) => (y, r) {
                  y, r = Loop(n, , x) <body = t (int64 i, bool c, a) => (bool d, e, s) {
                    d = Identity(c)  e = Sin(a)  s = Transpose(e) }> })",
                                                "float32[b,3]", "float32[?,3,b]"},
                                           Case{"Grows",
                                                R"(g (float[2,3] x, int64 n) => (y) {
                  y = Loop(n, , x) <body = t (int64 i, bool c, a) => (bool d, e) { d = Identity(c)  e = Concat<axis=0>(a, x) }> })",
                                                "float32[?,3]", ""},
                                           Case{"OtherRank",
                                                R"(g (float[2] x, float[3,2] w, int64 n) => (y) {
                  y = Loop(n, , x) <body = t (int64 i, bool c, a) => (bool d, e) { d = Identity(c)  e = Add(a, w) }> })",
                                                "float32[...]", ""},
                                           // The second value gets the first one's size only in the second pass.
                                           Case{"OneAfterAnother",
                                                R"(g (float[2] x, float[2] z, int64 n) => (y) {
                  y, k = Loop(n, , x, z) <body = t (int64 i, bool c, a, b) => (bool d, e, f) {
                    d = Identity(c)  e = Identity(b)  f = Concat<axis=0>(z, z) }> })",
                                                "float32[?]", ""},
                                           Case{"OfALoopInside",
                                                R"(g (float[2,3] x, int64 n) => (y) {
                  y = Loop(n, , x) <body = t (int64 i, bool c, a) => (bool d, e) {
                    d = Identity(c)
                    e = Loop(n, c, a) <body = u (int64 j, bool p, q) => (bool r, s) { r = Identity(p)  s = Concat<axis=1>(q, x) }> }> })",
                                                "float32[2,?]", ""},
                                           Case{"List",
                                                R"(g (float[2] x, int64 n) => (y) {
                  l = SequenceConstruct(x)
                  y = Loop(n, , l) <body = t (int64 i, bool c, a) => (bool d, e) { d = Identity(c)  e = SequenceInsert(a, x) }> })",
                                                "seq(float32[2])", ""}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fretsaw
