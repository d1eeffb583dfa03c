// Training in half precision through fused attention: the steps are those of products, masks and softmax one by one, on every mesh.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/cuda/devices.h"
#include "runtime/evaluate.h"
#include "runtime/host_nodes.h"
#include "tests/runtime/training_runs.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kWords = 11, kHeads = 4, kHead = 8, kWide = kHeads * kHead, kLength = 6, kBatch = 8;
constexpr int kLayers = 4, kSteps = 4;

// Layers x += attention(norm(x) w) o, each with its scale and causal mask computed from sizes, as PyTorch's older exporter writes them.
class TextModel {
 public:
  explicit TextModel(const Dim& batch) : model_(*new_model()), graph_(*model_.graph) {
    Value* words = weight("words", {kWords, kWide});
    Value* x = node("Gather", {words, add_input(model_, "ids", DType::int64, {batch, Dim(kLength)})}, "embedded");
    for (int l = 0; l < kLayers; ++l) x = layer(x, "l" + std::to_string(l) + "_");
    graph_.outputs = {node("MatMul", {x, weight("head", {kWide, kWords})}, "logits")};
    name_nodes_by_outputs(graph_);
  }
  Model take() { return std::move(model_); }

 private:
  Value* node(const std::string& op, std::vector<Value*> inputs, const std::string& output, std::vector<Attribute> attributes = {}) {
    return add_node(graph_, op, std::move(inputs), output, std::move(attributes));
  }
  Value* weight(const std::string& name, const Dims& dims) { return add_weight(graph_, name, dims, seed_++); }
  // Constant nodes: initializers would learn.
  Value* number(float value, const std::string& name) { return node("Constant", {}, name, {attribute("value", floats({}, {value}))}); }
  Value* ints(const std::vector<int64_t>& values, const std::string& name) { return graph_.add_constant(name, make_int64s(values)); }

  Value* heads(Value* part, const std::string& name, std::vector<int64_t> perm) {
    return node("Transpose", {node("Reshape", {part, ints({0, 0, kHeads, kHead}, name + "_dims")}, name + "_cut")}, name,
                {attribute("perm", std::move(perm))});
  }

  Value* layer(Value* x, const std::string& l) {
    Value* norm = node("LayerNormalization", {x, weight(l + "scale", {kWide}), weight(l + "shift", {kWide})}, l + "norm");
    Value* joined = node("MatMul", {norm, weight(l + "w", {kWide, 3 * kWide})}, l + "qkv");
    const Node& split = *graph_.add_node("Split", {joined, ints({kWide, kWide, kWide}, l + "sizes")}, {l + "q0", l + "k0", l + "v0"},
                                         {attribute("axis", int64_t{2})});
    Value *q = heads(split.outputs[0], l + "q", {0, 2, 1, 3}), *k = heads(split.outputs[1], l + "k", {0, 2, 3, 1}),
          *v = heads(split.outputs[2], l + "v", {0, 2, 1, 3});
    Value* size = node("Shape", {q}, l + "size", {attribute("start", int64_t{3})});
    Value* width = node("Cast", {size}, l + "width", {attribute("to", static_cast<int64_t>(DType::float32))});
    Value* scale = node("Div", {number(1, l + "one"), node("Sqrt", {width}, l + "root")}, l + "factor");
    Value* half = node("Sqrt", {scale}, l + "half");
    Value* scores = node("MatMul", {node("Mul", {q, half}, l + "qs"), node("Mul", {k, half}, l + "ks")}, l + "scores");
    Value* ones = node("Expand", {number(1, l + "filled"), ints({kLength, kLength}, l + "square")}, l + "ones");
    Value* lower = node("Trilu", {ones}, l + "lower", {attribute("upper", int64_t{0})});
    Value* hidden = node("Equal", {lower, number(0, l + "zero")}, l + "hidden");
    Value* mask = node("Where", {hidden, number(-INFINITY, l + "none"), number(0, l + "all")}, l + "mask");
    Value* weights = node("Softmax", {node("Add", {scores, mask}, l + "masked")}, l + "weights");
    Value* turned = node("Transpose", {node("MatMul", {weights, v}, l + "attended")}, l + "turned",
                         {attribute("perm", std::vector<int64_t>{0, 2, 1, 3})});
    Value* rows = node("Reshape", {turned, ints({0, 0, kWide}, l + "rows_dims")}, l + "rows");
    return node("Add", {x, node("MatMul", {rows, weight(l + "o", {kWide, kWide})}, l + "out")}, l + "sum");
  }

  Model model_;
  Graph& graph_;
  unsigned seed_ = 1;
};

Batch batch_of(int step) {
  return some_text(kBatch, kLength, kWords, step);
}

struct Case {
  std::string name;
  int data = 1, pipeline = 1, tensor = 1, micro_batches = 1;
  int zero = 0;
  std::string recompute = "none", precision = "bf16";
  bool fused = true;
  Dim batch = Dim("batch");
};

TrainingPlan make_plan(const Case& c) {
  TrainingOptions training = with_optimizer("adamw:lr=0.02", c.precision);
  training.zero = c.zero, training.recompute = c.recompute;
  if (c.fused) training.evaluate = evaluate_on_constants;
  return partition_for_training(TextModel(c.batch).take(), cut_of(c), training);
}

Trainer make_trainer(const Case& c, const std::string& device = "cpu") {
  TrainerOptions with;
  with.session.device = device;
  if (device != "cpu") with.session.devices = {0};
  with.session.threads = 1;
  return Trainer(make_plan(c), with);
}

