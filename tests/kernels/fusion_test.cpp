// Fusion groups: whatever the rules allow gives what the nodes give one by one.
#include "graph/fusion_rules.h"
#include "tests/kernels/fused_group.h"
#include "tests/kernels/on_device.h"

namespace fretsaw::testing {
namespace {

RuntimeValue random_tensor(const Dims& dims, uint32_t seed) {
  return tensor_as(DType::float32, dims, spread_values(count_of(dims), -1, 1, seed));
}

// The contraction of a case and the shape of its result.
struct Start {
  std::string name;
  Dims y;
  void (*add)(FusedGroup&);
};

void add_conv(FusedGroup& g, const Dims& x, const Dims& w, const std::string& op, bool bias, std::vector<Attribute> attributes = {}) {
  std::vector<Value*> inputs = {g.input("x", random_tensor(x, 1)), g.constant("w", random_tensor(w, 2))};
  if (bias) inputs.push_back(g.constant("b", random_tensor({op == "Conv" ? w[0] : w[1]}, 3)));
  g.add(op, inputs, std::move(attributes));
}

const Start kStarts[] = {
    {"Conv",
     {2, 16, 6, 6},
     [](FusedGroup& g) {
       add_conv(g, {2, 8, 8, 8}, {16, 8, 3, 3}, "Conv", true);
     }},
    {"ConvNoBias",
     {1, 8, 7, 7},
     [](FusedGroup& g) {
       add_conv(g, {1, 16, 7, 7}, {8, 16, 1, 1}, "Conv", false);
     }},
    {"Depthwise",
     {1, 8, 8, 8},
     [](FusedGroup& g) {
       add_conv(g, {1, 8, 8, 8}, {8, 1, 3, 3}, "Conv", true, {attribute("group", int64_t{8}), attribute("pads", Dims{1, 1, 1, 1})});
     }},
    {"Grouped",
     {1, 6, 6, 6},
     [](FusedGroup& g) {
       add_conv(g, {1, 6, 8, 8}, {6, 2, 3, 3}, "Conv", false, {attribute("group", int64_t{3})});
     }},
    {"Conv1d",
     {2, 5, 18},
     [](FusedGroup& g) {
       add_conv(g, {2, 4, 20}, {5, 4, 3}, "Conv", true);
     }},
    {"ConvTranspose",
     {1, 6, 10, 10},
     [](FusedGroup& g) {
       add_conv(g, {1, 4, 5, 5}, {4, 6, 2, 2}, "ConvTranspose", true, {attribute("strides", Dims{2, 2})});
     }},
    {"MatMul",
     {2, 5, 12},
     [](FusedGroup& g) {
       g.add("MatMul", {g.input("x", random_tensor({2, 5, 8}, 1)), g.constant("w", random_tensor({8, 12}, 2))});
     }},
    {"MatMulRow",
     {1, 12},
     [](FusedGroup& g) {
       g.add("MatMul", {g.input("x", random_tensor({1, 8}, 1)), g.constant("w", random_tensor({8, 12}, 2))});
     }},
    {"MatMulTwo",
     {3, 4, 5, 6},
     [](FusedGroup& g) {
       g.add("MatMul", {g.input("x", random_tensor({3, 4, 5, 7}, 1)), g.input("w", random_tensor({3, 4, 7, 6}, 2))});
     }},
    {"Gemm",
     {5, 12},
     [](FusedGroup& g) {
       g.add("Gemm",
             {g.input("x", random_tensor({5, 8}, 1)), g.constant("w", random_tensor({12, 8}, 2)), g.constant("c", random_tensor({12}, 3))},
             {attribute("transB", int64_t{1}), attribute("alpha", 0.5f), attribute("beta", 2.0f)});
     }},
    {"GemmNoC",
     {5, 12},
     [](FusedGroup& g) {
       g.add("Gemm", {g.input("x", random_tensor({8, 5}, 1)), g.input("w", random_tensor({8, 12}, 2))}, {attribute("transA", int64_t{1})});
     }},
};

Dims channel_shape(const Dims& y, bool convolution) {
  if (!convolution) return {y.back()};
  Dims dims(y.size() - 1, 1);
  dims[0] = y[1];
  return dims;
}

struct Chain {
  std::string name;
  void (*add)(FusedGroup&, const Dims& y, bool convolution);
};

const Chain kChains[] = {
    {"Nothing", [](FusedGroup&, const Dims&, bool) {}},
    {"Relu", [](FusedGroup& g, const Dims&, bool) { g.add("Relu", {nullptr}); }},
    {"LeakyRelu", [](FusedGroup& g, const Dims&, bool) { g.add("LeakyRelu", {nullptr}, {attribute("alpha", 0.3f)}); }},
    {"Clip",
     [](FusedGroup& g, const Dims&, bool) {
       g.add("Clip", {nullptr, g.constant("low", random_tensor({}, 9)), g.constant("high", tensor_as(DType::float32, {}, {0.5}))});
     }},
    {"Sigmoid", [](FusedGroup& g, const Dims&, bool) { g.add("Sigmoid", {nullptr}); }},
    {"HardSigmoid", [](FusedGroup& g, const Dims&, bool) { g.add("HardSigmoid", {nullptr}, {attribute("alpha", 0.4f)}); }},
    {"HardSwish", [](FusedGroup& g, const Dims&, bool) { g.add("HardSwish", {nullptr}); }},
    {"Gelu", [](FusedGroup& g, const Dims&, bool) { g.add("Gelu", {nullptr}); }},
    {"GeluTanh", [](FusedGroup& g, const Dims&, bool) { g.add("Gelu", {nullptr}, {attribute("approximate", std::string("tanh"))}); }},
    {"Tanh", [](FusedGroup& g, const Dims&, bool) { g.add("Tanh", {nullptr}); }},
    {"Elu", [](FusedGroup& g, const Dims&, bool) { g.add("Elu", {nullptr}, {attribute("alpha", 0.7f)}); }},
    {"Mish", [](FusedGroup& g, const Dims&, bool) { g.add("Mish", {nullptr}); }},
    {"Swish", [](FusedGroup& g, const Dims&, bool) { g.add("Swish", {nullptr}, {attribute("alpha", 1.5f)}); }},
    {"BiasRelu",
     [](FusedGroup& g, const Dims& y, bool conv) {
       g.add("Add", {nullptr, g.constant("bias", random_tensor(channel_shape(y, conv), 11))});
       g.add("Relu", {nullptr});
     }},
    {"ResidualRelu",
     [](FusedGroup& g, const Dims& y, bool) {
       g.add("Add", {g.input("residual", random_tensor(y, 12)), nullptr});
       g.add("Relu", {nullptr});
     }},
    {"BiasResidualGelu",
     [](FusedGroup& g, const Dims& y, bool conv) {
       g.add("Add", {g.constant("bias", random_tensor(channel_shape(y, conv), 11)), nullptr});
       g.add("Add", {nullptr, g.input("residual", random_tensor(y, 12))});
       g.add("Gelu", {nullptr});
     }},
    {"ScaleShift",
     [](FusedGroup& g, const Dims& y, bool conv) {
       g.add("Mul", {nullptr, g.constant("scale", random_tensor(channel_shape(y, conv), 13))});
       g.add("Sub", {nullptr, g.constant("shift", random_tensor({1}, 14))});
       g.add("Div", {nullptr, g.constant("by", tensor_as(DType::float32, {}, {3.0}))});
     }},
    {"ActivationThenMul",
     [](FusedGroup& g, const Dims& y, bool) {
       g.add("Sigmoid", {nullptr});
       g.add("Mul", {g.input("gate", random_tensor(y, 15)), nullptr});
     }},
    {"LastDimension",
     [](FusedGroup& g, const Dims& y, bool) {
       g.add("Mul", {nullptr, g.constant("columns", random_tensor({y.back()}, 16))});
     }},
    {"FirstDimension",
     [](FusedGroup& g, const Dims& y, bool) {
       Dims dims(y.size(), 1);
       dims[0] = y[0];
       g.add("Add", {nullptr, g.input("samples", random_tensor(dims, 17))});
       g.add("Relu", {nullptr});
     }},
    {"WithoutBatch",
     [](FusedGroup& g, const Dims& y, bool) {
       g.add("Add", {nullptr, g.input("position", random_tensor(Dims(y.begin() + 1, y.end()), 18))});
     }},
};

TEST(Fusion, ChainsEqualTheirNodes) {
  if (test_device()) GTEST_SKIP() << "compares bits of the CPU's kernels, fused and one by one";
  for (const Start& start : kStarts) {
    for (const Chain& chain : kChains) {
      FusedGroup group;
      start.add(group);
      chain.add(group, start.y, start.name.find("Mat") == std::string::npos && start.name.find("Gemm") == std::string::npos);
      group.infer();
      SCOPED_TRACE(start.name + " + " + chain.name);
      ASSERT_TRUE(can_fuse(group.contraction(), group.chain()));
      for (int threads : {1, 2}) {
        const RuntimeValue wanted = group.run_one_by_one(threads);
        ASSERT_EQ(wanted.tensor.dims, start.y);
        const RuntimeValue fused = group.run_fused(threads);
        EXPECT_EQ(std::memcmp(fused.tensor.data, wanted.tensor.data, wanted.tensor.bytes()), 0)
            << "a group that a cut opens must give the same bits; it is off by " << relative_difference(fused, wanted);
        if (start.y.size() == 4) {
          const RuntimeValue from_nhwc = group.run_fused(threads, Layout::nhwc);
          EXPECT_EQ(std::memcmp(from_nhwc.tensor.data, fused.tensor.data, fused.tensor.bytes()), 0);
        }
      }
    }
  }
}

TEST(Fusion, RulesRefuse) {
  const auto refused = [](const Dims& operand, const char* op, bool second) {
    FusedGroup g;
    add_conv(g, {1, 4, 5, 5}, {4, 4, 1, 1}, "Conv", false);
    g.infer();
    std::vector<Value*> inputs = {nullptr, g.input("operand", random_tensor(operand, 4))};
    if (second) std::swap(inputs[0], inputs[1]);
    g.add(op, inputs);
    g.infer();
    return !can_fuse(g.contraction(), g.chain());
  };
  EXPECT_TRUE(refused({3, 4, 5, 5}, "Add", false)) << "the result is larger than the contraction's";
  EXPECT_TRUE(refused({1, 4, 1, 1}, "Sub", true)) << "the chain is the second operand";
  EXPECT_TRUE(refused({1, 4, 1, 1}, "Pow", false)) << "no rule for Pow";
  EXPECT_FALSE(refused({4, 1, 1}, "Sub", false));
}

}  // namespace
}  // namespace fretsaw::testing
