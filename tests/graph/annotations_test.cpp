// Multi-device annotations: they come back as they were set, and each rule finds what breaks it and nothing else.
#include "graph/annotations.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <onnx/onnx_pb.h>

#include "graph/annotation_rules.h"
#include "tests/graph/text_model.h"

namespace fretsaw {
namespace {

using testing::parse_model;

constexpr char kLayers[] = R"(
  g (float[n, 8] x, float[8, 12] w1, float[12] b1, float[12, 6] w2) => (float[n, 6] y) {
    [up] a = MatMul(x, w1)
    [bias] b = Add(a, b1)
    [act] h = Relu(b)
    [down] y = MatMul(h, w2)
  })";

struct On {  // what one node is annotated with, for configuration "c" unless said otherwise
  std::string node;
  NodeAnnotation annotation;
};
using Devices = std::vector<int64_t>;
using Parts = std::vector<SimpleSharding>;

TensorAnnotation cut(const std::string& tensor, int64_t axis, int64_t shards = 2, Devices devices = {0, 1}) {
  return {tensor, std::move(devices), {}, {{axis, {{shards, std::nullopt, ""}}}}};
}
TensorAnnotation sized(const std::string& tensor, int64_t axis, Parts parts) {
  return {tensor, {0, 1}, {}, {{axis, std::move(parts)}}};
}
TensorAnnotation grid(const std::string& tensor, int64_t first, int64_t second) {
  return {tensor, {0, 1, 2, 3}, {}, {{first, {{2, std::nullopt, ""}}}, {second, {{2, std::nullopt, ""}}}}};
}
TensorAnnotation grouped(const std::string& tensor, std::vector<DeviceGroup> groups, std::vector<ShardedAxis> axes = {},
                         Devices devices = {-1, -2}) {
  return {tensor, std::move(devices), std::move(groups), std::move(axes)};
}
TensorAnnotation whole(const std::string& tensor, Devices devices) {
  return {tensor, std::move(devices), {}, {}};
}
On on(const std::string& node, std::vector<TensorAnnotation> tensors, const std::string& configuration = "c") {
  return {node, {configuration, std::nullopt, std::move(tensors)}};
}
On stage(const std::string& node, int stage, const std::string& configuration = "c") {
  return {node, {configuration, stage, {}}};
}
const std::vector<ShardedAxis> kRows = {{0, {{2, std::nullopt, ""}}}};

Node* find(const Graph& graph, const std::string& name) {
  for (Node* node : graph.nodes) {
    if (node->name == name) return node;
    for (const GraphPtr& body : bodies(*node))
      if (Node* inner = find(*body, name)) return inner;
  }
  return nullptr;
}

void annotate(Model& model, const std::vector<On>& all) {
  for (const On& one : all) {
    Node* node = find(*model.graph, one.node);
    ASSERT_NE(node, nullptr) << one.node;
    auto so_far = annotations(*node);
    so_far.push_back(one.annotation);
    set_annotations(*node, so_far);
  }
}

// "rule node/tensor" for each finding.
std::string text(const std::vector<Finding>& findings) {
  std::string all;
  for (const Finding& f : findings) {
    EXPECT_EQ(f.severity, "error");
    EXPECT_FALSE(f.message.empty());
    all += fmt::format("{}{} {}{}", all.empty() ? "" : ", ", f.rule, f.node, f.tensor.empty() ? "" : "/" + f.tensor);
  }
  return all;
}

struct Case {
  std::string name;
  std::vector<On> annotations;
  std::string findings;
  std::vector<DeviceConfiguration> configurations = {{"c", 4, {}}};
};

const Case kCases[] = {
    // --- legal ---
    {"nothing", {}, ""},
    {"columns", {on("up", {cut("w1", 1), cut("a", 1)})}, ""},
    {"negative axis", {on("up", {cut("w1", -1)})}, ""},
    {"first negative axis", {on("up", {cut("w1", -2)})}, ""},
    {"producer and consumer differ", {on("up", {cut("a", 1)}), on("bias", {cut("a", 0)})}, ""},
    {"two axes", {on("up", {grid("w1", 0, 1)})}, ""},
    {"uneven", {on("bias", {cut("b1", 0, 3, {0, 1, 2})})}, ""},
    {"more parts than rows", {on("up", {cut("x", 0, 6, {0, 1, 2, 3, 4, 5})})}, "", {{"c", 6, {}}}},
    {"copies on each device", {on("up", {whole("x", {0, 1, 2})})}, ""},
    {"a copy on a group", {on("up", {grouped("x", {{-1, {0, 1}}}, {}, {-1})})}, ""},
    {"parts on groups", {on("up", {grouped("x", {{-1, {0, 1}}, {-2, {2, 3}}}, kRows)})}, ""},
    {"a group's key is a device's number", {on("up", {grouped("x", {{0, {2, 3}}}, kRows, {0, 1})})}, ""},
    {"no devices yet", {on("up", {cut("w1", 1, 4, {})})}, ""},
    {"an axis with nothing said", {on("up", {{"x", {0, 1}, {}, {{0, {}}}}})}, ""},
    {"size", {on("up", {sized("w1", 1, {{2, 12, ""}})})}, ""},
    {"size of a dimension unknown", {on("down", {sized("y", 0, {{2, 99, ""}})})}, ""},
    {"symbol", {on("up", {sized("x", 0, {{2, std::nullopt, "batch"}})})}, ""},
    {"fused axes", {on("up", {sized("w1", 1, {{2, 4, ""}, {1, 3, ""}})})}, ""},
    {"fused axes, one size", {on("up", {sized("w1", 1, {{2, std::nullopt, "h"}, {1, 3, ""}})})}, ""},
    {"stages", {stage("up", 0), stage("bias", 0), stage("act", 2), stage("down", 2)}, ""},
    {"stages of some nodes", {stage("up", 1), stage("down", 1)}, ""},
    {"stages back in another configuration", {stage("up", 1), stage("down", 0, "d")}, "", {{"c", 4, {}}, {"d", 2, {}}}},
    {"device names", {on("up", {cut("w1", 1)})}, "", {{"c", 2, {"left", "right"}}}},

    // --- illegal ---
    {"axis beyond the rank", {on("up", {cut("w1", 2)})}, "axis-range up/w1"},
    {"axis before the first", {on("up", {cut("w1", -3)})}, "axis-range up/w1"},
    {"axis of an inferred output", {on("bias", {cut("b", 2)})}, "axis-range bias/b"},
    {"device beyond the count", {on("up", {cut("w1", 1, 2, {0, 4})})}, "device-range up/w1"},
    {"negative device", {on("up", {cut("w1", 1, 2, {0, -1})})}, "device-range up/w1"},
    {"device of a group", {on("up", {grouped("x", {{-1, {0, 9}}, {-2, {2, 3}}}, kRows)})}, "device-range up/x"},
    {"device twice", {on("up", {cut("w1", 1, 2, {1, 1})})}, "device-twice up/w1"},
    {"device in two groups", {on("up", {grouped("x", {{-1, {0, 1}}, {-2, {1, 2}}}, kRows)})}, "device-twice up/x"},
    {"empty group", {on("up", {grouped("x", {{-1, {}}, {-2, {2, 3}}}, kRows)})}, "device-group up/x"},
    {"group twice", {on("up", {grouped("x", {{-1, {0, 1}}, {-1, {2, 3}}}, {}, {-1})})}, "device-group up/x"},
    {"more parts than devices", {on("up", {cut("w1", 1, 3)})}, "shard-count up/w1"},
    {"fewer parts than devices", {on("up", {cut("w1", 1, 2, {0, 1, 2, 3})})}, "shard-count up/w1"},
    {"parts within one group", {on("up", {grouped("x", {{-1, {0, 1}}}, kRows, {-1})})}, "shard-count up/x"},
    {"no parts", {on("up", {cut("w1", 1, 0)})}, "shard-count up/w1"},
    {"parts of fused axes", {on("up", {sized("w1", 1, {{2, 4, ""}, {3, 3, ""}})})}, "shard-count up/w1"},
    {"more parts than all devices", {on("up", {cut("w1", 1, 5, {})})}, "shard-count up/w1"},
    {"too many parts for a number", {on("up", {sized("x", 0, {{INT64_MAX, {}, ""}, {INT64_MAX, {}, ""}})})}, "shard-count up/x"},
    {"size contradicts", {on("up", {sized("w1", 1, {{2, 99, ""}})})}, "shard-size up/w1"},
    {"size on a negative axis", {on("up", {sized("w1", -2, {{2, 12, ""}})})}, "shard-size up/w1"},
    {"sizes that do not multiply up", {on("up", {sized("w1", 1, {{2, 6, ""}, {1, 6, ""}})})}, "shard-size up/w1"},
    {"a size that does not divide", {on("up", {sized("w1", 1, {{2, {}, "h"}, {1, 5, ""}})})}, "shard-size up/w1"},
    {"negative size", {on("down", {sized("y", 0, {{2, -4, ""}})})}, "shard-size down/y"},
    {"unknown tensor", {on("up", {cut("nope", 0)})}, "unknown-tensor up/nope"},
    {"another node's tensor", {on("up", {cut("w2", 0)})}, "unknown-tensor up/w2"},
    {"unknown configuration", {on("up", {cut("w1", 1)}, "zzz")}, "unknown-configuration up"},
    {"configuration twice on a node", {stage("up", 0), on("up", {cut("w1", 1)})}, "configuration-twice up"},
    {"axis twice", {on("up", {grid("w1", 1, 1)})}, "axis-twice up/w1"},
    {"axis twice, once negative", {on("up", {grid("w1", 1, -1)})}, "axis-twice up/w1"},
    {"tensor twice", {on("up", {cut("w1", 1), cut("w1", 0)})}, "tensor-twice up/w1"},
    {"stage goes back", {stage("up", 1), stage("bias", 1), stage("act", 0), stage("down", 0)}, "stage-back act"},
    {"stage goes back across a node without", {stage("up", 1), stage("act", 0)}, "stage-back act"},
    {"negative stage", {stage("up", -1)}, "stage-negative up"},
    {"two configurations of one name", {}, "configuration-name ", {{"c", 2, {}}, {"c", 4, {}}}},
    {"a configuration with no devices", {}, "configuration-devices ", {{"c", 0, {}}}},
    {"a name too few", {}, "configuration-devices ", {{"c", 2, {"left"}}}},
    {"two faults", {on("up", {cut("w1", 2), cut("x", 0, 3)})}, "axis-range up/w1, shard-count up/x"},
};

TEST(Annotations, RulesFindWhatBreaksThem) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    Model model = parse_model(20, kLayers);
    set_device_configurations(model, c.configurations);
    annotate(model, c.annotations);
    EXPECT_EQ(text(check_model(model)), c.findings);
  }
}

