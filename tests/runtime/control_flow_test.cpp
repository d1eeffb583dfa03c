// If, Loop, Scan and SequenceMap, with captures, changing shapes, nesting and sequences; and values whose shape depends on data.
#include <gtest/gtest.h>

#include "graph/errors.h"
#include "runtime/session.h"
#include "tests/runtime/plans.h"

namespace fretsaw {
namespace {

using namespace testing_plans;
using Inputs = std::map<std::string, RuntimeValue>;
using Floats = std::vector<float>;

GraphPtr new_body(Model& model) {
  auto body = std::make_shared<Graph>();
  body->parent = model.graph.get();
  return body;
}
Value* body_input(Graph& body, const std::string& name, Type type = {}) {
  body.inputs.push_back(body.add_value(name, std::move(type)));
  return body.inputs.back();
}
Type floats_of(Shape shape) {
  return Type::tensor(DType::float32, std::move(shape));
}

std::vector<RuntimeValue> run_model(const std::shared_ptr<Model>& model, const Inputs& inputs) {
  return Session(make_plan({model}), {.threads = 1}).run(inputs);
}

// y = c ? x * w : x, where the else branch gives an outer value directly and w is used in the branch alone.
std::shared_ptr<Model> if_model(bool constant_condition, bool condition = false) {
  auto model = new_model();
  Graph& g = *model->graph;
  Value* x = add_input(*model, "x", DType::float32, {2});
  Value* c = constant_condition ? nullptr : add_input(*model, "c", DType::boolean, {});
  if (constant_condition) {
    auto t = make_tensor(DType::boolean, {});
    *reinterpret_cast<bool*>(mutable_data(*t)) = condition;
    c = g.add_constant("c", t);
  }
  Value* w = g.add_constant("w", floats({2}, {10, 100}));
  GraphPtr yes = new_body(*model), no = new_body(*model);
  yes->outputs = {add_node(*yes, "Mul", {x, w}, "product")};
  no->outputs = {x};
  g.outputs = {add_node(g, "If", {c}, "y", {attribute("then_branch", yes), attribute("else_branch", no)})};
  return model;
}

TEST(ControlFlow, IfTakesABranch) {
  auto model = if_model(false);
  Session session(make_plan({model}), {.threads = 1});
  auto x = float_value({2}, {1, 2});
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(elements<float>(session.run({{"x", x}, {"c", bool_value(true)}})[0]), (Floats{10, 200}));
    EXPECT_EQ(elements<float>(session.run({{"x", x}, {"c", bool_value(false)}})[0]), (Floats{1, 2}));
  }
}

TEST(ControlFlow, AConstantIfIsInlined) {
  for (bool condition : {true, false}) {
    auto out = run_model(if_model(true, condition), {{"x", float_value({2}, {1, 2})}});
    EXPECT_EQ(elements<float>(out[0]), condition ? (Floats{10, 200}) : (Floats{1, 2}));
  }
}

// for i < trips while sum < limit: sum += step; scan output: sum before
std::shared_ptr<Model> sum_loop() {
  auto model = new_model();
  Graph& g = *model->graph;
  Value* trips = add_input(*model, "trips", DType::int64, {});
  Value* go = add_input(*model, "go", DType::boolean, {});
  Value* start = add_input(*model, "start", DType::float32, {2});
  Value* step = add_input(*model, "step", DType::float32, {2});
  Value* limit = add_input(*model, "limit", DType::float32, {});
  GraphPtr body = new_body(*model);
  body_input(*body, "i", Type::tensor(DType::int64, Shape{}));
  body_input(*body, "cond", Type::tensor(DType::boolean, Shape{}));
  Value* sum = body_input(*body, "sum", floats_of({2}));
  Value* next = add_node(*body, "Add", {sum, step}, "next");
  Value* axes = body->add_constant("axes", make_int64s({0}));
  Value* total = add_node(*body, "ReduceMax", {next, axes}, "total", {attribute("keepdims", int64_t{0})});
  body->outputs = {add_node(*body, "Less", {total, limit}, "less"), next, add_node(*body, "Identity", {sum}, "before")};
  Node* loop = g.add_node("Loop", {trips, go, start}, {"sum_out", "history"}, {attribute("body", body)});
  g.outputs = {loop->outputs[0], loop->outputs[1]};
  return model;
}

TEST(ControlFlow, LoopCarriesAndStacks) {
  struct Case {
    int64_t trips;
    bool go;
    float limit;
    Floats sum, history;
  };
  const Case cases[] = {
      {3, true, 1e9f, {3, 7}, {0, 1, 1, 3, 2, 5}}, {0, true, 1e9f, {0, 1}, {}},     {5, false, 1e9f, {0, 1}, {}},
      {9, true, 4.0f, {2, 5}, {0, 1, 1, 3}},       {1, true, 1e9f, {1, 3}, {0, 1}},
  };
  Session session(make_plan({sum_loop()}), {.threads = 1});
  for (const Case& c : cases) {
    auto out = session.run({{"trips", int_value({}, {c.trips})},
                            {"go", bool_value(c.go)},
                            {"start", float_value({2}, {0, 1})},
                            {"step", float_value({2}, {1, 2})},
                            {"limit", float_value({}, {c.limit})}});
    EXPECT_EQ(elements<float>(out[0]), c.sum);
    EXPECT_EQ(elements<float>(out[1]), c.history);
    EXPECT_EQ(out[1].tensor.dims, (Dims{static_cast<int64_t>(c.history.size() / 2), 2}));
  }
}

// A carried value that grows by concatenation.
TEST(ControlFlow, LoopCarriedShapesMayChange) {
  auto model = new_model();
  Graph& g = *model->graph;
  Value* trips = add_input(*model, "trips", DType::int64, {});
  Value* start = add_input(*model, "start", DType::float32, {Dim("n")});
  GraphPtr body = new_body(*model);
  Value* i = body_input(*body, "i", Type::tensor(DType::int64, Shape{}));
  Value* cond = body_input(*body, "cond", Type::tensor(DType::boolean, Shape{}));
  Value* list = body_input(*body, "list", floats_of({Dim("m")}));
  Value* axes = body->add_constant("axes", make_int64s({0}));
  Value* number = add_node(*body, "Cast", {i}, "number", {attribute("to", int64_t{1})});
  Value* one = add_node(*body, "Unsqueeze", {number, axes}, "one");
  Node* concat = body->add_node("Concat", {list, one}, {"longer"}, {attribute("axis", int64_t{0})});
  body->outputs = {add_node(*body, "Identity", {cond}, "again"), concat->outputs[0]};
  Value* none = nullptr;
  g.outputs = {add_node(g, "Loop", {trips, none, start}, "list_out", {attribute("body", body)})};
  Session session(make_plan({model}), {.threads = 1});
  for (int64_t n : {0, 1, 3, 20}) {
    auto out = session.run({{"trips", int_value({}, {n})}, {"start", float_value({1}, {-5})}});
    Floats expected{-5};
    for (int64_t k = 0; k < n; ++k) expected.push_back(static_cast<float>(k));
    EXPECT_EQ(elements<float>(out[0]), expected);
  }
}

// sum over i < 3 of (i is even ? x : x * x), with an If inside the Loop that uses a value two graphs out.
TEST(ControlFlow, Nested) {
  auto model = new_model();
  Graph& g = *model->graph;
  Value* x = add_input(*model, "x", DType::float32, {2});
  Value* trips = g.add_constant("trips", make_int64(3));
  GraphPtr body = new_body(*model);
  Value* i = body_input(*body, "i", Type::tensor(DType::int64, Shape{}));
  Value* cond = body_input(*body, "cond", Type::tensor(DType::boolean, Shape{}));
  Value* sum = body_input(*body, "x", floats_of({2}));  // shadows the outer name
  Value* two = body->add_constant("two", make_int64(2));
  Value* zero = body->add_constant("zero", make_int64(0));
  Value* even = add_node(*body, "Equal", {add_node(*body, "Mod", {i, two}, "rest"), zero}, "even");
  auto yes = std::make_shared<Graph>(), no = std::make_shared<Graph>();
  yes->parent = no->parent = body.get();
  yes->outputs = {add_node(*yes, "Add", {sum, x}, "plus")};
  no->outputs = {add_node(*no, "Add", {sum, add_node(*no, "Mul", {x, x}, "square")}, "plus")};
  Value* next = add_node(*body, "If", {even}, "next", {attribute("then_branch", yes), attribute("else_branch", no)});
  body->outputs = {add_node(*body, "Identity", {cond}, "again"), next};
  Value* start = g.add_constant("start", floats({2}, {0, 0}));
  Value* none = nullptr;
  g.outputs = {add_node(g, "Loop", {trips, none, start}, "y", {attribute("body", body)})};
  auto out = run_model(model, {{"x", float_value({2}, {2, 3})}});
  EXPECT_EQ(elements<float>(out[0]), (Floats{2 + 4 + 2, 3 + 9 + 3}));
}

// Cumulative sums along an axis, forwards and backwards, along axis 0 and 1.
TEST(ControlFlow, ScanAxesAndDirections) {
  for (int64_t axis : {0, 1}) {
    for (int64_t reverse : {0, 1}) {
      auto model = new_model();
      Graph& g = *model->graph;
      Value* start = add_input(*model, "start", DType::float32, {2});
      Value* xs = add_input(*model, "xs", DType::float32, axis == 0 ? Shape{3, 2} : Shape{2, 3});
      GraphPtr body = new_body(*model);
      Value* sum = body_input(*body, "sum", floats_of({2}));
      Value* x = body_input(*body, "x", floats_of({2}));
      Value* next = add_node(*body, "Add", {sum, x}, "next");
      body->outputs = {next, add_node(*body, "Identity", {next}, "copy")};
      Node* scan = g.add_node(
          "Scan", {start, xs}, {"last", "all"},
          {attribute("body", body), attribute("num_scan_inputs", int64_t{1}), attribute("scan_input_axes", std::vector<int64_t>{axis}),
           attribute("scan_output_axes", std::vector<int64_t>{axis}), attribute("scan_input_directions", std::vector<int64_t>{reverse}),
           attribute("scan_output_directions", std::vector<int64_t>{reverse})});
      g.outputs = {scan->outputs[0], scan->outputs[1]};
      // x_t = (t + 1, 10 (t + 1)), t = 0, 1, 2
      Floats values = axis == 0 ? Floats{1, 10, 2, 20, 3, 30} : Floats{1, 2, 3, 10, 20, 30};
      auto out = run_model(model, {{"start", float_value({2}, {0, 0})}, {"xs", float_value(axis == 0 ? Dims{3, 2} : Dims{2, 3}, values)}});
      EXPECT_EQ(elements<float>(out[0]), (Floats{6, 60}));
      Floats sums = reverse ? Floats{6, 5, 3} : Floats{1, 3, 6}, expected;
      if (axis == 0) {
        for (float s : sums) expected.insert(expected.end(), {s, 10 * s});
      } else {
        expected = {sums[0], sums[1], sums[2], 10 * sums[0], 10 * sums[1], 10 * sums[2]};
      }
      EXPECT_EQ(elements<float>(out[1]), expected) << axis << " " << reverse;
      EXPECT_EQ(out[1].tensor.dims, (axis == 0 ? Dims{3, 2} : Dims{2, 3}));
    }
  }
}

// A sequence carried through a loop, then concatenated.
TEST(ControlFlow, SequencesAreCarried) {
  auto model = new_model();
  Graph& g = *model->graph;
  Value* x = add_input(*model, "x", DType::float32, {2});
  Value* trips = add_input(*model, "trips", DType::int64, {});
  Value* empty = add_node(g, "SequenceEmpty", {}, "empty", {attribute("dtype", int64_t{1})});
  GraphPtr body = new_body(*model);
  Value* i = body_input(*body, "i", Type::tensor(DType::int64, Shape{}));
  Value* cond = body_input(*body, "cond", Type::tensor(DType::boolean, Shape{}));
  Value* list = body_input(*body, "list", Type::sequence(Type::tensor(DType::float32)));
  Value* scaled = add_node(*body, "Mul", {x, add_node(*body, "Cast", {i}, "number", {attribute("to", int64_t{1})})}, "scaled");
  body->outputs = {add_node(*body, "Identity", {cond}, "again"), add_node(*body, "SequenceInsert", {list, scaled}, "longer")};
  Value* none = nullptr;
  Value* all = add_node(g, "Loop", {trips, none, empty}, "all", {attribute("body", body)});
  g.outputs = {add_node(g, "ConcatFromSequence", {all}, "y", {attribute("axis", int64_t{0})}), all};
  auto out = run_model(model, {{"x", float_value({2}, {1, 2})}, {"trips", int_value({}, {3})}});
  EXPECT_EQ(elements<float>(out[0]), (Floats{0, 0, 1, 2, 2, 4}));
  ASSERT_EQ(out[1].kind, RuntimeValue::Kind::sequence);
  ASSERT_EQ(out[1].items.size(), 3u);
  EXPECT_EQ(elements<float>(out[1].items[2]), (Floats{2, 4}));
}

// The body makes [4] of anything, so that is what inference says; a loop that never runs gives its initial [2] instead.
TEST(ControlFlow, ALoopThatNeverRunsKeepsItsInitialShape) {
  auto model = new_model();
  Graph& g = *model->graph;
  Value* trips = add_input(*model, "trips", DType::int64, {});
  Value* start = add_input(*model, "start", DType::float32, {2});
  GraphPtr body = new_body(*model);
  body_input(*body, "i", Type::tensor(DType::int64, Shape{}));
  Value* cond = body_input(*body, "cond", Type::tensor(DType::boolean, Shape{}));
  body_input(*body, "x", floats_of({Dim("m")}));
  body->outputs = {add_node(*body, "Identity", {cond}, "again"),
                   add_node(*body, "Neg", {body->add_constant("c", floats({4}, {1, 2, 3, 4}))}, "four")};
  Value* none = nullptr;
  Value* last = add_node(g, "Loop", {trips, none, start}, "last", {attribute("body", body)});
  g.outputs = {add_node(g, "Relu", {add_node(g, "Neg", {last}, "minus")}, "y")};
  Session session(make_plan({model}), {.threads = 1});
  auto run = [&](int64_t n) {
    return elements<float>(session.run({{"trips", int_value({}, {n})}, {"start", float_value({2}, {-7, 8})}})[0]);
  };
  EXPECT_EQ(run(3), (Floats{1, 2, 3, 4}));
  EXPECT_EQ(run(0), (Floats{7, 0}));
  EXPECT_EQ(run(1), (Floats{1, 2, 3, 4}));
}

TEST(ControlFlow, AFaultInABodyNamesItsNode) {
  auto model = sum_loop();
  for (Value* v : model->graph->inputs) {
    if (v->name == "step") v->type = floats_of({Dim("s")});
  }
  Session session(make_plan({model}), {.threads = 1});
  try {
    session.run({{"trips", int_value({}, {2})},
                 {"go", bool_value(true)},
                 {"start", float_value({2}, {0, 1})},
                 {"step", float_value({3}, {1, 2, 3})},
                 {"limit", float_value({}, {9})}});
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("node 'next' (Add)"), std::string::npos) << e.what();
  }
}

