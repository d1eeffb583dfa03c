// Collectives inside the graphs of tensor-parallel ranks: layers cut over ranks, counts, memory, aborts.
#include "runtime/collectives.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>

#include "tests/runtime/collective_plans.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

// --- layers cut over ranks ---

std::vector<int64_t> begins_of(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> begins(sizes.size(), 0);
  std::partial_sum(sizes.begin(), sizes.end() - 1, begins.begin() + 1);
  return begins;
}
TensorPtr part_of(const Array& x, size_t axis, int64_t begin, int64_t count) {
  Array part = slice(x, axis, begin, count);
  return floats(part.dims, std::vector<float>(part.values.begin(), part.values.end()));
}
Array noise_array(Dims dims, unsigned seed) {
  auto values = noise(static_cast<size_t>(count_of(dims)), seed);
  return {std::move(dims), std::vector<double>(values.begin(), values.end())};
}

// y = relu(x w1) w2 with a hidden width of sum(sizes), cut there; then y is scattered along its last axis, negated and gathered again, and
// x is added: each rank's part of a value by another collective.
Models cut_layers(const std::vector<int64_t>& hidden, const std::vector<int64_t>& columns) {
  const auto ranks = static_cast<int>(hidden.size());
  const int64_t width = std::accumulate(columns.begin(), columns.end(), int64_t{0});
  const int64_t inner = std::accumulate(hidden.begin(), hidden.end(), int64_t{0});
  Array w1 = noise_array({width, inner}, 1), w2 = noise_array({inner, width}, 2);
  auto begins = begins_of(hidden);
  Models models;
  for (int r = 0; r < ranks; ++r) {
    auto model = new_model();
    Graph& g = *model->graph;
    const auto at = static_cast<size_t>(r);
    Value* x = add_input(*model, "x", DType::float32, {Dim("batch"), width});
    Value* a = g.add_constant("w1", part_of(w1, 1, begins[at], hidden[at]));
    Value* b = g.add_constant("w2", part_of(w2, 0, begins[at], hidden[at]));
    Value* h = add_node(g, "Relu", {add_node(g, "MatMul", {x, a}, "m1")}, "h");
    Value* partial = add_node(g, "MatMul", {h, b}, "partial");
    Value* sum = add_collective(g, "AllReduce", partial, ranks, "sum");
    Attributes by_columns = {number("tensor_axis", -1), ints("sizes", columns), number("index", r), number("uneven", 1)};
    Value* own = add_node(g, "Neg", {add_collective(g, "ReduceScatter", partial, ranks, "scattered", by_columns)}, "own");
    Value* whole = add_collective(g, "AllGather", own, ranks, "whole", by_columns);
    g.outputs = {add_node(g, "Add", {add_node(g, "Add", {sum, whole}, "zero"), add_node(g, "Add", {sum, x}, "skip")}, "y")};
    models.push_back(model);
  }
  return models;
}
// The sum and what was scattered and gathered cancel: y = x + relu(x w1) w2.
std::vector<double> layers_reference(const std::vector<float>& x, int64_t width, int64_t inner) {
  Array w1 = noise_array({width, inner}, 1), w2 = noise_array({inner, width}, 2);
  std::vector<double> y(x.begin(), x.end());
  for (size_t row = 0; row < x.size() / static_cast<size_t>(width); ++row) {
    for (int64_t k = 0; k < inner; ++k) {
      double h = 0;
      for (int64_t i = 0; i < width; ++i) h += x[row * width + i] * w1.values[i * inner + k];
      for (int64_t i = 0; i < width; ++i) y[row * width + i] += std::max(h, 0.0) * w2.values[k * width + i];
    }
  }
  return y;
}
struct Cut {
  std::vector<int64_t> hidden, columns;
};
const Cut cuts[] = {{{32, 32}, {24, 24}}, {{20, 13}, {7, 30}}, {{3, 0, 2}, {16, 16, 1}}, {{8, 8, 8, 8}, {10, 10, 10, 0}}};

TEST(Collectives, LayersCutOverRanksEqualTheWhole) {
  for (const Cut& cut : cuts) {
    const int64_t width = std::accumulate(cut.columns.begin(), cut.columns.end(), int64_t{0});
    const int64_t inner = std::accumulate(cut.hidden.begin(), cut.hidden.end(), int64_t{0});
    auto x = noise(static_cast<size_t>(6 * width), 3);
    for (int micro_batches : {1, 3}) {
      auto out =
          Session(tensor_plan(cut_layers(cut.hidden, cut.columns), micro_batches), {.threads = 1}).run({{"x", float_value({6, width}, x)}});
      auto got = elements<float>(out[0]);
      auto expected = layers_reference(x, width, inner);
      ASSERT_EQ(got.size(), expected.size());
      for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], 1e-4) << i << " of " << to_string(cut.hidden);
    }
  }
}

