// Updates that early ranks of zero-bubble-h2 make before it is known whether the step counts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <thread>

#include "kernels/cuda/devices.h"
#include "runtime/rank.h"
#include "runtime/thread_group.h"
#include "tests/runtime/host_backed_device.h"
#include "tests/runtime/training_runs.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kWidth = 8, kClasses = 4, kBatch = 8;

Model make_chain() {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* x = add_input(model, "x", DType::float32, {kBatch, kWidth});
  for (unsigned layer = 0; layer < 4; ++layer) {
    const std::string name = "layer" + std::to_string(layer);
    const int64_t columns = layer < 3 ? kWidth : kClasses;
    x = add_node(g, "MatMul", {x, add_weight(g, name + ".weight", {kWidth, columns}, layer + 1)}, name + ".product");
    x = add_node(g, "Add", {x, add_row(g, name + ".bias", columns, 0.1f)}, name + ".sum");
    if (layer < 3) x = add_node(g, "Tanh", {x}, name);
  }
  g.outputs = {x};
  name_nodes_by_outputs(g);
  return model;
}

Batch batch_of(int step) {
  return classified_noise(kWidth, some_classes(kBatch, kClasses, 3, step), 100 + static_cast<unsigned>(step));
}
Batch with_an_infinity(Batch batch) {
  batch.at("x").tensor.as<float>()[3] = std::numeric_limits<float>::infinity();
  return batch;
}
Batch with_ignored(Batch batch, int count) {
  for (int i = 0; i < count; ++i) batch.at("target").tensor.as<int64_t>()[i] = -100;
  return batch;
}

TrainingPlan plan_of(int pipeline, const std::string& schedule, TrainingOptions training, int data = 1) {
  PartitionOptions options;
  options.mesh.pipeline = pipeline, options.mesh.data = data, options.micro_batches = 4, options.schedule = schedule;
  return partition_for_training(make_chain(), options, training);
}

// --- which ranks ---

TEST(TrainingAhead, AllRanksButTheLastUpdateAheadUnderH2Alone) {
  const TrainingPlan h2 = plan_of(3, "zero-bubble-h2", with_optimizer("sgd:lr=0.1"));
  EXPECT_TRUE(updates_ahead(*h2.plan, 0));
  EXPECT_TRUE(updates_ahead(*h2.plan, 1));
  EXPECT_FALSE(updates_ahead(*h2.plan, 2));
  for (const char* schedule : {"gpipe", "1f1b", "zero-bubble-h1"}) {
    const TrainingPlan other = plan_of(2, schedule, with_optimizer("sgd:lr=0.1"));
    EXPECT_FALSE(updates_ahead(*other.plan, 0)) << schedule;
    EXPECT_FALSE(Session(other.plan, {.threads = 1}).updates_ahead()) << schedule;
  }
  EXPECT_TRUE(Session(h2.plan, {.threads = 1}).updates_ahead());
}

// --- trainers ---

struct Steps {
  const char* name;
  std::string optimizer, loss;
  double clip;
  bool skips;
  int data, zero;
  Batch (*batch)(int step);
};

const Steps kSteps[] = {
    {"plain", "adamw:lr=0.05", "softmax_cross_entropy", 0, false, 1, 0, batch_of},
    {"momentum", "sgd:lr=0.1,momentum=0.9,nesterov=1", "softmax_cross_entropy", 0, false, 1, 0, batch_of},
    {"skipped", "adamw:lr=0.05", "softmax_cross_entropy", 0, true, 1, 0,
     [](int step) { return step % 3 == 2 ? with_an_infinity(batch_of(step)) : batch_of(step); }},
    {"clipped", "adamw:lr=0.05", "softmax_cross_entropy", 0.55, false, 1, 0, batch_of},
    {"ignored", "sgd:lr=0.1", "softmax_cross_entropy:ignore_index=-100", 0, false, 1, 0,
     [](int step) { return with_ignored(batch_of(step), step); }},
    {"sum", "sgd:lr=0.02", "softmax_cross_entropy:reduction=sum", 0, false, 1, 0, batch_of},
    {"data", "adamw:lr=0.05", "softmax_cross_entropy", 0, false, 2, 0, batch_of},
    {"zero1", "adamw:lr=0.05", "softmax_cross_entropy", 0, true, 2, 1,
     [](int step) { return step == 3 ? with_an_infinity(batch_of(step)) : batch_of(step); }},
    {"zero3", "adamw:lr=0.05", "softmax_cross_entropy", 0, true, 2, 3,
     [](int step) { return step == 3 ? with_an_infinity(batch_of(step)) : batch_of(step); }},
};

