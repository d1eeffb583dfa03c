// States in a device's memory: read where they lie, and given their new values there.
#include <gtest/gtest.h>

#include "graph/training/training_plan.h"
#include "runtime/batches.h"
#include "runtime/rank.h"
#include "runtime/thread_group.h"
#include "tests/runtime/host_backed_device.h"
#include "tests/runtime/training_runs.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kCount = 96;

double no_time() {
  return 0;
}

// next = a + x, of which the program says that it stays where a lies; `more` adds nodes.
class OneState {
 public:
  explicit OneState(const std::function<void(Model&, Value* a, Value* next)>& more = {},
                    std::shared_ptr<Device> device = std::make_shared<HostBackedDevice>()) {
    model_ = new_model();
    Graph& g = *model_->graph;
    Value* a = add_input(*model_, "a", DType::float32, {kCount});
    Value* x = add_input(*model_, "x", DType::float32, {kCount});
    Value* next = add_node(g, "Add", {a, x}, "next");
    g.outputs = {next};
    if (more) more(*model_, a, next);
    infer_shapes(*model_);
    context_.device = std::move(device);
    context_.device_memory = std::make_unique<RankMemory>(context_.device.get());
    context_.now_us = no_time;
    cache_ = std::make_unique<ProgramCache>(model_, g.inputs, false);
    BindingSpec binding{.binds = true, .kept = {0}};
    binding.kept.resize(g.outputs.size(), -1);
    cache_->bind(binding);
    outputs_.resize(g.outputs.size());
    copy_pooled(context_.device_memory->pool, float_value({kCount}, noise(kCount, 1)), state_, context_.device.get());
  }

  // The outputs, after a run with this x.
  std::vector<RuntimeValue>& run(const RuntimeValue& x) {
    const RuntimeValue* inputs[] = {&state_, &x};
    cache_->run(inputs, outputs_, context_, 0);
    return outputs_;
  }
  RuntimeValue& state() { return state_; }
  const Program& program() const { return *cache_->last_program(); }
  // Whether the new value is written where the old one lies, and not copied there.
  bool in_place() const {
    const Slot& made = program().slots[static_cast<size_t>(program().outputs[0])];
    return made.binding >= 0 && program().bindings[static_cast<size_t>(made.binding)].input == 0;
  }

 private:
  std::shared_ptr<Model> model_;
  RankContext context_;
  std::unique_ptr<ProgramCache> cache_;
  RuntimeValue state_;
  std::vector<RuntimeValue> outputs_;
};

std::vector<float> sum_of(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<float> sums;
  for (size_t i = 0; i < a.size(); ++i) sums.push_back(a[i] + b[i]);
  return sums;
}

TEST(BoundStates, AnElementwiseUpdateIsMadeInPlace) {
  OneState one;
  const RuntimeValue x = float_value({kCount}, noise(kCount, 2));
  std::vector<float> wanted = noise(kCount, 1);
  void* place = one.state().tensor.data;
  for (int run = 0; run < 3; ++run) {
    wanted = sum_of(wanted, elements<float>(x));
    EXPECT_EQ(one.run(x)[0].tensor.data, place);
    EXPECT_EQ(elements<float>(one.state()), wanted) << run;
  }
  EXPECT_TRUE(one.in_place());
}

// Where something reads the old value later, or is handed it, the new one is copied to its place at the end.
TEST(BoundStates, TheOldValueStaysAsLongAsItIsRead) {
  for (bool handed_over : {false, true}) {
    OneState one([&](Model& m, Value* a, Value* next) {
      Value* shape = m.graph->add_constant("shape", make_int64s({kCount / 4, 4}));
      Value* other = handed_over ? add_node(*m.graph, "Reshape", {a, shape}, "old") : add_node(*m.graph, "Sub", {next, a}, "moved");
      m.graph->outputs.push_back(other);
    });
    const RuntimeValue x = float_value({kCount}, std::vector<float>(kCount, 0.5f));
    std::vector<float> wanted = noise(kCount, 1);
    for (int run = 0; run < 3; ++run) {
      const std::vector<float> old = wanted, other = elements<float>(one.run(x)[1]);
      wanted = sum_of(wanted, elements<float>(x));
      EXPECT_EQ(elements<float>(one.state()), wanted) << run;
      for (size_t i = 0; i < kCount; ++i) EXPECT_EQ(other[i], handed_over ? old[i] : wanted[i] - old[i]) << run << " " << i;
    }
    EXPECT_FALSE(one.in_place());
  }
}

