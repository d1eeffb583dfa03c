// Sessions over small plans: stages, micro-batches, errors, memory.
#include "runtime/session.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <new>
#include <thread>

#include "graph/errors.h"
#include "tests/runtime/plans.h"

// Counts what the C++ code of this program asks of the heap while a test wants to know.
namespace {
std::atomic<bool> counting{false};
std::atomic<long> large_allocations{0}, all_allocations{0};
void count(size_t size) {
  if (!counting) return;
  ++all_allocations;
  if (size >= 4096) ++large_allocations;
}
}  // namespace
// Replacing both operators is what makes malloc and free match here; GCC does not see that once they are inlined.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
void* operator new(size_t size) {
  count(size);
  if (void* p = std::malloc(size ? size : 1)) return p;
  throw std::bad_alloc();
}
void* operator new(size_t size, std::align_val_t alignment) {
  count(size);
  void* p = nullptr;
  if (posix_memalign(&p, static_cast<size_t>(alignment), size ? size : 1) != 0) throw std::bad_alloc();
  return p;
}
void* operator new(size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  count(size);
  void* p = nullptr;
  return posix_memalign(&p, static_cast<size_t>(alignment), size ? size : 1) == 0 ? p : nullptr;
}
void operator delete(void* p) noexcept {
  std::free(p);
}
void operator delete(void* p, size_t) noexcept {
  std::free(p);
}
void operator delete(void* p, std::align_val_t) noexcept {
  std::free(p);
}
void operator delete(void* p, size_t, std::align_val_t) noexcept {
  std::free(p);
}

