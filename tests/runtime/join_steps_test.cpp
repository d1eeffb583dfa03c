// Small steps of a device that do the same become one.
#include <gtest/gtest.h>

#include "runtime/program.h"
#include "tests/runtime/host_backed_device.h"
#include "tests/runtime/plans.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kCount = 96, kMany = 1 << 18;

double no_time() {
  return 0;
}

void negate(RunContext& r, size_t i) {
  const TensorView& x = r.input(i);
  const TensorView& y = r.output(i, x.dims);
  for (int64_t k = 0; k < x.count(); ++k) y.as<float>()[k] = -x.as<float>()[k];
}

class JoinableNeg : public JoinableKernel {
 public:
  const std::string& kind() const override {
    static const std::string kind = "Neg";
    return kind;
  }
  CompiledKernel join(const std::vector<std::shared_ptr<const JoinableKernel>>& members) const override {
    CompiledKernel kernel;
    kernel.run = [count = members.size()](RunContext& r) {
      for (size_t i = 0; i < count; ++i) negate(r, i);
    };
    return kernel;
  }
};

class JoiningDevice : public HostBackedDevice {
 public:
  JoiningDevice() {
    for (const auto& [key, record] : HostBackedDevice::kernels().all()) {
      KernelRecord own = record;
      if (own.op == "Neg") own.make = make_neg;
      registry_.add(own);
    }
  }
  const KernelRegistry& kernels() const override { return registry_; }

 private:
  static CompiledKernel make_neg(const CompileContext&) {
    CompiledKernel kernel;
    kernel.run = [](RunContext& r) { negate(r, 0); };
    kernel.joinable = std::make_shared<JoinableNeg>();
    return kernel;
  }
  KernelRegistry registry_;
};

// A graph that a device runs, of inputs in its memory. The first `states` outputs are the new values of the first inputs.
class OnDevice {
 public:
  OnDevice(Dims dims, size_t inputs, size_t states, const std::function<void(Graph&)>& fill, bool detect_anomaly = false) {
    model_ = new_model();
    std::vector<const RuntimeValue*> given;
    for (size_t i = 0; i < inputs; ++i) {
      add_input(*model_, "x" + std::to_string(i), DType::float32, shape_of(dims));
      host_.push_back(noise(static_cast<size_t>(count_of(dims)), static_cast<unsigned>(i)));
    }
    fill(*model_->graph);
    infer_shapes(*model_);
    context_.device = std::make_shared<JoiningDevice>();
    context_.device_memory = std::make_unique<RankMemory>(context_.device.get());
    context_.now_us = no_time, context_.detect_anomaly = detect_anomaly;
    values_.resize(inputs);
    for (size_t i = 0; i < inputs; ++i) {
      copy_pooled(context_.device_memory->pool, float_value(dims, host_[i]), values_[i], context_.device.get());
      given.push_back(&values_[i]);
    }
    ProgramCache cache(model_, model_->graph->inputs, false);
    BindingSpec binding{.binds = true, .kept = std::vector<int>(model_->graph->outputs.size(), -1)};
    for (size_t i = 0; i < states; ++i) binding.kept[i] = static_cast<int>(i);
    cache.bind(std::move(binding));
    outputs_.resize(model_->graph->outputs.size());
    cache.run(given, outputs_, context_, 0);
    for (const Step& step : cache.last_program()->steps)
      if (step.kind == Step::Kind::kernel) members_.push_back(step.outputs.size());
  }

  const std::vector<size_t>& members() const { return members_; }  // of each step: how many values it makes
  std::vector<float> output(size_t i) const { return elements<float>(outputs_[i]); }
  std::vector<float> before(size_t i) const { return host_[i]; }

 private:
  std::shared_ptr<Model> model_;
  RankContext context_;
  std::vector<std::vector<float>> host_;
  std::vector<RuntimeValue> values_, outputs_;
  std::vector<size_t> members_;
};

Value* neg(Graph& g, Value* x, const std::string& name) {
  return add_node(g, "Neg", {x}, name);
}
std::vector<float> negative(std::vector<float> x) {
  for (float& v : x) v = -v;
  return x;
}

using Counts = std::vector<size_t>;

TEST(JoinSteps, UpdatesOfWhatIsKeptAreOneStep) {
  const OnDevice d({kCount}, 3, 3, [](Graph& g) {
    for (size_t i = 0; i < 3; ++i) g.outputs.push_back(neg(g, g.inputs[i], "next" + std::to_string(i)));
  });
  EXPECT_EQ(d.members(), Counts{3});
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(d.output(i), negative(d.before(i))) << i;
}

TEST(JoinSteps, AStepDoesNotWaitForItself) {
  const OnDevice d({kCount}, 1, 0, [](Graph& g) { g.outputs = {neg(g, neg(g, g.inputs[0], "once"), "twice")}; });
  EXPECT_EQ(d.members(), (Counts{1, 1}));
  EXPECT_EQ(d.output(0), d.before(0));
}

// Two Negs stand around what takes the first one's result.
TEST(JoinSteps, NothingIsMadeTooLate) {
  const OnDevice d({kCount}, 2, 0, [](Graph& g) {
    Value* first = neg(g, g.inputs[0], "first");
    Value* taken = add_node(g, "Abs", {first}, "taken");
    g.outputs = {taken, neg(g, g.inputs[1], "second"), neg(g, taken, "third")};
  });
  EXPECT_EQ(d.members(), (Counts{1, 1, 2}));
  std::vector<float> taken = d.before(0);
  for (float& v : taken) v = std::abs(v);
  EXPECT_EQ(d.output(0), taken);
  EXPECT_EQ(d.output(1), negative(d.before(1)));
  EXPECT_EQ(d.output(2), negative(taken));
}

// The new value goes where the old one lies, which the other member reads.
TEST(JoinSteps, MembersDoNotReadWhatOthersReplace) {
  const OnDevice d({kCount}, 1, 1, [](Graph& g) { g.outputs = {neg(g, g.inputs[0], "next"), neg(g, g.inputs[0], "other")}; });
  EXPECT_EQ(d.members(), (Counts{1, 1}));
  EXPECT_EQ(d.output(0), negative(d.before(0)));
  EXPECT_EQ(d.output(1), negative(d.before(0)));
}

TEST(JoinSteps, LargeValuesInsideDoNotWait) {
  for (const bool large : {false, true}) {
    const Dims dims{large ? kMany : kCount};
    const OnDevice d(dims, 2, 0, [](Graph& g) {
      g.outputs = {neg(g, add_node(g, "Abs", {g.inputs[0]}, "inside"), "early"), neg(g, g.inputs[1], "late")};
    });
    EXPECT_EQ(d.members(), large ? (Counts{1, 1, 1}) : (Counts{1, 2})) << large;
    EXPECT_EQ(d.output(1), negative(d.before(1)));
  }
}

TEST(JoinSteps, NodesAreLookedAtOneByOneForAnomalies) {
  const auto fill = [](Graph& g) { g.outputs = {neg(g, g.inputs[0], "first"), neg(g, g.inputs[1], "second")}; };
  EXPECT_EQ(OnDevice({kCount}, 2, 0, fill, true).members(), (Counts{1, 1}));
  EXPECT_EQ(OnDevice({kCount}, 2, 0, fill, false).members(), Counts{2});
}

}  // namespace
}  // namespace fretsaw
