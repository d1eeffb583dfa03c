// Folders of plans that train: what is written is read back, and what is damaged is named.
#include "graph/training/training_plan_file.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "graph/errors.h"
#include "graph/passes.h"
#include "graph/training/plan_graphs.h"
#include "tests/error_text.h"
#include "tests/temporary_folder.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using namespace testing_files;
using testing::AllOf;
using testing::HasSubstr;

constexpr int64_t kRows = 60, kColumns = 40;

// w [60, 40]: columns in two stripes for each tensor rank, and of those half the rows for each data rank.
std::vector<PlanState::Part> parts_of_w() {
  return {{"tensor", 1, {kColumns, {{{0, 10}, {20, 30}}, {{10, 20}, {30, 40}}}}}, {"data", 0, even_cut(kRows, 2)}};
}
Type part_of_w() {
  return Type::tensor(DType::float32, Shape{kRows / 2, kColumns / 2});
}

// Graphs of one rank: their nodes only pass values on, between the inputs and outputs that such graphs have.
class GraphMaker {
 public:
  GraphMaker() {
    model_->ir_version = 10;
    model_->opsets = {{"", newest_opset()}, {"ai.fretsaw", 1}};
    model_->graph = std::make_shared<Graph>();
    model_->graph->name = "graph";
  }
  Value* input(const std::string& name, const Type& type) {
    Value* v = graph().add_value(name, type);
    graph().inputs.push_back(v);
    return v;
  }
  Value* node(const std::string& op, std::vector<Value*> inputs, const std::string& output, const Type& type, bool crosses = false) {
    const std::vector<Attribute> border = {{"axis", std::string("pipeline")}, {"peer", int64_t{1}}, {"tag", int64_t{1}}};
    Node* n = graph().add_node(op, std::move(inputs), {output}, crosses ? border : std::vector<Attribute>(), crosses ? "ai.fretsaw" : "");
    n->outputs[0]->type = type;
    return n->outputs[0];
  }
  void output(Value* v) { graph().outputs.push_back(v); }
  std::shared_ptr<Model> take() { return model_; }

 private:
  Graph& graph() { return *model_->graph; }
  std::shared_ptr<Model> model_ = std::make_shared<Model>();
};

const Type kScalar = Type::tensor(DType::float32, Shape{});

std::shared_ptr<Model> forward_graph() {
  GraphMaker g;
  Value* x = g.input("x", Type::tensor(DType::float32, Shape{Dim("batch")}));
  Value* w = g.input("state:w", part_of_w());
  Value* h = g.node("Relu", {w}, "h", part_of_w());
  g.output(g.node("ReduceSum", {x}, "loss_sum", kScalar));
  g.output(g.node("Size", {x}, "loss_count", Type::tensor(DType::int64, Shape{})));
  g.output(g.node("Send", {h}, "send:h>1", part_of_w(), true));
  return g.take();
}
std::shared_ptr<Model> backward_graph() {
  GraphMaker g;
  Value* h = g.node("Recv", {g.input("recv:h", part_of_w())}, "h", part_of_w(), true);
  g.output(g.node("Add", {g.input("state:gradient:w", part_of_w()), h}, "next:gradient:w", part_of_w()));
  return g.take();
}
std::shared_ptr<Model> reduce_graph() {
  GraphMaker g;
  g.output(g.node("ReduceSumSquare", {g.input("state:gradient:w", part_of_w())}, "next:squared_sum", kScalar));
  return g.take();
}
std::shared_ptr<Model> update_graph() {
  GraphMaker g;
  Value *w = g.input("state:w", part_of_w()), *lr = g.input("state:scalar:lr", kScalar);
  g.output(g.node("Sub", {w, lr}, "next:w", part_of_w()));
  return g.take();
}

