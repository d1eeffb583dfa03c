// Attention on the GPU against the CPU's: cuDNN's and our kernels, masks, caches, grouped heads and layouts.
#include <cmath>

#include "graph/device_operators.h"
#include "tests/kernels/on_device.h"
#include "tests/kernels/single_op.h"

namespace fretsaw::testing {
namespace {

struct AttentionCase {
  int64_t B = 2, H = 4, G = 4, S = 16, T = 16, D = 64, V = 64, past = 0;
  bool three = false, causal = false;
  std::string mask;  // "bool [S,T]" forms by name; empty: none
  float softcap = 0;
  int64_t left = -1, mode = -1;  // a mode below 0: scores are not asked for
  std::vector<int64_t> lengths;
  int64_t presents = 0;
};

class AttentionOnDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    device = any_device();
    if (!device) GTEST_SKIP() << "there is no GPU";
  }

  RuntimeValue random(const Dims& dims, DType type) { return tensor_as(type, dims, spread_values(count_of(dims), -1, 1, ++seed)); }
  RuntimeValue heads(const AttentionCase& c, int64_t H, int64_t S, int64_t D, DType type) {
    return random(c.three ? Dims{c.B, S, H * D} : Dims{c.B, H, S, D}, type);
  }
  RuntimeValue mask(const AttentionCase& c, DType type) {
    const int64_t T = c.T + c.past;
    if (c.mask == "hidden row" || c.mask == "bool") {
      std::vector<double> values = spread_values(c.S * T, 0, 2, ++seed);
      for (double& v : values) v = std::floor(v);
      if (c.mask == "hidden row") std::fill_n(values.begin() + T, T, 0.0);
      return tensor_as(DType::boolean, {c.S, T}, values);
    }
    if (c.mask == "padding") {
      std::vector<double> values(static_cast<size_t>(c.B * T), 1.0);
      for (int64_t t = 0; t < T / 2; ++t) values[static_cast<size_t>(t)] = 0;  // the first sample is padded on the left
      return tensor_as(DType::boolean, {c.B, 1, 1, T}, values);
    }
    if (c.mask == "added") return random({c.B, c.H, c.S, T}, type);
    if (c.mask == "per head") return random({1, c.H, c.S, T}, type);
    return random({c.S, T - 3}, type);  // "short"
  }

  void check(const AttentionCase& c, DType type) {
    std::vector<RuntimeValue> inputs = {heads(c, c.H, c.S, c.D, type), heads(c, c.G, c.T, c.D, type), heads(c, c.G, c.T, c.V, type)};
    inputs.resize(7);
    if (!c.mask.empty()) inputs[3] = mask(c, type);
    if (c.past) inputs[4] = random({c.B, c.G, c.past, c.D}, type), inputs[5] = random({c.B, c.G, c.past, c.V}, type);
    if (!c.lengths.empty()) inputs[6] = tensor<int64_t>({c.B}, c.lengths);
    std::vector<Attribute> attributes = {attribute("is_causal", int64_t{c.causal}), attribute("softcap", c.softcap),
                                         attribute("left_window_size", c.left),
                                         attribute("qk_matmul_output_mode", std::max<int64_t>(c.mode, 0))};
    if (c.three) attributes.push_back(attribute("q_num_heads", c.H)), attributes.push_back(attribute("kv_num_heads", c.G));
    compare(inputs, attributes, c.mode >= 0 ? 4 : c.presents ? 3 : 1, type);
  }

  // Queries, keys and values are views of one tensor of `elements`.
  void check_strided(const AttentionCase& c, const AttentionViews& views, int64_t elements, DType type) {
    const RuntimeValue x = random({elements}, type);
    std::vector<RuntimeValue> inputs = {x, x, x};
    if (!c.mask.empty()) inputs.push_back(mask(c, type));
    Node written;
    write_attention_views(written, views);
    std::vector<Attribute> attributes = written.attributes;
    attributes.push_back(attribute("is_causal", int64_t{c.causal}));
    attributes.push_back(attribute("softcap", c.softcap));
    compare(inputs, attributes, 1, type, "StridedAttention", kDeviceDomain);
  }