constexpr char kBranches[] = R"(
  g (float[4, 8] x, bool p) => (float[m, n] y) {
    [before] a = Relu(x)
    [choose] z = If(p) <
      then_branch = t () => (float[4, 8] u) { [then] u = Abs(a) },
      else_branch = e () => (float[4, 8] v) { [else] v = Neg(a) }>
    [after] y = Sqrt(z)
  })";

const Case kBodyCases[] = {
    {"legal", {stage("before", 0), stage("then", 1), on("else", {cut("v", 1)})}, ""},
    {"a shape that only inference knows", {on("choose", {cut("z", 2)})}, "axis-range choose/z"},
    {"a captured value", {on("then", {cut("a", 0, 3)})}, "shard-count then/a"},
    {"a captured value's rank", {on("then", {cut("a", 2)})}, "axis-range then/a"},
    {"a body's own value", {on("else", {sized("v", 0, {{2, 5, ""}})})}, "shard-size else/v"},
    {"a body before what it captures", {stage("before", 1), stage("then", 0)}, "stage-back then"},
    {"a body before its node", {stage("choose", 1), stage("else", 0)}, "stage-back else"},
    {"what comes after a body", {stage("then", 1), stage("after", 0)}, "stage-back after"},
    {"the node before what its body captures", {stage("before", 1), stage("choose", 0)}, "stage-back choose"},
};