// An input that is the program's to use up: what is made of it lies there, unless somebody else holds it.
TEST(BoundStates, InputsAreWrittenOverWhereNobodyElseHoldsThem) {
  std::shared_ptr<Model> model = new_model();
  Value* x = add_input(*model, "x", DType::float32, {kCount});
  Value* inner = add_node(*model->graph, "Neg", {x}, "inner");
  Value* axis = model->graph->add_constant("axis", make_int64(0));
  model->graph->outputs = {add_node(*model->graph, "CumSum", {inner, axis}, "sums")};
  infer_shapes(*model);
  RankContext context;
  context.device = std::make_shared<HostBackedDevice>();
  context.device_memory = std::make_unique<RankMemory>(context.device.get());
  context.now_us = no_time;
  ProgramCache cache(model, model->graph->inputs, false);
  cache.bind({.binds = true, .kept = {-1}});
  cache.may_overwrite(0);
  const std::vector<float> given = noise(kCount, 1);
  std::vector<RuntimeValue> outputs(1);
  for (bool shared : {false, true, false}) {
    RuntimeValue value;
    copy_pooled(context.device_memory->pool, float_value({kCount}, given), value, context.device.get());
    const std::shared_ptr<void> other = shared ? value.owner : nullptr;
    const RuntimeValue* inputs[] = {&value};
    cache.run(inputs, outputs, context, 0);
    float sum = 0;
    const std::vector<float> got = elements<float>(outputs[0]), left = elements<float>(value);
    for (size_t i = 0; i < given.size(); ++i) {
      sum -= given[i];
      EXPECT_NEAR(got[i], sum, 1e-4) << i;
      EXPECT_EQ(left[i], shared ? given[i] : -given[i]) << i;
    }
  }
  EXPECT_TRUE(cache.last_program()->bindings[0].overwritten);
}

// What was captured was so with its addresses: outputs go where they went before with the same inputs, if that is free.
TEST(BoundStates, OutputsLieWhereTheyLayBefore) {
  std::shared_ptr<Model> model = new_model();
  Value* x = add_input(*model, "x", DType::float32, {kCount});
  model->graph->outputs = {add_node(*model->graph, "Neg", {x}, "y")};
  infer_shapes(*model);
  RankContext context;
  context.device = std::make_shared<HostBackedDevice>();
  context.device_memory = std::make_unique<RankMemory>(context.device.get());
  context.now_us = no_time;
  BufferPool& pool = context.device_memory->pool;
  ProgramCache cache(model, model->graph->inputs, false);
  cache.bind({.binds = true, .kept = {-1}});
  RuntimeValue given[2];
  for (unsigned i = 0; i < 2; ++i) copy_pooled(pool, float_value({kCount}, noise(kCount, i)), given[i], context.device.get());
  const auto run = [&](const RuntimeValue& value) {
    std::vector<RuntimeValue> outputs(1);
    const RuntimeValue* inputs[] = {&value};
    cache.run(inputs, outputs, context, 0);
    return outputs[0];
  };
  const void* places[2];
  {
    const RuntimeValue first = run(given[0]), second = run(given[1]);
    places[0] = first.tensor.data, places[1] = second.tensor.data;
    ASSERT_NE(places[0], places[1]);
  }
  for (const size_t i : {1, 0, 1, 1, 0}) EXPECT_EQ(run(given[i]).tensor.data, places[i]) << i;
  const RuntimeValue held = run(given[1]);
  EXPECT_NE(run(given[1]).tensor.data, places[1]) << "somebody holds it";
}

TEST(BoundStates, PoolsGiveTheBufferThatIsWantedIfItIsFree) {
  BufferPool pool(std::make_shared<AllocationCount>());
  std::shared_ptr<void> a = pool.take(1000), b = pool.take(1000);
  void* const places[] = {a.get(), b.get()};
  EXPECT_FALSE(pool.is_free(1000, places[1]));
  a.reset(), b.reset();
  EXPECT_TRUE(pool.is_free(1000, places[1]));
  EXPECT_FALSE(pool.is_free(100000, places[1])) << "a buffer of another size";
  b = pool.take(1000, places[1]);
  EXPECT_EQ(b.get(), places[1]);
  EXPECT_EQ(pool.take(1000, places[1]).get(), places[0]) << "somebody holds it: any other";
}