// --- values whose shape depends on data ---

TEST(DynamicShapes, NonZeroFeedsGatherAndReshape) {
  auto model = new_model();
  Graph& g = *model->graph;
  Value* x = add_input(*model, "x", DType::float32, {Dim("n")});
  Value* flat = g.add_constant("flat", make_int64s({-1}));
  Value* where = add_node(g, "Reshape", {add_node(g, "NonZero", {x}, "nz"), flat}, "where");
  Value* kept = add_node(g, "Relu", {add_node(g, "Gather", {x, where}, "kept")}, "positive");
  g.outputs = {kept, where};
  Session session(make_plan({model}), {.threads = 1});
  struct Case {
    Floats x, positive;
    std::vector<int64_t> where;
  };
  for (const Case& c : {Case{{0, 2, 0, -3}, {2, 0}, {1, 3}}, Case{{0, 0, 0, 0}, {}, {}}, Case{{1, 2, 3, 4}, {1, 2, 3, 4}, {0, 1, 2, 3}}}) {
    auto out = session.run({{"x", float_value({4}, c.x)}});
    EXPECT_EQ(elements<float>(out[0]), c.positive);
    EXPECT_EQ(elements<int64_t>(out[1]), c.where);
  }
  for (int i = 0; i < 2; ++i) session.run({{"x", float_value({4}, {1, 0, 0, 1})}});
  EXPECT_EQ(session.allocations_in_last_step(), 0);
}

