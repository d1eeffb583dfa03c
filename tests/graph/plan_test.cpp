// Plan folders: what is written is read back, and what is damaged is named.
#include "graph/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "graph/errors.h"
#include "graph/passes.h"
#include "tests/error_text.h"
#include "tests/temporary_folder.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using namespace testing_files;

Value* border_node(Graph& g, const char* op, Value* in, const std::string& out) {
  Node* n = g.add_node(op, {in}, {out},
                       {{"axis", std::string("pipeline"), "", ""}, {"peer", int64_t{op[0] == 'S'}, "", ""}, {"tag", int64_t{1}, "", ""}},
                       "ai.fretsaw");
  n->outputs[0]->type = in->type;
  return n->outputs[0];
}

// y = relu(x + w) in two stages, cut between the two.
Plan small_plan() {
  Type type = Type::tensor(DType::float32, Shape{Dim("batch"), 400});
  auto model = [] {
    auto m = std::make_shared<Model>();
    m->ir_version = 10;
    m->opsets = {{"", newest_opset()}, {"ai.fretsaw", 1}};
    m->graph = std::make_shared<Graph>();
    m->graph->name = "stage";
    return m;
  };
  auto first = model(), second = model();
  Graph &a = *first->graph, &b = *second->graph;
  Value* x = a.add_value("x", type);
  a.inputs = {x};
  auto w = make_tensor(DType::float32, {400});
  for (int i = 0; i < 400; ++i) reinterpret_cast<float*>(mutable_data(*w))[i] = static_cast<float>(i);
  w->name = "w";
  Value* h = a.add_node("Add", {x, a.add_constant("w", w)}, {"h"})->outputs[0];
  h->type = type;
  a.outputs = {border_node(a, "Send", h, "send:h>1")};
  Value* outside = b.add_value("recv:h", type);
  b.inputs = {outside};
  Value* y = b.add_node("Relu", {border_node(b, "Recv", outside, "h")}, {"y"})->outputs[0];
  y->type = type;
  b.outputs = {y};

  Plan plan;
  plan.source_file = "model.onnx";
  plan.source_digest = "xxh3:0";
  plan.mesh.pipeline = 2;
  plan.micro_batches = 1;
  plan.link_bytes_per_us = 10;
  plan.link_latency_us = 2;
  plan.graphs = {{0, "forward", {}, "stage0.onnx", first}, {1, "forward", {}, "stage1.onnx", second}};
  plan.routes = {{1, 0, 1, "h", "send:h>1", "recv:h", "h", type}};
  plan.inputs = {{"x", type, 0, {0}}};
  plan.outputs = {{"y", type, 1, "concat", 0}};
  plan.stages = {{400, 1.5, 1600, 3200, 1600}, {400, 1, 0, 3200, 0}};
  plan.schedule = {"gpipe",
                   {{parse_action("0F0"), parse_action("0S0>1"), parse_action("0D0")},
                    {parse_action("1R0<0"), parse_action("1F0"), parse_action("1D0")}}};
  plan.notes = {"costs assumed batch=1"};
  return plan;
}

class PlanFolder : public testing::Test {
 protected:
  std::string folder(const std::string& name = "plan") const { return root_ / name; }
  std::string error_of_read() const {
    return error_of([&] { read_plan(folder()); });
  }
  const TemporaryFolder root_;
};