// A sum over the state is no elementwise operator: its result of the same size does not go where it reads.
TEST(BoundStates, OtherOperatorsAreNotMadeInPlace) {
  OneState one([](Model& m, Value* a, Value*) {
    Value* axis = m.graph->add_constant("axis", make_int64(0));
    m.graph->outputs[0] = add_node(*m.graph, "CumSum", {a, axis}, "sums");
  });
  std::vector<float> wanted = noise(kCount, 1);
  one.run(float_value({kCount}, noise(kCount, 2)));
  for (size_t i = 1; i < wanted.size(); ++i) wanted[i] += wanted[i - 1];
  const std::vector<float> got = elements<float>(one.state());
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(got[i], wanted[i], 1e-4) << i;
  EXPECT_FALSE(one.in_place());
}

// ScatterElements is no elementwise operator; this device's adds 1 to the data, and says whether it may write over them.
class AddingDevice : public HostBackedDevice {
 public:
  explicit AddingDevice(bool writes_over) {
    for (const auto& [key, record] : HostBackedDevice::kernels().all()) {
      KernelRecord own = record;
      if (own.op == "ScatterElements") own.make = writes_over ? make<0> : make<kOverwriteNone>;
      registry_.add(own);
    }
  }
  const KernelRegistry& kernels() const override { return registry_; }

 private:
  template <int kOverwrites>
  static CompiledKernel make(const CompileContext&) {
    CompiledKernel kernel;
    kernel.overwrites = kOverwrites;
    kernel.capturable = false;
    kernel.run = [](RunContext& r) {
      const TensorView& data = r.input(0);
      const TensorView& y = r.output(0, data.dims, data.dtype);
      for (int64_t i = 0; i < data.count(); ++i) y.as<float>()[i] = data.as<float>()[i] + 1;
    };
    return kernel;
  }
  KernelRegistry registry_;
};

TEST(BoundStates, AKernelThatMayWriteOverTheStateDoesSo) {
  for (const bool reads_it_twice : {false, true}) {
    for (const bool writes_over : {true, false}) {
      OneState one(
          [&](Model& m, Value* a, Value*) {
            Value* places = m.graph->add_constant("places", make_int64s(std::vector<int64_t>(kCount, 0)));
            Value* updates = reads_it_twice ? a : m.graph->add_constant("updates", floats({kCount}, noise(kCount, 3)));
            m.graph->outputs[0] = add_node(*m.graph, "ScatterElements", {a, places, updates}, "scattered");
          },
          std::make_shared<AddingDevice>(writes_over));
      const RuntimeValue x = float_value({kCount}, noise(kCount, 2));
      std::vector<float> wanted = noise(kCount, 1);
      for (int run = 0; run < 3; ++run) {
        one.run(x);
        for (float& number : wanted) number += 1;
        EXPECT_EQ(elements<float>(one.state()), wanted) << run;
      }
      EXPECT_EQ(one.in_place(), writes_over && !reads_it_twice) << writes_over << reads_it_twice;
    }
  }
}

TEST(BoundStates, OutputsThatAreHandedOverLieInMemoryOfTheirOwn) {
  OneState one([](Model& m, Value* a, Value*) { m.graph->outputs.push_back(add_node(*m.graph, "Neg", {a}, "negative")); });
  const RuntimeValue x = float_value({kCount}, noise(kCount, 2));
  const RuntimeValue first = one.run(x)[1];
  const std::vector<float> kept = elements<float>(first);
  const RuntimeValue second = one.run(x)[1];
  EXPECT_NE(first.tensor.data, second.tensor.data);
  EXPECT_EQ(elements<float>(first), kept);
  EXPECT_NE(elements<float>(second), kept);
}

// What a graph keeps without having read it is made at its place, too; of one value that is kept twice, the second is a copy.
TEST(BoundStates, WhatIsMadeAnewIsMadeAtItsPlace) {
  const auto model = new_model();
  Graph& g = *model->graph;
  Value* x = add_input(*model, "x", DType::float32, {kCount});
  Value* made = add_node(g, "Neg", {x}, "made");
  g.outputs = {made, add_node(g, "Identity", {made}, "again")};
  infer_shapes(*model);
  RankContext context;
  context.device = std::make_shared<HostBackedDevice>();
  context.device_memory = std::make_unique<RankMemory>(context.device.get());
  context.now_us = no_time;
  RuntimeValue states[2];
  for (RuntimeValue& state : states)
    copy_pooled(context.device_memory->pool, float_value({kCount}, noise(kCount, 1)), state, context.device.get());
  ProgramCache cache(model, g.inputs, false);
  cache.bind({.binds = true, .kept = {-1, -1}, .places = {&states[0], &states[1]}});
  for (unsigned run = 0; run < 3; ++run) {
    const RuntimeValue given = float_value({kCount}, noise(kCount, 2 + run));
    const RuntimeValue* inputs[] = {&given};
    RuntimeValue outputs[2];
    cache.run(inputs, outputs, context, 0);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(outputs[i].tensor.data, states[i].tensor.data) << run << " " << i;
      const std::vector<float> got = elements<float>(states[i]), from = elements<float>(given);
      for (size_t k = 0; k < kCount; ++k) ASSERT_EQ(got[k], -from[k]) << run << " " << i;
    }
  }
}