TEST(Collectives, WarmStepsAllocateNothing) {
  for (const Cut& cut : cuts) {
    const int64_t width = std::accumulate(cut.columns.begin(), cut.columns.end(), int64_t{0});
    Session session(tensor_plan(cut_layers(cut.hidden, cut.columns), 2), {.threads = 1});
    Inputs inputs{{"x", float_value({6, width}, noise(static_cast<size_t>(6 * width), 3))}};
    for (int i = 0; i < 2; ++i) session.run(inputs);
    for (int i = 0; i < 10; ++i) {
      auto outputs = session.run(inputs);
      EXPECT_EQ(session.allocations_in_last_step(), 0) << "step " << i;
    }
  }
}

TEST(Collectives, CountsAreThoseOfOneMicroBatchOnTheFirstRank) {
  Session session(tensor_plan(cut_layers({3, 0, 2}, {4, 3, 1}), 3), {.threads = 1, .trace = true});
  for (int step = 0; step < 2; ++step) {
    session.run({{"x", float_value({6, 8}, noise(6 * 8, 3))}});
    std::map<std::string, CommunicationCount> counts;
    for (const CommunicationCount& c : session.communication()) {
      EXPECT_EQ(c.axis, "tensor");
      counts[c.op] = c;
    }
    ASSERT_EQ(counts.size(), 3u);
    const int64_t whole_bytes = 2 * 8 * 4;  // [2, 8] of float32: what is given is as much as what is gathered
    for (const char* op : {"AllReduce", "ReduceScatter", "AllGather"}) {
      EXPECT_EQ(counts[op].count, 1) << op;
      EXPECT_EQ(counts[op].bytes, whole_bytes) << op;
    }
  }
  int events = 0;
  for (const TraceEvent& event : session.trace()) events += event.category == "collective";
  EXPECT_EQ(events, 3 * 3 * 3);  // collectives, micro-batches, ranks
}

// Two stages, each cut in two: collectives and sends side by side. The counts are those of one rank of each stage.
TEST(Collectives, StagesAndTensorRanks) {
  auto model = [](int stage, int rank) {
    auto made = new_model();
    Graph& g = *made->graph;
    Value* x = stage == 0 ? add_input(*made, "x", DType::float32, {Dim("n"), 4}) : receive(*made, "h", DType::float32, {Dim("n"), 4});
    Value* scale = g.add_constant("scale", floats({1}, {static_cast<float>(rank + 1)}));
    Value* sum = add_collective(g, "AllReduce", add_node(g, "Mul", {x, scale}, "part"), 2, stage == 0 ? "h" : "y");
    if (stage == 0) {
      send(*made, sum, 1);
    } else {
      g.outputs = {sum};
    }
    return made;
  };
  auto plan = make_plan({model(0, 0), model(1, 0)}, 4);
  plan->mesh.tensor = 2;
  plan->graphs.clear();
  for (int stage = 0; stage < 2; ++stage) {
    for (int t = 0; t < 2; ++t) plan->graphs.push_back({stage, "forward", {{"tensor", t}}, "", model(stage, t)});
  }
  Session session(plan, {.threads = 1});
  auto x = noise(8 * 4, 5);
  auto got = elements<float>(session.run({{"x", float_value({8, 4}, x)}})[0]);
  for (size_t i = 0; i < x.size(); ++i) EXPECT_FLOAT_EQ(got[i], 9 * x[i]);
  auto counts = session.communication();
  ASSERT_EQ(counts.size(), 2u);
  EXPECT_EQ(counts[0].op, "AllReduce");
  EXPECT_EQ(counts[0].count, 2);
  EXPECT_EQ(counts[0].bytes, 2 * 2 * 4 * 4);
  EXPECT_EQ(counts[1].op, "Send");
  EXPECT_EQ(counts[1].count, 1);
}

// A convolution cut over its input channels, unevenly; the ranks' convolutions may leave different layouts.
TEST(Collectives, ConvolutionsAreReducedChannelsLast) {
  const Array w = noise_array({24, 19, 3, 3}, 1), x = noise_array({2, 19, 9, 10}, 2);
  auto build = [&](int64_t begin, int64_t count, int ranks) {
    auto model = new_model();
    Graph& g = *model->graph;
    Value* in = add_input(*model, "x" + std::to_string(begin), DType::float32, {2, count, 9, 10});
    Value* y = add_node(g, "Conv", {in, g.add_constant("w", part_of(w, 1, begin, count))}, "conv", {ints("pads", {1, 1, 1, 1})});
    if (ranks > 1) y = add_collective(g, "AllReduce", y, ranks, "sum", {number("channels_last", 1)});
    g.outputs = {add_node(g, "Relu", {y}, "y")};
    return model;
  };
  auto whole = elements<float>(run_on_every_rank(tensor_plan({build(0, 19, 1)}), {{"x0", value_of(DType::float32, x)}})[0]);
  auto plan = tensor_plan({build(0, 16, 2), build(16, 3, 2)});
  auto parts = run_on_every_rank(plan, {{"x0", value_of(DType::float32, slice(x, 1, 0, 16))},  //
                                        {"x16", value_of(DType::float32, slice(x, 1, 16, 3))}});
  for (const RuntimeValue& part : parts) {
    auto got = elements<float>(part);
    ASSERT_EQ(got.size(), whole.size());
    for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], whole[i], 1e-4) << i;
  }
}