TEST_F(PlanFolder, GoesThereAndBack) {
  Plan plan = small_plan();
  write_plan(plan, folder() + "/");
  EXPECT_TRUE(is_plan_folder(folder()));
  EXPECT_FALSE(is_plan_folder(root_.path()));
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(folder())) files.push_back(entry.path().filename().string());
  std::sort(files.begin(), files.end());
  EXPECT_EQ(files, (std::vector<std::string>{"plan.json", "stage0.onnx", "stage0.onnx.data", "stage1.onnx"}));
  EXPECT_EQ(std::distance(fs::directory_iterator(root_.path()), fs::directory_iterator()), 1) << "temporary folders are left";
  Plan again = read_plan(folder());
  EXPECT_EQ(again.folder, folder());
  EXPECT_EQ(again.source_digest, plan.source_digest);
  EXPECT_EQ(again.mesh.pipeline, 2);
  EXPECT_EQ(again.routes[0].from_name, "send:h>1");
  EXPECT_EQ(again.routes[0].type, plan.routes[0].type);
  EXPECT_EQ(again.inputs[0].stages, plan.inputs[0].stages);
  EXPECT_EQ(again.outputs[0].merge, "concat");
  EXPECT_EQ(again.schedule.ranks, plan.schedule.ranks);
  EXPECT_EQ(again.notes, plan.notes);
  EXPECT_EQ(again.stages[0].time_us, 1.5);
  EXPECT_EQ(again.link_bytes_per_us, 10);
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(print_graph(*again.graphs[i].model->graph), print_graph(*plan.graphs[i].model->graph));
  const Value* w = again.graphs[0].model->graph->initializers().at(0);
  ASSERT_TRUE(w->constant->file) << "the weight is mapped";
  EXPECT_EQ(w->constant->file_offset % 64, 0u);
  EXPECT_EQ(w->constant->as<float>()[399], 399);
}

TEST_F(PlanFolder, JsonReadsLikeThis) {
  write_plan(small_plan(), folder());
  Json json = Json::parse(read_bytes_of(fs::path(folder()) / "plan.json"));
  EXPECT_EQ(json["format_version"], 1);
  EXPECT_EQ(json["schedule"].dump(), R"({"name":"gpipe","ranks":[["0F0","0S0>1","0D0"],["1R0<0","1F0","1D0"]]})");
  EXPECT_EQ(
      json["graphs"].dump(),
      R"([{"stage":0,"kind":"forward","coordinates":{},"file":"stage0.onnx"},{"stage":1,"kind":"forward","coordinates":{},"file":"stage1.onnx"}])");
  EXPECT_EQ(json["ranks"][1].dump(),
            R"({"rank":1,"coordinates":{"data":0,"pipeline":1,"tensor":0},"stages":[1],"graphs":["stage1.onnx"]})");
  EXPECT_EQ(
      json["routes"].dump(),
      R"([{"tag":1,"from_stage":0,"to_stage":1,"from_rank":0,"to_rank":1,"value":"h","from_name":"send:h>1","to_name":"recv:h","source":"h",)"
      R"("type":{"kind":"tensor","dtype":"float32","shape":["batch",400]}}])");
}

TEST_F(PlanFolder, RefusesWhatItWouldDestroy) {
  Plan plan = small_plan();
  write_plan(plan, folder());
  EXPECT_THROW(write_plan(plan, folder()), Error);
  plan.notes = {"second"};
  write_plan(plan, folder(), {.overwrite = true});
  EXPECT_EQ(read_plan(folder()).notes, plan.notes);
  fs::create_directories(folder("other"));
  write_bytes(folder("other") + "/thesis.txt", "all of it");
  EXPECT_THROW(write_plan(plan, folder("other"), {.overwrite = true}), Error);
  EXPECT_TRUE(fs::exists(folder("other") + "/thesis.txt"));
  // The plan's own weights come from the folder that it would replace.
  Plan again = read_plan(folder());
  EXPECT_THROW(write_plan(again, folder(), {.overwrite = true}), Error);
  EXPECT_NO_THROW(write_plan(again, folder("copy")));
  fs::create_directories(folder("empty"));
  EXPECT_NO_THROW(write_plan(plan, folder("empty")));
}

TEST_F(PlanFolder, NamesAreAnyBytes) {
  Plan plan = small_plan();
  std::string odd = "a/../\"b\"\n\xff\xfe {hex}";
  plan.inputs[0].name = odd;
  plan.graphs[0].model->graph->inputs[0]->name = odd;
  plan.notes = {odd, "\xc3\xa4", "\xed\xa0\x80"};
  write_plan(plan, folder());
  Json json = Json::parse(read_bytes_of(fs::path(folder()) / "plan.json"));
  EXPECT_EQ(json["notes"][1], "\xc3\xa4");
  EXPECT_TRUE(json["notes"][0].is_object());
}

