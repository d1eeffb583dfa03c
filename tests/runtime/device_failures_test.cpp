// Failures of ranks on GPUs: the others end with them, with one error. Ranks that share a GPU go on afterwards; several GPUs, which NCCL
// connected, refuse to.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>

#include "graph/errors.h"
#include "kernels/cuda/devices.h"
#include "tests/runtime/plans.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kWidth = 256;
constexpr int kLayers = 4, kMicroBatches = 4;

Value* weight(Graph& graph, const std::string& name, unsigned seed) {
  std::vector<float> values = noise(kWidth * kWidth, seed);
  for (float& v : values) v /= 8;
  return graph.add_constant(name, floats({kWidth, kWidth}, values));
}

Value* add_layers(Graph& graph, Value* x, unsigned seed, int ranks) {
  for (int i = 0; i < kLayers; ++i) {
    const std::string name = "y" + std::to_string(i);
    x = add_node(graph, "MatMul", {x, weight(graph, "w" + std::to_string(i), seed + static_cast<unsigned>(i))}, name);
    if (ranks > 1) {
      Node* sum = graph.add_node("AllReduce", {x}, {name + "_sum"},
                                 {attribute("axis", std::string("tensor")), attribute("group_size", int64_t{ranks})}, kCommunicationDomain);
      x = sum->outputs[0];
    }
    x = add_node(graph, "Tanh", {x}, name + "_tanh");
  }
  return x;
}

// Each rank has weights of its own, and the sum of both goes on.
std::shared_ptr<Plan> tensor_plan() {
  std::vector<std::shared_ptr<Model>> models;
  for (unsigned r = 0; r < 2; ++r) {
    auto model = new_model();
    Value* x = add_input(*model, "x", DType::float32, {Dim("batch"), Dim(kWidth)});
    model->graph->outputs = {add_layers(*model->graph, x, 10 * r, 2)};
    models.push_back(model);
  }
  auto plan = make_plan({models[0]}, kMicroBatches);
  plan->mesh.tensor = 2;
  plan->graphs[0].coordinates = {{"tensor", 0}};
  plan->graphs.push_back({0, "forward", {{"tensor", 1}}, "", models[1]});
  return plan;
}

std::shared_ptr<Plan> pipeline_plan() {
  auto first = new_model(), second = new_model();
  Value* x = add_input(*first, "x", DType::float32, {Dim("batch"), Dim(kWidth)});
  Value* made = add_layers(*first->graph, x, 0, 1);
  send(*first, made, 1);
  Value* between = receive(*second, made->name, DType::float32, {Dim("batch"), Dim(kWidth)});
  Value* y = add_layers(*second->graph, between, 10, 1);
  second->graph->outputs = {add_node(*second->graph, "Neg", {y}, "y")};
  return make_plan({first, second}, kMicroBatches);
}

// Two GPUs, or twice the only one; empty where there is none.
std::vector<int> two_devices() {
  const size_t found = cuda_devices().size();
  if (found == 0) return {};
  return found > 1 ? std::vector<int>{0, 1} : std::vector<int>{0, 0};
}

std::string error_of_run(Session& session, const std::map<std::string, RuntimeValue>& inputs) {
  try {
    session.run(inputs);
    return "";
  } catch (const Error& e) {
    return e.what();
  }
}

void expect_one_error(const std::shared_ptr<Plan>& plan, int failing, const std::vector<int>& devices) {
  std::atomic<bool> fails{false};
  SessionOptions options{.device = "cuda", .devices = devices};
  options.before_forward = [&](int rank, int micro_batch) {
    if (fails && rank == failing && micro_batch == kMicroBatches / 2) throw Error("the device fell off", "", ErrorCode::device);
  };
  Session session(plan, options);
  const std::map<std::string, RuntimeValue> inputs{{"x", float_value({4 * kMicroBatches, kWidth}, noise(4 * kMicroBatches * kWidth, 3))}};
  std::vector<float> wanted;
  for (int i = 0; i < 4; ++i) wanted = elements<float>(session.run(inputs)[0]);  // captured and replayed by then
  for (int again = 0; again < 2; ++again) {
    fails = true;
    const auto start = std::chrono::steady_clock::now();
    try {
      session.run(inputs);
      FAIL() << "the failure went unnoticed";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("rank " + std::to_string(failing)), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("the device fell off"), std::string::npos) << e.what();
      EXPECT_EQ(e.code(), ErrorCode::device);
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
    fails = false;
    if (devices[0] != devices[1]) {
      const std::string refusal = error_of_run(session, inputs);
      EXPECT_NE(refusal.find("start the program again"), std::string::npos) << refusal;
      return;
    }
    for (int i = 0; i < 3; ++i) EXPECT_EQ(elements<float>(session.run(inputs)[0]), wanted);
  }
}

// What is thrown where the model can't run for want of memory; in a few seconds, as nothing is made before.
std::string refusal_of(const std::shared_ptr<Model>& model, const std::map<std::string, RuntimeValue>& inputs) {
  const auto start = std::chrono::steady_clock::now();
  try {
    Session(make_plan({model}), {.device = "cuda", .random_weights = true}).run(inputs);
    return "";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::device);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
    return e.what();
  }
}

TEST(FailuresOnDevices, WeightsThatDoNotFit) {
  if (two_devices().empty()) GTEST_SKIP() << "no CUDA device";
  constexpr int64_t kRows = int64_t{1} << 20;  // 4 TiB of weights
  auto model = new_model();
  auto lost = std::make_shared<Tensor>();
  lost->dtype = DType::float32;
  lost->dims = {kRows, kRows};
  lost->missing = "weights.bin is not there";
  Value* x = add_input(*model, "x", DType::float32, {Dim(1), Dim(kRows)});
  model->graph->outputs = {add_node(*model->graph, "MatMul", {x, model->graph->add_constant("w", lost)}, "y")};
  const std::string refusal = refusal_of(model, {{"x", make_value(DType::float32, {1, kRows})}});
  EXPECT_NE(refusal.find("cuda:0 needs 4096.0 GiB and has "), std::string::npos) << refusal;
}

TEST(FailuresOnDevices, ValuesThatDoNotFit) {
  if (two_devices().empty()) GTEST_SKIP() << "no CUDA device";
  auto model = new_model();
  Value* x = add_input(*model, "x", DType::float32, {Dim(1)});
  Value* repeats = model->graph->add_constant("repeats", make_int64s({int64_t{1} << 40}));  // 4 TiB of values
  model->graph->outputs = {add_node(*model->graph, "Tile", {x, repeats}, "y")};
  const std::string refusal = refusal_of(model, {{"x", float_value({1}, {1})}});
  EXPECT_NE(refusal.find("4096.0 GiB for values between nodes"), std::string::npos) << refusal;
}

TEST(FailuresOnDevices, OfARankThatOthersMeetInCollectives) {
  const std::vector<int> devices = two_devices();
  if (devices.empty()) GTEST_SKIP() << "no CUDA device";
  for (int failing : {0, 1}) expect_one_error(tensor_plan(), failing, devices);
}

TEST(FailuresOnDevices, OfAStageThatOthersSendTo) {
  const std::vector<int> devices = two_devices();
  if (devices.empty()) GTEST_SKIP() << "no CUDA device";
  for (int failing : {0, 1}) expect_one_error(pipeline_plan(), failing, devices);
}

}  // namespace
}  // namespace fretsaw