class TrainingAttention : public ::testing::TestWithParam<Case> {};

TEST_P(TrainingAttention, GivesTheStepsOfItsParts) {
  const Case& c = GetParam();
  Trainer fused = make_trainer(c), parts = make_trainer({.name = "parts", .precision = "fp32"});
  EXPECT_EQ(count_nodes(fused, "AttentionGrad"), kLayers * c.tensor);
  EXPECT_EQ(count_nodes(fused, "Softmax"), 0);
  EXPECT_EQ(count_nodes(parts, "AttentionGrad"), 0);
  for (int s = 0; s < kSteps; ++s) {
    const StepResult got = fused.step(batch_of(s), 0.02), wanted = parts.step(batch_of(s), 0.02);
    EXPECT_NEAR(got.loss, wanted.loss, 2e-2 * wanted.loss) << s;
    EXPECT_NEAR(got.gradient_norm, wanted.gradient_norm, 3e-2 * wanted.gradient_norm) << s;
    if (s > 0) continue;
    for (const std::string& name : parts.plan().parameters) {
      const std::vector<float> a = elements<float>(parts.gradient(name)), b = elements<float>(fused.gradient(name));
      ASSERT_EQ(a.size(), b.size()) << name;
      float largest = 0;
      for (const float x : a) largest = std::max(largest, std::abs(x));
      for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 4e-2 * largest) << name << " " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, TrainingAttention,
                         ::testing::Values(Case{.name = "one"}, Case{.name = "number_for_the_batch", .batch = Dim(kBatch)},
                                           Case{.name = "micro_batches", .micro_batches = 2},
                                           Case{.name = "number_for_the_batch_in_parts", .micro_batches = 4, .batch = Dim(kBatch)},
                                           Case{.name = "tensor", .tensor = 2}, Case{.name = "pipeline", .pipeline = 2, .micro_batches = 2},
                                           Case{.name = "zero_3", .data = 2, .zero = 3}, Case{.name = "recompute", .recompute = "all"}),
                         [](const auto& info) { return info.param.name; });

// Its first steps overflow and are left out, while the loss's scale falls.
TEST(TrainingAttention, TrainsInFloat16) {
  Trainer half = make_trainer({.name = "half", .precision = "fp16"}), wide = make_trainer({.name = "wide", .precision = "fp32"});
  int taken = 0;
  for (int s = 0; s < 20 && taken < kSteps; ++s) {
    const StepResult got = half.step(batch_of(taken), 0.02);
    EXPECT_TRUE(std::isfinite(got.loss)) << s;
    if (got.skipped) continue;
    const StepResult wanted = wide.step(batch_of(taken++), 0.02);
    EXPECT_NEAR(got.loss, wanted.loss, 1e-2 * wanted.loss) << s;
    EXPECT_NEAR(got.gradient_norm, wanted.gradient_norm, 1e-2 * wanted.gradient_norm) << s;
  }
  EXPECT_EQ(taken, kSteps);
}

TEST(TrainingAttention, ComputedMasksAreReadWithAnEvaluator) {
  for (const bool evaluates : {true, false}) {
    const Trainer trainer = make_trainer({.name = "masks", .fused = evaluates});
    int found = 0;
    for (const PlanGraph& g : trainer.plan().plan->graphs) {
      for (const Node* node : g.model->graph->nodes) {
        if (node->op != "AttentionGrad") continue;
        ++found;
        EXPECT_EQ(node->get_int("is_causal", 0), evaluates ? 1 : 0);
        EXPECT_EQ(node->input(4) == nullptr, evaluates);
      }
    }
    EXPECT_EQ(found, kLayers);
  }
}

TEST(TrainingAttention, GivesTheStepsOfTheCpuOnDevices) {
  if (cuda_devices().empty()) GTEST_SKIP() << "no CUDA device";
  for (const Case& c : {Case{.name = "bf16"}, Case{.name = "masks", .fused = false}, Case{.name = "recompute", .recompute = "all"}}) {
    Trainer on_cpu = make_trainer(c), on_device = make_trainer(c, "cuda");
    for (int s = 0; s < kSteps; ++s) {
      const StepResult wanted = on_cpu.step(batch_of(s), 0.02), got = on_device.step(batch_of(s), 0.02);
      EXPECT_NEAR(got.loss, wanted.loss, 2e-2 * wanted.loss) << c.name << ", step " << s;
      EXPECT_NEAR(got.gradient_norm, wanted.gradient_norm, 3e-2 * wanted.gradient_norm) << c.name << ", step " << s;
    }
    for (const RankReport& rank : on_device.session().ranks())
      EXPECT_TRUE(rank.host_nodes.empty()) << c.name << ": " << rank.host_nodes.front();
  }
}

TEST(TrainingAttention, HasAKernelOnDevicesForEachNode) {
  if (!built_with_cuda()) GTEST_SKIP() << "a build without CUDA";
  for (const char* precision : {"bf16", "fp16"}) {
    const TrainingPlan plan = make_plan({.name = "graphs", .precision = precision, .batch = Dim(kBatch)});
    for (const PlanGraph& graph : plan.plan->graphs) {
      if (graph.kind != "forward" && graph.kind != "backward") continue;
      std::string missing;
      for (const HostFallback& node : nodes_without_kernel(*graph.model, kernels_of_cuda_devices()))
        missing += node.op + " (" + node.reason + ") " + node.node + "\n";
      EXPECT_EQ(missing, "") << precision << ", " << graph.kind << " " << graph.stage;
    }
  }
}

}  // namespace
}  // namespace fretsaw
