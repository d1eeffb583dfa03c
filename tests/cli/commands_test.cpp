// The command line's contract: the fields of JSON, the files that are written, what is refused when files are put together.
#include <gmock/gmock.h>
#include <sys/wait.h>

#include <cstdlib>
#include <cstring>
#include <functional>

#include "graph/io.h"
#include "tests/cli/command.h"

namespace fretsaw {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::StartsWith;

TEST_F(CommandTest, InspectCountsAModel) {
  const std::string model = write_mlp("m.onnx", 0);
  const json one = fretsaw({"inspect", model, "--json"}).json();
  EXPECT_EQ(one["nodes"], 3);
  EXPECT_EQ(one["ops"], json({{"MatMul", 2}, {"Relu", 1}}));
  EXPECT_EQ(one["opset"], json({{"", 20}}));
  EXPECT_EQ(one["ir_version"], 10);
  EXPECT_EQ(one["parameters"], 4 * 8 + 8 * 2);
  EXPECT_EQ(one["parameter_bytes"], 4 * (4 * 8 + 8 * 2));
  EXPECT_EQ(one["flops"], 2 * 4 * 8 + 8 + 2 * 8 * 2);
  EXPECT_EQ(one["activation_bytes"], 4 * (8 + 8));
  EXPECT_EQ(one["peak_activation_bytes"], 4 * (8 + 8));
  EXPECT_EQ(one["inputs"], json::array({{{"name", "x"}, {"dtype", "float32"}, {"shape", {"batch", 4}}}}));
  EXPECT_EQ(one["outputs"][0]["shape"], json({"batch", 2}));
  EXPECT_THAT(one["notes"].dump(), HasSubstr("batch"));
  const json ten = fretsaw({"inspect", model, "--json", "--shape", "x=10,4"}).json();
  EXPECT_EQ(ten["flops"], 10 * (2 * 4 * 8 + 8 + 2 * 8 * 2));
  EXPECT_EQ(ten["notes"], json::array());
}

TEST_F(CommandTest, InspectListsWhatGpusHaveNoKernelFor) {
  const std::string model = write_mlp("m.onnx", 0);
  EXPECT_EQ(fretsaw({"inspect", model, "--device", "gpu"}).exit_code, 2);
  const CommandResult told = fretsaw({"inspect", model, "--device", "cuda", "--json"});
  if (told.exit_code == 0) {
    EXPECT_EQ(told.json()["host_nodes"], json::array());
  } else {  // a build without CUDA
    EXPECT_EQ(told.exit_code, 4);
    EXPECT_THAT(told.json()["error"]["message"].get<std::string>(), HasSubstr("CPU only"));
  }
}

TEST_F(CommandTest, CheckTellsSoundFromUnsound) {
  const CommandResult sound = fretsaw({"check", write_mlp("m.onnx", 0), "--json"});
  EXPECT_EQ(sound.exit_code, 0) << sound.out;
  EXPECT_EQ(sound.json()["ok"], true);
  Model model = mlp(0);
  model.graph->nodes[1]->op = "NoSuchOperator";
  write_model(model, path("bad.onnx"));
  const CommandResult unsound = fretsaw({"check", path("bad.onnx"), "--json"});
  EXPECT_EQ(unsound.exit_code, 1);
  const json findings = unsound.json()["findings"];
  ASSERT_FALSE(findings.empty());
  EXPECT_EQ(findings[0]["severity"], "error");
  EXPECT_EQ(findings[0]["node"], "relu");
  EXPECT_TRUE(findings[0].contains("tensor") && findings[0].contains("rule") && findings[0].contains("message"));
}

struct Unsound {
  const char* what;
  std::function<void(Model&)> damage;
  const char *node, *rule, *says;
};

TEST_F(CommandTest, WhatCanNeverRunIsRefused) {
  const auto relu = [](Model& m) { return m.graph->nodes[1]; };
  const std::vector<Unsound> cases = {
      {"operator", [&](Model& m) { relu(m)->op = "NoSuchOp"; }, "relu", "unknown-operator", "NoSuchOp"},
      {"attribute", [&](Model& m) { relu(m)->set("colour", int64_t{1}); }, "relu", "operator-schema", "colour"},
      {"input", [&](Model& m) { relu(m)->inputs.clear(); }, "relu", "operator-schema", "input"},
      {"domain", [&](Model& m) { relu(m)->domain = "com.example"; }, "relu", "opset-import", "com.example"},
      {"opset", [&](Model& m) { m.opsets[""] = 99; }, "", "opset", "99"},
      {"old opset", [&](Model& m) { m.opsets[""] = 6; }, "", "opset", "7 to"},
      {"shapes",
       [&](Model& m) {
         m.graph->inputs[0]->type.shape = Shape{2, 3};
       },
       "first", "shape-inference", "first"},
      {"axis", [&](Model& m) { relu(m)->op = "Softmax", relu(m)->set("axis", int64_t{7}); }, "relu", "shape-inference", "axis"},
      {"type", [&](Model& m) { m.graph->outputs[0]->type.dtype = DType::int64; }, "second", "declared-type", "int64"},
  };
  for (const Unsound& c : cases) {
    Model model = mlp(2);
    c.damage(model);
    write_model(model, path("bad.onnx"));
    const CommandResult check = fretsaw({"check", path("bad.onnx"), "--json"});
    EXPECT_EQ(check.exit_code, 1) << c.what << check.out;
    json found;
    const json all = check.json()["findings"];
    for (const json& finding : all)
      if (finding["severity"] == "error" && found.is_null()) found = finding;
    ASSERT_FALSE(found.is_null()) << c.what;
    EXPECT_EQ(found["node"], c.node) << c.what;
    EXPECT_EQ(found["rule"], c.rule) << c.what;
    const CommandResult cut = fretsaw({"partition", path("bad.onnx"), "-o", path("plan"), "--mesh", "pipeline=2"});
    EXPECT_EQ(cut.exit_code, 3) << c.what;
    EXPECT_THAT(cut.err, HasSubstr(c.says)) << c.what;
    EXPECT_FALSE(std::filesystem::exists(path("plan"))) << c.what;
  }
}

TEST_F(CommandTest, WrongHintsInsideAndMissingWeightsAreWarnings) {
  Model model = mlp(2, 256);
  model.graph->nodes[0]->out(0)->type = Type::tensor(DType::float32, Shape{2, 77});
  write_model(model, path("m.onnx"), {.external_above = 0});
  std::filesystem::remove(path("m.onnx.data"));
  const CommandResult check = fretsaw({"check", path("m.onnx"), "--json"});
  EXPECT_EQ(check.exit_code, 0) << check.out;
  EXPECT_THAT(check.out, HasSubstr("missing-weights"));
  EXPECT_THAT(check.out, HasSubstr("declared-type"));
  EXPECT_EQ(fretsaw({"partition", path("m.onnx"), "-o", path("plan"), "--structure-only"}).exit_code, 0);
}

TEST_F(CommandTest, CheckFindsWhatIsNoGraph) {
  const std::vector<std::pair<std::function<void(Model&)>, std::string>> cases = {
      {[](Model& m) { m.graph->nodes[1]->inputs[0] = m.graph->add_value("nothing"); }, "'nothing'"},
      {[](Model& m) { m.graph->nodes[0]->inputs[0] = m.graph->nodes[1]->out(0); }, "cycle"},
      {[](Model& m) { m.graph->outputs[0] = m.graph->add_value("absent", m.graph->outputs[0]->type); }, "'absent'"},
  };
  for (const auto& [damage, says] : cases) {
    Model model = mlp(2);
    damage(model);
    write_model(model, path("bad.onnx"));
    const CommandResult check = fretsaw({"check", path("bad.onnx"), "--json"});
    EXPECT_EQ(check.exit_code, 1) << says << check.err;
    EXPECT_EQ(check.json()["findings"][0]["rule"], "structure");
    EXPECT_THAT(check.out, HasSubstr(says));
    EXPECT_EQ(fretsaw({"partition", path("bad.onnx"), "-o", path("plan")}).exit_code, 3) << says;
  }
}

TEST_F(CommandTest, PartitionThenRunAgreesWithTheModel) {
  const std::string model = write_mlp("m.onnx", 0);
  const CommandResult cut = fretsaw({"partition", model, "-o", path("plan"), "--mesh", "pipeline=2", "--micro-batches", "3", "--json"});
  ASSERT_EQ(cut.exit_code, 0) << cut.err;
  const json plan = cut.json();
  EXPECT_EQ(plan["mesh"], json({{"data", 1}, {"pipeline", 2}, {"tensor", 1}}));
  EXPECT_EQ(plan["micro_batches"], 3);
  ASSERT_EQ(plan["stages"].size(), 2U);
  EXPECT_EQ(plan["ranks"].size(), 2U);
  EXPECT_EQ(plan["communication"][0]["op"], "Send");
  EXPECT_EQ(plan["communication"][0]["count"], 1);
  EXPECT_EQ(fretsaw({"inspect", path("plan"), "--json"}).json(), plan);
  const CommandResult run = fretsaw({"run", path("plan"), "--random", "1", "--compare", model, "--rtol", "0", "--atol", "0", "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const json result = run.json();
  EXPECT_EQ(result["ok"], true);
  EXPECT_EQ(result["outputs"][0]["name"], "y");
  EXPECT_EQ(result["outputs"][0]["dtype"], "float32");
  EXPECT_EQ(result["outputs"][0]["shape"], json({3, 2}));
  EXPECT_EQ(result["outputs"][0]["max_abs_diff"], 0);
  EXPECT_EQ(result["time_ms"]["runs"], 1);
  EXPECT_EQ(result["ranks"].size(), 2U);
  EXPECT_EQ(result["communication"], plan["communication"]);
}

TEST_F(CommandTest, PartitionDoesNotOverwriteUnlessAsked) {
  const std::string model = write_mlp("m.onnx", 0);
  const std::vector<std::string> arguments = {"partition", model, "-o", path("plan"), "--mesh", "pipeline=2"};
  ASSERT_EQ(fretsaw(arguments).exit_code, 0);
  EXPECT_EQ(fretsaw(arguments).exit_code, 3);
  auto again = arguments;
  again.push_back("--overwrite");
  EXPECT_EQ(fretsaw(again).exit_code, 0);
}

TEST_F(CommandTest, CutsWhereTheUserSays) {
  const std::string model = write_mlp("m.onnx", 0);
  const CommandResult cut = fretsaw({"partition", model, "-o", path("plan"), "--cut", "h", "--json"});
  ASSERT_EQ(cut.exit_code, 0) << cut.err;
  EXPECT_EQ(cut.json()["stages"].size(), 2U);
  EXPECT_EQ(fretsaw({"partition", model, "-o", path("other"), "--cut", "nothing"}).exit_code, 2);
  EXPECT_EQ(fretsaw({"run", model, "--random", "1", "--shape", "z=1"}).exit_code, 2);
}

TEST_F(CommandTest, RunWritesOutputsThatItCanCompareWith) {
  const std::string model = write_mlp("m.onnx", 5);
  std::filesystem::create_directory(path("out"));
  for (const char* earlier : {"out/output_0.pb", "out/output_1.pb"}) write_text("earlier", path(earlier));
  ASSERT_EQ(fretsaw({"run", model, "--random", "1", "--output", path("out")}).exit_code, 0);
  EXPECT_FALSE(std::filesystem::exists(path("out/output_1.pb")));
  EXPECT_EQ(json::parse(read_text(path("out/outputs.json")))["outputs"][0]["shape"], json({5, 2}));
  EXPECT_EQ(read_tensor_file(path("out/output_0.pb"))->dims, (Dims{5, 2}));
  EXPECT_EQ(fretsaw({"run", model, "--random", "1", "--expect", path("out")}).exit_code, 0);
  const CommandResult other = fretsaw({"run", model, "--random", "2", "--expect", path("out"), "--json"});
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_EQ(other.json()["ok"], false);
  EXPECT_GT(other.json()["outputs"][0]["max_abs_diff"], 0);
}

TEST_F(CommandTest, RunTakesNumberedAndNamedInputs) {
  const std::string model = write_mlp("m.onnx", 0);
  auto x = make_tensor(DType::float32, {2, 4});
  write_tensor_file(*x, path("x.pb"));
  std::filesystem::create_directory(path("in"));
  write_tensor_file(*x, path("in/input_0.pb"));
  const std::vector<std::vector<std::string>> ways = {{"--inputs", path("in")}, {"--input", "x=" + path("x.pb")}};
  for (const auto& input : ways) {
    std::vector<std::string> arguments = {"run", model, "--json"};
    arguments.insert(arguments.end(), input.begin(), input.end());
    const CommandResult run = fretsaw(arguments);
    ASSERT_EQ(run.exit_code, 0) << run.err;
    EXPECT_EQ(run.json()["outputs"][0]["shape"], json({2, 2}));
  }
  EXPECT_EQ(fretsaw({"run", model, "--micro-batches", "3", "--inputs", path("in")}).exit_code, 3);
}

TEST_F(CommandTest, NumberedInputsCountAllOrThoseWithoutADefault) {
  Model model = mlp(2);
  Value* w1 = model.graph->nodes[0]->inputs[1];
  model.graph->inputs.insert(model.graph->inputs.begin(), w1);
  write_model(model, path("m.onnx"));
  const auto x = make_tensor(DType::float32, {2, 4}), w = make_tensor(DType::float32, {4, 8});
  const std::vector<std::pair<std::vector<TensorPtr>, int>> cases = {{{x}, 0}, {{w, x}, 0}, {{x, w}, 3}, {{w, x, x}, 3}};
  for (size_t i = 0; i < cases.size(); ++i) {
    const std::string folder = path("in" + std::to_string(i));
    std::filesystem::create_directory(folder);
    for (size_t k = 0; k < cases[i].first.size(); ++k)
      write_tensor_file(*cases[i].first[k], folder + "/input_" + std::to_string(k) + ".pb");
    const CommandResult run = fretsaw({"run", path("m.onnx"), "--inputs", folder});
    EXPECT_EQ(run.exit_code, cases[i].second) << i << run.err;
  }
  std::filesystem::create_directory(path("many"));
  for (const char* name : {"input_0.pb", "input_1.pb"}) write_tensor_file(*x, path(std::string("many/") + name));
  EXPECT_THAT(fretsaw({"run", write_mlp("plain.onnx", 2), "--inputs", path("many")}).err, HasSubstr("input_1.pb: is taken by no input"));
}

TEST_F(CommandTest, FailedFilesLeaveNothingBehind) {
  std::filesystem::create_directories(path("t.json"));  // a folder stands where the file should
  EXPECT_EQ(fretsaw({"run", write_mlp("m.onnx", 1), "--random", "1", "--trace", path("t.json")}).exit_code, 3);
  for (const auto& entry : std::filesystem::directory_iterator(path("")))
    EXPECT_EQ(entry.path().filename().string().find(".part"), std::string::npos) << entry.path();
}

TEST_F(CommandTest, OutputThatCanNotBeWrittenIsAnError) {
  const std::string model = write_mlp("m.onnx", 1);
  const std::string line = std::string(FRETSAW_COMMAND) + " inspect --json '" + model + "' > /dev/full 2> /dev/null";
  EXPECT_EQ(WEXITSTATUS(std::system(line.c_str())), 3);
}

TEST_F(CommandTest, RunRepeatsTimesAndTraces) {
  const CommandResult run =
      fretsaw({"run", write_mlp("m.onnx", 1), "--random", "1", "--repeat", "4", "--warmup", "1", "--trace", path("t.json"), "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const json time = run.json()["time_ms"];
  EXPECT_EQ(time["runs"], 4);
  EXPECT_LE(time["min"], time["median"]);
  EXPECT_LE(time["median"], time["max"]);
  const json trace = json::parse(read_text(path("t.json")));
  EXPECT_GE(trace["traceEvents"].size(), 2U);
}

TEST_F(CommandTest, StructureOnlyPlansRunWithRandomWeights) {
  const std::string model = path("m.onnx");
  write_model(mlp(1, 256), model, {.external_above = 0});
  ASSERT_TRUE(std::filesystem::remove(path("m.onnx.data")));
  EXPECT_EQ(fretsaw({"partition", model, "-o", path("plan"), "--mesh", "pipeline=2"}).exit_code, 3);
  for (const std::string mesh : {"pipeline=2", "tensor=2", "tensor=3"}) {
    const CommandResult cut = fretsaw({"partition", model, "-o", path("plan"), "--mesh", mesh, "--structure-only", "--overwrite"});
    ASSERT_EQ(cut.exit_code, 0) << mesh << cut.err;
    EXPECT_EQ(fretsaw({"run", path("plan"), "--random", "1"}).exit_code, 3) << mesh;
    const CommandResult run = fretsaw({"run", path("plan"), "--random", "1", "--random-weights", "7", "--compare", model});
    EXPECT_EQ(run.exit_code, 0) << mesh << run.out << run.err;
  }
}

TEST_F(CommandTest, MergedPlanGivesTheSourcesResults) {
  Model source = mlp(0, 256);  // weights of more than 1 KiB, which whole.onnx leaves out
  write_model(source, path("m.onnx"));
  ASSERT_EQ(fretsaw({"partition", path("m.onnx"), "-o", path("plan"), "--mesh", "pipeline=2,tensor=2"}).exit_code, 0);
  ASSERT_TRUE(std::filesystem::exists(path("plan/stage0.tensor1.onnx")));
  const CommandResult merged = fretsaw({"merge", path("plan"), "-o", path("merged.onnx")});
  ASSERT_EQ(merged.exit_code, 0) << merged.err;
  EXPECT_THAT(merged.out, HasSubstr("3 nodes"));
  const CommandResult run =
      fretsaw({"run", path("merged.onnx"), "--random", "1", "--compare", path("m.onnx"), "--rtol", "0", "--atol", "0", "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.err << run.out;
  EXPECT_EQ(run.json()["outputs"][0]["max_abs_diff"], 0);
  const Model read = read_model(path("merged.onnx"));
  std::map<std::string, TensorPtr> weights;
  for (const Value* v : read.graph->initializers()) weights[v->name] = v->constant;
  for (const Value* v : source.graph->initializers()) {
    ASSERT_TRUE(weights.count(v->name)) << v->name;
    EXPECT_EQ(std::memcmp(weights[v->name]->data, v->constant->data, v->constant->bytes()), 0) << v->name;
  }
}

// Rows of a weight over one axis, columns over the other.
TEST_F(CommandTest, TwoTensorAxesCutAMatrixBothWays) {
  write_model(mlp(4, 256), path("m.onnx"));
  const CommandResult made = fretsaw(
      {"partition", path("m.onnx"), "-o", path("plan"), "--mesh", "tensor_x=2,tensor_y=2", "--shard", "w1=[tensor_x,tensor_y]", "--json"});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  EXPECT_EQ(made.json()["mesh"]["tensor_x"], 2);
  EXPECT_EQ(made.json()["ranks"].size(), 4U);
  EXPECT_THAT(made.out, HasSubstr("[tensor_x, tensor_y]"));
  const CommandResult run = fretsaw({"run", path("plan"), "--random", "1", "--compare", path("m.onnx"), "--range-tol", "1e-5", "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.err << run.out;
  EXPECT_EQ(run.json()["communication"], made.json()["communication"]);
  EXPECT_EQ(fretsaw({"partition", path("m.onnx"), "-o", path("other"), "--mesh", "tensor_x=2,tensor=2"}).exit_code, 2);
  EXPECT_EQ(fretsaw({"merge", path("plan"), "-o", path("merged.onnx")}).exit_code, 3);
}

TEST_F(CommandTest, MergeRefusesWhatItCanNotDo) {
  write_model(mlp(2, 256), path("m.onnx"));
  ASSERT_EQ(fretsaw({"partition", path("m.onnx"), "-o", path("plan"), "--mesh", "pipeline=2,tensor=2"}).exit_code, 0);
  const std::vector<std::string> arguments = {"merge", path("plan"), "-o", path("merged.onnx")};
  auto expect_refused = [&](const std::vector<std::string>& line, const std::string& says) {
    const CommandResult result = fretsaw(line);
    EXPECT_EQ(result.exit_code, 3) << result.out;
    EXPECT_THAT(result.err, HasSubstr(says));
  };
  expect_refused({"merge", path("plan"), "-o", path("plan/stage0.tensor0.onnx"), "--overwrite"}, "the plan's own folder");
  std::filesystem::create_symlink(path("plan/plan.json"), path("link.onnx"));
  expect_refused({"merge", path("plan"), "-o", path("link.onnx"), "--overwrite"}, "the plan's own folder");
  ASSERT_EQ(fretsaw(arguments).exit_code, 0);
  expect_refused(arguments, "merged.onnx: there is something at this path already");
  auto again = arguments;
  again.push_back("--overwrite");
  EXPECT_EQ(fretsaw(again).exit_code, 0);

  Model piece = read_model(path("plan/stage0.tensor1.onnx"));
  ASSERT_EQ(piece.metadata.count("fretsaw.parts"), 1U);
  for (Value* v : piece.graph->initializers()) v->name += "_lost";
  piece.metadata.erase("fretsaw.parts");
  write_model(piece, path("lost.onnx"));
  std::filesystem::rename(path("lost.onnx"), path("plan/stage0.tensor1.onnx"));
  expect_refused(again, "rows [128, 256) of dimension 1 of tensor 'w1' are in no file of the plan");
  std::filesystem::remove(path("plan/whole.onnx"));
  expect_refused(again, "the plan has no whole.onnx");
}

TEST_F(CommandTest, StructureOnlyPlansMergeWithoutWeights) {
  write_model(mlp(2, 256), path("m.onnx"), {.external_above = 0});
  std::filesystem::remove(path("m.onnx.data"));
  ASSERT_EQ(fretsaw({"partition", path("m.onnx"), "-o", path("plan"), "--mesh", "tensor=2", "--structure-only"}).exit_code, 0);
  const CommandResult merged = fretsaw({"merge", path("plan"), "-o", path("merged.onnx")});
  ASSERT_EQ(merged.exit_code, 0) << merged.err;
  EXPECT_THAT(merged.out, HasSubstr("note: "));
  EXPECT_EQ(fretsaw({"run", path("merged.onnx"), "--random", "1"}).exit_code, 3);
  EXPECT_EQ(fretsaw({"run", path("merged.onnx"), "--random", "1", "--random-weights", "7", "--compare", path("m.onnx")}).exit_code, 0);
}

TEST_F(CommandTest, SimulateBenchAndDevicesHaveTheirFields) {
  const std::string model = write_mlp("m.onnx", 4);
  ASSERT_EQ(fretsaw({"partition", model, "-o", path("plan"), "--mesh", "pipeline=2", "--micro-batches", "2"}).exit_code, 0);
  const json simulated = fretsaw({"simulate", path("plan"), "--json"}).json();
  EXPECT_GT(simulated["time_us"], 0);
  EXPECT_GT(simulated["idle_share"], 0);
  ASSERT_EQ(simulated["ranks"].size(), 2U);
  EXPECT_TRUE(simulated["ranks"][0].contains("busy_us") && simulated["ranks"][0].contains("peak_micro_batches"));
  EXPECT_EQ(simulated["ranks"][0]["actions"][0]["action"], "0F0");
  const json bench = fretsaw({"bench", model, "--json"}).json();
  EXPECT_GT(bench["time_ms"]["runs"], 1);
  EXPECT_EQ(bench["ranks"].size(), 1U);
  const json devices = fretsaw({"devices", "--json"}).json();
  EXPECT_GT(devices["cpu"]["cores"], 0);
  EXPECT_GT(devices["cpu"]["memory_bytes"], 0);
  EXPECT_TRUE(devices["cuda"].is_array());
}

TEST_F(CommandTest, OddNamesStayOnOneLineAndInTheirPlace) {
  Model model = mlp(1);
  model.graph->nodes[0]->name = "a \"quoted\" name\nwith ../ and ]>";
  model.graph->nodes[0]->out(0)->name = "h,\"1\"\\";
  write_model(model, path("odd.onnx"));
  const CommandResult inspect = fretsaw({"inspect", path("odd.onnx"), "--nodes", "--json", "--dot", path("odd.dot")});
  ASSERT_EQ(inspect.exit_code, 0) << inspect.err;
  EXPECT_EQ(inspect.json()["node_list"][0]["name"], model.graph->nodes[0]->name);
  EXPECT_THAT(read_text(path("odd.dot")), HasSubstr(R"("MatMul\na \"quoted\" name\\nwith ../ and ]>")"));
  const CommandResult cut = fretsaw({"partition", path("odd.onnx"), "-o", path("plan"), "--cut", "h,\"1\"\\"});
  EXPECT_EQ(cut.exit_code, 0) << cut.err;
}

TEST_F(CommandTest, ModelListsAndWrites) {
  EXPECT_THAT(fretsaw({"model"}).out, HasSubstr("resnet50"));
  const CommandResult written = fretsaw({"model", "mlp", "-o", path("mlp.onnx"), "--set", "layers=2", "--set", "hidden=16"});
  ASSERT_EQ(written.exit_code, 0) << written.err;
  EXPECT_EQ(fretsaw({"check", path("mlp.onnx")}).exit_code, 0);
  EXPECT_EQ(fretsaw({"run", path("mlp.onnx"), "--random", "1"}).exit_code, 0);
}

TEST_F(CommandTest, HelpExitsWith0) {
  for (const char* command : {"inspect", "check", "model", "partition", "run", "merge", "simulate", "bench", "devices"}) {
    const CommandResult help = fretsaw({command, "--help"});
    EXPECT_EQ(help.exit_code, 0) << command;
    EXPECT_THAT(help.out, HasSubstr("--help"));
  }
  EXPECT_THAT(fretsaw({"--version"}).out, StartsWith("fretsaw "));
}

}  // namespace
}  // namespace fretsaw
