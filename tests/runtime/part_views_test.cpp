// Parts of a Split that lie one behind the other are views of its input: what overwrites, outlives or reads them sees the right bytes.
#include <gtest/gtest.h>

#include "tests/runtime/plans.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kPart = 32;

struct Parts {
  std::shared_ptr<Model> model = new_model();
  Graph& graph = *model->graph;
  Value *x = nullptr, *a = nullptr, *b = nullptr, *c = nullptr;

  // x's three parts, of x itself or of what a node makes of it.
  explicit Parts(bool made) {
    x = add_input(*model, "x", DType::float32, {Dim(1), Dim(3 * kPart)});
    Value* whole = made ? add_node(graph, "Neg", {x}, "whole") : x;
    Value* sizes = graph.add_constant("sizes", make_int64s({kPart, kPart, kPart}));
    Node* split = graph.add_node("Split", {whole, sizes}, {"a", "b", "c"}, {attribute("axis", int64_t{-1})});
    a = split->outputs[0], b = split->outputs[1], c = split->outputs[2];
  }
  std::vector<std::vector<float>> run(const std::vector<float>& values) {
    Session session(make_plan({model}), {.threads = 1});
    const std::map<std::string, RuntimeValue> inputs{{"x", float_value({1, 3 * kPart}, values)}};
    session.run(inputs);
    std::vector<std::vector<float>> out;
    for (const RuntimeValue& value : session.run(inputs)) out.push_back(elements<float>(value));
    return out;
  }
};

std::vector<float> part_of(const std::vector<float>& values, int64_t part, float sign) {
  std::vector<float> out;
  for (int64_t i = 0; i < kPart; ++i) out.push_back(sign * values[static_cast<size_t>(part * kPart + i)]);
  return out;
}
std::vector<float> combined(const std::vector<float>& x, const std::vector<float>& y, float (*f)(float, float)) {
  std::vector<float> out;
  for (size_t i = 0; i < x.size(); ++i) out.push_back(f(x[i], y[i % y.size()]));
  return out;
}
float sum(float x, float y) {
  return x + y;
}
float product(float x, float y) {
  return x * y;
}

TEST(PartViews, AreUsedAndOverwritten) {
  for (bool made : {false, true}) {
    Parts p(made);
    Value* first = add_node(p.graph, "Mul", {p.a, p.b}, "first");
    Value* second = add_node(p.graph, "Add", {first, p.c}, "second");
    Value* third = add_node(p.graph, "Mul", {second, p.b}, "third");
    p.graph.outputs = {third};
    const std::vector<float> x = noise(3 * kPart, 1);
    const float sign = made ? -1.0f : 1.0f;
    const auto a = part_of(x, 0, sign), b = part_of(x, 1, sign), c = part_of(x, 2, sign);
    EXPECT_EQ(p.run(x)[0], combined(combined(combined(a, b, product), c, sum), b, product));
  }
}

TEST(PartViews, LastUsesMayOverwriteTheirPartAlone) {
  Parts p(true);
  Value* first = add_node(p.graph, "Abs", {p.a}, "first");
  Value* second = add_node(p.graph, "Abs", {p.b}, "second");
  Value* third = add_node(p.graph, "Neg", {p.c}, "third");  // the last use of any part
  Value* view = add_node(p.graph, "Reshape", {third, p.graph.add_constant("dims", make_int64s({kPart, 1}))}, "view");
  Value* row = add_node(p.graph, "Transpose", {view}, "row", {attribute("perm", std::vector<int64_t>{1, 0})});
  p.graph.outputs = {add_node(p.graph, "Sum", {first, second, row}, "y")};
  const std::vector<float> x = noise(3 * kPart, 2);
  const auto a = part_of(x, 0, -1), b = part_of(x, 1, -1), c = part_of(x, 2, 1);
  const auto absolute = [](float v, float) { return v < 0 ? -v : v; };
  EXPECT_EQ(p.run(x)[0], combined(combined(combined(a, a, absolute), combined(b, b, absolute), sum), c, sum));
}

TEST(PartViews, AnElementwiseStepThatReadsAPartAndTheWhole) {
  Parts p(true);
  Value* whole = p.a->producer->inputs[0];
  Value* one = p.graph.add_constant("one", make_int64s({1, 3 * kPart - 1}));
  Node* split = p.graph.add_node("Split", {whole, one}, {"head", "tail"}, {attribute("axis", int64_t{1})});
  p.graph.outputs = {add_node(p.graph, "Mul", {whole, split->outputs[0]}, "y")};  // [1, 3 * kPart] by [1, 1]
  const std::vector<float> x = noise(3 * kPart, 3);
  std::vector<float> negative;
  for (float v : x) negative.push_back(-v);
  EXPECT_EQ(p.run(x)[0], combined(negative, {negative[0]}, product));
}

TEST(PartViews, AsOutputs) {
  for (bool made : {false, true}) {
    Parts p(made);
    p.graph.outputs = {p.b, p.c, add_node(p.graph, "Abs", {p.a}, "y")};
    const std::vector<float> x = noise(3 * kPart, 4);
    const float sign = made ? -1.0f : 1.0f;
    const auto out = p.run(x);
    EXPECT_EQ(out[0], part_of(x, 1, sign));
    EXPECT_EQ(out[1], part_of(x, 2, sign));
  }
}

TEST(PartViews, OfAView) {
  Parts p(true);
  Value* lines = add_node(p.graph, "Reshape", {p.b, p.graph.add_constant("lines", make_int64s({2, kPart / 2}))}, "lines");
  Value* sizes = p.graph.add_constant("halves", make_int64s({1, 1}));
  Node* split = p.graph.add_node("Split", {lines, sizes}, {"up", "down"}, {attribute("axis", int64_t{0})});
  p.graph.outputs = {add_node(p.graph, "Add", {split->outputs[0], split->outputs[1]}, "y")};
  const std::vector<float> x = noise(3 * kPart, 5);
  const auto b = part_of(x, 1, -1);
  EXPECT_EQ(p.run(x)[0], combined({b.begin(), b.begin() + kPart / 2}, {b.begin() + kPart / 2, b.end()}, sum));
}

}  // namespace
}  // namespace fretsaw