// --- what may go wrong ---

// Nobody takes what rank 1 gathers, and all it holds is a constant: rank 0 must not wait for ever.
TEST(Collectives, RunAlsoWhereNothingTakesTheirResult) {
  Models models;
  for (int r = 0; r < 2; ++r) {
    auto model = new_model();
    Graph& g = *model->graph;
    Value* x = add_input(*model, "x", DType::float32, {2});
    Value* own = r == 0 ? x : g.add_constant("c", floats({2}, {10, 20}));
    Value* sum = add_collective(g, "AllReduce", own, 2, "sum");
    g.outputs = {add_node(g, "Neg", {r == 0 ? sum : x}, "y")};
    models.push_back(model);
  }
  auto out = run_on_every_rank(tensor_plan(models), {{"x", float_value({2}, {1, 2})}});
  EXPECT_EQ(elements<float>(out[0]), (std::vector<float>{-11, -22}));
  EXPECT_EQ(elements<float>(out[1]), (std::vector<float>{-1, -2}));
}

TEST(Collectives, AFailingRankEndsThoseThatWaitForIt) {
  for (int failing : {0, 1}) {
    for (int micro_batch : {0, 2}) {
      std::atomic<bool> fails{true};
      SessionOptions options{.threads = 1};
      options.before_forward = [&](int r, int m) {
        if (!fails || r != failing || m != micro_batch) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the other is asleep in its collective by then
        throw Error("the device fell off", "", ErrorCode::device);
      };
      Session session(tensor_plan(cut_layers({20, 13}, {7, 9}), 3), options);
      auto x = noise(6 * 16, 3);
      Inputs inputs{{"x", float_value({6, 16}, x)}};
      auto start = std::chrono::steady_clock::now();
      try {
        session.run(inputs);
        FAIL() << "the failure went unnoticed";
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find("rank " + std::to_string(failing)), std::string::npos) << e.what();
        EXPECT_NE(std::string(e.what()).find("the device fell off"), std::string::npos) << e.what();
        EXPECT_EQ(e.code(), ErrorCode::device);
      }
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
      fails = false;  // the session goes on, with new groups
      auto got = elements<float>(session.run(inputs)[0]);
      auto expected = layers_reference(x, 16, 33);
      for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], 1e-4);
    }
  }
}

// A loop that never runs keeps a shape of [2] where inference says [4], so its program is compiled and run again.
Models models_with_a_wrong_shape(bool on_every_rank) {
  Models models;
  for (int r = 0; r < 2; ++r) {
    auto model = new_model();
    Graph& g = *model->graph;
    Value* x = add_input(*model, "x", DType::float32, {2});
    Value* trips = add_input(*model, r == 0 || on_every_rank ? "trips" : "other_trips", DType::int64, {});
    Value* sum = add_collective(g, "AllReduce", x, 2, "sum");
    auto body = std::make_shared<Graph>();
    body->parent = &g;
    Value* i = body->add_value("i", Type::tensor(DType::int64, Shape{}));
    Value* go_on = body->add_value("go_on", Type::tensor(DType::boolean, Shape{}));
    Value* v = body->add_value("v", Type::tensor(DType::float32, Shape{Dim("m")}));
    body->inputs = {i, go_on, v};
    body->outputs = {add_node(*body, "Identity", {go_on}, "again"),
                     add_node(*body, "Neg", {body->add_constant("c", floats({4}, {1, 2, 3, 4}))}, "four")};
    Value* looped = add_node(g, "Loop", {trips, nullptr, sum}, "looped", {attribute("body", GraphPtr(body))});
    g.outputs = {add_collective(g, "AllReduce", add_node(g, "Neg", {looped}, "negated"), 2, "y")};
    models.push_back(model);
  }
  return models;
}

TEST(Collectives, AProgramThatRunsAgainDoesSoOnEveryRank) {
  auto plan = tensor_plan(models_with_a_wrong_shape(true));
  Session session(plan, {.threads = 1});
  auto out = session.run({{"x", float_value({2}, {1, 2})}, {"trips", int_value({}, {0})}});
  EXPECT_EQ(elements<float>(out[0]), (std::vector<float>{-4, -8}));
  ASSERT_EQ(session.communication().size(), 1u);
  EXPECT_EQ(session.communication()[0].count, 2);  // not 3: what ran in vain is not counted
}

TEST(Collectives, AProgramThatRunsAgainAloneIsAnError) {
  auto start = std::chrono::steady_clock::now();
  std::string error = error_of(tensor_plan(models_with_a_wrong_shape(false)),
                               {{"x", float_value({2}, {1, 2})}, {"trips", int_value({}, {0})}, {"other_trips", int_value({}, {1})}});
  EXPECT_NE(error.find("ranks disagree"), std::string::npos) << error;
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
}

}  // namespace
}  // namespace fretsaw
