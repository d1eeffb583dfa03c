// What surrounds a training run: evaluation, epochs, anomalies, checkpoints of a process that is killed.
#include <gmock/gmock.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <random>
#include <sstream>

#include "graph/io.h"
#include "graph/passes.h"
#include "runtime/training/checkpoint.h"
#include "tests/cli/training_data.h"

namespace fretsaw {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The losses that a log has, by step.
std::map<int64_t, double> losses_of(const std::string& log) {
  std::map<int64_t, double> losses;
  std::istringstream lines(log);
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line, nullptr, false);
    if (json.contains("loss")) losses[json["step"]] = json["loss"];
  }
  return losses;
}

// The loss on the data that a step is about to train on is that step's. Odd sizes leave smaller batches at the end.
TEST_F(CommandTest, TrainEvaluates) {
  write_samples(path("data"), 22);
  for (const std::string& model : {write_mlp("symbolic.onnx", 0), write_mlp("fixed.onnx", 22)}) {
    const Arguments train = {"train",   model, "--data",      path("data"), "--batch", "22",
                             "--steps", "4",   "--optimizer", "sgd:lr=0.5", "--json"};
    const Arguments evaluate = {"--eval", path("data"), "--eval-every", "1", "--log", path("log.jsonl")};
    const Arguments meshes[] = {{},
                                {"--micro-batches", "4"},
                                {"--mesh", "data=2,pipeline=2", "--micro-batches", "3", "--schedule", "1f1b"},
                                {"--mesh", "data=2,tensor=2", "--zero", "2"}};
    for (const Arguments& mesh : meshes) {
      const CommandResult result = fretsaw(train + evaluate + mesh);
      ASSERT_EQ(result.exit_code, 0) << result.err;
      const auto losses = result.json()["losses"], evals = result.json()["evals"];
      ASSERT_EQ(evals.size(), 4u);
      for (size_t i = 0; i < 4; ++i) EXPECT_EQ(evals[i]["step"], i + 1);
      for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(evals[i]["loss"].get<double>(), losses[i + 1].get<double>(), 1e-5);
      EXPECT_GT(std::abs(losses[0].get<double>() - losses[3].get<double>()), 1e-2);  // so that they differ from step to step
      EXPECT_THAT(read_text(path("log.jsonl")), HasSubstr("eval_loss"));
    }
  }
  const CommandResult last = fretsaw({"train", path("symbolic.onnx"), "--data", path("data"), "--batch", "4", "--steps", "3", "--eval",
                                      path("data"), "--eval-every", "2", "--json"});
  ASSERT_EQ(last.exit_code, 0) << last.err;
  EXPECT_EQ(last.json()["evals"][0]["step"], 2);
  EXPECT_EQ(last.json()["evals"][1]["step"], 3);
}

