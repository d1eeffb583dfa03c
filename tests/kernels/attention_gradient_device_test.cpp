// AttentionGrad on the GPU against the CPU's: cuDNN's and our kernels, masks, grouped heads and layouts.
#include <cmath>

#include "graph/communication_schemas.h"
#include "tests/kernels/on_device_again.h"
#include "tests/kernels/single_op.h"

namespace fretsaw::testing {
namespace {

struct GradientProblem {
  int64_t B = 2, H = 4, G = 4, S = 16, T = 16, D = 64, V = 64;
  bool three = false, causal = false;
  std::string mask;  // which form; empty: none
  float softcap = 0;
  int64_t left = -1;
  size_t unwanted = 3;  // which gradient nobody wants; 3: all are wanted
};

class AttentionGradientOnDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    device = any_device();
    if (!device) GTEST_SKIP() << "there is no GPU";
  }

  RuntimeValue random(const Dims& dims, DType type) { return tensor_as(type, dims, spread_values(count_of(dims), -1, 1, ++seed)); }
  RuntimeValue heads(const GradientProblem& c, int64_t H, int64_t S, int64_t D, DType type) {
    return random(c.three ? Dims{c.B, S, H * D} : Dims{c.B, H, S, D}, type);
  }
  RuntimeValue mask(const GradientProblem& c, DType type) {
    if (c.mask == "bool" || c.mask == "hidden row") {
      std::vector<double> values = spread_values(c.S * c.T, 0, 2, ++seed);
      for (double& v : values) v = std::floor(v);
      if (c.mask == "hidden row") std::fill_n(values.begin() + c.T, c.T, 0.0);
      return tensor_as(DType::boolean, {c.S, c.T}, values);
    }
    if (c.mask == "padding") {
      std::vector<double> values(static_cast<size_t>(c.B * c.T), 1.0);
      std::fill_n(values.begin(), c.T / 2, 0.0);
      return tensor_as(DType::boolean, {c.B, 1, 1, c.T}, values);
    }
    return random(c.mask == "added" ? Dims{c.B, c.H, c.S, c.T} : Dims{1, c.H, c.S, c.T - 3}, type);  // "short"
  }

  void check(const GradientProblem& c, DType type) {
    std::vector<RuntimeValue> inputs = {heads(c, c.H, c.S, c.V, type), heads(c, c.H, c.S, c.D, type), heads(c, c.G, c.T, c.D, type),
                                        heads(c, c.G, c.T, c.V, type)};
    if (!c.mask.empty()) inputs.push_back(mask(c, type));
    std::vector<Attribute> attributes = {attribute("is_causal", int64_t{c.causal}), attribute("softcap", c.softcap),
                                         attribute("left_window_size", c.left)};
    if (c.three) attributes.push_back(attribute("q_num_heads", c.H)), attributes.push_back(attribute("kv_num_heads", c.G));
    Graph graph;
    std::vector<Value*> values;
    std::vector<RuntimeValue*> given;
    CompileContext context;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const TensorView& x = inputs[i].tensor;
      values.push_back(graph.add_value("x" + std::to_string(i), Type::tensor(x.dtype, shape_of(x.dims))));
      given.push_back(&inputs[i]);
      context.inputs.push_back(values.back()), context.input_types.push_back(values.back()->type);
      context.constants.push_back(nullptr), context.offered.push_back(Layout::plain);
    }
    std::vector<std::string> names = {"dq", "dk", "dv"};
    if (c.unwanted < 3) names[c.unwanted] = "";
    Node& node = *graph.add_node("AttentionGrad", values, names, attributes, kCommunicationDomain);
    const std::vector<RuntimeValue> wanted = run_node(node, given);
    context.nodes = {&node};
    for (size_t o = 0; o < 3; ++o) {
      context.outputs.push_back(node.out(o));
      context.output_types.push_back(node.out(o) ? values[o + 1]->type : Type{});
    }
    compare(run_on_device_with_noise(*device, context, given, tolerance_of(type)), wanted, c, type);
  }

  static double tolerance_of(DType type) { return type == DType::float32 ? 5e-5 : type == DType::float16 ? 4e-3 : 3e-2; }

  // Against the largest element: halves are rounded between the products.
  static void compare(const std::vector<RuntimeValue>& got, const std::vector<RuntimeValue>& wanted, const GradientProblem& c, DType type) {
    const double tolerance = tolerance_of(type);
    for (size_t o = 0; o < 3; ++o) {
      if (o == c.unwanted) continue;
      ASSERT_EQ(got[o].tensor.dims, wanted[o].tensor.dims);
      const std::vector<double> a = doubles_of(got[o]), b = doubles_of(wanted[o]);
      double largest = 0;
      for (double x : b) largest = std::max(largest, std::fabs(x));
      ASSERT_GT(largest, 0) << "output " << o;
      for (size_t k = 0; k < b.size(); ++k) ASSERT_NEAR(a[k], b[k], tolerance * largest) << "output " << o << " element " << k;
    }
  }

  Device* device = nullptr;
  uint32_t seed = 0;
};

TEST_F(AttentionGradientOnDevice, EqualsTheCpu) {
  const std::pair<const char*, GradientProblem> cases[] = {
      {"plain", {.S = 40, .T = 72}},
      {"even tiles", {.S = 128, .T = 256}},
      {"many tiles", {.H = 2, .G = 2, .S = 300, .T = 333}},
      {"3-D", {.S = 70, .T = 70, .three = true}},
      {"3-D and causal", {.S = 128, .T = 128, .three = true, .causal = true}},
      {"grouped", {.H = 8, .G = 2, .S = 33, .T = 65, .three = true}},
      {"grouped and causal", {.H = 8, .G = 2, .S = 64, .T = 64, .causal = true}},
      {"causal", {.S = 150, .T = 150, .causal = true}},
      {"causal of more keys", {.S = 30, .T = 100, .causal = true}},
      {"causal of more queries", {.S = 100, .T = 30, .causal = true}},
      {"wide heads", {.S = 20, .T = 50, .D = 128, .V = 128}},
      {"widest heads", {.S = 20, .T = 50, .D = 256, .V = 256}},
      {"odd heads", {.S = 20, .T = 50, .D = 37, .V = 19}},
      {"values wider", {.S = 20, .T = 50, .D = 32, .V = 80}},
      {"boolean mask", {.S = 30, .T = 45, .mask = "bool"}},
      {"hidden row", {.S = 30, .T = 45, .mask = "hidden row"}},
      {"left padding", {.S = 130, .T = 130, .causal = true, .mask = "padding"}},
      {"added mask", {.S = 30, .T = 44, .mask = "added"}},
      {"short mask of each head", {.S = 30, .T = 45, .mask = "short"}},
      {"softcap", {.S = 30, .T = 45, .causal = true, .softcap = 2}},
      {"window", {.S = 90, .T = 90, .causal = true, .left = 20}},
      {"few queries", {.S = 3, .T = 50}},
      {"without queries' gradient", {.S = 40, .T = 40, .unwanted = 0}},
      {"without keys' gradient", {.S = 40, .T = 40, .three = true, .unwanted = 1}},
      {"without values' gradient", {.S = 3, .T = 40, .unwanted = 2}},
  };
  for (const auto& [name, c] : cases) {
    for (DType type : {DType::float32, DType::float16, DType::bfloat16}) {
      SCOPED_TRACE(std::string(name) + " " + std::string(name_of(type)));
      check(c, type);
    }
  }
}

}  // namespace
}  // namespace fretsaw::testing