// One stage on two data times two tensor ranks.
TrainingPlan small_plan() {
  TrainingPlan training;
  training.plan = std::make_shared<Plan>();
  Plan& plan = *training.plan;
  plan.source_file = "model.onnx", plan.source_digest = "xxh3:0";
  plan.mesh = {.data = 2, .pipeline = 1, .tensor = 2};
  for (int t = 0; t < 2; ++t) {
    const std::map<std::string, int> place = {{"tensor", t}};
    const std::string rank = ".tensor" + std::to_string(t) + ".onnx";
    plan.graphs.push_back({0, "forward", place, "stage0" + rank, forward_graph()});
    plan.graphs.push_back({1, "backward", place, "stage0.backward" + rank, backward_graph()});
    plan.graphs.push_back({2, "reduce", place, "rank0.reduce" + rank, reduce_graph()});
    for (int d = 0; d < 2; ++d)
      plan.graphs.push_back({3, "update", {{"data", d}, {"tensor", t}}, "rank0.update.data" + std::to_string(d) + rank, update_graph()});
  }
  plan.routes = {{1, 0, 1, "h", "send:h>1", "recv:h", "h", part_of_w()}};
  plan.inputs = {{"x", Type::tensor(DType::float32, Shape{Dim("batch")}), 0, {0}}};
  plan.outputs = {{"loss_sum", kScalar, 0, "sum", 0}, {"loss_count", Type::tensor(DType::int64, Shape{}), 0, "sum", 0}};
  plan.stages.resize(2);
  plan.schedule = {
      "gpipe",
      {{parse_action("0F0"), parse_action("1F0"), parse_action("0D0"), parse_action("1D0"), parse_action("2G0"), parse_action("3U0")}}};
  const Type whole = Type::tensor(DType::float32, Shape{kRows, kColumns});
  auto w = make_tensor(DType::float32, {kRows, kColumns});
  for (int64_t i = 0; i < kRows * kColumns; ++i) reinterpret_cast<float*>(mutable_data(*w))[i] = static_cast<float>(i);
  plan.states = {{"w", whole, w, false, parts_of_w()},
                 {"gradient:w", whole, nullptr, true, parts_of_w()},
                 {kLearningRate, kScalar, make_float(0.5F), false, {}},
                 {kSquaredSum, kScalar, nullptr, false, {}}};
  training.loss_sum = "loss_sum", training.loss_count = "loss_count";
  training.parameters = {"w"};
  training.least_batch = 2;
  return training;
}

class TrainingPlanFolder : public testing::Test {
 protected:
  void SetUp() override { write_training_plan(small_plan(), {"mse", "sgd:lr=0.1", {{"zero", "3"}, {"odd", "\xff"}}}, folder()); }
  std::string folder() const { return root_ / "plan"; }
  fs::path file(const std::string& name) const { return fs::path(folder()) / name; }
  std::string error_of_read() const {
    return error_of([&] { read_training_plan(folder()); });
  }
  // The error of reading with one JSON file changed; the file is whole again afterwards.
  std::string damaged(const std::string& name, const std::function<void(Json&)>& change) const {
    const std::string whole = read_bytes_of(file(name));
    Json json = Json::parse(whole);
    change(json);
    write_bytes(file(name), json.dump());
    const std::string error = error_of_read();
    write_bytes(file(name), whole);
    return error;
  }
  const TemporaryFolder root_;
};

TEST_F(TrainingPlanFolder, GoesThereAndBack) {
  EXPECT_TRUE(is_training_plan(folder()));
  EXPECT_FALSE(is_training_plan(root_.path()));
  EXPECT_EQ(std::distance(fs::directory_iterator(root_.path()), fs::directory_iterator()), 1) << "temporary folders are left";
  const TrainingPlanFile again = read_training_plan(folder());
  const TrainingPlan wanted = small_plan();
  const TrainingPlan& got = again.training;
  EXPECT_EQ(again.specs.loss, "mse");
  EXPECT_EQ(again.specs.optimizer, "sgd:lr=0.1");
  EXPECT_EQ(again.specs.options, (std::map<std::string, std::string>{{"zero", "3"}, {"odd", "\xff"}}));
  EXPECT_EQ(got.target, "");
  EXPECT_EQ(got.loss_sum, "loss_sum");
  EXPECT_EQ(got.loss_count, "loss_count");
  EXPECT_EQ(got.parameters, wanted.parameters);
  EXPECT_EQ(got.least_batch, 2);
  ASSERT_EQ(got.plan->states.size(), wanted.plan->states.size());
  for (size_t i = 0; i < wanted.plan->states.size(); ++i) {
    const PlanState &a = got.plan->states[i], &b = wanted.plan->states[i];
    EXPECT_EQ(a.name, b.name);
    EXPECT_EQ(a.type, b.type);
    EXPECT_EQ(a.starts_at_zero, b.starts_at_zero);
    ASSERT_EQ(a.parts.size(), b.parts.size());
    for (size_t k = 0; k < b.parts.size(); ++k) {
      EXPECT_EQ(a.parts[k].axis, b.parts[k].axis);
      EXPECT_EQ(a.parts[k].dim, b.parts[k].dim);
      EXPECT_EQ(a.parts[k].cut, b.parts[k].cut);
    }
    ASSERT_EQ(a.initial != nullptr, b.initial != nullptr);
    if (!b.initial) continue;
    EXPECT_THAT(a.initial->as<float>(), testing::ElementsAreArray(b.initial->as<float>()));
  }
  EXPECT_TRUE(got.plan->states[0].initial->file) << "the values are mapped";
  EXPECT_EQ(got.plan->schedule.ranks, wanted.plan->schedule.ranks);
  for (size_t i = 0; i < wanted.plan->graphs.size(); ++i)
    EXPECT_EQ(print_graph(*got.plan->graphs[i].model->graph), print_graph(*wanted.plan->graphs[i].model->graph));
}