// A batch that the file fixes, and whose samples are mixed, is run whole.
TEST_F(CommandTest, TrainEvaluatesWhatMixesSamples) {
  write_samples(path("data"), 22);
  Model model = mlp(22, 6);
  Graph& g = *model.graph;
  Value* y = g.outputs[0];
  Node* mean = g.add_node("ReduceMean", {y, g.add_constant("axis", make_int64s({0}))}, {"mean"});
  Node* rest = g.add_node("Sub", {y, mean->outputs[0]}, {"rest"});
  mean->name = "mean", rest->name = "rest", rest->outputs[0]->type = y->type;
  g.outputs = {rest->outputs[0]};
  write_model(model, path("mixing.onnx"));
  const Arguments train = {"train", path("mixing.onnx"), "--data", path("data"),  "--batch",
                           "22",    "--steps",           "2",      "--optimizer", "sgd:lr=0"};
  const CommandResult result = fretsaw(train + Arguments{"--eval", path("data"), "--eval-every", "1", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NEAR(result.json()["evals"][0]["loss"].get<double>(), result.json()["losses"][0].get<double>(), 1e-5);
  EXPECT_THAT(fretsaw(train + Arguments{"--micro-batches", "2"}).err, HasSubstr("mixes the samples"));
}

TEST_F(CommandTest, TrainCountsEpochs) {
  write_samples(path("data"), 10);
  const std::string model = write_mlp("m.onnx", 0);
  const auto losses = [&](const Arguments& more) {
    const CommandResult result = fretsaw(Arguments{"train", model, "--data", path("data"), "--optimizer", "sgd:lr=0", "--json"} + more);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.json()["losses"].get<std::vector<double>>();
  };
  EXPECT_EQ(losses({"--batch", "4", "--epochs", "2"}).size(), 5u);  // 20 samples
  EXPECT_EQ(losses({"--batch", "4", "--epochs", "1"}).size(), 3u);
  EXPECT_EQ(losses({"--batch", "4"}).size(), 3u);
  EXPECT_EQ(losses({"--batch", "4", "--steps", "7"}).size(), 7u);
  const std::vector<double> one = losses({"--batch", "1", "--epochs", "2"}), other = losses({"--batch", "1", "--seed", "1"});
  ASSERT_EQ(one.size(), 20u);
  const std::vector<double> first(one.begin(), one.begin() + 10), second(one.begin() + 10, one.end());
  EXPECT_NE(first, second);
  EXPECT_NE(first, other);
  EXPECT_THAT(second, ::testing::UnorderedElementsAreArray(first));  // the learning rate is 0: each sample has its loss
  EXPECT_THAT(other, ::testing::UnorderedElementsAreArray(first));
}

TEST_F(CommandTest, TrainFindsTheFirstNodeThatIsNotFinite) {
  write_samples(path("data"), 8);
  Model model = mlp(0);
  Graph& g = *model.graph;
  Node *relu = g.nodes[1], *second = g.nodes[2];
  Node* root = g.add_node("Sqrt", {relu->out(0)}, {"q"});  // its gradient at 0 is infinite
  root->name = "root", second->inputs[0] = root->out(0);
  sort_nodes(g);
  write_model(model, path("root.onnx"));
  const Arguments mesh = {"--mesh", "pipeline=2"};
  const auto error = [&](const std::string& file, const Arguments& more) {
    const CommandResult result = fretsaw(Arguments{"train", file, "--data", path("data"), "--batch", "8", "--steps", "2"} + more);
    EXPECT_EQ(result.exit_code, 3) << result.err;
    return result.err;
  };
  for (const Arguments& more : {Arguments(), mesh}) {
    const std::string text = error(path("root.onnx"), more + Arguments{"--detect-anomaly"});
    EXPECT_THAT(text, AllOf(HasSubstr("step 0, rank "), HasSubstr("root.onnx")));
    EXPECT_THAT(text, HasSubstr("in the backward pass of node 'root'"));
  }
  const CommandResult without =  // Relu's gradient is 0 there
      fretsaw({"train", path("root.onnx"), "--data", path("data"), "--batch", "8", "--steps", "2", "--json"});
  ASSERT_EQ(without.exit_code, 0) << without.err;
  EXPECT_EQ(without.json()["skipped"], 0);

  std::vector<float> x(32, 1.0F);
  x[9] = std::numeric_limits<float>::quiet_NaN();
  write_array(x, "8, 4", path("data/x.npy"));
  const std::string text = error(write_mlp("m.onnx", 0), {"--detect-anomaly"});
  EXPECT_THAT(text, HasSubstr("node 'first' (MatMul)"));
  EXPECT_THAT(text, HasSubstr("makes NaN"));
  const CommandResult skipped = fretsaw({"train", path("m.onnx"), "--data", path("data"), "--batch", "8", "--steps", "2", "--json"});
  ASSERT_EQ(skipped.exit_code, 0) << skipped.err;
  EXPECT_EQ(skipped.json()["skipped"], 2);
}

// Masks hold infinities; what they lead to is finite.
TEST_F(CommandTest, TrainTakesInfiniteMasksForFinite) {
  write_samples(path("data"), 8);
  Model model = mlp(0);
  Graph& g = *model.graph;
  auto mask = make_tensor(DType::float32, {8});
  for (int64_t i = 0; i < 8; ++i) reinterpret_cast<float*>(mutable_data(*mask))[i] = i == 5 ? -std::numeric_limits<float>::infinity() : 0;
  Node* relu = g.nodes[1];
  Node* masked = g.add_node("Add", {g.nodes[0]->out(0), g.add_constant("mask", mask)}, {"masked"});
  Node* soft = g.add_node("Softmax", {masked->out(0)}, {"p"});
  masked->name = "masked", soft->name = "soft", relu->inputs[0] = soft->out(0);
  sort_nodes(g);
  write_model(model, path("m.onnx"));
  const CommandResult result = fretsaw(
      {"train", path("m.onnx"), "--data", path("data"), "--batch", "8", "--steps", "3", "--freeze", "mask", "--detect-anomaly", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.json()["losses"].size(), 3u);
}

// Killed at random moments while it writes a checkpoint a step, then resumed, in turns under another mesh.
TEST_F(CommandTest, TrainSurvivesBeingKilled) {
  constexpr int kSteps = 60, kTries = 5;
  write_samples(path("data"), 40);
  const Arguments train = {"train",   write_mlp("m.onnx", 0), "--data", path("data"),      "--batch", "8", "--optimizer", "adam",
                           "--steps", std::to_string(kSteps), "--log",  path("log.jsonl"), "--seed",  "5", "--json"};
  const Arguments saving = {"--every", "1", "--keep", "2", "--checkpoint"};
  const auto start = std::chrono::steady_clock::now();
  const CommandResult undisturbed = fretsaw(train + saving + Arguments{path("undisturbed")});
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  ASSERT_EQ(undisturbed.exit_code, 0) << undisturbed.err;
  const std::vector<double> whole = undisturbed.json()["losses"];
  ASSERT_EQ(whole.size(), static_cast<size_t>(kSteps));
  std::mt19937 random(11);
  std::uniform_real_distribution<double> share(0.1, 0.8);
  int64_t last = -1, killed = 0;
  for (int attempt = 0; attempt <= kTries && last + 1 < kSteps; ++attempt) {
    std::filesystem::remove(path("log.jsonl"));
    Arguments command = train + saving + Arguments{path("c")};
    const bool begun = !list_checkpoints(path("c")).empty();
    if (begun) command = command + Arguments{"--resume", path("c")};
    if (attempt % 2 == 1) command = command + Arguments{"--mesh", "data=2,pipeline=2", "--zero", "1"};
    const CommandResult result =
        attempt < kTries ? fretsaw_killed(command, static_cast<int>(took.count() * share(random))) : fretsaw(command);
    ASSERT_THAT(result.exit_code, ::testing::AnyOf(0, 128 + 9)) << result.err;
    killed += result.exit_code != 0;
    const std::map<int64_t, double> losses = losses_of(read_text(path("log.jsonl")));
    if (losses.empty()) continue;
    // One checkpoint may be unfinished, and the step after it as well.
    EXPECT_GE(losses.begin()->first, last - 1);
    for (const auto& [step, loss] : losses) EXPECT_NEAR(loss, whole[static_cast<size_t>(step)], 1e-4) << "step " << step;
    last = losses.rbegin()->first;
  }
  EXPECT_EQ(last + 1, kSteps);
  EXPECT_GE(killed, 1);
  for (const auto& entry : std::filesystem::directory_iterator(path("c")))  // no part of a checkpoint is left
    EXPECT_THAT(entry.path().filename().string(), ::testing::StartsWith("step-"));
}

TEST_F(CommandTest, TrainTellsOfACheckpointThatCannotBeWritten) {
  write_samples(path("data"), 8);
  write_text("a file", path("c"));
  const CommandResult result = fretsaw(
      {"train", write_mlp("m.onnx", 0), "--data", path("data"), "--batch", "8", "--steps", "3", "--checkpoint", path("c") + "/below"});
  EXPECT_EQ(result.exit_code, 3) << result.err;
  EXPECT_THAT(result.err, HasSubstr("cannot be written"));
}

TEST_F(CommandTest, TrainChecksItsOptions) {
  const std::string model = write_mlp("m.onnx", 0);
  write_samples(path("data"), 8);
  const auto error = [&](const Arguments& more) {
    const CommandResult result = fretsaw(Arguments{"train", model, "--data", path("data"), "--batch", "8"} + more);
    EXPECT_EQ(result.exit_code, 2) << result.err;
    return result.err;
  };
  EXPECT_THAT(error({"--precision", "fp8"}), HasSubstr("bf16"));
  EXPECT_THAT(error({"--recompute", "some"}), HasSubstr("auto"));
  EXPECT_THAT(error({"--chunks", "3"}), HasSubstr("interleaved"));
  EXPECT_THAT(error({"--eval-every", "3"}), HasSubstr("--eval"));
  EXPECT_THAT(error({"--every", "3"}), HasSubstr("--checkpoint"));
  EXPECT_THAT(error({"--zero", "4"}), HasSubstr("--zero"));
  EXPECT_THAT(error({"--memory", "much"}), HasSubstr("--memory"));
  EXPECT_THAT(error({"--steps", "0"}), HasSubstr("--steps 0"));
  EXPECT_THAT(error({"--epochs", "0"}), HasSubstr("--epochs 0"));
  EXPECT_THAT(error({"--steps", "2", "--epochs", "2"}), HasSubstr("keep one"));
  EXPECT_THAT(error({"--epochs", "9223372036854775807"}), HasSubstr("too large"));
  EXPECT_THAT(error({"--clip", "nan"}), HasSubstr("--clip"));
  EXPECT_THAT(error({"--keep", "2"}), HasSubstr("--checkpoint"));
  EXPECT_THAT(error({"--overwrite"}), HasSubstr("--save-plan"));
  EXPECT_THAT(error({"--freeze", "v1*"}), AllOf(HasSubstr("'v1*'"), HasSubstr("'w1'")));
  EXPECT_THAT(error({"--train", "w1|w9"}), HasSubstr("'w9'"));
  EXPECT_THAT(error({"--optimizer", "adamw:no_decay=1d|*.bias"}), HasSubstr("'*.bias'"));
}

// h = tanh(w h + x[:, t]) over the columns of x, whose number the model leaves open and the data tells.
TEST_F(CommandTest, TrainRunsLoopsAsOftenAsTheDataSays) {
  Model model;
  model.ir_version = 10, model.opsets[""] = newest_opset();
  model.graph = std::make_shared<Graph>();
  Graph& g = *model.graph;
  const auto add = [](Graph& graph, const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes = {}) {
    return graph.add_node(op, std::move(inputs), {graph.fresh_name(op)}, std::move(attributes))->outputs[0];
  };
  Value* x = g.add_value("x", Type::tensor(DType::float32, Shape{Dim("batch"), Dim("time")}));
  g.inputs = {x};
  Value* w = g.add_constant("w", make_float(0.5F));
  auto pass = std::make_shared<Graph>();
  pass->parent = &g;
  pass->inputs = {pass->add_value("before", Type::tensor(DType::float32)), pass->add_value("column", Type::tensor(DType::float32))};
  pass->outputs = {add(*pass, "Tanh", {add(*pass, "Add", {add(*pass, "Mul", {pass->inputs[0], w}), pass->inputs[1]})})};
  Value* first = add(g, "Gather", {x, g.add_constant("zero", make_int64(0))}, {{"axis", int64_t{1}}});
  Value* state =
      add(g, "Scan", {first, x}, {{"body", pass}, {"num_scan_inputs", int64_t{1}}, {"scan_input_axes", std::vector<int64_t>{1}}});
  Value* row = add(g, "Unsqueeze", {state, g.add_constant("last", make_int64s({1}))});
  auto head = make_tensor(DType::float32, {1, 2});
  reinterpret_cast<float*>(mutable_data(*head))[0] = -1;
  g.outputs = {add(g, "MatMul", {row, g.add_constant("head", head)})};
  write_model(model, path("loop.onnx"));
  write_samples(path("columns"), 16);
  const Arguments arguments = {"train", path("loop.onnx"), "--data",      path("columns"), "--batch", "16", "--steps",
                               "4",     "--json",          "--optimizer", "sgd:lr=0.1"};
  const CommandResult whole = fretsaw(arguments), cut = fretsaw(arguments + Arguments{"--mesh", "data=2,pipeline=2"});
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  ASSERT_EQ(cut.exit_code, 0) << cut.err;
  const auto losses = whole.json()["losses"], others = cut.json()["losses"];
  ASSERT_EQ(losses.size(), 4u);
  EXPECT_LT(losses[3].get<double>(), losses[0].get<double>());
  for (size_t s = 0; s < losses.size(); ++s) EXPECT_NEAR(losses[s].get<double>(), others[s].get<double>(), 1e-5);
}

}  // namespace
}  // namespace fretsaw
