// Convolutions on the device: all windows and types, fused steps, depthwise kernels, layouts, weights that are computed.
#include "kernels/cpu/convolution.h"
#include "tests/kernels/device_case.h"

namespace fretsaw::testing {
namespace {

struct WindowCase {
  std::string name;
  Dims x, w;
  int64_t group = 1;
  Dims strides = {}, dilations = {}, pads = {}, output_padding = {};
  bool transposed = false;
  std::string auto_pad = "";
};

std::vector<Attribute> attributes_of(const WindowCase& c) {
  std::vector<Attribute> out = {attribute("group", c.group)};
  if (!c.strides.empty()) out.push_back(attribute("strides", c.strides));
  if (!c.dilations.empty()) out.push_back(attribute("dilations", c.dilations));
  if (!c.pads.empty()) out.push_back(attribute("pads", c.pads));
  if (!c.output_padding.empty()) out.push_back(attribute("output_padding", c.output_padding));
  if (!c.auto_pad.empty()) out.push_back(attribute("auto_pad", c.auto_pad));
  return out;
}

// Sums of K products, each of numbers up to 1: their roundings add up.
Tolerance sums_of(DType type, int64_t terms) {
  const Tolerance one = tolerance_for(type);
  const double growth = std::sqrt(static_cast<double>(terms));
  return {one.relative, type == DType::float32 ? 2e-6 * growth : type == DType::float64 ? 1e-12 * growth : one.relative * (1 + growth / 8)};
}

const std::vector<WindowCase> kWindows = {
    {"plain_3x3", {2, 8, 9, 7}, {16, 8, 3, 3}, 1, {}, {}, {1, 1, 1, 1}},
    {"three_channels", {2, 3, 33, 31}, {32, 3, 7, 7}, 1, {2, 2}, {}, {3, 3, 3, 3}},
    {"odd_channels", {1, 5, 6, 6}, {7, 5, 1, 1}},
    {"many_channels", {2, 64, 14, 14}, {255, 64, 1, 1}},
    {"asymmetric", {1, 16, 8, 9}, {24, 16, 3, 2}, 1, {2, 1}, {}, {0, 1, 2, 0}},
    {"same_upper", {1, 16, 15, 16}, {24, 16, 3, 3}, 1, {2, 2}, {}, {}, {}, false, "SAME_UPPER"},
    {"same_lower", {1, 16, 15, 16}, {24, 16, 4, 4}, 1, {2, 2}, {}, {}, {}, false, "SAME_LOWER"},
    {"dilated", {1, 16, 11, 11}, {16, 16, 3, 3}, 1, {1, 1}, {2, 3}, {2, 2, 2, 2}},
    {"grouped", {2, 8, 6, 6}, {12, 2, 3, 3}, 4, {}, {}, {1, 1, 1, 1}},
    {"grouped_by_eight", {1, 32, 6, 6}, {32, 8, 3, 3}, 4, {}, {}, {1, 1, 1, 1}},
    {"depthwise_odd", {1, 12, 8, 8}, {12, 1, 3, 3}, 12, {2, 2}, {}, {1, 1, 1, 1}},
    {"depthwise_twice", {1, 4, 8, 8}, {8, 1, 3, 3}, 4},
    {"large", {4, 64, 56, 56}, {64, 64, 3, 3}, 1, {}, {}, {1, 1, 1, 1}},
    {"one_dimension", {2, 6, 20}, {5, 6, 4}, 1, {3}, {}, {2, 1}},
    {"sound", {1, 80, 300}, {96, 80, 3}, 1, {2}, {}, {1, 1}},
    {"three_dimensions", {1, 3, 5, 6, 4}, {4, 3, 2, 3, 2}, 1, {1, 2, 1}, {}, {1, 0, 1, 0, 1, 0}},
    {"volume", {1, 16, 8, 8, 8}, {16, 16, 3, 3, 3}, 1, {}, {}, {1, 1, 1, 1, 1, 1}},
    {"one_pixel", {1, 16, 1, 1}, {8, 16, 1, 1}},
    {"empty_batch", {0, 16, 5, 5}, {8, 16, 3, 3}},
    {"transposed", {1, 6, 5, 4}, {6, 4, 3, 3}, 1, {2, 2}, {}, {1, 1, 1, 1}, {1, 1}, true},
    {"transposed_by_eight", {2, 32, 12, 12}, {32, 16, 4, 4}, 1, {2, 2}, {}, {1, 1, 1, 1}, {}, true},
    {"transposed_grouped", {1, 6, 4, 4}, {6, 2, 2, 2}, 3, {2, 2}, {}, {}, {}, true},
    {"transposed_dilated", {2, 3, 4, 5}, {3, 2, 3, 3}, 1, {1, 2}, {2, 1}, {1, 0, 0, 1}, {}, true},
    {"transposed_line", {1, 4, 7}, {4, 3, 4}, 1, {3}, {}, {1, 2}, {}, true},
    {"transposed_volume", {1, 8, 4, 4, 4}, {8, 8, 2, 2, 2}, 1, {2, 2, 2}, {}, {}, {}, true},
};

TEST(ConvolutionOnDevice, EqualsTheCpu) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const WindowCase& c : kWindows) {
    const int64_t outputs = c.transposed ? c.w[1] * c.group : c.w[0], terms = count_of(c.w) / std::max<int64_t>(c.w[0], 1);
    for (DType type : kFloatTypes) {
      for (Layout layout : {Layout::plain, Layout::nhwc}) {
        if (layout == Layout::nhwc && c.x.size() != 4) continue;
        const RuntimeValue x = reordered(numbers(type, c.x, -1, 1, 1), layout), w = numbers(type, c.w, -1, 1, 2),
                           b = numbers(type, {outputs}, -1, 1, 3);
        const std::string op = c.transposed ? "ConvTranspose" : "Conv";
        expect_same_on_device({op, {x, w, b}, attributes_of(c), 1, {1, 2}}, sums_of(type, terms), c.name);
        expect_same_on_device({op, {x, w}, attributes_of(c)}, sums_of(type, terms), c.name + " with given weights");
      }
    }
  }
}