namespace fretsaw {
namespace {

using namespace testing_plans;
using Inputs = std::map<std::string, RuntimeValue>;

std::vector<RuntimeValue> run_once(const std::shared_ptr<Plan>& plan, const Inputs& inputs, SessionOptions options = {}) {
  if (options.threads == 0) options.threads = 1;
  return Session(plan, options).run(inputs);
}
std::string error_of(const std::shared_ptr<Plan>& plan, const Inputs& inputs) {
  try {
    run_once(plan, inputs);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

// y = relu(x w1 + b1) w2 with a width of 64.
std::vector<float> weights(size_t n, unsigned seed) {
  return noise(n, seed);
}
Value* half_mlp(Model& model, Value* x, const std::string& name, unsigned seed) {
  Graph& g = *model.graph;
  Value* w = g.add_constant(name + ".w", floats({64, 64}, weights(64 * 64, seed)));
  Value* b = g.add_constant(name + ".b", floats({64}, weights(64, seed + 1)));
  return add_node(g, "Relu", {add_node(g, "Add", {add_node(g, "MatMul", {x, w}, name + ".mm"), b}, name + ".sum")}, name);
}
std::vector<float> half_mlp_reference(const std::vector<float>& x, unsigned seed) {
  auto w = weights(64 * 64, seed), b = weights(64, seed + 1);
  std::vector<float> y(x.size());
  for (size_t r = 0; r < x.size() / 64; ++r) {
    for (size_t n = 0; n < 64; ++n) {
      double sum = b[n];
      for (size_t k = 0; k < 64; ++k) sum += static_cast<double>(x[r * 64 + k]) * w[k * 64 + n];
      y[r * 64 + n] = static_cast<float>(std::max(sum, 0.0));
    }
  }
  return y;
}
void expect_near(const RuntimeValue& got, const std::vector<float>& expected) {
  auto values = elements<float>(got);
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(values[i], expected[i], 1e-4 * std::max(1.0f, std::abs(expected[i]))) << i;
}

std::shared_ptr<Model> whole_mlp() {
  auto model = new_model();
  Value* x = add_input(*model, "x", DType::float32, {Dim("batch"), 64});
  Value* h = half_mlp(*model, x, "h", 1);
  Value* sum = add_node(*model->graph, "Add", {half_mlp(*model, h, "k", 5), x}, "y");
  model->graph->outputs = {sum};
  return model;
}
// The same in two or three stages; x skips over to the last.
std::vector<std::shared_ptr<Model>> cut_mlp(bool three) {
  auto a = new_model(), b = new_model(), c = new_model();
  Value* x = add_input(*a, "x", DType::float32, {Dim("batch"), 64});
  send(*a, half_mlp(*a, x, "h", 1), 1);
  Value* h = receive(*b, "h", DType::float32, {Dim("batch"), 64});
  if (!three) {
    Value* again = add_input(*b, "x", DType::float32, {Dim("batch"), 64});
    b->graph->outputs = {add_node(*b->graph, "Add", {half_mlp(*b, h, "k", 5), again}, "y")};
    return {a, b};
  }
  Value* copy = add_node(*a->graph, "Identity", {x}, "skip");
  send(*a, copy, 2);
  send(*b, half_mlp(*b, h, "k", 5), 2);
  Value* k = receive(*c, "k", DType::float32, {Dim("batch"), 64});
  Value* skip = receive(*c, "skip", DType::float32, {Dim("batch"), 64});
  c->graph->outputs = {add_node(*c->graph, "Add", {k, skip}, "y")};
  return {a, b, c};
}
std::vector<float> mlp_reference(const std::vector<float>& x) {
  auto y = half_mlp_reference(half_mlp_reference(x, 1), 5);
  for (size_t i = 0; i < y.size(); ++i) y[i] += x[i];
  return y;
}

TEST(Session, OneStageEqualsTheReference) {
  auto x = noise(3 * 64, 9);
  auto out = run_once(make_plan({whole_mlp()}), {{"x", float_value({3, 64}, x)}});
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].tensor.dims, (Dims{3, 64}));
  expect_near(out[0], mlp_reference(x));
}

TEST(Session, StagesAndMicroBatchesGiveTheSameBits) {
  for (int micro_batches : {1, 2, 3, 5, 7}) {
    auto x = noise(7 * 64, 11);
    Inputs inputs{{"x", float_value({7, 64}, x)}};
    auto whole = run_once(make_plan({whole_mlp()}, micro_batches), inputs);
    expect_near(whole[0], mlp_reference(x));
    for (bool three : {false, true}) {
      auto cut = run_once(make_plan(cut_mlp(three), micro_batches), inputs);
      EXPECT_EQ(elements<float>(cut[0]), elements<float>(whole[0])) << micro_batches << " micro-batches, three: " << three;
    }
  }
}

TEST(Session, ManyStepsOfChangingBatch) {
  auto plan = make_plan(cut_mlp(true), 2);
  Session session(plan, {.threads = 1});
  for (int batch : {2, 5, 2, 9, 3, 4, 6, 7, 8, 10, 11, 2, 12}) {
    auto x = noise(static_cast<size_t>(batch) * 64, static_cast<unsigned>(batch));
    expect_near(session.run({{"x", float_value({batch, 64}, x)}})[0], mlp_reference(x));
  }
}

TEST(Session, WarmStepsAllocateNothing) {
  for (int micro_batches : {1, 4}) {
    Session session(make_plan(cut_mlp(true), micro_batches), {.threads = 1});
    Inputs inputs{{"x", float_value({64, 64}, noise(64 * 64, 3))}};
    for (int i = 0; i < 2; ++i) session.run(inputs);
    large_allocations = all_allocations = 0;
    for (int i = 0; i < 20; ++i) {
      counting = true;
      auto outputs = session.run(inputs);
      counting = false;
      EXPECT_EQ(session.allocations_in_last_step(), 0) << "step " << i;
    }
    EXPECT_EQ(large_allocations, 0);
    RecordProperty("small_allocations_a_step", static_cast<int>(all_allocations / 20));
    std::printf("small allocations a step with %d micro-batches: %ld\n", micro_batches, all_allocations / 20);
  }
}

TEST(Session, ReportsWeightsPeakAndCommunication) {
  Session session(make_plan(cut_mlp(true), 4), {.threads = 1, .trace = true});
  session.run({{"x", float_value({8, 64}, noise(8 * 64, 3))}});
  auto ranks = session.ranks();
  ASSERT_EQ(ranks.size(), 3u);
  EXPECT_EQ(ranks[0].weight_bytes, (64 * 64 + 64) * 4);
  EXPECT_EQ(ranks[2].weight_bytes, 0);
  EXPECT_GT(ranks[0].peak_bytes, ranks[0].weight_bytes);
  EXPECT_GT(ranks[0].busy_share, 0);
  EXPECT_LE(ranks[0].busy_share, 1);
  auto counts = session.communication();
  ASSERT_EQ(counts.size(), 1u);
  EXPECT_EQ(counts[0].op, "Send");
  EXPECT_EQ(counts[0].count, 3);  // h, skip and k
  EXPECT_EQ(counts[0].bytes, 3 * 2 * 64 * 4);
  bool sends = false, receives = false, kernels = false;
  for (const TraceEvent& event : session.trace()) {
    sends |= event.category == "send", receives |= event.category == "recv", kernels |= event.category == "MatMul";
    EXPECT_GE(event.duration_us, 0);
  }
  EXPECT_TRUE(sends && receives && kernels);
}

TEST(Session, InputsAtFaultAreNamed) {
  auto plan = make_plan({whole_mlp()}, 2);
  EXPECT_NE(error_of(plan, {}).find("'x' is missing"), std::string::npos);
  EXPECT_NE(error_of(plan, {{"x", int_value({4, 64}, std::vector<int64_t>(256))}}).find("'x' has the type int64"), std::string::npos);
  EXPECT_NE(error_of(plan, {{"x", float_value({4}, noise(4, 1))}}).find("'x' has the shape [4]"), std::string::npos);
  EXPECT_NE(error_of(plan, {{"x", float_value({4, 63}, noise(252, 1))}}).find("dimension 1"), std::string::npos);
  EXPECT_NE(error_of(plan, {{"x", float_value({1, 64}, noise(64, 1))}}).find("'x' has a batch of 1"), std::string::npos);
  Inputs extra{{"x", float_value({4, 64}, noise(256, 1))}, {"z", float_value({1}, {1})}};
  EXPECT_NE(error_of(plan, extra).find("no input 'z'"), std::string::npos);
}

TEST(Session, BatchesMustAgree) {
  auto model = new_model();
  Value* a = add_input(*model, "a", DType::float32, {Dim("n"), 2});
  Value* b = add_input(*model, "b", DType::float32, {Dim("m"), 2});
  model->graph->outputs = {add_node(*model->graph, "Add", {a, b}, "y")};
  Inputs inputs{{"a", float_value({4, 2}, noise(8, 1))}, {"b", float_value({1, 2}, noise(2, 1))}};
  EXPECT_NE(error_of(make_plan({model}, 2), inputs).find("'b' has a batch of 1 where 'a' has 4"), std::string::npos);
  EXPECT_EQ(error_of(make_plan({model}, 1), inputs), "");
  auto split = run_once(make_plan({model}, 2, {{"b", -1}}), inputs), whole = run_once(make_plan({model}), inputs);
  EXPECT_EQ(elements<float>(split[0]), elements<float>(whole[0]));
}

TEST(Session, BatchAxisMayBeAnother) {
  auto model = new_model();
  Value* x = add_input(*model, "x", DType::float32, {3, Dim("batch")});
  model->graph->outputs = {add_node(*model->graph, "Neg", {x}, "y")};
  auto plan = make_plan({model}, 3, {{"x", 1}});
  plan->outputs[0].axis = 1;
  auto values = noise(3 * 7, 4);
  auto out = run_once(plan, {{"x", float_value({3, 7}, values)}});
  for (float& v : values) v = -v;
  EXPECT_EQ(out[0].tensor.dims, (Dims{3, 7}));
  EXPECT_EQ(elements<float>(out[0]), values);
}

TEST(Session, OutputsMergeAsThePlanSays) {
  auto model = new_model();
  Value* x = add_input(*model, "x", DType::float32, {Dim("batch"), 1});
  Value* axes = model->graph->add_constant("axes", make_int64s({0}));
  Value* mean = add_node(*model->graph, "ReduceMean", {x, axes}, "mean");
  Value* sum = add_node(*model->graph, "ReduceSum", {x, axes}, "sum");
  Value* shape = model->graph->add_constant("c", floats({1}, {42}));
  Value* same = add_node(*model->graph, "Neg", {shape}, "same");
  model->graph->outputs = {mean, sum, same};
  auto plan = make_plan({model}, 3);
  plan->outputs[0].merge = "mean", plan->outputs[1].merge = "sum", plan->outputs[2].merge = "same";
  auto out = run_once(plan, {{"x", float_value({7, 1}, {1, 2, 3, 4, 5, 6, 14})}});
  EXPECT_FLOAT_EQ(elements<float>(out[0])[0], 5);  // weighted by samples: parts of 3, 2, 2
  EXPECT_FLOAT_EQ(elements<float>(out[1])[0], 35);
  EXPECT_EQ(elements<float>(out[2]), std::vector<float>{-42});
}

TEST(Session, DefaultsMayBeLeftOut) {
  auto model = new_model();
  Value* x = add_input(*model, "x", DType::float32, {2});
  Value* scale = add_input(*model, "scale", DType::float32, {2});
  scale->constant = floats({2}, {10, 100});
  model->graph->outputs = {add_node(*model->graph, "Mul", {x, scale}, "y"), scale, x};
  auto plan = make_plan({model});
  Session session(plan, {.threads = 1});
  auto x_value = float_value({2}, {1, 2});
  EXPECT_EQ(elements<float>(session.run({{"x", x_value}})[0]), (std::vector<float>{10, 200}));
  auto given = session.run({{"x", x_value}, {"scale", float_value({2}, {3, 4})}});
  EXPECT_EQ(elements<float>(given[0]), (std::vector<float>{3, 8}));
  EXPECT_EQ(elements<float>(given[1]), (std::vector<float>{3, 4}));
  EXPECT_EQ(elements<float>(given[2]), (std::vector<float>{1, 2}));
  EXPECT_NE(given[2].tensor.data, x_value.tensor.data);  // an output is never the caller's memory
  auto left_out = session.run({{"x", x_value}});
  EXPECT_EQ(elements<float>(left_out[1]), (std::vector<float>{10, 100}));
}

// Stage 1 takes an index from a table; index 99 is outside.
std::vector<std::shared_ptr<Model>> gather_stages() {
  auto a = new_model(), b = new_model();
  Value* i = add_input(*a, "i", DType::int64, {Dim("n")});
  send(*a, add_node(*a->graph, "Add", {i, a->graph->add_constant("one", make_int64s({1}))}, "next"), 1);
  Value* next = receive(*b, "next", DType::int64, {Dim("n")});
  Value* table = b->graph->add_constant("table", floats({4, 1}, {0, 10, 20, 30}));
  b->graph->outputs = {add_node(*b->graph, "Gather", {table, next}, "y")};
  return {a, b};
}

TEST(Session, AFailingKernelStopsEverybodyAtOnce) {
  auto plan = make_plan(gather_stages(), 4);
  Session session(plan, {.threads = 1});
  auto start = std::chrono::steady_clock::now();
  try {
    session.run({{"i", int_value({8}, {0, 1, 98, 0, 1, 2, 0, 1})}});
    FAIL() << "the bad index went unnoticed";
  } catch (const Error& e) {
    std::string text = e.what();
    EXPECT_NE(text.find("rank 1, stage 1, node 'y' (Gather)"), std::string::npos) << text;
    EXPECT_EQ(e.code(), ErrorCode::model);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
  // The session goes on.
  auto out = session.run({{"i", int_value({4}, {0, 1, 2, 0})}});
  EXPECT_EQ(elements<float>(out[0]), (std::vector<float>{10, 20, 30, 10}));
}

TEST(Session, AnyRankMayFailAtAnyTime) {
  for (int rank = 0; rank < 3; ++rank) {
    for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
      SessionOptions options{.threads = 1};
      options.before_forward = [&](int r, int m) {
        if (r == rank && m == micro_batch) throw Error("the device fell off", "", ErrorCode::device);
      };
      auto start = std::chrono::steady_clock::now();
      try {
        run_once(make_plan(cut_mlp(true), 3), {{"x", float_value({6, 64}, noise(6 * 64, 1))}}, options);
        FAIL();
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find("rank " + std::to_string(rank)), std::string::npos) << e.what();
        EXPECT_NE(std::string(e.what()).find("the device fell off"), std::string::npos) << e.what();
        EXPECT_EQ(e.code(), ErrorCode::device);
      }
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
    }
  }
}

TEST(Session, ARankThatDoesNotStopIsLeftBehind) {
  struct Signals {
    std::atomic<bool> waits{false}, released{false};
  };
  const auto signals = std::make_shared<Signals>();  // lives as long as the rank that is left
  SessionOptions options{.threads = 1, .stop_limit_s = 0.2};
  options.before_forward = [signals](int rank, int) {
    const auto wait_for = [](const std::atomic<bool>& signal) {
      while (!signal) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    if (rank == 0) {
      wait_for(signals->waits);
      throw Error("the device fell off", "", ErrorCode::device);
    }
    signals->waits = true;
    wait_for(signals->released);
  };
  const Inputs inputs{{"x", float_value({6, 64}, noise(6 * 64, 1))}};
  const auto start = std::chrono::steady_clock::now();
  {
    Session session(make_plan(cut_mlp(true), 3), options);
    for (const char* expected : {"the device fell off", "did not stop after an earlier failure"}) {
      try {
        session.run(inputs);
        FAIL() << "the failure went unnoticed";
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find(expected), std::string::npos) << e.what();
      }
    }
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  EXPECT_TRUE(must_exit_at_once());
  signals->released = true;
}

TEST(Session, MissingWeightsAreFilledTheSameWhateverTheCut) {
  auto lose_weights = [](const std::shared_ptr<Model>& model) {
    for (Value& v : model->graph->all_values()) {
      if (!v.constant) continue;
      auto lost = std::make_shared<Tensor>(*v.constant);
      lost->data = nullptr, lost->owner = nullptr, lost->missing = "weights.bin is not there";
      v.constant = lost;
    }
    return model;
  };
  auto whole = make_plan({lose_weights(whole_mlp())}, 2);
  std::vector<std::shared_ptr<Model>> stages;
  for (const auto& stage : cut_mlp(true)) stages.push_back(lose_weights(stage));
  Inputs inputs{{"x", float_value({4, 64}, noise(4 * 64, 1))}};
  EXPECT_NE(error_of(whole, inputs).find("weights.bin"), std::string::npos);
  SessionOptions options{.threads = 1, .random_weights = true, .weight_seed = 7};
  auto a = elements<float>(run_once(whole, inputs, options)[0]), b = elements<float>(run_once(make_plan(stages, 2), inputs, options)[0]);
  EXPECT_EQ(a, b);
  for (float v : a) EXPECT_TRUE(std::isfinite(v) && std::abs(v) < 1e3);
  options.weight_seed = 8;
  EXPECT_NE(elements<float>(run_once(whole, inputs, options)[0]), a);
}

TEST(Session, TwoStagesOnOneRank) {
  auto plan = make_plan(cut_mlp(true), 2);
  plan->mesh.pipeline = 1;
  plan->schedule.ranks = {{}};
  for (int m = 0; m < 2; ++m) {
    for (int s = 0; s < 3; ++s) plan->schedule.ranks[0].push_back({Action::Kind::forward, s, m, -1});
    for (int s = 0; s < 3; ++s) plan->schedule.ranks[0].push_back({Action::Kind::free, s, m, -1});
  }
  auto x = noise(5 * 64, 2);
  expect_near(run_once(plan, {{"x", float_value({5, 64}, x)}})[0], mlp_reference(x));
}

}  // namespace
}  // namespace fretsaw
