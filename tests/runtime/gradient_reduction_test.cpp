// Gradients that are added up over ranks beside the backward pass, against the same after it.
#include "runtime/gradient_reduction.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "graph/errors.h"
#include "runtime/batches.h"
#include "runtime/collectives.h"
#include "runtime/rank.h"
#include "tests/runtime/host_backed_device.h"
#include "tests/runtime/training_runs.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kWide = 12, kInner = 20, kBatch = 8, kClasses = 4;
constexpr int kLayers = 4, kSteps = 4;
constexpr double kTinyMb = 300.0 / (1 << 20);  // several buckets, some of one gradient and some of more

// Layers x += tanh(x w1 + b1) w2 between two products; `tied`: the last takes the first one's matrix.
Model make_network(int64_t wide = kWide, int64_t inner = kInner, bool tied = true) {
  Model model = *new_model();
  Graph& g = *model.graph;
  unsigned seed = 1;
  const auto weight = [&](const std::string& name, const Dims& dims) { return add_weight(g, name, dims, seed++); };
  Value* ends = weight("ends", {kClasses, wide});
  Value* x = add_node(g, "MatMul", {add_input(model, "x", DType::float32, {Dim("batch"), Dim(kClasses)}), ends}, "first");
  for (int l = 0; l < kLayers; ++l) {
    const auto name = [&](const std::string& what) { return what + std::to_string(l); };
    Value* product = add_node(g, "MatMul", {x, weight(name("w1_"), {wide, inner})}, name("product"));
    Value* sum = add_node(g, "Add", {product, weight(name("b1_"), {inner})}, name("sum"));
    Value* back = add_node(g, "MatMul", {add_node(g, "Tanh", {sum}, name("tanh")), weight(name("w2_"), {inner, wide})}, name("back"));
    x = add_node(g, "Add", {x, back}, name("layer"));
  }
  Value* last =
      tied ? add_node(g, "Transpose", {ends}, "turned", {attribute("perm", std::vector<int64_t>{1, 0})}) : weight("last", {wide, kClasses});
  g.outputs = {add_node(g, "MatMul", {x, last}, "logits")};
  name_nodes_by_outputs(g);
  return model;
}

Batch batch_of(int step, int64_t samples = kBatch) {
  return classified_noise(kClasses, some_classes(samples, kClasses, 3, step), 100 + static_cast<unsigned>(step));
}

struct Case {
  std::string name;
  int data = 1, pipeline = 1, tensor = 1, micro_batches = 1;
  std::string schedule = "gpipe";
  int chunks = 1, zero = 0;
};

TrainingPlan plan_of(const Case& c, const Model& model = make_network(), double bucket_mb = kTinyMb) {
  TrainingOptions training = with_optimizer("adamw:lr=0.02");
  training.chunks = c.chunks, training.zero = c.zero, training.bucket_mb = bucket_mb;
  return partition_for_training(clone(model), cut_of(c), training);
}

Trainer make_trainer(const Case& c, SessionOptions session = {}, double bucket_mb = kTinyMb) {
  session.threads = 1;
  return Trainer(plan_of(c, make_network(), bucket_mb), {.session = session});
}

// The gradients of all parameters.
std::map<std::string, std::vector<float>> gradients_of(const Trainer& trainer) {
  std::map<std::string, std::vector<float>> gradients;
  for (const std::string& name : trainer.plan().parameters) gradients[name] = elements<float>(trainer.gradient(name));
  return gradients;
}

class GradientReductions : public ::testing::TestWithParam<Case> {};