  void compare(std::vector<RuntimeValue>& inputs, const std::vector<Attribute>& attributes, size_t outputs, DType type,
               const std::string& op = "Attention", const std::string& domain = "") {
    while (inputs.back().kind == RuntimeValue::Kind::absent) inputs.pop_back();
    Graph graph;
    std::vector<Value*> values;
    std::vector<RuntimeValue*> given;
    CompileContext c;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const bool absent = inputs[i].kind == RuntimeValue::Kind::absent;
      const TensorView& x = inputs[i].tensor;
      values.push_back(absent ? nullptr : graph.add_value("x" + std::to_string(i), Type::tensor(x.dtype, shape_of(x.dims))));
      given.push_back(absent ? nullptr : &inputs[i]);
      c.inputs.push_back(values.back()), c.input_types.push_back(absent ? Type{} : values.back()->type);
      c.constants.push_back(nullptr), c.offered.push_back(Layout::plain);
    }
    std::vector<std::string> names;
    for (size_t i = 0; i < outputs; ++i) names.push_back("y" + std::to_string(i));
    const Node& node = *graph.add_node(op, values, names, attributes, domain);
    const std::vector<RuntimeValue> wanted = run_node(node, given);
    c.nodes = {&node};
    for (size_t i = 0; i < outputs; ++i) {
      c.outputs.push_back(node.out(i));
      c.output_types.push_back(Type::tensor(wanted[i].tensor.dtype, shape_of(wanted[i].tensor.dims)));
    }
    const std::vector<RuntimeValue> got = run_on_device(*device, c, given);
    const double tolerance = type == DType::float32 ? 2e-5 : type == DType::float16 ? 4e-3 : 3e-2;
    for (size_t i = 0; i < outputs; ++i) {
      ASSERT_EQ(got[i].tensor.dims, wanted[i].tensor.dims);
      const std::vector<double> a = doubles_of(got[i]), b = doubles_of(wanted[i]);
      for (size_t k = 0; k < b.size(); ++k) {
        if (a[k] == b[k]) continue;  // infinities among the scores
        ASSERT_NEAR(a[k], b[k], tolerance * (1 + std::fabs(b[k]))) << "output " << i << " element " << k;
      }
    }
  }

  Device* device = nullptr;
  uint32_t seed = 0;
};

TEST_F(AttentionOnDevice, EqualsTheCpu) {
  const std::pair<const char*, AttentionCase> cases[] = {
      {"plain", {.S = 40, .T = 72}},
      {"many tiles", {.H = 2, .G = 2, .S = 300, .T = 333}},
      {"3-D", {.S = 70, .T = 70, .three = true}},
      {"grouped", {.H = 8, .G = 2, .S = 33, .T = 65, .three = true}},
      {"causal", {.S = 150, .T = 150, .causal = true}},
      {"causal of more keys", {.S = 30, .T = 100, .causal = true}},
      {"causal of more queries", {.S = 100, .T = 30, .causal = true}},
      {"wide heads", {.S = 20, .T = 50, .D = 128, .V = 128}},
      {"widest heads", {.S = 20, .T = 50, .D = 256, .V = 256}},
      {"too wide heads", {.S = 9, .T = 21, .D = 300, .V = 270}},
      {"odd heads", {.S = 20, .T = 50, .D = 37, .V = 19}},
      {"narrow heads", {.S = 20, .T = 50, .D = 16, .V = 24}},
      {"values wider", {.S = 20, .T = 50, .D = 32, .V = 80}},
      {"boolean mask", {.S = 30, .T = 45, .mask = "bool"}},
      {"hidden row", {.S = 30, .T = 45, .mask = "hidden row"}},
      {"left padding", {.S = 130, .T = 130, .causal = true, .mask = "padding"}},
      {"added mask", {.S = 30, .T = 44, .mask = "added"}},
      {"mask of each head", {.S = 30, .T = 43, .causal = true, .mask = "per head"}},
      {"short mask", {.S = 30, .T = 45, .mask = "short"}},
      {"softcap", {.S = 30, .T = 45, .causal = true, .softcap = 2}},
      {"window", {.S = 90, .T = 90, .causal = true, .left = 20}},
      {"lengths", {.S = 8, .T = 60, .causal = true, .lengths = {60, 13}}},
      {"lengths alone", {.S = 20, .T = 60, .lengths = {0, 47}}},
      {"cache", {.H = 8, .S = 12, .T = 12, .past = 40, .causal = true, .presents = 1}},
      {"cache and mask", {.S = 12, .T = 12, .past = 41, .three = true, .causal = true, .mask = "bool", .presents = 1}},
      {"cache that nobody takes", {.S = 12, .T = 12, .past = 40, .three = true}},
      {"presents alone", {.S = 12, .T = 20, .three = true, .presents = 1}},
      {"scores", {.S = 12, .T = 20, .softcap = 3, .mode = 0}},
      {"capped scores", {.S = 12, .T = 20, .softcap = 3, .mode = 1}},
      {"masked scores", {.S = 12, .T = 20, .causal = true, .softcap = 3, .mode = 2}},
      {"weights", {.S = 12, .T = 20, .mask = "hidden row", .mode = 3}},
      {"decode", {.H = 8, .S = 1, .T = 1, .past = 700, .three = true, .causal = true, .presents = 1}},
      {"decode of grouped heads", {.H = 8, .G = 2, .S = 1, .T = 1, .D = 128, .V = 128, .past = 1500, .causal = true, .presents = 1}},
      {"decode of many heads for one", {.H = 12, .G = 1, .S = 2, .T = 2, .past = 300, .causal = true}},
      {"decode of three", {.B = 1, .S = 3, .T = 500, .mask = "bool"}},
      {"decode of wide heads", {.S = 1, .T = 260, .D = 192, .V = 256}},
      {"decode with lengths", {.S = 1, .T = 900, .lengths = {33, 800}}},
      {"decode of odd heads", {.S = 1, .T = 90, .D = 20, .V = 12}},
      {"one key", {.S = 1, .T = 1}},
  };
  for (const auto& [name, c] : cases) {
    for (DType type : {DType::float32, DType::float16, DType::bfloat16}) {
      SCOPED_TRACE(std::string(name) + " " + std::string(name_of(type)));
      check(c, type);
    }
  }
}