// --- a whole training plan ---

constexpr int64_t kIn = 6, kHidden = 8, kClasses = 4, kBatch = 8;

Model make_network() {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* x = add_input(model, "x", DType::float32, {kBatch, kIn});
  const auto row = [&](const std::string& name, float value) {
    return g.add_constant(name, floats({kHidden}, std::vector<float>(kHidden, value)));
  };
  Value* product = add_node(g, "MatMul", {x, g.add_constant("w1", floats({kIn, kHidden}, noise(kIn * kHidden, 1)))}, "product");
  Value* normal =
      add_node(g, "BatchNormalization", {product, row("scale", 0.8f), row("shift", 0.1f), row("mean", 0.2f), row("var", 1.5f)}, "normal");
  Value* w2 = g.add_constant("w2", floats({kHidden, kClasses}, noise(kHidden * kClasses, 3)));
  g.outputs = {add_node(g, "MatMul", {add_node(g, "Tanh", {normal}, "hidden"), w2}, "logits")};
  name_nodes_by_outputs(g);
  return model;
}

Batch batch_of(int step) {
  Batch batch;
  batch["x"] = float_value({kBatch, kIn}, noise(kBatch * kIn, 100 + static_cast<unsigned>(step)));
  std::vector<int64_t> classes;
  for (int64_t i = 0; i < kBatch; ++i) classes.push_back((i * 3 + step) % kClasses);
  batch["target"] = int_value({kBatch}, classes);
  return batch;
}

TEST(BoundStates, ARankWithADeviceTrainsAsOneWithout) {
  for (const char* optimizer : {"sgd:lr=0.1,momentum=0.9", "adamw:lr=0.05", "lamb:lr=0.05,weight_decay=0.1"}) {
    for (int micro_batches : {1, 2}) {
      PartitionOptions options;
      options.micro_batches = micro_batches;
      TrainingOptions training;
      training.optimizer = parse_optimizer(optimizer);
      const TrainingPlan plan = partition_for_training(make_network(), options, training);
      Session wanted(plan.plan, {.threads = 1});
      Rank rank(plan.plan, {}, 0, 0, 0, 1, no_time, {std::make_shared<HostBackedDevice>(), nullptr, nullptr});
      const auto world = make_thread_communicators(1);
      const auto set = [&](const std::string& name, const RuntimeValue& value) {
        wanted.set_state(name, value);
        for (const PlanState& state : plan.plan->states)
          if (state.name == name) rank.set_state(state, value);
      };
      int64_t allocations = 0;
      for (int step = 0; step < 6; ++step) {
        const Batch batch = batch_of(step);
        wanted.run(batch);
        StepInputs inputs;
        inputs.inputs = check_inputs(*plan.plan, batch, std::vector<bool>(plan.plan->inputs.size(), false));
        inputs.batches = divide_batch(*plan.plan, inputs.inputs);
        rank.run_step(inputs, *world[0]);
        set(kLearningRate, float_value({}, {0.05f}));
        set(kStep, int_value({}, {step + 1}));
        set(kScale, float_value({}, {0.125f}));
        wanted.update();
        inputs.update = true;
        rank.run_step(inputs, *world[0]);
        for (const PlanState& state : plan.plan->states) {
          if (state.type.dtype != DType::float32) continue;
          const std::vector<float> want = elements<float>(wanted.state(state.name)), got = elements<float>(rank.state(state.name));
          ASSERT_EQ(got.size(), want.size()) << state.name;
          for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-5) << optimizer << " " << state.name << " " << i;
        }
        if (step == 2) allocations = rank.allocations();
      }
      EXPECT_EQ(rank.allocations(), allocations) << "a warm step asks for no memory";
    }
  }
}

}  // namespace
}  // namespace fretsaw