// Every field at every level, left out and made nonsense: an error that names it, never a crash.
TEST_F(PlanFolder, NamesTheDamagedField) {
  write_plan(small_plan(), folder());
  fs::path file = fs::path(folder()) / "plan.json";
  Json whole = Json::parse(read_bytes_of(file));
  std::vector<std::string> unused = {"ranks", "predicted", "state"};  // for readers of the file
  for (auto it = whole.begin(); it != whole.end(); ++it) {
    if (std::count(unused.begin(), unused.end(), it.key())) continue;
    Json damaged = whole;
    damaged.erase(it.key());
    write_bytes(file, damaged.dump());
    EXPECT_THAT(error_of_read(), testing::AllOf(testing::HasSubstr("plan.json"), testing::HasSubstr("'" + it.key()))) << it.key();
    for (const Json& nonsense : {Json(-7), Json("\x01"), Json::array({1.5, Json::object()}), Json()}) {
      if (it.key() == "batch" && nonsense == -7) continue;
      damaged = whole;
      damaged[it.key()] = nonsense;
      if (damaged == whole || (nonsense.is_string() && whole[it.key()].is_string())) continue;
      write_bytes(file, damaged.dump());
      EXPECT_NE(error_of_read(), "") << it.key() << " = " << nonsense;
    }
    if (!it->is_array() || it->empty() || !(*it)[0].is_object()) continue;
    for (auto field = (*it)[0].begin(); field != (*it)[0].end(); ++field) {
      if (field.key() == "from_rank" || field.key() == "to_rank" || (it.key() == "stages" && field.key() == "stage")) continue;
      damaged = whole;
      damaged[it.key()][0].erase(field.key());
      write_bytes(file, damaged.dump());
      EXPECT_THAT(error_of_read(), testing::HasSubstr(it.key() + "[0]." + field.key()));
    }
  }
}

TEST_F(PlanFolder, ChecksReferences) {
  write_plan(small_plan(), folder());
  fs::path file = fs::path(folder()) / "plan.json";
  Json whole = Json::parse(read_bytes_of(file));
  auto damage = [&](const std::function<void(Json&)>& f) {
    Json json = whole;
    f(json);
    write_bytes(file, json.dump());
    return error_of_read();
  };
  EXPECT_THAT(damage([](Json& j) { j["routes"][0]["from_name"] = "nothing"; }), testing::HasSubstr("routes[0].from_name"));
  EXPECT_THAT(damage([](Json& j) { j["routes"][0]["to_stage"] = 7; }), testing::HasSubstr("routes[0].to_stage"));
  EXPECT_THAT(damage([](Json& j) { j["outputs"][0]["name"] = "z"; }), testing::HasSubstr("outputs[0]"));
  EXPECT_THAT(damage([](Json& j) { j["inputs"][0]["stages"] = {1}; }), testing::HasSubstr("inputs[0].stages"));
  EXPECT_THAT(damage([](Json& j) { j["graphs"][0]["file"] = "../model.onnx"; }), testing::HasSubstr("graphs[0].file"));
  EXPECT_THAT(damage([](Json& j) { j["schedule"]["ranks"][0][0] = "0F9"; }), testing::HasSubstr("plan.json"));
  EXPECT_THAT(damage([](Json& j) { j["schedule"]["ranks"][0][0] = "hello"; }), testing::HasSubstr("schedule.ranks[0][0]"));
  EXPECT_THAT(damage([](Json& j) { j["format_version"] = 99; }), testing::HasSubstr("version 99"));
  EXPECT_EQ(damage([](Json&) {}), "");
  write_bytes(file, "{\"format_version\": 1,");
  EXPECT_THAT(error_of_read(), testing::HasSubstr("plan.json"));
  fs::remove(fs::path(folder()) / "stage1.onnx");
  write_bytes(file, whole.dump());
  EXPECT_THAT(error_of_read(), testing::HasSubstr("stage1.onnx"));
}

}  // namespace
}  // namespace fretsaw