// [B, S, 3, H, D], and the result as [B, S, H, D].
AttentionViews rows_of_batches(const AttentionCase& c) {
  const int64_t width = c.H * c.D, row = 3 * width;
  const auto part = [&](int64_t i) { return HeadsView{c.B, c.H, c.S, c.D, i * width, c.S * row, c.D, row}; };
  return {part(0), part(1), part(2), {c.B, c.H, c.S, c.D, 0, c.S * width, c.D, width}, {c.B, c.S, width}};
}

// [S, B, 3, H, D], and the result as [S, B, H, D].
AttentionViews positions_first(const AttentionCase& c) {
  const int64_t width = c.H * c.D, row = 3 * width;
  const auto part = [&](int64_t i) { return HeadsView{c.B, c.H, c.S, c.D, i * width, row, c.D, c.B * row}; };
  return {part(0), part(1), part(2), {c.B, c.H, c.S, c.D, 0, width, c.D, c.B * width}, {c.S * c.B, width}};
}

// [B, S, H, 3, D], and the result as [B, H, S, D].
AttentionViews parts_of_heads(const AttentionCase& c) {
  const int64_t head = 3 * c.D, row = c.H * head;
  const auto part = [&](int64_t i) { return HeadsView{c.B, c.H, c.S, c.D, i * c.D, c.S * row, head, row}; };
  return {part(0), part(1), part(2), dense_view(c.B, c.H, c.S, c.D), {c.B, c.H, c.S, c.D}};
}

// Rows that begin at no multiple of 16 bytes.
AttentionViews odd_offsets(const AttentionCase& c) {
  AttentionViews views = rows_of_batches(c);
  views.k.offset -= 3, views.v.offset -= 1;
  return views;
}

TEST_F(AttentionOnDevice, ReadsViews) {
  const std::pair<const char*, AttentionCase> cases[] = {
      {"plain", {.S = 70, .T = 70}},
      {"one batch", {.B = 1, .S = 40, .T = 40}},
      {"causal", {.S = 150, .T = 150, .causal = true}},
      {"hidden row", {.S = 30, .T = 30, .mask = "hidden row"}},
      {"mask of each head", {.S = 30, .T = 30, .mask = "per head"}},
      {"softcap", {.S = 30, .T = 30, .softcap = 2}},
      {"wide heads", {.H = 2, .S = 30, .T = 30, .D = 128, .V = 128}},
      {"odd heads", {.S = 30, .T = 30, .D = 37, .V = 37}},
      {"few queries", {.S = 3, .T = 3}},
  };
  for (const auto& [name, c] : cases) {
    for (const auto& views : {rows_of_batches(c), positions_first(c), parts_of_heads(c), odd_offsets(c)}) {
      for (DType type : {DType::float32, DType::float16, DType::bfloat16}) {
        SCOPED_TRACE(std::string(name) + " " + std::string(name_of(type)) + " row " + std::to_string(views.q.row) + " keys at " +
                     std::to_string(views.k.offset));
        check_strided(c, views, 3 * c.B * c.S * c.H * c.D, type);
      }
    }
  }
}

}  // namespace
}  // namespace fretsaw::testing
