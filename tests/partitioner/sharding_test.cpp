// What dividing a model over the tensor axis finds: which collectives, and how much each rank holds and does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "graph/catalogue.h"
#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "partitioner/sharding/shard.h"
#include "tests/partitioner/net.h"

namespace fretsaw {
namespace {

using ::testing::HasSubstr;

Attribute attribute(const std::string& name, AttributeValue value) {
  return {name, std::move(value), "", ""};
}

ShardedModel sharded(Net& net, int ranks) {
  infer_shapes(net.model);
  ShardOptions options;
  options.ranks = ranks;
  options.target = load_target("cpu");
  return shard(net.model, *net.model.graph, options);
}

// "AllReduce 1", "AllGather 2 ReduceScatter 1": of one rank.
std::string collectives(const ShardedModel& model) {
  std::map<std::string, int> counts;
  for (const Node* node : model.models.front().graph->nodes)
    if (node->domain == kCommunicationDomain) ++counts[node->op];
  std::string text;
  for (const auto& [op, n] : counts) text += (text.empty() ? "" : " ") + op + " " + std::to_string(n);
  return text;
}

// Counted as all-reduces: a reduce-scatter and an all-gather move as much as one.
double all_reduces(const ShardedModel& model) {
  double count = 0;
  for (const Node* node : model.models.front().graph->nodes)
    if (node->domain == kCommunicationDomain) count += node->op == "AllReduce" ? 1 : 0.5;
  return count;
}

int64_t weight_bytes(const Model& model) {
  int64_t bytes = 0;
  for (const Value* v : model.graph->initializers())
    if (v->constant->dtype == DType::float32) bytes += static_cast<int64_t>(v->constant->bytes());
  return bytes;
}

// Each rank's share of the weights, the largest.
double weight_share(const Net& net, const ShardedModel& model) {
  int64_t largest = 0;
  for (const Model& local : model.models) largest = std::max(largest, weight_bytes(local));
  return static_cast<double>(largest) / static_cast<double>(weight_bytes(net.model));
}

Value* convolution(Net& net, Value* x, const std::string& name, int64_t in, int64_t out, int64_t kernel, int64_t group = 1) {
  const int64_t pad = kernel / 2;
  return net.op("Conv", {x, net.weight(name + ".w", {out, in / group, kernel, kernel}), net.weight(name + ".b", {out})}, name,
                {attribute("pads", std::vector<int64_t>{pad, pad, pad, pad}), attribute("group", group)});
}

TEST(Shard, ColumnThenRowTakesOneAllReduce) {
  for (const int ranks : {2, 3, 4}) {
    Net net;
    Value* x = net.input("x", {64, 48});
    Value* h = net.op("Relu", {net.op("MatMul", {x, net.weight("up", {48, 192})}, "a")}, "h");
    net.output(net.op("MatMul", {h, net.weight("down", {192, 48})}, "y"));
    const ShardedModel model = sharded(net, ranks);
    EXPECT_EQ(collectives(model), "AllReduce 1");
    EXPECT_NEAR(weight_share(net, model), 1.0 / ranks, 1e-9);
    EXPECT_EQ(model.shardings.at("up"), "[_, tensor]");
    EXPECT_EQ(model.shardings.at("down"), "[tensor, _]");
  }
}

// A bias after a row-cut product counts once.
TEST(Shard, AddsABiasOnce) {
  Net net;
  Value* x = net.input("x", {64, 32});
  Value* h = net.op("Gemm", {x, net.weight("up", {32, 128}), net.weight("b1", {128})}, "h");
  net.output(net.op("Gemm", {h, net.weight("down", {128, 32}), net.weight("b2", {32})}, "y"));
  const ShardedModel model = sharded(net, 2);
  auto bias = [&](int rank) {
    double sum = 0;
    for (const Value* v : model.models[static_cast<size_t>(rank)].graph->initializers())
      if (v->source_name() == "b2")
        for (const float f : v->constant->as<float>()) sum += std::abs(f);
    return sum;
  };
  EXPECT_EQ(collectives(model), "AllReduce 1");
  EXPECT_GT(bias(0), 0);
  EXPECT_EQ(bias(1), 0);
}

// Query, key and value by heads, the output's rows: one all-reduce.
TEST(Shard, DividesAttentionByHeads) {
  for (const auto& [heads, ranks] : std::vector<std::pair<int64_t, int>>{{4, 2}, {4, 4}, {6, 3}}) {
    Net net;
    const int64_t hidden = heads * 16;
    Value* x = net.input("x", {2, 64, hidden});
    auto split = [&](const std::string& n, std::vector<int64_t> perm) {
      Value* projected = net.op("MatMul", {x, net.weight(n + ".w", {hidden, hidden})}, n);
      Value* by_head = net.op("Reshape", {projected, net.ints(n + ".shape", {0, 0, heads, -1})}, n + ".heads");
      return net.op("Transpose", {by_head}, n + ".t", {attribute("perm", std::move(perm))});
    };
    Value *q = split("q", {0, 2, 1, 3}), *k = split("k", {0, 2, 3, 1}), *v = split("v", {0, 2, 1, 3});
    Value* weights = net.op("Softmax", {net.op("MatMul", {q, k}, "scores")}, "weights");
    Value* mixed =
        net.op("Transpose", {net.op("MatMul", {weights, v}, "mixed")}, "back", {attribute("perm", std::vector<int64_t>{0, 2, 1, 3})});
    Value* flat = net.op("Reshape", {mixed, net.ints("flat", {0, 0, hidden})}, "merged");
    net.output(net.op("MatMul", {flat, net.weight("o.w", {hidden, hidden})}, "y"));
    const ShardedModel model = sharded(net, ranks);
    EXPECT_EQ(collectives(model), "AllReduce 1") << heads << " heads over " << ranks;
    if (heads % ranks == 0) {
      EXPECT_NEAR(weight_share(net, model), 1.0 / ranks, 1e-9);
    }
  }
}

// A fused q, k, v: each segment is cut, not their sequence.
TEST(Shard, CutsSegmentsOfAFusedWeight) {
  Net net;
  Value* x = net.input("x", {2, 64, 64});
  Value* all = net.op("MatMul", {x, net.weight("qkv", {64, 64 + 32 + 32})}, "all");
  Node* split = net.g.add_node("Split", {all, net.ints("sizes", {64, 32, 32})}, {"q", "k", "v"}, {attribute("axis", int64_t{-1})});
  Value* kv = net.op("Mul", {split->outputs[1], split->outputs[2]}, "kv");
  Value* both = net.op("Concat", {split->outputs[0], kv}, "both", {attribute("axis", int64_t{-1})});
  net.output(net.op("MatMul", {both, net.weight("o", {96, 64})}, "y"));
  const ShardedModel model = sharded(net, 2);
  EXPECT_EQ(collectives(model), "AllReduce 1");
  EXPECT_EQ(model.shardings.at("qkv"), "[_, tensor{0:32+64:80+96:112|32:64+80:96+112:128}]");
  EXPECT_EQ(model.shardings.at("o"), "[tensor{0:32+64:80|32:64+80:96}, _]");
}

TEST(Shard, ResidualBlockOfTwoConvolutionsTakesOneExchange) {
  Net net;
  Value* x = net.input("x", {1, 64, 28, 28});
  for (int b = 0; b < 3; ++b) {
    const std::string n = "b" + std::to_string(b);
    Value* h = net.op("Relu", {convolution(net, x, n + ".1", 64, 64, 3)}, n + ".r");
    x = net.op("Relu", {net.op("Add", {convolution(net, h, n + ".2", 64, 64, 3), x}, n + ".a")}, n + ".y");
  }
  net.output(x);
  const ShardedModel model = sharded(net, 4);
  EXPECT_EQ(all_reduces(model), 3) << collectives(model);
  EXPECT_NEAR(weight_share(net, model), 0.25, 0.01);
}

TEST(Shard, DepthwiseConvolutionKeepsWholeGroups) {
  Net net;
  Value* x = net.input("x", {1, 16, 14, 14});
  Value* up = net.op("Relu", {convolution(net, x, "up", 16, 96, 1)}, "r");
  Value* deep = net.op("Relu", {convolution(net, up, "deep", 96, 96, 3, 96)}, "s");
  net.output(convolution(net, deep, "down", 96, 16, 1));
  const ShardedModel model = sharded(net, 2);
  EXPECT_EQ(collectives(model), "AllReduce 1");
  for (const Node* node : model.models[1].graph->nodes) {
    if (node->name != "deep") continue;
    EXPECT_EQ(node->get_int("group", 0), 48);
  }
}

// The shape of an Expand may hold the last sizes alone.
TEST(Shard, ExpandsByTheLastSizesAlone) {
  for (const auto& [shape, expected] : std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>>{{{5}, {5}}, {{6, 5}, {3, 5}}}) {
    Net net;
    Value* h = net.op("MatMul", {net.input("x", {4, 32}), net.weight("w", {32, 6})}, "h");
    Value* column = net.op("Unsqueeze", {h, net.ints("axis", {2})}, "column");
    Value* wide = net.op("Expand", {column, net.ints("shape", shape)}, "wide");
    net.output(net.op("MatMul", {net.op("Flatten", {wide}, "flat"), net.weight("down", {30, 8})}, "y"));
    const ShardedModel model = sharded(net, 2);
    EXPECT_EQ(collectives(model), "AllReduce 1");
    for (const Node* node : model.models.front().graph->nodes)
      if (node->op == "Expand") {
        EXPECT_EQ(int_values(*node->inputs[1]->constant), expected);
      }
  }
}

// Constants that are outputs of the graph are whole there, under their names, however else they are cut.
TEST(Shard, ConstantOutputsKeepTheirNames) {
  Net net;
  Value* turned = net.op("Transpose", {net.weight("up", {64, 16})}, "turned");
  Value* bias = net.weight("bias", {16});
  Value* down = net.weight("down", {64, 16});
  Value* h = net.op("Relu", {net.op("MatMul", {net.input("x", {4, 16}), turned}, "a")}, "h");
  for (Value* v : {net.op("Gemm", {h, down, bias}, "y"), turned, bias, down}) net.output(v);
  for (const int ranks : {2, 3}) {
    const ShardedModel model = sharded(net, ranks);
    for (const Model& local : model.models)
      for (size_t k = 0; k < net.g.outputs.size(); ++k) {
        EXPECT_EQ(local.graph->outputs[k]->name, net.g.outputs[k]->name);
        EXPECT_EQ(to_string(local.graph->outputs[k]->type), to_string(net.g.outputs[k]->type));
      }
  }
}

// Parts of one constant that differ in size: each has a cut of its own.
TEST(Shard, SplitsAConstantIntoUnequalParts) {
  Net net;
  Node* split = net.g.add_node("Split", {net.weight("qkv", {64, 480}), net.ints("sizes", {288, 96, 96})}, {"q", "k", "v"},
                               {attribute("axis", int64_t{1})});
  Value* x = net.input("x", {4, 64});
  std::vector<Value*> products;
  for (Value* w : split->outputs) products.push_back(net.op("Relu", {net.op("MatMul", {x, w}, w->name + ".m")}, w->name + ".r"));
  Value* joined = net.op("Concat", products, "joined", {attribute("axis", int64_t{1})});
  net.output(net.op("MatMul", {joined, net.weight("down", {480, 16})}, "y"));
  const ShardedModel model = sharded(net, 2);
  EXPECT_EQ(collectives(model), "AllReduce 1");
  EXPECT_TRUE(model.kept_whole.empty());
}

// The default of an input says nothing about what a caller gives: neither the rules nor the sizes put in for parts may rely on it.
TEST(Shard, DefaultsOfInputsAreNoConstants) {
  Net net;
  Value *k = net.ints("k", {3}), *shape = net.ints("shape", {3, 1, 1});
  Value* h = net.op("MatMul", {net.input("x", {4, 32}), net.weight("w", {32, 12})}, "h");
  for (Value* v : {k, shape}) net.g.inputs.push_back(v);
  Node* top = net.g.add_node("TopK", {h, k}, {"top", "places"});
  net.output(top->outputs[0]);
  net.output(net.op("Expand", {net.op("Unsqueeze", {h, net.ints("axis", {0})}, "row"), shape}, "wide"));
  const ShardedModel model = sharded(net, 2);
  for (const Factor& factor : factor_rule(*top).factors) EXPECT_EQ(factor.when_cut, Factor::WhenCut::impossible);
  for (const Node* node : model.models.front().graph->nodes)
    if (node->op == "Expand") {
      const Value* sizes = node->inputs[1];
      EXPECT_TRUE(sizes->name == "shape" || (sizes->producer && sizes->producer->inputs[2]->name == "shape")) << sizes->name;
    }
}

TEST(Shard, UnevenSizesAreNoted) {
  Net net;
  Value* x = net.input("x", {8, 10});
  net.output(net.op("MatMul", {x, net.weight("w", {10, 7})}, "y"));
  const ShardedModel model = sharded(net, 4);
  EXPECT_THAT(model.notes, ::testing::Contains(HasSubstr("cut unevenly")));
  EXPECT_LE(weight_share(net, model), 0.31);
}

TEST(Shard, WhatIsGatheredIsNoted) {
  Net net;
  Value* x = net.input("x", {8, 16});
  Value* h = net.op("MatMul", {x, net.weight("w", {16, 32})}, "h");
  net.output(net.op("NonZero", {h}, "where"));
  const ShardedModel model = sharded(net, 2);
  EXPECT_THAT(model.notes, ::testing::Contains(HasSubstr("'h' for 'where' (NonZero)")));
  EXPECT_THAT(model.notes, ::testing::Contains(HasSubstr("without a factor rule run whole on every rank: NonZero")));
}

TEST(Shard, ADimensionOfUnknownSizeIsNotCut) {
  Net net;
  Value* x = net.input("x", {Dim("batch"), 8});
  net.output(net.op("MatMul", {x, net.weight("w", {8, 8})}, "y"));
  const ShardedModel model = sharded(net, 2);
  EXPECT_NEAR(weight_share(net, model), 0.5, 1e-9);
  EXPECT_FALSE(model.shardings.count("x"));
}

TEST(Shard, ChainOfAThousandNodesIsPlannedQuickly) {
  Net net;
  Value* x = net.input("x", {64, 64});
  for (int i = 0; i < 500; ++i) x = net.layer(x, "l" + std::to_string(i), 64);
  net.output(x);
  const ShardedModel model = sharded(net, 8);
  EXPECT_EQ(all_reduces(model), 250) << collectives(model);
}

}  // namespace
}  // namespace fretsaw