TEST_F(TrainingPlanFolder, PlanJsonReadsLikeThis) {
  const Json json = Json::parse(read_bytes_of(file("plan.json")));
  EXPECT_EQ(json["state"][0].dump(),
            R"({"name":"w","type":{"kind":"tensor","dtype":"float32","shape":[60,40]},"initial":true,"starts_at_zero":false,"parts":[)"
            R"({"axis":"tensor","dim":1,"size":40,"intervals":[[[0,10],[20,30]],[[10,20],[30,40]]]},)"
            R"({"axis":"data","dim":0,"size":60,"intervals":[[[0,30]],[[30,60]]]}]})");
  EXPECT_EQ(json["ranks"][3]["graphs"].dump(),
            R"(["stage0.tensor1.onnx","stage0.backward.tensor1.onnx","rank0.reduce.tensor1.onnx","rank0.update.data1.tensor1.onnx"])");
}

// A plan that is read from a folder is not written over itself, and a copy of it is the same, bytes of states included.
TEST_F(TrainingPlanFolder, IsCopiedFromItsOwnFiles) {
  const TrainingPlanFile again = read_training_plan(folder());
  EXPECT_THROW(write_training_plan(again.training, again.specs, folder(), {.overwrite = true}), Error);
  const fs::path copy = root_ / "copy";
  write_training_plan(again.training, again.specs, copy.string());
  for (const auto& entry : fs::directory_iterator(folder()))
    EXPECT_EQ(read_bytes_of(entry.path()), read_bytes_of(copy / entry.path().filename())) << entry.path();
}

TEST_F(TrainingPlanFolder, NamesTheDamagedField) {
  const Json whole = Json::parse(read_bytes_of(file("training.json")));
  for (auto it = whole.begin(); it != whole.end(); ++it) {
    const std::string& key = it.key();
    EXPECT_THAT(damaged("training.json", [&](Json& j) { j.erase(key); }), AllOf(HasSubstr("training.json"), HasSubstr("'" + key + "'")));
    for (const Json& nonsense : {Json(-7), Json("\x01"), Json::array({1.5}), Json()})
      EXPECT_THAT(damaged("training.json", [&](Json& j) { j[key] = nonsense; }), AllOf(HasSubstr("training.json"), HasSubstr("'" + key)))
          << key << " = " << nonsense;
  }
  for (const char* field : {"name", "type", "initial", "starts_at_zero", "parts"})
    EXPECT_THAT(damaged("plan.json", [&](Json& j) { j["state"][1].erase(field); }), HasSubstr(std::string("state[1].") + field));
  for (const char* field : {"axis", "dim", "size", "intervals"}) {
    const std::string place = std::string("state[0].parts[1].") + field;
    EXPECT_THAT(damaged("plan.json", [&](Json& j) { j["state"][0]["parts"][1].erase(field); }), HasSubstr(place));
    EXPECT_THAT(damaged("plan.json", [&](Json& j) { j["state"][0]["parts"][1][field] = 77; }), HasSubstr(place));
  }
}

