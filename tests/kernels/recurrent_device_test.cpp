// LSTM, GRU, RNN and their gradients on the device: directions, layouts, lengths, states, peepholes, activations and sizes.
#include "graph/communication_schemas.h"
#include "tests/kernels/device_case.h"

namespace fretsaw::testing {
namespace {

struct RecurrentCase {
  std::string op;
  int64_t T = 5, B = 3, I = 6, H = 8;
  std::string direction = "forward";
  int64_t layout = 0;
  bool bias = true, lengths = false, states = false, peepholes = false;
  std::vector<Attribute> more = {};
};

int64_t gates_of(const RecurrentCase& c) {
  return c.op == "LSTM" ? 4 : c.op == "GRU" ? 3 : 1;
}

DeviceCase device_case(const RecurrentCase& c, DType type) {
  const int64_t D = c.direction == "bidirectional" ? 2 : 1, G = gates_of(c);
  const Dims x = c.layout ? Dims{c.B, c.T, c.I} : Dims{c.T, c.B, c.I}, state = c.layout ? Dims{c.B, D, c.H} : Dims{D, c.B, c.H};
  std::vector<double> lengths;
  for (int64_t b = 0; b < c.B; ++b) lengths.push_back(static_cast<double>((b * 2 + 1) % (c.T + 1)));
  DeviceCase out;
  out.op = c.op;
  out.inputs = {numbers(type, x, -1, 1, 1),
                numbers(type, {D, G * c.H, c.I}, -0.5, 0.5, 2),
                numbers(type, {D, G * c.H, c.H}, -0.4, 0.4, 3),
                c.bias ? numbers(type, {D, 2 * G * c.H}, -0.5, 0.5, 4) : RuntimeValue{},
                c.lengths ? tensor_as(DType::int32, {c.B}, lengths) : RuntimeValue{},
                c.states ? numbers(type, state, -1, 1, 5) : RuntimeValue{}};
  if (c.op == "LSTM") {
    out.inputs.push_back(c.states ? numbers(type, state, -1, 1, 6) : RuntimeValue{});
    out.inputs.push_back(c.peepholes ? numbers(type, {D, 3 * c.H}, -0.5, 0.5, 7) : RuntimeValue{});
  }
  out.attributes = c.more;
  out.attributes.push_back(attribute("hidden_size", c.H));
  out.attributes.push_back(attribute("direction", c.direction));
  if (c.layout) out.attributes.push_back(attribute("layout", c.layout));
  out.outputs = c.op == "LSTM" ? 3 : 2;
  return out;
}

// With all operands that have a gradient. What Y holds need not be the cell's.
DeviceCase gradient_case(RecurrentCase c, DType type) {
  c.bias = c.states = c.peepholes = true;
  DeviceCase out = device_case(c, type);
  const int64_t D = c.direction == "bidirectional" ? 2 : 1;
  const Dims y = c.layout ? Dims{c.B, c.T, D, c.H} : Dims{c.T, D, c.B, c.H}, state = out.inputs[5].tensor.dims;
  out.inputs.push_back(numbers(type, y, -0.9, 0.9, 8));
  out.inputs.push_back(numbers(type, y, -1, 1, 9));
  for (unsigned seed = 10; seed < 9 + out.outputs; ++seed) out.inputs.push_back(numbers(type, state, -1, 1, seed));
  out.op += "Grad", out.domain = kCommunicationDomain;
  out.outputs = c.op == "LSTM" ? 7 : 5;
  return out;
}

void expect_equal(const RecurrentCase& c) {
  for (DType type : kFloatTypes) {
    // The projected input is rounded to the element type before the steps.
    const Tolerance tolerance = type == DType::float16    ? Tolerance{5e-3, 5e-3}
                                : type == DType::bfloat16 ? Tolerance{3e-2, 3e-2}
                                : type == DType::float32  ? Tolerance{2e-5, 2e-5}
                                                          : Tolerance{1e-11, 1e-11};
    const std::string what = c.direction + " H " + std::to_string(c.H) + " B " + std::to_string(c.B);
    expect_same_on_device(device_case(c, type), tolerance, what);
    // Sums over samples and steps of what is rounded to the element type.
    const double terms = std::sqrt(static_cast<double>(c.T * c.B + c.H));
    expect_same_on_device(gradient_case(c, type), {tolerance.relative, tolerance.absolute * terms}, what);
  }
}

TEST(RecurrentOnDevice, DirectionsLayoutsAndOptionalInputs) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const char* op : {"LSTM", "GRU", "RNN"}) {
    for (const char* direction : {"forward", "reverse", "bidirectional"}) {
      for (int64_t layout : {0, 1}) {
        expect_equal({op, 5, 3, 6, 8, direction, layout});
        expect_equal({op, 5, 3, 6, 8, direction, layout, true, true, true, true});
        expect_equal({op, 4, 2, 3, 5, direction, layout, false, true});
      }
    }
  }
}

TEST(RecurrentOnDevice, Sizes) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const char* op : {"LSTM", "GRU", "RNN"}) {
    expect_equal({op, 1, 1, 1, 1});
    expect_equal({op, 12, 1, 32, 64});
    expect_equal({op, 6, 17, 24, 40, "bidirectional"});
    expect_equal({op, 3, 8, 100, 130});
    expect_equal({op, 8, 4, 128, 256});
  }
}

TEST(RecurrentOnDevice, Attributes) {
  if (!any_device()) GTEST_SKIP() << "no device";
  const Attribute clip = attribute("clip", 0.3f), linear = attribute("linear_before_reset", int64_t{1});
  const auto activations = [](std::vector<std::string> names) { return attribute("activations", std::move(names)); };
  expect_equal({"LSTM", 5, 3, 6, 8, "forward", 0, true, false, true, true, {clip, attribute("input_forget", int64_t{1})}});
  expect_equal({"LSTM",
                5,
                3,
                6,
                8,
                "bidirectional",
                0,
                true,
                false,
                false,
                false,
                {activations({"HardSigmoid", "Relu", "Softsign", "Sigmoid", "Elu", "ScaledTanh"})}});
  for (bool lengths : {false, true}) {
    expect_equal({"GRU", 5, 3, 6, 8, "bidirectional", 0, true, lengths, true, false, {linear}});
    expect_equal({"GRU", 5, 3, 6, 7, "reverse", 1, false, lengths, true, false, {linear, clip}});
  }
  expect_equal({"GRU", 5, 3, 6, 8, "forward", 0, true, false, false, false, {clip, activations({"Affine", "Softplus"})}});
  for (const char* name : {"Relu", "LeakyRelu", "ThresholdedRelu", "Softplus", "Affine"})
    expect_equal({"RNN", 4, 3, 6, 8, "forward", 0, true, false, false, false, {activations({name}), clip}});
}

}  // namespace
}  // namespace fretsaw::testing