TEST(Annotations, RulesHoldInBodies) {
  for (const Case& c : kBodyCases) {
    SCOPED_TRACE(c.name);
    Model model = parse_model(20, kBranches);
    set_device_configurations(model, c.configurations);
    annotate(model, c.annotations);
    EXPECT_EQ(text(check_model(model)), c.findings);
  }
}

TEST(Annotations, ComeBackAsTheyWereSet) {
  Model model = parse_model(20, kLayers);
  const std::vector<DeviceConfiguration> configurations = {{"c", 4, {"a", "b", "c", "d"}}, {"d", 2, {}}};
  const std::vector<NodeAnnotation> all = {
      {"c", 3, {grouped("x", {{-1, {0, 1}}, {-2, {2, 3}}}, kRows), sized("w1", -1, {{2, 4, ""}, {1, {}, "k"}})}},
      {"d", std::nullopt, {cut("w1", 1), whole("a", {})}},
      {"", 0, {}}};
  set_device_configurations(model, configurations);
  Node& node = *find(*model.graph, "up");
  set_annotations(node, all);
  EXPECT_EQ(device_configurations(model), configurations);
  EXPECT_EQ(annotations(node), all);
  EXPECT_EQ(annotations(*find(*model.graph, "act")), std::vector<NodeAnnotation>());
  set_annotations(node, {});
  set_device_configurations(model, {});
  EXPECT_EQ(node.extra, "");
  EXPECT_EQ(device_configurations(model), std::vector<DeviceConfiguration>());
}