class TrainingAheadSteps : public ::testing::TestWithParam<Steps> {};

// Trains under h2 and under h1, which updates when all ranks have ended.
void expect_same_numbers(const Steps& c, const std::string& precision, int pipeline, const SessionOptions& session) {
  SCOPED_TRACE(precision + ", pipeline=" + std::to_string(pipeline));
  TrainingOptions training = with_optimizer(c.optimizer, precision);
  training.loss = parse_loss(c.loss), training.zero = c.zero;
  const TrainerOptions options{.session = session, .loss = training.loss, .clip = c.clip};
  Trainer ahead(plan_of(pipeline, "zero-bubble-h2", training, c.data), options);
  Trainer wanted(plan_of(pipeline, "zero-bubble-h1", training, c.data), options);
  int skipped = 0;
  std::vector<double> norms;
  for (int step = 0; step < 7; ++step) {
    const StepResult got = ahead.step(c.batch(step), 0.05), want = wanted.step(c.batch(step), 0.05);
    EXPECT_EQ(got.skipped, want.skipped) << step;
    if (!want.skipped) {
      EXPECT_EQ(got.loss, want.loss) << step;
    }
    skipped += want.skipped, norms.push_back(want.gradient_norm);
  }
  if (precision != "fp16") {
    EXPECT_EQ(skipped > 0, c.skips);
  }
  const auto is_clipped = [&](double norm) { return norm > c.clip; };
  EXPECT_TRUE(c.clip == 0 ||
              (std::any_of(norms.begin() + 1, norms.end(), is_clipped) && !std::all_of(norms.begin(), norms.end(), is_clipped)))
      << "some steps must be taken for what they are not: " << ::testing::PrintToString(norms);
  EXPECT_EQ(ahead.updates(), wanted.updates());
  const auto got = ahead.kept(), want = wanted.kept();
  ASSERT_EQ(got.size(), want.size());
  for (const auto& [name, value] : want) {
    const TensorView &a = got.at(name).tensor, &b = value.tensor;
    ASSERT_EQ(a.bytes(), b.bytes()) << name;
    EXPECT_EQ(std::memcmp(a.data, b.data, a.bytes()), 0) << name;
  }
}

TEST_P(TrainingAheadSteps, GiveTheNumbersOfOtherSchedules) {
  for (const char* precision : {"fp32", "bf16", "fp16"})
    for (const int pipeline : {2, 3}) expect_same_numbers(GetParam(), precision, pipeline, {.threads = 1});
}

TEST_P(TrainingAheadSteps, GiveTheNumbersOfOtherSchedulesOnDevices) {
  const size_t found = cuda_devices().size();
  if (found == 0) GTEST_SKIP() << "no CUDA device";
  if (GetParam().data > 1) GTEST_SKIP() << "as many data ranks as there may be GPUs for";
  for (const char* precision : {"fp32", "bf16", "fp16"})
    expect_same_numbers(GetParam(), precision, 2, {.device = "cuda", .devices = {0, found > 1 ? 1 : 0}});
}
INSTANTIATE_TEST_SUITE_P(Cases, TrainingAheadSteps, ::testing::ValuesIn(kSteps), [](const auto& info) { return info.param.name; });

// --- ranks on devices ---

constexpr const char* kOptimizers[] = {"sgd:lr=0.1", "sgd:lr=0.1,momentum=0.9", "adamw:lr=0.05"};

