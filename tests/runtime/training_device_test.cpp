// Training on GPUs: a convolutional net and a transformer against the CPU; and, without a GPU, how their graphs are divided for one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "kernels/cuda/devices.h"
#include "runtime/device_steps.h"
#include "runtime/host_nodes.h"
#include "runtime/program.h"
#include "tests/runtime/host_backed_device.h"
#include "tests/runtime/training_runs.h"

namespace fretsaw {
namespace {

using namespace testing_plans;
using Ints = std::vector<int64_t>;

constexpr int64_t kBatch = 8, kClasses = 5;
constexpr int kSteps = 5;

// Builds a model node by node; weights are named after what they belong to.
class Layers {
 public:
  Layers() : model_(*new_model()) {}
  Graph& graph() { return *model_.graph; }
  Value* input(const std::string& name, DType type, const Dims& dims) { return add_input(model_, name, type, shape_of(dims)); }
  Value* weight(const std::string& name, const Dims& dims, float size) { return add_weight(graph(), name, dims, ++seed_, size); }
  Value* row(const std::string& name, int64_t n, float value) { return add_row(graph(), name, n, value); }
  Value* ints(const Ints& values) { return graph().add_constant("ints" + std::to_string(++seed_), make_int64s(values)); }
  Value* add(const std::string& op, std::vector<Value*> inputs, const std::string& name, std::vector<Attribute> attributes = {}) {
    return add_node(graph(), op, std::move(inputs), name, std::move(attributes));
  }
  Model finish(Value* output) {
    graph().outputs = {output};
    name_nodes_by_outputs(graph());
    return std::move(model_);
  }

  Value* normalised_convolution(Value* x, const std::string& name, const Dims& w, const std::vector<Attribute>& attributes) {
    Value* y = add("Conv", {x, weight(name + ".weight", w, 0.5f)}, name, attributes);
    const int64_t n = w[0];
    y = add("BatchNormalization",
            {y, row(name + ".scale", n, 0.9f), row(name + ".shift", n, 0.1f), row(name + ".mean", n, 0), row(name + ".var", n, 1)},
            name + ".norm");
    return add("Relu", {y}, name + ".relu");
  }
  Value* norm(Value* x, const std::string& name, int64_t n) {
    return add("LayerNormalization", {x, row(name + ".scale", n, 0.9f), row(name + ".shift", n, 0.1f)}, name);
  }
  Value* linear(Value* x, const std::string& name, int64_t in, int64_t out) {
    Value* y = add("MatMul", {x, weight(name + ".weight", {in, out}, 0.4f)}, name + ".product");
    return add("Add", {y, row(name + ".bias", out, 0.05f)}, name);
  }