TEST(ConvolutionOnDevice, OutputShapeOfATransposeMayPadOneSideOnly) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : kFloatTypes) {
    const RuntimeValue x = numbers(type, {1, 8, 5, 5}), w = numbers(type, {8, 8, 3, 3}, -1, 1, 2);
    for (const Dims& shape : {Dims{10, 10}, Dims{11, 9}, Dims{12, 12}}) {
      const std::vector<Attribute> attributes = {attribute("output_shape", shape), attribute("strides", Dims{2, 2})};
      expect_same_on_device({"ConvTranspose", {x, w}, attributes}, sums_of(type, 72), to_string(shape));
    }
  }
}

TEST(ConvolutionOnDevice, DepthwiseWindows) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (int64_t kernel : {3, 5, 7}) {
    for (int64_t stride : {1, 2}) {
      for (const Dims& x : {Dims{2, 32, 13, 17}, Dims{1, 8, 3, 2}, Dims{1, 40, 28, 28}, Dims{1, 12, 9, 9}}) {
        const int64_t pad = kernel / 2;
        const WindowCase c{"depthwise", x, {x[1], 1, kernel, kernel}, x[1], {stride, stride}, {}, {pad, pad, pad, pad}};
        for (DType type : kFloatTypes) {
          const RuntimeValue w = numbers(type, c.w, -1, 1, 2), b = numbers(type, {x[1]}, -1, 1, 3);
          for (Layout layout : {Layout::plain, Layout::nhwc}) {
            expect_same_on_device({"Conv", {reordered(numbers(type, x), layout), w, b}, attributes_of(c), 1, {1}},
                                  sums_of(type, kernel * kernel), std::to_string(kernel));
          }
        }
      }
    }
  }
}

