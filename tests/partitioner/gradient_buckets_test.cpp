// Gradients that ranks exchange together: what is in a bucket, and in which order they come.
#include "partitioner/gradient_buckets.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <set>

#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/training/training_plan.h"
#include "partitioner/training.h"
#include "tests/runtime/plans.h"

namespace fretsaw {
namespace {

using namespace testing_plans;
using testing::ElementsAre;
using testing::HasSubstr;
using OverData = GradientExchange::OverData;
using Places = std::map<std::string, std::pair<int, size_t>>;

ReducedGradient gradient(const std::string& name, int64_t bytes, OverData over = OverData::all, DType dtype = DType::float32) {
  return {name, "gradient:" + name, {.over_data = over, .dtype = dtype}, bytes};
}

std::vector<std::string> names_of(const std::vector<GradientBucket>& buckets) {
  std::vector<std::string> names;
  for (const GradientBucket& bucket : buckets) {
    std::string& text = names.emplace_back();
    for (const ReducedGradient& g : bucket.gradients) text += g.parameter;
  }
  return names;
}

TEST(GradientBuckets, AreFilledInTheOrderOfTheBackwardPass) {
  const Places places = {{"gradient:a", {3, 9}}, {"gradient:b", {3, 5}}, {"gradient:c", {2, 7}}, {"gradient:d", {2, 1}}};
  const std::vector<ReducedGradient> all = {gradient("a", 40), gradient("b", 40), gradient("c", 40), gradient("d", 40)};
  EXPECT_THAT(names_of(gradient_buckets(all, places, 80)), ElementsAre("dc", "ba"));
  EXPECT_THAT(names_of(gradient_buckets(all, places, 119)), ElementsAre("dc", "ba"));
  EXPECT_THAT(names_of(gradient_buckets(all, places, 120)), ElementsAre("dcb", "a"));
  EXPECT_THAT(names_of(gradient_buckets(all, places, 1)), ElementsAre("d", "c", "b", "a"));
  EXPECT_THAT(names_of(gradient_buckets(all, places, 1e9)), ElementsAre("dcba"));
}

TEST(GradientBuckets, TheLastExchangeIsSmall) {
  Places places;
  std::vector<ReducedGradient> all;
  const auto add = [&](const std::string& name, int64_t bytes, OverData over = OverData::all) {
    all.push_back(gradient(name, bytes, over));
    places["gradient:" + name] = {0, all.size()};
  };
  for (const char* name : {"a", "b", "c"}) add(name, 40);
  add("d", 4), add("e", 3), add("f", 2);
  EXPECT_THAT(names_of(gradient_buckets(all, places, 160)), ElementsAre("abc", "def"));  // 10 at most
  EXPECT_THAT(names_of(gradient_buckets(all, places, 81)), ElementsAre("ab", "cd", "ef"));
  EXPECT_THAT(names_of(gradient_buckets(all, places, 3200)), ElementsAre("abcdef"));  // small enough as it is
  add("g", 4, OverData::parts), add("h", 40);
  EXPECT_THAT(names_of(gradient_buckets(all, places, 320)), ElementsAre("g", "abcdefh"));  // h alone is more
}

TEST(GradientBuckets, HoldGradientsOfOneKind) {
  const Places places = {{"gradient:a", {0, 1}}, {"gradient:b", {0, 2}}, {"gradient:c", {0, 3}},
                         {"gradient:d", {0, 4}}, {"gradient:e", {0, 5}}, {"gradient:f", {0, 6}}};
  const std::vector<ReducedGradient> all = {gradient("a", 8),
                                            gradient("b", 8, OverData::parts),
                                            gradient("c", 8, OverData::none),
                                            gradient("d", 8, OverData::all, DType::float64),
                                            gradient("e", 8),
                                            gradient("f", 8, OverData::parts)};
  // In the order of the last gradient of each; one that needs no exchange is in none.
  EXPECT_THAT(names_of(gradient_buckets(all, places, 100)), ElementsAre("d", "ae", "bf"));
}

// Layers of tanh(x w + b), 8 wide.
Model make_layers(int layers) {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* x = add_input(model, "x", DType::float32, {Dim(8), Dim(8)});
  for (int l = 0; l < layers; ++l) {
    const std::string n = std::to_string(l);
    Value* product = add_node(g, "MatMul", {x, g.add_constant("w" + n, floats({8, 8}, std::vector<float>(64, 0.1f)))}, "product" + n);
    x = add_node(g, "Tanh", {add_node(g, "Add", {product, g.add_constant("b" + n, floats({8}, std::vector<float>(8)))}, "sum" + n)},
                 "y" + n);
  }
  g.outputs = {x};
  for (Node* node : g.nodes) node->name = node->outputs[0]->name;
  return model;
}

TrainingPlan plan_of(const Mesh& mesh, int zero, double bucket_mb) {
  PartitionOptions options;
  options.mesh = mesh;
  TrainingOptions training;
  training.loss = parse_loss("mse");
  training.zero = zero, training.bucket_mb = bucket_mb;
  return partition_for_training(make_layers(4), options, training);
}

// "AllReduce data: w3 b3" of each exchange of gradients.
std::vector<std::string> exchanges(const PlanGraph& reduce) {
  std::vector<std::string> texts;
  for (const Node* node : reduce.model->graph->nodes) {
    if (!communicates(*node) || !node->inputs[0] || node->inputs[0]->type.shape->empty()) continue;
    std::string text = node->op + " " + node->get_string("axis", "") + ":";
    for (const Value* v : node->outputs) text += " " + v->name.substr(v->name.rfind(':') + 1);
    texts.push_back(text);
    EXPECT_EQ(node->inputs.size(), node->outputs.size());
    for (size_t i = 0; i < node->inputs.size(); ++i) EXPECT_EQ(node->inputs[i]->type.dtype, node->inputs[0]->type.dtype);
  }
  return texts;
}

const PlanGraph& graph_of(const Plan& plan, const std::string& kind) {
  return *std::find_if(plan.graphs.begin(), plan.graphs.end(), [&](const PlanGraph& g) { return g.kind == kind; });
}

constexpr double kLayerMb = 288.0 / (1 << 20);  // of w and b

TEST(GradientBuckets, ExchangeGradientsFromTheLastLayerOn) {
  const TrainingPlan one = plan_of({.data = 2}, 0, kLayerMb), all = plan_of({.data = 2}, 0, 25), each = plan_of({.data = 2}, 0, 1e-9);
  EXPECT_THAT(exchanges(graph_of(*one.plan, "reduce")),
              ElementsAre("AllReduce data: b3 w3", "AllReduce data: b2 w2", "AllReduce data: b1 w1", "AllReduce data: b0 w0"));
  EXPECT_THAT(exchanges(graph_of(*all.plan, "reduce")), ElementsAre("AllReduce data: b3 w3 b2 w2 b1 w1 b0 w0"));
  EXPECT_EQ(exchanges(graph_of(*each.plan, "reduce")).size(), 8u);
}

TEST(GradientBuckets, KeepKindsOfExchangeApart) {
  EXPECT_THAT(exchanges(graph_of(*plan_of({.data = 2}, 1, 25).plan, "reduce")), ElementsAre("ReduceScatter data: b3 w3 b2 w2 b1 w1 b0 w0"));
  EXPECT_THAT(exchanges(graph_of(*plan_of({.data = 2}, 2, 25).plan, "reduce")), ElementsAre());
  for (const std::string& text : exchanges(graph_of(*plan_of({.data = 2, .tensor = 2}, 0, 25).plan, "reduce")))
    EXPECT_TRUE(text.starts_with("AllReduce data:") || text.starts_with("AllReduce tensor:")) << text;
}

// An exchange can only begin before the backward pass has ended if sums do not wait for the end.
TEST(GradientBuckets, SumsAreMadeWhereTheirGradientsAre) {
  const TrainingPlan plan = plan_of({.data = 2}, 0, 25);
  const Graph& backward = *graph_of(*plan.plan, "backward").model->graph;
  std::map<std::string, size_t> place;
  for (size_t i = 0; i < backward.nodes.size(); ++i)
    for (const Value* v : backward.nodes[i]->outputs)
      if (v) place[v->name] = i;
  const std::string next = std::string(kStateOutput) + "gradient:";
  EXPECT_LT(place.at(next + "w3"), place.at(next + "b2"));
  EXPECT_LT(place.at(next + "w2"), place.at(next + "b1"));
  EXPECT_LT(place.at(next + "w3"), backward.nodes.size() / 2);
}

TEST(GradientBuckets, OfNothingAreRefused) {
  try {
    plan_of({.data = 2}, 0, 0);
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("hold nothing"));
  }
}

}  // namespace
}  // namespace fretsaw