 private:
  Model model_;
  unsigned seed_ = 0;
};

Model make_convolutional_net() {
  Layers l;
  const Attribute same = attribute("pads", Ints{1, 1, 1, 1});
  Value* x = l.input("x", DType::float32, {kBatch, 3, 16, 16});
  Value* y = l.normalised_convolution(x, "first", {16, 3, 3, 3}, {same});
  y = l.add("MaxPool", {y}, "pool", {attribute("kernel_shape", Ints{3, 3}), attribute("strides", Ints{2, 2}), same});
  Value* z = l.normalised_convolution(y, "depthwise", {16, 1, 3, 3}, {same, attribute("group", int64_t{16})});
  z = l.normalised_convolution(z, "second", {16, 16, 1, 1}, {});
  y = l.add("Add", {y, z}, "residual");
  // More padding on one side than on the other.
  y = l.normalised_convolution(y, "strided", {24, 16, 3, 3}, {attribute("strides", Ints{2, 2}), attribute("pads", Ints{0, 0, 1, 1})});
  y = l.add("AveragePool", {y}, "mean", {attribute("kernel_shape", Ints{2, 2}), attribute("strides", Ints{2, 2})});
  y = l.add("Flatten", {l.add("GlobalAveragePool", {y}, "all")}, "flat");
  return l.finish(l.linear(y, "classes", 24, kClasses));
}

constexpr int64_t kLength = 12, kWidth = 32, kHeads = 4, kWords = 50;

Model make_transformer() {
  Layers l;
  Value* x = l.input("x", DType::int64, {kBatch, kLength});
  Value* y = l.add("Gather", {l.weight("words", {kWords, kWidth}, 1), x}, "embedded");
  y = l.add("Add", {y, l.weight("places", {kLength, kWidth}, 0.3f)}, "placed");
  const auto heads = [&](Value* v, const std::string& name, const Ints& order) {
    v = l.add("Reshape", {v, l.ints({kBatch, kLength, kHeads, kWidth / kHeads})}, name + ".split");
    return l.add("Transpose", {v}, name + ".turned", {attribute("perm", order)});
  };
  Value* n = l.norm(y, "norm1", kWidth);
  Value* q = heads(l.linear(n, "q", kWidth, kWidth), "q", {0, 2, 1, 3});
  Value* k = heads(l.linear(n, "k", kWidth, kWidth), "k", {0, 2, 3, 1});
  Value* v = heads(l.linear(n, "v", kWidth, kWidth), "v", {0, 2, 1, 3});
  Value* p = l.add("Softmax", {l.add("MatMul", {q, k}, "scores")}, "probabilities", {attribute("axis", int64_t{-1})});
  Value* a = l.add("Transpose", {l.add("MatMul", {p, v}, "attended")}, "back", {attribute("perm", Ints{0, 2, 1, 3})});
  a = l.add("Reshape", {a, l.ints({kBatch, kLength, kWidth})}, "joined");
  y = l.add("Add", {y, l.linear(a, "out", kWidth, kWidth)}, "after");
  Value* up = l.add("Gelu", {l.linear(l.norm(y, "norm2", kWidth), "up", kWidth, 2 * kWidth)}, "gelu");
  y = l.add("Add", {y, l.linear(up, "down", 2 * kWidth, kWidth)}, "block");
  return l.finish(l.linear(l.norm(y, "norm3", kWidth), "logits", kWidth, kClasses));
}

Ints classes_of(int64_t count, int64_t below, int step) {
  return some_classes(count, below, 7, step * 3);
}

struct Network {
  const char* name;
  Model (*make)();
  Batch (*batch)(int step);
  const char* optimizer;
};
const Network kNetworks[] = {
    {"convolutional", make_convolutional_net,
     [](int step) {
       Batch batch;
       batch["x"] = float_value({kBatch, 3, 16, 16}, noise(kBatch * 3 * 256, 100 + static_cast<unsigned>(step)));
       batch["target"] = int_value({kBatch}, classes_of(kBatch, kClasses, step));
       return batch;
     },
     "sgd:lr=0.05,momentum=0.9,weight_decay=0.01"},
    {"transformer", make_transformer,
     [](int step) {
       Batch batch;
       batch["x"] = int_value({kBatch, kLength}, classes_of(kBatch * kLength, kWords, step));
       batch["target"] = int_value({kBatch, kLength}, classes_of(kBatch * kLength, kClasses, step + 1));
       return batch;
     },
     "adamw:lr=0.01,weight_decay=0.01"},
};

TrainingPlan plan_of(const Network& network, int data, int pipeline, int micro_batches, const std::string& precision = "fp32") {
  PartitionOptions options;
  options.mesh.data = data, options.mesh.pipeline = pipeline, options.micro_batches = micro_batches;
  TrainingOptions training;
  training.optimizer = parse_optimizer(network.optimizer);
  training.sync_batch_norm = data > 1;
  training.precision = precision;
  training.bucket_mb = 0.01;  // several of them
  return partition_for_training(network.make(), options, training);
}

// Two GPUs, or twice the only one; empty where there is none.
std::vector<int> two_devices() {
  const size_t found = cuda_devices().size();
  if (found == 0) return {};
  return found > 1 ? std::vector<int>{0, 1} : std::vector<int>{0, 0};
}

void expect_near(const RuntimeValue& got, const RuntimeValue& wanted, const std::string& what) {
  const std::vector<float> a = elements<float>(got), b = elements<float>(wanted);
  ASSERT_EQ(a.size(), b.size()) << what;
  float range = 1e-3f, worst = 0;
  for (size_t i = 0; i < b.size(); ++i) range = std::max(range, std::abs(b[i])), worst = std::max(worst, std::abs(a[i] - b[i]));
  EXPECT_LE(worst, 2e-3f * range) << what;
}

// What is added to all keys alike leaves a softmax as it is: the bias has no gradient but what is rounded, and Adam makes steps of that.
bool is_noise(const std::string& parameter) {
  return parameter == "k.bias";
}

class TrainingOnDevices : public ::testing::TestWithParam<int> {};

TEST_P(TrainingOnDevices, GivesTheLossesAndParametersOfTheCpu) {
  const std::vector<int> devices = two_devices();
  if (devices.empty()) GTEST_SKIP() << "no CUDA device";
  const Network& network = kNetworks[GetParam()];
  struct Cut {
    int data, pipeline, micro_batches;
  };
  for (const Cut cut : {Cut{1, 1, 1}, Cut{1, 1, 2}, Cut{2, 1, 1}, Cut{1, 2, 1}, Cut{1, 2, 2}}) {
    const std::string where = std::string(network.name) + " data=" + std::to_string(cut.data) +
                              " pipeline=" + std::to_string(cut.pipeline) + " micro-batches " + std::to_string(cut.micro_batches);
    // Statistics are those of micro-batches: the CPU is cut likewise.
    Trainer wanted(plan_of(network, 1, 1, cut.micro_batches), {.session = {.threads = 1}});
    Trainer got(plan_of(network, cut.data, cut.pipeline, cut.micro_batches), {.session = {.device = "cuda", .devices = devices}});
    for (int step = 0; step < kSteps; ++step) {
      const Batch batch = network.batch(step);
      const StepResult want = wanted.step(batch, 0.02), have = got.step(batch, 0.02);
      EXPECT_NEAR(have.loss, want.loss, 1e-3 * std::abs(want.loss)) << where << ", step " << step;
      EXPECT_EQ(have.count, want.count) << where;
      EXPECT_NEAR(have.gradient_norm, want.gradient_norm, 2e-3 * want.gradient_norm) << where << ", step " << step;
    }
    for (const auto* names : {&got.plan().parameters, &got.plan().statistics})
      for (const std::string& name : *names)
        if (!is_noise(name)) expect_near(got.parameter(name), wanted.parameter(name), where + ", " + name);
    for (const RankReport& rank : got.session().ranks())
      EXPECT_TRUE(rank.host_nodes.empty()) << where << ": " << rank.host_nodes.front() << " and others run on the host";
  }
}

INSTANTIATE_TEST_SUITE_P(Networks, TrainingOnDevices, ::testing::Values(0, 1),
                         [](const auto& info) { return std::string(kNetworks[info.param].name); });

// States that are set while a run goes on (a checkpoint's) are what the next step begins with.
TEST(TrainingOnDevices, GoesOnFromGivenStates) {
  if (two_devices().empty()) GTEST_SKIP() << "no CUDA device";
  const Network& network = kNetworks[1];
  const auto make = [&](const char* device) {
    return Trainer(plan_of(network, 1, 1, 1), {.session = {.device = device, .devices = {0}, .threads = 1}});
  };
  Trainer on_cpu = make("cpu"), on_device = make("cuda");
  for (int step = 0; step < 3; ++step) on_cpu.step(network.batch(step), 0.02), on_device.step(network.batch(step + 7), 0.02);
  on_device.restore(on_cpu.kept(), on_cpu.updates());
  for (int step = 3; step < 6; ++step) {
    const double wanted = on_cpu.step(network.batch(step), 0.02).loss;
    EXPECT_NEAR(on_device.step(network.batch(step), 0.02).loss, wanted, 1e-3 * wanted) << step;
  }
}

// --- without a GPU, but with its kernels ---

TEST(TrainingGraphs, HaveAKernelOnDevicesForEachNode) {
  if (!built_with_cuda()) GTEST_SKIP() << "a build without CUDA";
  for (const Network& network : kNetworks) {
    const TrainingPlan plan = plan_of(network, 1, 1, 1);
    for (const PlanGraph& graph : plan.plan->graphs) {
      std::string missing;
      for (const HostFallback& node : nodes_without_kernel(*graph.model, kernels_of_cuda_devices()))
        missing += node.op + " (" + node.reason + ") " + node.node + "\n";
      EXPECT_EQ(missing, "") << network.name << ", " << graph.kind << " " << graph.stage;
    }
  }
}

// A device with the kernels of GPUs, which are asked what they take and never run.
class DividedDevice : public HostBackedDevice {
 public:
  const KernelRegistry& kernels() const override { return kernels_of_cuda_devices(); }
};

TEST(TrainingGraphs, UpdateEachParameterInOneStep) {
  if (!built_with_cuda()) GTEST_SKIP() << "a build without CUDA";
  DividedDevice device;
  for (const Network& network : kNetworks) {
    const TrainingPlan plan = plan_of(network, 1, 1, 1);
    const auto update =
        std::find_if(plan.plan->graphs.begin(), plan.plan->graphs.end(), [](const PlanGraph& g) { return g.kind == "update"; });
    ASSERT_NE(update, plan.plan->graphs.end());
    const Graph& graph = *update->model->graph;
    const Consumers consumers = consumers_of(graph);
    const std::unordered_set<const Value*> outputs(graph.outputs.begin(), graph.outputs.end());
    const HostNodes host = find_host_nodes(graph, device.kernels(), &device, false);
    size_t of_parameters = 0;
    for (const auto& step : device_steps(graph, host, consumers, outputs, device, false)) {
      const CompileContext c = device_context(step, consumers, outputs, device, false);
      of_parameters += std::any_of(c.outputs.begin(), c.outputs.end(), [&](const Value* v) { return v && outputs.contains(v); });
    }
    EXPECT_EQ(of_parameters, plan.parameters.size()) << network.name;
  }
}

// BatchNormalization with the Relu behind it, and the gradient of both.
TEST(TrainingGraphs, NormaliseAndCutOffInOneStep) {
  if (!built_with_cuda()) GTEST_SKIP() << "a build without CUDA";
  DividedDevice device;
  for (const std::string precision : {"fp32", "bf16"}) {
    const TrainingPlan plan = plan_of(kNetworks[0], 1, 1, 1, precision);
    std::map<std::string, int> steps;
    for (const PlanGraph& part : plan.plan->graphs) {
      const Graph& graph = *part.model->graph;
      const Consumers consumers = consumers_of(graph);
      const std::unordered_set<const Value*> outputs(graph.outputs.begin(), graph.outputs.end());
      const HostNodes host = find_host_nodes(graph, device.kernels(), &device, false);
      for (const auto& step : device_steps(graph, host, consumers, outputs, device, false)) {
        std::string operators;
        for (const Node* node : step) operators += " " + node->op;
        if (operators.find("BatchNormalization") != std::string::npos) ++steps[operators];
      }
    }
    const std::map<std::string, int> wanted = {{" BatchNormalization Relu", 4}, {" Greater Where BatchNormalizationGrad", 4}};
    EXPECT_EQ(steps, wanted) << precision;
  }
}

}  // namespace
}  // namespace fretsaw