TEST(ConvolutionOnDevice, FewChannels) {
  if (!any_device()) GTEST_SKIP() << "no device";
  const std::vector<WindowCase> stems = {
      {"residual network", {2, 3, 70, 66}, {64, 3, 7, 7}, 1, {2, 2}, {}, {3, 3, 3, 3}},
      {"mobile network", {3, 3, 33, 47}, {24, 3, 3, 3}, 1, {2, 2}, {}, {0, 0, 1, 1}},
      {"plain stride", {1, 3, 20, 21}, {72, 3, 3, 3}, 1, {}, {}, {1, 1, 1, 1}},
      {"digits", {4, 1, 28, 28}, {32, 1, 5, 5}, 1, {}, {}, {2, 2, 2, 2}},
      {"two channels", {1, 2, 19, 18}, {8, 2, 3, 5}, 1, {3, 1}, {}, {1, 2, 1, 2}},
      {"patches", {2, 4, 32, 32}, {200, 4, 8, 8}, 1, {8, 8}},
      {"halving", {1, 16, 8, 10}, {24, 16, 2, 2}, 1, {2, 2}},
      {"a line", {2, 3, 50}, {16, 3, 9}, 1, {2}, {}, {4, 4}},
  };
  for (const WindowCase& c : stems) {
    for (DType type : {DType::float16, DType::bfloat16}) {
      for (Layout layout : {Layout::plain, Layout::nhwc}) {
        if (layout == Layout::nhwc && c.x.size() != 4) continue;
        const RuntimeValue x = reordered(numbers(type, c.x, -1, 1, 1), layout), w = numbers(type, c.w, -1, 1, 2);
        const std::string name = c.name + " " + std::string(name_of(type));
        expect_same_on_device({"Conv", {x, w, numbers(type, {c.w[0]}, -1, 1, 3)}, attributes_of(c), 1, {1, 2}},
                              sums_of(type, count_of(c.w) / c.w[0]), name);
        expect_same_on_device({"Conv", {x, w}, attributes_of(c)}, sums_of(type, count_of(c.w) / c.w[0]), name + " with given weights");
      }
    }
  }
}

TEST(ConvolutionOnDevice, Deformable) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : kFloatTypes) {
    const RuntimeValue x = numbers(type, {2, 4, 7, 6}), w = numbers(type, {6, 2, 3, 3}, -1, 1, 2),
                       offset = numbers(type, {2, 36, 7, 6}, -2, 2, 3), b = numbers(type, {6}, -1, 1, 4),
                       mask = numbers(type, {2, 18, 7, 6}, 0, 1, 5);
    const std::vector<Attribute> attributes = {attribute("group", int64_t{2}), attribute("offset_group", int64_t{2}),
                                               attribute("pads", Dims{1, 1, 1, 1})};
    expect_same_on_device({"DeformConv", {x, w, offset, b, mask}, attributes}, sums_of(type, 18));
    expect_same_on_device({"DeformConv", {x, w, offset}, attributes, 1, {}, true}, sums_of(type, 18));
  }
}

// --- fused steps ---

struct Follower {
  std::string op;
  std::vector<Attribute> attributes = {};
  std::string operand = "";  // of Add: "channel" [1, O, 1, 1], "full" as Y
};

// The convolution of a window and what follows it, as values and nodes of one graph.
class Step {
 public:
  Step(const WindowCase& c, const std::vector<Follower>& followers, bool bias, DType type) : type_(type) {
    Window window;
    std::vector<Value*> inputs = {value(numbers(type, c.x, -1, 1, 1), false), value(numbers(type, c.w, -1, 1, 2), true)};
    const int64_t outputs = c.transposed ? c.w[1] * c.group : c.w[0];
    if (bias) inputs.push_back(value(numbers(type, {outputs}, -1, 1, 3), true));
    add(c.transposed ? "ConvTranspose" : "Conv", inputs, attributes_of(c));
    y_ = convolution_output(*nodes_[0], c.x, c.w, c.transposed, window);
    for (const Follower& f : followers) {
      std::vector<Value*> operands = {nodes_.back()->out(0)};
      if (f.operand == "full") operands.push_back(value(numbers(type, y_, -1, 1, 4), false));
      if (f.operand == "channel") operands.push_back(value(numbers(type, {1, outputs, 1, 1}, -1, 1, 5), true));
      if (f.op == "Clip")
        operands.push_back(value(tensor_as(type, {}, {0}), true)), operands.push_back(value(tensor_as(type, {}, {6}), true));
      add(f.op, operands, f.attributes);
    }
  }

  // All nodes as one step.
  RuntimeValue on_device(Device& device, Layout offered) {
    CompileContext c;
    c.nodes = {nodes_.begin(), nodes_.end()};
    std::vector<RuntimeValue*> given;
    for (const Node* node : nodes_) {
      for (Value* v : node->inputs) {
        if (v->producer) continue;
        c.inputs.push_back(v), c.input_types.push_back(v->type), c.constants.push_back(v->constant);
        c.offered.push_back(given.empty() ? offered : Layout::plain);
        given.push_back(&values_.at(v));
      }
    }
    c.outputs = {nodes_.back()->out(0)};
    c.output_types = {Type::tensor(type_, shape_of(y_))};
    return run_on_device(device, c, given)[0];
  }