TEST(DynamicShapes, ContentsOfIntegerInputsDecideShapes) {
  auto model = new_model();
  Graph& g = *model->graph;
  Value* x = add_input(*model, "x", DType::float32, {6});
  Value* rows = add_input(*model, "rows", DType::int64, {1});
  Value* shape =
      g.add_node("Concat", {rows, g.add_constant("rest", make_int64s({-1}))}, {"shape"}, {attribute("axis", int64_t{0})})->outputs[0];
  Value* axes = g.add_constant("axes", make_int64s({1}));
  g.outputs = {add_node(g, "ReduceSum", {add_node(g, "Reshape", {x, shape}, "matrix"), axes}, "y", {attribute("keepdims", int64_t{0})})};
  Session session(make_plan({model}), {.threads = 1});
  auto values = float_value({6}, {1, 2, 3, 4, 5, 6});
  for (int round = 0; round < 5; ++round) {
    EXPECT_EQ(elements<float>(session.run({{"x", values}, {"rows", int_value({1}, {2})}})[0]), (Floats{6, 15}));
    EXPECT_EQ(elements<float>(session.run({{"x", values}, {"rows", int_value({1}, {3})}})[0]), (Floats{3, 7, 11}));
    EXPECT_EQ(elements<float>(session.run({{"x", values}, {"rows", int_value({1}, {1})}})[0]), (Floats{21}));
    EXPECT_EQ(elements<float>(session.run({{"x", values}, {"rows", int_value({1}, {6})}})[0]), (Floats{1, 2, 3, 4, 5, 6}));
  }
}

TEST(DynamicShapes, NoElementsAndScalars) {
  auto model = new_model();
  Graph& g = *model->graph;
  Value* x = add_input(*model, "x", DType::float32, {Dim("n"), 3});
  Value* s = add_input(*model, "s", DType::float32, {});
  g.outputs = {add_node(g, "Add", {x, s}, "y"), add_node(g, "Neg", {s}, "t")};
  auto out = run_model(model, {{"x", float_value({0, 3}, {})}, {"s", float_value({}, {4})}});
  EXPECT_EQ(out[0].tensor.dims, (Dims{0, 3}));
  EXPECT_EQ(out[1].tensor.dims, Dims{});
  EXPECT_EQ(elements<float>(out[1]), Floats{-4});
}

}  // namespace
}  // namespace fretsaw