// To the bit: after the backward pass or beside it, in one bucket or many. And as one rank does, but for rounding.
TEST_P(GradientReductions, GiveTheSameGradientsAsAfterwards) {
  const Case& c = GetParam();
  Trainer one = make_trainer({"one"}), beside = make_trainer(c), after = make_trainer(c, {.reduce_beside = false}),
          whole = make_trainer(c, {}, 25);
  for (int s = 0; s < kSteps; ++s) {
    // The last batch is uneven, or leaves some ranks without a sample.
    const bool last = s + 1 == kSteps;
    if (last && beside.plan().least_batch > 1) break;  // they must all have one
    const Batch batch = batch_of(s, !last ? kBatch : c.micro_batches == 1 ? 1 : c.micro_batches == 2 ? kBatch - 1 : kBatch);
    const StepResult wanted = one.step(batch, 0.02), got = beside.step(batch, 0.02);
    EXPECT_NEAR(got.loss, wanted.loss, 1e-5 * std::abs(wanted.loss)) << s;
    EXPECT_NEAR(got.gradient_norm, wanted.gradient_norm, 1e-4 * wanted.gradient_norm) << s;
    after.step(batch, 0.02), whole.step(batch, 0.02);
    const auto exact = gradients_of(beside), near = gradients_of(one);
    EXPECT_EQ(exact, gradients_of(after)) << s;
    EXPECT_EQ(exact, gradients_of(whole)) << s;
    for (const auto& [name, values] : near)
      for (size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(exact.at(name)[i], values[i], 3e-5) << name << " " << i << " step " << s;
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, GradientReductions,
                         ::testing::Values(Case{"data", 2}, Case{"data_2", 2, 1, 1, 2}, Case{"data_4", 2, 1, 1, 4}, Case{"three", 3},
                                           Case{"pipeline", 2, 2}, Case{"pipeline_2", 2, 2, 1, 2}, Case{"pipeline_4", 2, 2, 1, 4, "1f1b"},
                                           Case{"zero_1", 2, 1, 1, 1, "gpipe", 1, 1}, Case{"zero_1_2", 2, 1, 1, 2, "gpipe", 1, 1},
                                           Case{"zero_1_pipeline_4", 2, 2, 1, 4, "1f1b", 1, 1},
                                           Case{"interleaved", 2, 2, 1, 4, "interleaved", 2},
                                           Case{"zero_bubble", 2, 2, 1, 4, "zero-bubble-h1"},
                                           Case{"zero_bubble_h2", 2, 2, 1, 4, "zero-bubble-h2"}, Case{"tensor", 1, 1, 2, 2},
                                           Case{"all", 2, 2, 2, 2, "1f1b"}, Case{"all_zero_1", 2, 2, 2, 2, "1f1b", 1, 1},
                                           Case{"zero_2", 2, 1, 1, 2, "gpipe", 1, 2}, Case{"zero_3", 2, 2, 1, 2, "1f1b", 1, 3}),
                         [](const auto& info) { return info.param.name; });

// --- when ---

double end_of(const TraceEvent& event) {
  return event.start_us + event.duration_us;
}

// A bucket's states are final, and its exchange begins, before the backward graph of the last micro-batch has ended.
TEST(GradientReduction, BeginsWhileTheBackwardPassRuns) {
  for (const int micro_batches : {1, 3}) {
    const Case c{"data", 2, 1, 1, micro_batches};
    Trainer trainer(plan_of(c, make_network(128, 512), 0.3), {.session = {.threads = 1, .trace = true}});
    bool begun = false;
    for (int s = 0; s < 30 && (s < 3 || !begun); ++s) {
      trainer.step(batch_of(s, 192), 0.001);
      std::map<int, double> backward_end, backward_begin;  // by rank, of the last one
      const std::vector<TraceEvent> events = trainer.session().trace();
      for (const TraceEvent& e : events)
        if (e.category == "backward") backward_end[e.rank] = std::max(backward_end[e.rank], end_of(e));
      for (const TraceEvent& e : events)
        if (e.category == "backward" && end_of(e) == backward_end[e.rank]) backward_begin[e.rank] = e.start_us;
      ASSERT_EQ(backward_end.size(), 2u);
      int ready = 0;
      for (const TraceEvent& e : events) {
        begun |= e.category == "bucket" && e.name.ends_with("bucket 0") && e.start_us < backward_end[e.rank];
        if (e.category != "ready") continue;
        EXPECT_GT(e.start_us, backward_begin[e.rank]) << "not before the last micro-batch";
        ready += e.name.ends_with("bucket 0") && e.start_us < backward_end[e.rank];
      }
      // A first run with its memory in place may have to be repeated, and tells nothing before its end.
      EXPECT_EQ(ready, s > 1 ? 2 : ready) << s;
    }
    EXPECT_TRUE(begun) << "of 30 steps none began an exchange before the backward graph's end";
  }
}

TEST(GradientReduction, RunsItsPartsInOneOrderOnAllRanks) {
  std::mutex mutex;
  std::map<int, std::vector<int>> order;
  SessionOptions session;
  session.before_reduction = [&](int rank, int part) {
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::unique_lock lock(mutex);
    order[rank].push_back(part);
  };
  Trainer trainer = make_trainer({"data", 2, 1, 1, 2}, session);
  for (int s = 0; s < 2; ++s) trainer.step(batch_of(s), 0.02);
  ASSERT_EQ(order.size(), 2u);
  EXPECT_EQ(order[0], order[1]);
  ASSERT_GT(order[0].size(), 6u);
  for (size_t i = 0; i < order[0].size() / 2; ++i) EXPECT_EQ(order[0][i], static_cast<int>(i));
}

TEST(GradientReduction, CountsAnExchangeForEachBucket) {
  const TrainingPlan plan = plan_of({"data", 2, 1, 1, 2});
  const auto reduce =
      std::find_if(plan.plan->graphs.begin(), plan.plan->graphs.end(), [](const PlanGraph& g) { return g.kind == "reduce"; });
  const auto& nodes = reduce->model->graph->nodes;
  const int64_t exchanges = std::count_if(nodes.begin(), nodes.end(), [](const Node* node) { return is_collective(*node); });
  EXPECT_GT(exchanges, 4);
  for (const bool beside : {true, false}) {
    Session session(plan.plan, {.threads = 1, .reduce_beside = beside});
    session.run(batch_of(0));
    int64_t count = 0, bytes = 0, wanted = 0;
    for (const CommunicationCount& c : session.communication()) count += c.count, bytes += c.bytes;
    for (const PlanState& state : plan.plan->states)
      if (state.name.starts_with(gradient_of(""))) wanted += 4 * count_of(dims_of(*state.type.shape));
    EXPECT_EQ(count, exchanges);
    EXPECT_EQ(bytes, wanted);
  }
}

TEST(GradientReduction, AWarmStepAsksForNoMemory) {
  Trainer trainer = make_trainer({"pipeline", 2, 2, 1, 2});
  for (int s = 0; s < 6; ++s) trainer.step(batch_of(s), 0.02);
  int64_t most = 0;
  for (int s = 6; s < 9; ++s) {
    trainer.step(batch_of(s), 0.02);
    most = std::max(most, trainer.session().allocations_in_last_step());
  }
  EXPECT_EQ(most, 0);
}

// --- failures ---

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// What fails on the thread beside, in any part of any rank, ends the step on all, and the next one is as if nothing had been.
TEST(GradientReduction, AFailureInABucketEndsAllRanks) {
  for (const Case& c : {Case{"data", 2, 1, 1, 2}, Case{"pipeline", 2, 2, 1, 2, "1f1b"}}) {
    Trainer wanted = make_trainer(c);
    std::atomic<int> fails_at = -1, fails_on = -1;
    SessionOptions session;
    session.before_reduction = [&](int rank, int part) {
      if (rank == fails_on && part == fails_at) throw Error("the exchange was torn", "");
    };
    Trainer trainer = make_trainer(c, session);
    trainer.step(batch_of(0), 0.02), wanted.step(batch_of(0), 0.02);
    int step = 1;
    for (const int part : {0, 1, 2}) {
      for (const int rank : {0, c.data * c.pipeline - 1}) {
        fails_at = part, fails_on = rank;
        const auto begin = std::chrono::steady_clock::now();
        try {
          trainer.step(batch_of(step), 0.02);
          FAIL() << c.name << " part " << part;
        } catch (const Error& e) {
          EXPECT_NE(std::string(e.what()).find("torn"), std::string::npos) << e.what();
        }
        EXPECT_LT(seconds_since(begin), 4.0);
        fails_on = -1;
        const StepResult want = wanted.step(batch_of(step), 0.02), got = trainer.step(batch_of(step), 0.02);
        EXPECT_EQ(got.loss, want.loss);
        EXPECT_EQ(got.gradient_norm, want.gradient_norm);
        ++step;
      }
    }
  }
}

// A rank fails in its last micro-batch, while the others' first buckets wait for it.
TEST(GradientReduction, AFailureBesideABucketEndsAllRanks) {
  for (const Case& c : {Case{"data", 2, 1, 1, 2}, Case{"pipeline", 2, 2, 1, 2, "1f1b"}}) {
    Trainer wanted = make_trainer(c);
    std::atomic<bool> fails = false;
    std::atomic<int> begun = 0;  // first exchanges of other ranks
    SessionOptions session;
    session.before_reduction = [&](int rank, int part) { begun += rank != 0 && part == 0; };
    session.before_forward = [&](int rank, int micro_batch) {
      if (!fails || rank != 0 || micro_batch != 1) return;
      for (int i = 0; i < 200 && begun == 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      throw Error("the rank broke", "");
    };
    Trainer trainer = make_trainer(c, session);
    trainer.step(batch_of(0), 0.02), wanted.step(batch_of(0), 0.02);
    for (int step = 1; step < 4; ++step) {
      fails = true, begun = 0;
      try {
        trainer.step(batch_of(step), 0.02);
        FAIL() << c.name;
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find("the rank broke"), std::string::npos) << e.what();
      }
      EXPECT_TRUE(c.pipeline > 1 || begun > 0) << "no exchange was under way";
      fails = false;
      EXPECT_EQ(trainer.step(batch_of(step), 0.02).loss, wanted.step(batch_of(step), 0.02).loss);
    }
  }
}

// --- on a device ---

double no_time() {
  return 0;
}

// Two ranks with devices of the tests, which exchange through the host, do what ranks of the CPU do.
TEST(GradientReduction, RanksWithDevicesDoTheSame) {
  for (const Case& c : {Case{"data", 2, 1, 1, 2}, Case{"zero_1", 2, 1, 1, 1, "gpipe", 1, 1}}) {
    const TrainingPlan plan = plan_of(c);
    for (const bool beside : {true, false}) {
      Session wanted(plan.plan, {.threads = 1});
      std::vector<std::unique_ptr<Rank>> ranks;
      std::atomic<int> reductions = 0;
      SessionOptions options;
      options.reduce_beside = beside;
      options.before_reduction = [&](int, int part) { reductions += part == 0; };
      for (int d = 0; d < 2; ++d) {
        Rank::OnDevice on_device{std::make_shared<HostBackedDevice>(), nullptr,
                                 [](Communicator& group, Device& device, bool) { return make_staged_communicator(group, device); },
                                 [] { return std::make_shared<HostBackedDevice>(); }};
        ranks.push_back(std::make_unique<Rank>(plan.plan, options, d, 0, 0, 1, no_time, std::move(on_device)));
      }
      const auto world = make_thread_communicators(2);
      const auto set = [&](const std::string& name, const RuntimeValue& value) {
        wanted.set_state(name, value);
        for (const PlanState& state : plan.plan->states)
          if (state.name == name) ranks[0]->set_state(state, value), ranks[1]->set_state(state, value);
      };
      const auto run = [&](const StepInputs& inputs) {
        std::vector<std::thread> threads;
        for (size_t r = 0; r < 2; ++r) threads.emplace_back([&, r] { ranks[r]->run_step(inputs, *world[r]); });
        for (std::thread& thread : threads) thread.join();
      };
      for (int s = 0; s < kSteps; ++s) {
        const Batch batch = batch_of(s);
        wanted.run(batch);
        StepInputs inputs;
        inputs.inputs = check_inputs(*plan.plan, batch, std::vector<bool>(plan.plan->inputs.size(), false));
        inputs.batches = divide_batch(*plan.plan, inputs.inputs);
        run(inputs);
        set(kLearningRate, float_value({}, {0.05f})), set(kStep, int_value({}, {s + 1})), set(kScale, float_value({}, {0.125f}));
        wanted.update();
        inputs.update = true;
        run(inputs);
        for (const std::string& name : plan.parameters) {
          for (const std::string& state : {name, gradient_of(name)}) {
            if (c.zero > 0 && state != name) continue;  // each rank has a part
            const std::vector<float> want = elements<float>(wanted.state(state));
            for (const auto& rank : ranks) {
              const std::vector<float> got = elements<float>(rank->state(state));
              ASSERT_EQ(got.size(), want.size()) << state;
              for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-5) << c.name << " " << state << " " << i << " " << s;
            }
          }
        }
      }
      EXPECT_EQ(reductions, beside ? 2 * kSteps : 0);
    }
  }
}

TEST(GradientReduction, IsLeftForLaterWhereMicroBatchesOfDevicesMeet) {
  EXPECT_TRUE(reduces_beside(*plan_of({"data", 2}).plan, true));
  EXPECT_TRUE(reduces_beside(*plan_of({"zero_1", 2, 1, 1, 1, "gpipe", 1, 1}).plan, true));
  EXPECT_FALSE(reduces_beside(*plan_of({"one"}).plan, true));
  EXPECT_FALSE(reduces_beside(*plan_of({"pipeline", 1, 2}).plan, false));
  for (const Case& c : {Case{"tensor", 2, 1, 2}, Case{"zero_3", 2, 1, 1, 1, "gpipe", 1, 3}}) {
    EXPECT_FALSE(reduces_beside(*plan_of(c).plan, true)) << c.name;
  }
  EXPECT_TRUE(reduces_beside(*plan_of({"tensor", 2, 1, 2}).plan, false));
}

TEST(GradientReduction, AGraphIsCutIntoExchangesAndTheRest) {
  const TrainingPlan plan = plan_of({"data", 2});
  const auto reduce =
      std::find_if(plan.plan->graphs.begin(), plan.plan->graphs.end(), [](const PlanGraph& g) { return g.kind == "reduce"; });
  const auto parts = parts_of_reduction(*reduce->model);
  ASSERT_GT(parts.size(), 3u);
  size_t nodes = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    const Graph& g = *parts[p]->graph;
    verify(g);
    nodes += g.nodes.size();
    if (p + 1 < parts.size()) {
      EXPECT_EQ(g.nodes.size(), 1u);
      EXPECT_TRUE(is_collective(*g.nodes[0]));
    }
    for (const Value* v : g.inputs) EXPECT_TRUE(v->name.starts_with(kStateInput)) << v->name;
    for (const Value* v : g.outputs) EXPECT_TRUE(v->name.starts_with(kStateOutput)) << v->name;
  }
  EXPECT_EQ(nodes, reduce->model->graph->nodes.size());
}

}  // namespace
}  // namespace fretsaw