// Two ranks with devices of the tests, one thread each.
class RanksOnDevices {
 public:
  explicit RanksOnDevices(const TrainingPlan& plan) : plan_(plan.plan), world_(make_thread_communicators(2)) {
    const auto mailbox = std::make_shared<DeviceMailbox>();
    const auto no_collectives = [](Communicator&, Device&, bool) { return std::unique_ptr<DeviceCommunicator>(); };
    for (int p = 0; p < 2; ++p)
      ranks_.push_back(std::make_unique<Rank>(
          plan_, SessionOptions{}, 0, p, 0, 1, [] { return 0.0; },
          Rank::OnDevice{std::make_shared<HostBackedDevice>(), mailbox, no_collectives, nullptr}));
  }
  void run(const Batch& batch, bool ahead) {
    inputs_.inputs = check_inputs(*plan_, batch, std::vector<bool>(plan_->inputs.size(), false));
    inputs_.batches = divide_batch(*plan_, inputs_.inputs);
    inputs_.update = false, inputs_.update_ahead = ahead;
    run_ranks();
  }
  void update() {
    inputs_.update = true, inputs_.update_ahead = false;
    run_ranks();
  }
  void set(const std::string& name, const RuntimeValue& value) {
    for (const PlanState& state : plan_->states)
      if (state.name == name)
        for (auto& rank : ranks_) rank->set_state(state, value);
  }
  Rank& rank(size_t p) { return *ranks_[p]; }
  // All that a rank keeps, but gradients and scalars.
  std::map<std::string, std::vector<std::byte>> kept(size_t p) {
    std::map<std::string, std::vector<std::byte>> all;
    for (const PlanState& state : plan_->states) {
      if (!outlives_step(state) && state.rounded_from.empty()) continue;
      const RuntimeValue value = ranks_[p]->state(state.name);
      if (value.kind == RuntimeValue::Kind::absent) continue;
      const auto* data = static_cast<const std::byte*>(value.tensor.data);
      all[state.name].assign(data, data + value.tensor.bytes());
    }
    return all;
  }
  float squared_sum(size_t p) { return *ranks_[p]->state(kSquaredSum).tensor.as<float>(); }

 private:
  void run_ranks() {
    std::vector<std::thread> threads;
    for (size_t p = 0; p < ranks_.size(); ++p) {
      threads.emplace_back([&, p] {
        try {
          ranks_[p]->run_step(inputs_, *world_[p]);
        } catch (const Error& e) {
          ADD_FAILURE() << "rank " << p << ": " << e.what();
          world_[p]->abort("the other rank failed");
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  std::shared_ptr<const Plan> plan_;
  std::vector<std::unique_ptr<Communicator>> world_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  StepInputs inputs_;
};

void set_numbers(RanksOnDevices& ranks, int step) {
  ranks.set(kLearningRate, float_value({}, {0.05f})), ranks.set(kStep, int_value({}, {step + 1})),
      ranks.set(kScale, float_value({}, {0.125f}));
}

TEST(TrainingAhead, OnDevicesAnUpdateIsTakenBackToTheByte) {
  for (const char* precision : {"fp32", "bf16"}) {
    for (const char* optimizer : kOptimizers) {
      SCOPED_TRACE(std::string(precision) + " " + optimizer);
      const TrainingPlan plan = plan_of(2, "zero-bubble-h2", with_optimizer(optimizer, precision));
      RanksOnDevices ahead(plan), behind(plan);
      int64_t allocations = 0;
      for (int step = 0; step < 8; ++step) {
        const auto before = ahead.kept(0), before_last = ahead.kept(1);
        set_numbers(ahead, step);
        ahead.run(batch_of(step), true);
        if (step % 3 == 2) ahead.run(batch_of(step), true);  // of the one before nobody says anything: it is taken back
        const auto made = ahead.kept(0);
        ASSERT_EQ(made.size(), before.size());
        for (const auto& [name, bytes] : before) EXPECT_NE(made.at(name), bytes) << name;
        EXPECT_EQ(ahead.kept(1), before_last) << "the last rank waits";
        behind.run(batch_of(step), false);
        for (const size_t p : {0, 1}) EXPECT_EQ(ahead.squared_sum(p), behind.squared_sum(p));
        if (step % 3 == 1) {
          ahead.rank(0).take_back_update();
          EXPECT_EQ(ahead.kept(0), before) << step;
          if (step == 4) continue;  // a step that does not count
          set_numbers(ahead, step);
        }
        ahead.update();
        set_numbers(behind, step), behind.update();
        for (const size_t p : {0, 1}) EXPECT_EQ(ahead.kept(p), behind.kept(p)) << step;
        if (step == 3) allocations = ahead.rank(0).allocations();
      }
      EXPECT_EQ(ahead.rank(0).allocations(), allocations) << "a warm step asks for no memory";
    }
  }
}

}  // namespace
}  // namespace fretsaw
