// Plans from hand-written annotations: which mesh they ask for, what each rank holds, what is illegal; and annotated.onnx read again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "graph/annotations.h"
#include "graph/errors.h"
#include "graph/plan_json.h"
#include "partitioner/partition.h"
#include "tests/partitioner/net.h"

namespace fretsaw {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kAll = 4 * (8 * 12 + 12 + 12 * 6 + 6);  // bytes of all weights

ShardedAxis in_parts(int64_t axis, int64_t shards, std::optional<int64_t> size = std::nullopt) {
  return {axis, {SimpleSharding{shards, size, ""}}};
}
TensorAnnotation spec(const std::string& tensor, std::vector<int64_t> devices, std::vector<ShardedAxis> axes,
                      std::vector<DeviceGroup> groups = {}) {
  return {tensor, std::move(devices), std::move(groups), std::move(axes)};
}
// Cut in two along an axis, on devices 0 and 1.
TensorAnnotation half(const std::string& tensor, int64_t axis, std::vector<int64_t> devices = {0, 1}) {
  return spec(tensor, std::move(devices), {in_parts(axis, 2)});
}

// x [4, 8] -> up (w1 [8, 12]) -> bias -> act -> down (w2 [12, 6]) -> out: y [4, 6]
struct Mlp : Net {
  explicit Mlp(int devices) {
    Value* a = op("MatMul", {input("x", {4, 8}), weight("w1", {8, 12})}, "a");
    Value* h = op("Relu", {op("Add", {a, weight("b1", {12})}, "b")}, "h");
    output(op("Add", {op("MatMul", {h, weight("w2", {12, 6})}, "o"), weight("b2", {6})}, "y"));
    const char* names[] = {"up", "bias", "act", "down", "out"};
    for (size_t i = 0; i < g.nodes.size(); ++i) g.nodes[i]->name = names[i];
    add_configuration("c", devices);
    model.ir_version = kIrWithAnnotations;
  }
  void add_configuration(const std::string& name, int devices) {
    std::vector<DeviceConfiguration> all = device_configurations(model);
    all.push_back({name, devices, {}});
    set_device_configurations(model, all);
  }
  NodeAnnotation& of(std::vector<NodeAnnotation>& all, const std::string& configuration) {
    for (NodeAnnotation& a : all)
      if (a.configuration == configuration) return a;
    return all.emplace_back(NodeAnnotation{configuration, std::nullopt, {}});
  }
  Mlp& at(const std::string& node, TensorAnnotation tensor, const std::string& configuration = "c") {
    return change(node, configuration, [&](NodeAnnotation& a) { a.tensors.push_back(std::move(tensor)); });
  }
  Mlp& stage(const std::string& node, int number) {
    return change(node, "c", [&](NodeAnnotation& a) { a.pipeline_stage = number; });
  }
  template <typename Change>
  Mlp& change(const std::string& node, const std::string& configuration, Change change) {
    for (Node* n : g.nodes) {
      if (n->name != node) continue;
      std::vector<NodeAnnotation> all = annotations(*n);
      change(of(all, configuration));
      set_annotations(*n, all);
    }
    return *this;
  }
  // The first product by columns, the second by rows, each half on one of two devices.
  Mlp& column_then_row(std::vector<int64_t> first = {0, 1}, std::vector<int64_t> second = {0, 1}) {
    at("up", half("w1", 1, first)).at("up", half("a", 1, first)).at("bias", half("b1", 0, first)).at("bias", half("b", 1, first));
    return at("act", half("h", 1, first)).at("down", half("h", 1, second)).at("down", half("w2", 0, second));
  }
};

Plan planned(const Model& model, const std::string& configuration = "", Mesh mesh = {}) {
  PartitionOptions options;
  options.from_annotations = true;
  options.configuration = configuration;
  options.mesh = mesh;
  options.note_sizes = false;
  return partition(clone(model), options);
}
std::string error_of(const Model& model, const std::string& configuration = "") {
  try {
    planned(model, configuration);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

std::string mesh_of(const Plan& plan) {
  return "d" + std::to_string(plan.mesh.data) + " p" + std::to_string(plan.mesh.pipeline) + " t" + std::to_string(plan.mesh.tensor);
}
// Of the rank that holds most, in one stage or another.
int64_t most_weight_bytes(const Plan& plan) {
  int64_t most = 0;
  for (const PlanGraph& graph : plan.graphs) {
    int64_t bytes = 0;
    for (const Value* v : graph.model->graph->initializers())
      if (v->constant->dtype == DType::float32 && v->constant->count() > 1) bytes += static_cast<int64_t>(v->constant->bytes());
    most = std::max(most, bytes);
  }
  return most;
}
std::vector<std::string> collectives(const Plan& plan) {
  std::vector<std::string> found;
  for (const PlanGraph& graph : plan.graphs)
    if (graph.coordinates.empty() || graph.coordinates.begin()->second == 0)
      for (const Node* node : graph.model->graph->nodes)
        if (node->domain == "ai.fretsaw" && node->op != "Send" && node->op != "Recv") found.push_back(node->op);
  return found;
}
std::string shape_of(const Plan& plan, const std::string& tensor, int rank) {
  for (const PlanGraph& graph : plan.graphs)
    if (graph.coordinates.empty() || graph.coordinates.at("tensor") == rank)
      for (const Value& v : graph.model->graph->all_values())
        if (v.source_name() == tensor && v.constant) return to_string(v.constant->dims);
  return "none";
}

// The plan's annotated.onnx gives the same plan.
void expect_round_trip(const Plan& plan) {
  Plan again = planned(*plan.annotated);
  Plan first = plan;
  for (Plan* p : {&first, &again}) p->source_file = p->source_digest = "";
  EXPECT_EQ(plan_to_json(again), plan_to_json(first));
  ASSERT_EQ(again.graphs.size(), plan.graphs.size());
  for (size_t i = 0; i < plan.graphs.size(); ++i)
    EXPECT_EQ(print_graph(*again.graphs[i].model->graph), print_graph(*plan.graphs[i].model->graph));
}

// --- one axis ---

TEST(AnnotatedPlan, ColumnThenRowTakesOneAllReduce) {
  Mlp net(2);
  const Plan plan = planned(net.column_then_row().model);
  EXPECT_EQ(mesh_of(plan), "d1 p1 t2");
  EXPECT_EQ(collectives(plan), std::vector<std::string>{"AllReduce"});
  EXPECT_LT(most_weight_bytes(plan), kAll * 6 / 10);
  EXPECT_THAT(plan.notes, IsEmpty());
  expect_round_trip(plan);
}

TEST(AnnotatedPlan, OneWeightAloneIsEnough) {
  for (const int64_t axis : {1, -1}) {
    Mlp net(2);
    const Plan plan = planned(net.at("up", half("w1", axis)).model);
    EXPECT_EQ(mesh_of(plan), "d1 p1 t2");
    EXPECT_EQ(shape_of(plan, "w1", 1), "[8,6]");
    EXPECT_EQ(shape_of(plan, "b2", 0), "[6]");
    expect_round_trip(plan);
  }
}

TEST(AnnotatedPlan, NodesWithoutAnnotationsAreNotDividedByThemselves) {
  Mlp net(2);
  const Plan plan = planned(net.at("down", half("h", 1)).at("down", half("w2", 0)).model);
  EXPECT_EQ(shape_of(plan, "w1", 0), "[8,12]");
  EXPECT_EQ(shape_of(plan, "w2", 0), "[6,6]");
  EXPECT_THAT(collectives(plan), Contains("AllReduce"));
  expect_round_trip(plan);
}

TEST(AnnotatedPlan, DevicesInAnotherOrderHoldTheOtherHalves) {
  Mlp net(2);
  const Plan plan = planned(net.at("up", half("w1", 1, {1, 0})).model);
  EXPECT_EQ(plan.shardings.at("w1"), "[_, tensor{6:12|0:6}]");
  expect_round_trip(plan);
}

TEST(AnnotatedPlan, SizesThatDoNotDivide) {
  Mlp net(5);
  const Plan plan = planned(net.at("up", spec("w1", {0, 1, 2, 3, 4}, {in_parts(1, 5, 12)})).model);
  EXPECT_EQ(mesh_of(plan), "d1 p1 t5");
  EXPECT_EQ(shape_of(plan, "w1", 0), "[8,3]");
  EXPECT_EQ(shape_of(plan, "w1", 4), "[8,2]");
  expect_round_trip(plan);
}

TEST(AnnotatedPlan, FusedDimensionsAreCutInside) {
  Mlp net(2);  // 12 columns are 3 blocks of 4: each rank takes half of every block
  ShardedAxis axis{1, {SimpleSharding{1, 3, ""}, SimpleSharding{2, 4, ""}}};
  const Plan plan = planned(net.at("up", spec("w1", {0, 1}, {axis})).model);
  EXPECT_EQ(plan.shardings.at("w1"), "[_, tensor{0:2+4:6+8:10|2:4+6:8+10:12}]");
  expect_round_trip(plan);
}

TEST(AnnotatedPlan, NoDevicesAreAllDevices) {
  Mlp net(2);
  const Plan plan = planned(net.at("up", spec("w1", {}, {in_parts(1, 2)})).model);
  EXPECT_EQ(mesh_of(plan), "d1 p1 t2");
  EXPECT_EQ(shape_of(plan, "w1", 0), "[8,6]");
}

TEST(AnnotatedPlan, DevicesThatASpecLeavesOutHoldWhatNeighboursDo) {
  Mlp net(3);
  const Plan plan = planned(net.at("up", half("w1", 1)).at("down", spec("w2", {0, 1, 2}, {in_parts(0, 3)})).model);
  EXPECT_EQ(mesh_of(plan), "d1 p1 t3");
  EXPECT_EQ(plan.shardings.at("w1"), "[_, tensor{0:6|6:12|6:12}]");
  expect_round_trip(plan);
}

TEST(AnnotatedPlan, WhatNoRuleAllowsIsConvertedAndNoted) {
  Mlp net(2);  // rows of x against columns of w1: the product can follow one of them
  const Plan plan = planned(net.at("up", half("x", 1)).at("up", half("w1", 1)).model);
  EXPECT_EQ(shape_of(plan, "w1", 0), "[8,6]");
  EXPECT_THAT(plan.notes, Contains(HasSubstr("node 'up' (MatMul): no rule lets it take 'x' as [_, tensor]")));
  expect_round_trip(plan);
}

TEST(AnnotatedPlan, TwoDimensionsOverOneAxisAreNotFollowed) {
  Mlp net(4);
  const Plan plan = planned(net.at("up", spec("w1", {0, 1, 2, 3}, {in_parts(0, 2), in_parts(1, 2)})).model);
  EXPECT_THAT(plan.notes, Contains(HasSubstr("the annotation of 'w1' is not followed: it is cut along two dimensions")));
}

// --- the batch, groups ---

TEST(AnnotatedPlan, TheBatchAloneIsADataAxis) {
  Mlp net(2);
  const Plan plan = planned(net.at("up", half("x", 0)).model);
  EXPECT_EQ(mesh_of(plan), "d2 p1 t1");
  EXPECT_THAT(collectives(plan), IsEmpty());
  EXPECT_EQ(plan.inputs[0].batch_axis, 0);
  expect_round_trip(plan);
}

TEST(AnnotatedPlan, TheBatchAndWeightsOverTwoAxes) {
  const std::vector<DeviceGroup> rows = {{-1, {0, 1}}, {-2, {2, 3}}}, columns = {{-1, {0, 2}}, {-2, {1, 3}}};
  for (const bool data_first : {true, false}) {
    Mlp net(4);
    net.at("up", spec("x", {-1, -2}, {in_parts(0, 2)}, data_first ? rows : columns));
    net.at("up", spec("w1", {-1, -2}, {in_parts(1, 2)}, data_first ? columns : rows));
    const Plan plan = planned(net.model);
    EXPECT_EQ(mesh_of(plan), "d2 p1 t2");
    EXPECT_EQ(plan.shardings.at("w1"), "[_, tensor]");
    expect_round_trip(plan);
  }
}

TEST(AnnotatedPlan, GroupsThatHoldTheSameWithoutABatch) {
  Mlp net(4);
  const Plan plan = planned(net.at("up", spec("w1", {-1, -2}, {in_parts(1, 2)}, {{-1, {0, 1}}, {-2, {2, 3}}})).model);
  EXPECT_EQ(mesh_of(plan), "d1 p1 t4");
  EXPECT_EQ(plan.shardings.at("w1"), "[_, tensor{0:6|0:6|6:12|6:12}]");
  expect_round_trip(plan);
}

TEST(AnnotatedPlan, TheBatchOnDevicesThatCutWeightsTooIsATensorAxis) {
  Mlp net(2);
  const Plan plan = planned(net.at("up", half("x", 0)).at("down", half("w2", 1)).model);
  EXPECT_EQ(mesh_of(plan), "d1 p1 t2");
  EXPECT_EQ(shape_of(plan, "w2", 0), "[12,3]");
  expect_round_trip(plan);
}

// --- stages ---

TEST(AnnotatedPlan, StagesWithGapsAndNodesWithoutOne) {
  Mlp net(2);  // bias and act have none: they run where their inputs are made
  const Plan plan = planned(net.stage("up", 3).stage("down", 7).stage("out", 7).model);
  EXPECT_EQ(mesh_of(plan), "d1 p2 t1");
  ASSERT_EQ(plan.routes.size(), 1u);
  EXPECT_EQ(plan.routes[0].source, "h");
  EXPECT_EQ(most_weight_bytes(plan), 4 * (8 * 12 + 12));
  expect_round_trip(plan);
}

TEST(AnnotatedPlan, StagesAndTensors) {
  Mlp net(4);
  for (const char* node : {"up", "bias", "act"}) net.stage(node, 0);
  for (const char* node : {"down", "out"}) net.stage(node, 1);
  const Plan plan = planned(net.column_then_row({0, 1}, {2, 3}).model);
  EXPECT_EQ(mesh_of(plan), "d1 p2 t2");
  EXPECT_EQ(collectives(plan), std::vector<std::string>{"AllReduce"});
  EXPECT_EQ(most_weight_bytes(plan), 4 * (8 * 6 + 6));
  expect_round_trip(plan);
}

TEST(AnnotatedPlan, StagesOfSeveralDevicesWithoutSpecsAreDividedFreely) {
  Mlp net(4);
  const Plan plan = planned(net.stage("up", 0).stage("down", 1).model);
  EXPECT_EQ(mesh_of(plan), "d1 p2 t2");
  EXPECT_LT(most_weight_bytes(plan), kAll * 4 / 10);
  expect_round_trip(plan);
}

TEST(AnnotatedPlan, StagesNeedDevicesOfTheirOwn) {
  Mlp net(2);
  net.stage("up", 0).stage("down", 1);
  EXPECT_THAT(error_of(net.column_then_row().model), HasSubstr("stages need devices of their own"));
}

TEST(AnnotatedPlan, DevicesThatStagesDoNotShareEvenly) {
  Mlp net(3);
  EXPECT_THAT(error_of(net.stage("up", 0).stage("down", 1).model),
              HasSubstr("device configuration 'c' has 3 devices, which 2 stages do not share evenly"));
}

// --- configurations, what is illegal ---

TEST(AnnotatedPlan, OneOfSeveralConfigurationsMustBeChosen) {
  Mlp net(2);
  net.add_configuration("four", 4);
  net.at("up", half("w1", 1)).at("up", spec("w1", {0, 1, 2, 3}, {in_parts(1, 4)}), "four");
  EXPECT_THAT(error_of(net.model), HasSubstr("2 device configurations: c, four"));
  EXPECT_THAT(error_of(net.model, "five"), HasSubstr("--configuration names 'five'"));
  EXPECT_EQ(mesh_of(planned(net.model, "c")), "d1 p1 t2");
  const Plan plan = planned(net.model, "four");
  EXPECT_EQ(mesh_of(plan), "d1 p1 t4");
  EXPECT_EQ(shape_of(plan, "w1", 3), "[8,3]");
}

TEST(AnnotatedPlan, IllegalAnnotationsAreRefused) {
  EXPECT_THAT(error_of(Mlp(2).at("up", half("w1", 2)).model), HasSubstr("tensor 'w1' is cut along axis 2"));
  EXPECT_THAT(error_of(Mlp(2).at("up", half("w1", 1, {0, 5})).model), HasSubstr("lists device 5"));
  EXPECT_THAT(error_of(Mlp(2).at("up", spec("w1", {0, 1}, {in_parts(1, 3)})).model), HasSubstr("3 parts"));
  EXPECT_THAT(error_of(Mlp(2).at("up", half("nope", 0)).model), HasSubstr("tensor 'nope' is no input or output"));
  EXPECT_THAT(error_of(Mlp(2).at("up", half("w1", 1), "zzz").model), HasSubstr("no configuration 'zzz'"));
  EXPECT_THAT(error_of(Mlp(2).at("up", spec("w1", {0, 1}, {in_parts(1, 2, 99)})).model), HasSubstr("size 99"));
  EXPECT_THAT(error_of(Mlp(2).stage("up", 1).stage("act", 0).model), HasSubstr("node 'act'"));
  EXPECT_THAT(error_of(Mlp(2).at("up", spec("w1", {0, 1}, {in_parts(1, 2), in_parts(1, 1)})).model), HasSubstr("twice"));
}

TEST(AnnotatedPlan, AModelWithoutConfigurationIsRefused) {
  Net net;
  net.output(net.layer(net.input("x", {2, 4}), "l", 4));
  EXPECT_THAT(error_of(net.model), HasSubstr("no device configuration"));
}

TEST(AnnotatedPlan, AMeshThatIsGivenWins) {
  Mlp net(2);
  net.at("up", half("w1", 1));
  const Plan plan = planned(net.model, "", {1, 1, 3});
  EXPECT_EQ(mesh_of(plan), "d1 p1 t3");
  EXPECT_EQ(plan.shardings.at("w1"), "[_, tensor{0:6|6:12|6:12}]");
  EXPECT_THROW(planned(net.model, "", {1, 2, 1}), Error);  // one rank in a stage, and two devices are named
}

// --- written by fretsaw ---

TEST(AnnotatedPlan, WhatAMeshGivesIsWrittenAsSpecs) {
  Mlp net(2);
  PartitionOptions options;
  options.mesh = {1, 1, 2};
  const Plan plan = partition(clone(net.model), options);
  const Model& model = *plan.annotated;
  EXPECT_EQ(device_configurations(model), (std::vector<DeviceConfiguration>{{"fretsaw", 2, {}}}));
  const std::vector<NodeAnnotation> up = annotations(*model.graph->nodes[0]);
  ASSERT_EQ(up.size(), 1u);
  EXPECT_EQ(up[0].pipeline_stage, 0);
  EXPECT_EQ(up[0].tensors, (std::vector<TensorAnnotation>{spec("x", {0, 1}, {}), half("w1", 1), half("a", 1)}));
  EXPECT_EQ(model.metadata.at("fretsaw.mesh"), "data=1,pipeline=1,tensor=2");
}

TEST(AnnotatedPlan, MeshOfThreeAxesAndMicroBatches) {
  Mlp net(1);
  PartitionOptions options;
  options.mesh = {2, 2, 2};
  options.micro_batches = 2;
  options.note_sizes = false;
  const Plan plan = partition(clone(net.model), options);
  const std::vector<NodeAnnotation> up = annotations(*plan.annotated->graph->nodes[0]);
  ASSERT_FALSE(up.empty());
  // Ranks 0, 1, 4 and 5 run stage 0; the data axis is the slowest.
  EXPECT_THAT(up[0].tensors, Contains(spec("w1", {-1, -2}, {in_parts(1, 2)}, {{-1, {0, 4}}, {-2, {1, 5}}})));
  EXPECT_THAT(up[0].tensors, Contains(spec("a", {0, 1, 4, 5}, {in_parts(0, 2), in_parts(1, 2)})));
  EXPECT_EQ(planned(*plan.annotated).micro_batches, 2);
  expect_round_trip(plan);
}

// --- --shard ---

Plan with_shard(const std::string& tensor, std::vector<std::string> axes, int ranks = 2) {
  Mlp net(1);
  PartitionOptions options;
  options.mesh.tensor = ranks;
  options.note_sizes = false;
  options.pins[tensor].axes = std::move(axes);
  return partition(clone(net.model), options);
}

TEST(Shard, PinsWeightsAndActivations) {
  EXPECT_EQ(shape_of(with_shard("w1", {"tensor", ""}), "w1", 0), "[4,12]");
  EXPECT_EQ(shape_of(with_shard("w1", {"", "tensor"}), "w1", 0), "[8,6]");
  EXPECT_EQ(shape_of(with_shard("w1", {"", ""}), "w1", 0), "[8,12]");
  EXPECT_EQ(with_shard("h", {"", ""}).shardings.count("h"), 0u);
  EXPECT_EQ(with_shard("h", {"tensor", ""}).shardings.at("h"), "[tensor, _]");
  EXPECT_EQ(with_shard("o", {"", "tensor"}).shardings.at("o"), "[_, tensor]");
  for (const char* value : {"x", "a", "h", "o"}) expect_round_trip(with_shard(value, {"tensor", ""}));
}

TEST(Shard, SaysWhatIsWrong) {
  const auto error = [](const std::string& tensor, std::vector<std::string> axes) -> std::string {
    try {
      with_shard(tensor, std::move(axes));
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::usage);
      return e.what();
    }
    return "";
  };
  EXPECT_THAT(error("nope", {""}), HasSubstr("--shard names 'nope', and there is no such tensor"));
  EXPECT_THAT(error("w1", {"tensor"}), HasSubstr("--shard names 1 dimensions of 'w1'"));
  EXPECT_THAT(with_shard("w1", {"tensor", ""}, 1).notes, Contains(HasSubstr("--shard w1 has nothing to do")));
  Net net;
  net.output(net.op("Relu", {net.input("x", {1, Dim(std::string("n"))})}, "y"));
  PartitionOptions options;
  options.mesh.tensor = 2;
  for (const auto& axes : {std::vector<std::string>{"tensor", ""}, {"", "tensor"}}) {
    options.pins["y"].axes = axes;
    EXPECT_THROW(partition(clone(net.model), options), Error);
  }
}

}  // namespace
}  // namespace fretsaw