// By ONNX's own classes: the fields are those that other tools write, and what stands beside them stays.
TEST(Annotations, AreOnnxsMessages) {
  Model model = parse_model(20, kLayers);
  onnx::ModelProto proto;
  to_proto(model, proto, true);
  proto.set_ir_version(11);
  proto.set_producer_name("someone");
  auto& configuration = *proto.add_configuration();
  configuration.set_name("c");
  configuration.set_num_devices(2);
  auto& up = *proto.mutable_graph()->mutable_node(0);
  up.set_doc_string("the first");
  auto& annotation = *up.add_device_configurations();
  annotation.set_configuration_id("c");
  annotation.set_pipeline_stage(0);
  auto& spec = *annotation.add_sharding_spec();
  spec.set_tensor_name("w1");
  spec.add_device(-1);
  auto& group = *spec.add_index_to_device_group_map();
  group.set_key(-1);
  group.add_value(0), group.add_value(1);
  auto& dim = *spec.add_sharded_dim();
  dim.set_axis(1);
  auto& part = *dim.add_simple_sharding();
  part.set_dim_value(12);
  part.set_num_shards(1);

  onnx::ModelProto given = proto;
  FileCache files;
  Model read = model_from_proto(given, "", files, {});
  Node& node = *read.graph->nodes[0];
  const std::vector<NodeAnnotation> want = {{"c", 0, {{"w1", {-1}, {{-1, {0, 1}}}, {{1, {{1, 12, ""}}}}}}}};
  EXPECT_EQ(annotations(node), want);
  EXPECT_EQ(device_configurations(read), (std::vector<DeviceConfiguration>{{"c", 2, {}}}));

  set_annotations(node, annotations(node));
  set_device_configurations(read, device_configurations(read));
  onnx::ModelProto written;
  to_proto(read, written, true);
  EXPECT_EQ(written.producer_name(), "someone");
  EXPECT_EQ(written.graph().node(0).SerializeAsString(), up.SerializeAsString());
  EXPECT_EQ(written.configuration(0).SerializeAsString(), configuration.SerializeAsString());
}

TEST(Annotations, PartsAndHolders) {
  EXPECT_EQ(shards_of(grid("w1", 0, 1)), 4);
  EXPECT_EQ(shards_of(whole("w1", {0, 1})), 1);
  EXPECT_EQ(shards_of(sized("w1", 0, {{2, {}, ""}, {3, {}, ""}})), 6);
  EXPECT_EQ(shards_of(sized("w1", 0, {{INT64_MAX, {}, ""}, {2, {}, ""}})), INT64_MAX);
  EXPECT_EQ(holders_of(grouped("x", {{-1, {0, 1}}}, kRows, {-1, 2})), (std::vector<Devices>{{0, 1}, {2}}));
}

}  // namespace
}  // namespace fretsaw