  // Node by node on the CPU, in float32 (float64 stays), rounded at the end.
  RuntimeValue on_cpu() const {
    const DType wide = type_ == DType::float64 ? type_ : DType::float32;
    Graph graph;  // without constants, which are of the narrow type
    std::map<const Value*, RuntimeValue> known;
    for (const auto& [v, x] : values_) known[v] = tensor_as(wide, x.tensor.dims, doubles_of(x));
    for (const Node* node : nodes_) {
      std::vector<RuntimeValue*> inputs;
      std::vector<Value*> values;
      for (Value* v : node->inputs) inputs.push_back(&known.at(v)), values.push_back(graph.add_value("v" + std::to_string(known.size())));
      const Node* copy = graph.add_node(node->op, values, {"y" + std::to_string(known.size())}, node->attributes);
      known[node->out(0)] = reordered(run_node(*copy, inputs)[0], Layout::plain);
    }
    return tensor_as(type_, y_, doubles_of(known.at(nodes_.back()->out(0))));
  }

 private:
  Value* value(RuntimeValue x, bool constant) {
    const std::string name = "v" + std::to_string(values_.size());
    Value* v = constant ? graph_.add_constant(name, fused_group_detail::constant_of(x)) : graph_.add_value(name);
    v->type = Type::tensor(type_, shape_of(x.tensor.dims));
    values_[v] = std::move(x);
    return v;
  }
  void add(const std::string& op, const std::vector<Value*>& inputs, const std::vector<Attribute>& attributes) {
    nodes_.push_back(graph_.add_node(op, inputs, {"r" + std::to_string(nodes_.size())}, attributes));
  }

  DType type_;
  Dims y_;
  Graph graph_;
  std::vector<Node*> nodes_;
  std::map<const Value*, RuntimeValue> values_;
};

TEST(ConvolutionOnDevice, FusedSteps) {
  if (!any_device()) GTEST_SKIP() << "no device";
  const std::vector<std::vector<Follower>> chains = {
      {{"Relu"}},
      {{"Add", {}, "full"}, {"Relu"}},
      {{"Add", {}, "channel"}, {"Clip"}},
      {{"Add", {}, "full"}, {"Add", {}, "channel"}, {"Swish"}},
      {{"Sigmoid"}},
      {{"Swish", {attribute("alpha", 1.5f)}}},
      {{"HardSwish"}},
      {{"LeakyRelu", {attribute("alpha", 0.1f)}}},
      {{"Gelu"}},
      {{"Gelu", {attribute("approximate", std::string("tanh"))}}},
      {{"Tanh"}},
  };
  const std::vector<WindowCase> windows = {
      {"square", {2, 16, 10, 9}, {24, 16, 3, 3}, 1, {}, {}, {1, 1, 1, 1}},
      {"stem", {1, 3, 20, 20}, {16, 3, 3, 3}, 1, {2, 2}, {}, {1, 1, 1, 1}},
      {"odd", {1, 7, 6, 5}, {9, 7, 1, 1}},
      {"depthwise", {1, 16, 9, 9}, {16, 1, 3, 3}, 16, {}, {}, {1, 1, 1, 1}},
      {"transposed", {1, 16, 5, 5}, {16, 8, 2, 2}, 1, {2, 2}, {}, {}, {}, true},
      {"same", {1, 16, 15, 15}, {16, 16, 3, 3}, 1, {2, 2}, {}, {0, 0, 1, 1}},
  };
  for (const WindowCase& window : windows) {
    for (const std::vector<Follower>& chain : chains) {
      for (DType type : kFloatTypes) {
        const bool bias = chain.front().operand.empty();  // a bias of its own leaves no room for one that is added
        Step step(window, chain, bias, type);
        if (chain.back().op == "Clip" && type == DType::float64) {  // its bounds are kept as float32
          EXPECT_THROW(step.on_device(*any_device(), Layout::plain), Error) << window.name;
          continue;
        }
        const RuntimeValue wanted = step.on_cpu();
        for (Layout offered : {Layout::plain, Layout::nhwc}) {
          const RuntimeValue got = step.on_device(*any_device(), offered);
          EXPECT_EQ(difference(got, wanted, sums_of(type, count_of(window.w) / window.w[0])), "")
              << window.name << " " << chain.back().op << " " << name_of(type);
        }
      }
    }
  }
}

}  // namespace
}  // namespace fretsaw::testing