TEST_F(TrainingPlanFolder, ChecksReferences) {
  struct {
    const char *file, *error;
    std::function<void(Json&)> change;
  } const cases[] = {
      {"training.json", "parameters[0]", [](Json& j) { j["parameters"] = {"v"}; }},
      {"training.json", "momentum_buffer:w", [](Json& j) { j["optimizer"] = "sgd:momentum=0.9"; }},
      {"training.json", "loss_sum", [](Json& j) { j["loss_sum"] = "x"; }},
      {"training.json", "target", [](Json& j) { j["target"] = "y"; }},
      {"training.json", "scales_loss", [](Json& j) { j["scales_loss"] = true; }},
      {"training.json", "least_batch", [](Json& j) { j["least_batch"] = 0; }},
      {"plan.json", "state[1].name", [](Json& j) { j["state"][1]["name"] = "w"; }},
      {"plan.json", "state[0].type", [](Json& j) { j["state"][0]["type"]["shape"][0] = "n"; }},
      {"plan.json", "parts[0].intervals",
       [](Json& j) {
         j["state"][0]["parts"][0]["intervals"][0][0] = {0, 20};
       }},
      {"plan.json", "parts[0].intervals", [](Json& j) { j["state"][0]["parts"][0]["intervals"].erase(0); }},
      {"plan.json", "parts[0].intervals",
       [](Json& j) {
         j["state"][0]["parts"][0]["intervals"][0][1] = {30, 20};
       }},
      {"plan.json", "parts[0].axis", [](Json& j) { j["state"][0]["parts"][0]["axis"] = "pipeline"; }},
      {"plan.json", "state:w", [](Json& j) { j["state"][0]["parts"].erase(1); }},
      {"plan.json", "state:gradient:w", [](Json& j) { j["state"].erase(1); }},
      {"plan.json", "graphs[1].stage", [](Json& j) { j["graphs"][1]["stage"] = 0; }},
      {"plan.json", "graphs[2].stage", [](Json& j) { j["graphs"][2]["stage"] = 4; }},
      {"plan.json", "graphs[2].kind", [](Json& j) { j["graphs"][2]["kind"] = "sideways"; }},
      {"plan.json", "graphs[0].coordinates", [](Json& j) { j["graphs"][0]["coordinates"]["tensor"] = 2; }},
      {"plan.json", "'stages'", [](Json& j) { j["stages"].push_back(j["stages"][0]); }},
      {"plan.json", "schedule.ranks[0][4]", [](Json& j) { j["schedule"]["ranks"][0][4] = "3G0"; }},
      {"plan.json", "leaves out", [](Json& j) { j["schedule"]["ranks"][0].erase(5); }},
      {"plan.json", "schedule.ranks[0][5]", [](Json& j) { j["schedule"]["ranks"][0][5] = "2G0"; }},
      {"plan.json", "1F0", [](Json& j) { j["schedule"]["ranks"][0].erase(1); }},
  };
  for (const auto& c : cases) EXPECT_THAT(damaged(c.file, c.change), AllOf(HasSubstr(c.file), HasSubstr(c.error)));
  EXPECT_EQ(error_of_read(), "");
}

TEST_F(TrainingPlanFolder, ChecksTheValuesOfStates) {
  const auto values = file("states.onnx.data");
  fs::resize_file(values, fs::file_size(values) - 4096);
  EXPECT_THAT(error_of_read(), HasSubstr("states.onnx"));
  fs::remove(values);
  EXPECT_THAT(error_of_read(), HasSubstr("states.onnx"));
  EXPECT_NO_THROW(read_training_plan(folder(), /*structure_only_weights=*/true));
  EXPECT_THAT(damaged("plan.json", [](Json& j) { j["state"][2]["type"]["dtype"] = "int64"; }), HasSubstr("states.onnx"));
  fs::remove(file("states.onnx"));
  EXPECT_THAT(error_of_read(), HasSubstr("states.onnx"));
  TrainingPlan other = small_plan();
  other.plan->states[0].initial = nullptr;
  write_training_plan(other, {"mse", "sgd", {}}, folder(), {.overwrite = true});
  EXPECT_EQ(error_of_read(), "");
  EXPECT_THAT(damaged("plan.json", [](Json& j) { j["state"][0]["initial"] = true; }), AllOf(HasSubstr("states.onnx"), HasSubstr("'w'")));
}

TEST(GraphNumbers, OfAPlanThatTrains) {
  Plan plan;
  plan.mesh.pipeline = 2;
  const int n = 4;
  for (int s = 0; s < 3 * n; ++s) plan.graphs.push_back({s, s < n ? "forward" : s < 2 * n ? "backward" : "weights", {}, "", nullptr});
  const GraphNumbers numbers = graph_numbers(plan);
  ASSERT_TRUE(numbers.trains());
  EXPECT_EQ(numbers.forward, n);
  EXPECT_EQ(numbers.in_micro_batch, 3 * n);
  const std::vector<int> ranks = {0, 1, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0, 0, 1, 0, 1};  // then reduce of both ranks, and update
  for (int s = 0; s < 3 * n + 4; ++s) EXPECT_EQ(numbers.rank_of(s), ranks[static_cast<size_t>(s)]) << s;
  EXPECT_EQ(numbers.forward_of(n), n - 1);
  EXPECT_EQ(numbers.forward_of(3 * n - 1), 0);
  plan.graphs.pop_back();  // stage 0 has no weights
  EXPECT_EQ(schedule_problem(plan).rank_of_stage.back(), -1);
}

}  // namespace
}  // namespace fretsaw
