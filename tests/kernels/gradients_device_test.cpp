// Gradient operators, and operators as they are while a model is trained, on the device: types, layouts and sizes that take different ways.
#include "graph/communication_schemas.h"
#include "tests/kernels/device_case.h"
#include "tests/kernels/fused_step.h"

namespace fretsaw::testing {
namespace {

using Attributes = std::vector<Attribute>;

DeviceCase gradient(const std::string& op, std::vector<RuntimeValue> inputs, Attributes attributes, size_t outputs = 1,
                    std::vector<size_t> constants = {}) {
  DeviceCase c{op, std::move(inputs), std::move(attributes), outputs, std::move(constants)};
  c.domain = kCommunicationDomain;
  return c;
}

// Sums of `terms` numbers up to 1: their roundings add up.
Tolerance sums_of(DType type, int64_t terms) {
  const Tolerance one = tolerance_for(type);
  const double growth = std::sqrt(static_cast<double>(terms));
  return {one.relative, type == DType::float32 ? 4e-6 * growth : type == DType::float64 ? 1e-12 * growth : one.relative * (1 + growth / 8)};
}

// The layouts that an image of this type and rank may have.
std::vector<Layout> layouts_of(const Dims& dims) {
  return dims.size() == 4 ? std::vector<Layout>{Layout::plain, Layout::nhwc} : std::vector<Layout>{Layout::plain};
}

struct ConvolutionCase {
  std::string name;
  Dims x, w, y;
  int64_t group = 1;
  Dims strides = {}, dilations = {}, pads = {};

  Attributes attributes() const {
    Attributes out = {attribute("group", group), attribute("kernel_shape", Dims(w.begin() + 2, w.end()))};
    if (!strides.empty()) out.push_back(attribute("strides", strides));
    if (!dilations.empty()) out.push_back(attribute("dilations", dilations));
    if (!pads.empty()) out.push_back(attribute("pads", pads));
    return out;
  }
};
const std::vector<ConvolutionCase> kConvolutions = {
    {"plain_3x3", {2, 16, 9, 8}, {24, 16, 3, 3}, {2, 24, 9, 8}, 1, {}, {}, {1, 1, 1, 1}},
    {"one_by_one", {3, 32, 7, 7}, {16, 32, 1, 1}, {3, 16, 7, 7}},
    {"stem", {2, 3, 32, 30}, {16, 3, 7, 7}, {2, 16, 16, 15}, 1, {2, 2}, {}, {3, 3, 3, 3}},
    {"odd_channels", {2, 5, 6, 7}, {7, 5, 3, 3}, {2, 7, 4, 5}},
    {"strided", {2, 16, 11, 12}, {16, 16, 3, 3}, {2, 16, 5, 5}, 1, {2, 2}},
    {"uneven_padding", {2, 16, 8, 8}, {8, 16, 3, 3}, {2, 8, 4, 4}, 1, {2, 2}, {}, {0, 0, 1, 1}},
    {"dilated", {1, 16, 11, 12}, {16, 16, 3, 3}, {1, 16, 11, 10}, 1, {}, {2, 3}, {2, 2, 2, 2}},
    {"grouped", {2, 32, 6, 6}, {32, 8, 3, 3}, {2, 32, 6, 6}, 4, {}, {}, {1, 1, 1, 1}},
    {"depthwise", {2, 24, 8, 9}, {24, 1, 3, 3}, {2, 24, 4, 5}, 24, {2, 2}, {}, {1, 1, 1, 1}},
    {"line", {2, 8, 21}, {6, 8, 4}, {2, 6, 7}, 1, {3}, {}, {2, 1}},
    {"volume", {1, 8, 6, 6, 6}, {8, 8, 3, 3, 3}, {1, 8, 6, 6, 6}, 1, {}, {}, {1, 1, 1, 1, 1, 1}},
};

TEST(GradientsOnDevice, OfConvolutionsByTheInput) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const ConvolutionCase& c : kConvolutions) {
    const int64_t terms = count_of(c.w) / c.w[1] / c.group;
    for (DType type : kFloatTypes) {
      for (Layout layout : layouts_of(c.y)) {
        const RuntimeValue dy = reordered(numbers(type, c.y, -1, 1, 1), layout), w = numbers(type, c.w, -1, 1, 2);
        expect_same_on_device(gradient("ConvGradInput", {dy, w, int_list(c.x)}, c.attributes(), 1, {2}), sums_of(type, terms), c.name);
      }
    }
  }
}

TEST(GradientsOnDevice, OfConvolutionsByTheWeight) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const ConvolutionCase& c : kConvolutions) {
    const int64_t terms = count_of(c.y) / c.y[1];
    for (DType type : kFloatTypes) {
      for (Layout layout : layouts_of(c.y)) {
        const RuntimeValue dy = reordered(numbers(type, c.y, -1, 1, 1), layout), x = reordered(numbers(type, c.x, -1, 1, 2), layout);
        expect_same_on_device(gradient("ConvGradWeight", {dy, x}, c.attributes()), sums_of(type, terms), c.name);
      }
    }
  }
}

struct PoolCase {
  Dims x, y;
  Attributes attributes;
};
const std::vector<PoolCase> kPools = {
    {{2, 16, 9, 8},
     {2, 16, 5, 4},
     {attribute("kernel_shape", Dims{3, 3}), attribute("strides", Dims{2, 2}), attribute("pads", Dims{1, 1, 1, 1})}},
    {{3, 24, 12, 11}, {3, 24, 5, 5}, {attribute("kernel_shape", Dims{3, 3}), attribute("strides", Dims{2, 2})}},
    {{2, 16, 7, 10},
     {2, 16, 4, 5},
     {attribute("kernel_shape", Dims{3, 3}), attribute("strides", Dims{2, 2}), attribute("pads", Dims{0, 1, 2, 0})}},
    {{1, 5, 8, 6}, {1, 5, 4, 3}, {attribute("kernel_shape", Dims{2, 2}), attribute("strides", Dims{2, 2})}},
    {{1, 8, 7, 7},
     {1, 8, 4, 4},
     {attribute("kernel_shape", Dims{2, 2}), attribute("strides", Dims{2, 2}), attribute("ceil_mode", int64_t{1})}},
    {{1, 3, 9, 9},
     {1, 3, 3, 5},
     {attribute("kernel_shape", Dims{3, 2}), attribute("strides", Dims{2, 1}), attribute("dilations", Dims{2, 4})}},
    {{2, 4, 17}, {2, 4, 6}, {attribute("kernel_shape", Dims{4}), attribute("strides", Dims{3}), attribute("pads", Dims{1, 1})}},
    {{1, 2, 5, 6, 4}, {1, 2, 4, 3, 2}, {attribute("kernel_shape", Dims{2, 2, 2}), attribute("strides", Dims{1, 2, 2})}},
    {{1, 3, 20, 20}, {1, 3, 1, 1}, {attribute("kernel_shape", Dims{20, 20})}},  // more taps than a byte counts
};

TEST(GradientsOnDevice, OfPoolings) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const PoolCase& c : kPools) {
    for (DType type : kFloatTypes) {
      for (Layout layout : layouts_of(c.x)) {
        const RuntimeValue dy = reordered(numbers(type, c.y, -1, 1, 1), layout), x = reordered(numbers(type, c.x, -1, 1, 2), layout);
        expect_same_on_device(gradient("MaxPoolGrad", {dy, x}, c.attributes), tolerance_for(type));
        // Values that are equal: the first of a window takes it all.
        const RuntimeValue equal = reordered(numbers(type, c.x, 0, 0), layout);
        expect_same_on_device(gradient("MaxPoolGrad", {dy, equal}, c.attributes), tolerance_for(type), "equal");
        for (int64_t padding : {0, 1}) {
          Attributes with = c.attributes;
          with.push_back(attribute("count_include_pad", padding));
          expect_same_on_device(gradient("AveragePoolGrad", {dy, int_list(c.x)}, with, 1, {1}), tolerance_for(type));
        }
      }
    }
  }
}

// The mean and the deviation of what is normalised, and how far the results may be apart.
Tolerance norm_tolerance(DType type) {
  const Tolerance t = tolerance_for(type);
  return {8 * t.relative, type == DType::float32 ? 1e-4 : type == DType::float64 ? 1e-9 : 16 * t.relative};
}

TEST(GradientsOnDevice, OfBatchNormalization) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const Dims& dims : std::vector<Dims>{{4, 16, 6, 6},
                                            {2, 5, 7, 3},
                                            {64, 12},
                                            {3, 8, 50},
                                            {2, 3, 4, 5, 6},
                                            {8, 64, 28, 28},
                                            {1, 256, 2, 2},
                                            {40, 24, 16, 15},
                                            {2, 300, 5, 5},
                                            {4, 512, 14, 14},
                                            {2, 2048, 3, 3}}) {
    for (DType type : kFloatTypes) {
      for (Layout layout : layouts_of(dims)) {
        const RuntimeValue dy = reordered(numbers(type, dims, -1, 1, 1), layout), x = reordered(numbers(type, dims, 1, 3, 2), layout);
        const int64_t C = dims[1];
        const DType wide = type == DType::float64 ? type : DType::float32;
        const RuntimeValue scale = numbers(wide, {C}, 0.5, 2, 3);
        const Tolerance sums = {norm_tolerance(type).relative,
                                sums_of(type, count_of(dims) / C).absolute * 4 + norm_tolerance(type).absolute};
        DeviceCase c = gradient("BatchNormalizationGrad", {dy, x, scale}, {attribute("epsilon", 1e-3f)}, 3);
        c.output_types = {type, wide, wide};
        expect_same_on_device(c, sums);
        DeviceCase forward{"BatchNormalization",
                           {x, scale, numbers(wide, {C}, -1, 1, 4), numbers(wide, {C}, -1, 1, 5), numbers(wide, {C}, 0.5, 2, 6)},
                           {attribute("training_mode", int64_t{1}), attribute("momentum", 0.8f)},
                           3};
        forward.output_types = {type, wide, wide};
        expect_same_on_device(forward, norm_tolerance(type));
      }
    }
  }
}

// The gradient of Relu(BatchNormalization(x)) as one step, in which a part of dy counts.
class ReluStep {
 public:
  ReluStep(DType type, const Dims& dims, double bound = 0) {
    Value* y = step_.input(random_tensor(type, dims, 1));
    Value* mask = step_.add("Greater", {y, step_.constant(tensor_as(type, {}, {bound}))});
    part_ = step_.add("Where", {mask, step_.input(random_tensor(type, dims, 2)), step_.constant(tensor_as(type, {}, {0}))});
    Value *x = step_.input(random_tensor(type, dims, 3)), *scale = step_.input(random_tensor(type, {dims[1]}, 4, 0.5, 2));
    step_.add("BatchNormalizationGrad", {part_, x, scale}, {attribute("epsilon", 1e-3f)}, 3, kCommunicationDomain);
  }
  FusedStep& step() { return step_; }
  Value* part() const { return part_; }
  Value* output(size_t i) const { return step_.output(i); }

 private:
  FusedStep step_;
  Value* part_ = nullptr;
};

TEST(GradientsOnDevice, OfBatchNormalizationWithRelu) {
  FRETSAW_DEVICE_OR_SKIP(device);
  for (const Dims& dims : std::vector<Dims>{{4, 16, 6, 6}, {2, 5, 7, 3}, {64, 16}, {8, 64, 28, 27}, {3, 24, 9, 9}, {2, 520, 5, 5}}) {
    for (DType type : kFloatTypes) {
      for (Layout layout : layouts_of(dims)) {
        for (const std::vector<size_t>& taken : std::vector<std::vector<size_t>>{{0, 1, 2}, {0}, {1, 2}}) {
          ReluStep relu(type, dims);
          std::vector<Value*> kept;
          for (size_t i : taken) kept.push_back(relu.output(i));
          const std::vector<RuntimeValue> got = relu.step().run_fused(*device, relu.step().context(kept, layout, dims));
          const Tolerance t = {norm_tolerance(type).relative,
                               sums_of(type, count_of(dims) / dims[1]).absolute * 4 + norm_tolerance(type).absolute};
          for (size_t i = 0; i < kept.size(); ++i)
            EXPECT_EQ(difference(got[i], relu.step().wanted(kept[i]), t), "") << "output " << taken[i] << " of " << to_string(dims);
        }
      }
    }
  }
}

TEST(GradientsOnDevice, OfBatchNormalizationTakeNoOtherMasks) {
  FRETSAW_DEVICE_OR_SKIP(device);
  const auto reason = [&](double bound, bool keeps_part) {
    ReluStep relu(DType::float32, {2, 3, 4, 4}, bound);
    CompileContext c = relu.step().context(keeps_part ? std::vector<Value*>{relu.part(), relu.output(0)} : std::vector{relu.output(0)});
    c.device = device;
    return why_unsupported_on_device(c);
  };
  EXPECT_EQ(reason(0, false), "");
  EXPECT_EQ(reason(0.5, false), "other nodes than those of Relu's gradient before BatchNormalizationGrad");
  EXPECT_EQ(reason(0, true), "a value inside the step that is used outside it");
}

// The deviation is small beside the mean, and one element is far from all others.
TEST(GradientsOnDevice, BatchStatisticsKeepTheirDigits) {
  if (!any_device()) GTEST_SKIP() << "no device";
  RuntimeValue x = numbers(DType::float32, {8, 4, 30, 30}, 999.5, 1000.5, 2);
  x.tensor.as<float>()[0] = -3000;
  std::vector<RuntimeValue> inputs = {x};
  for (uint32_t i = 0; i < 4; ++i) inputs.push_back(numbers(DType::float32, {4}, 0.5, 2, i));
  expect_same_on_device({"BatchNormalization", inputs, {attribute("training_mode", int64_t{1})}, 3}, {1e-3, 1e-3});
}

TEST(GradientsOnDevice, OfRowsOfAllLengths) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (int64_t n : {1, 2, 7, 31, 64, 100, 129, 768, 1000, 4096, 5000, 8192, 8193, 33000}) {
    for (DType type : kFloatTypes) {
      const Dims dims = {n > 1000 ? 3 : 301, n};
      const RuntimeValue dy = numbers(type, dims, -1, 1, 1), x = numbers(type, dims, -2, 3, 2), scale = numbers(type, {n}, 0.5, 2, 3);
      const Attributes at = {attribute("epsilon", 0.01f)};
      for (const char* op : {"LayerNormalizationGrad", "RMSNormalizationGrad"}) {
        expect_same_on_device(gradient(op, {dy, x, scale}, at), norm_tolerance(type));
        const Tolerance sums = {norm_tolerance(type).relative, norm_tolerance(type).absolute + sums_of(type, dims[0]).absolute};
        expect_same_on_device(gradient(op + std::string("Scale"), {dy, x}, at), sums);
      }
    }
  }
  // Several dimensions, and a scale that is broadcast to them.
  const RuntimeValue dy = numbers(DType::float32, {2, 3, 4, 8}), x = numbers(DType::float32, {2, 3, 4, 8}, -2, 3, 2);
  for (const Dims& dims : {Dims{4, 8}, Dims{8}, Dims{4, 1}, Dims{1}}) {
    const RuntimeValue scale = numbers(DType::float32, dims, 0.5, 2, 3);
    expect_same_on_device(gradient("LayerNormalizationGrad", {dy, x, scale}, {attribute("axis", int64_t{2})}),
                          norm_tolerance(DType::float32));
  }
}

// As many that blocks go through several of them, or too few for all blocks.
TEST(GradientsOnDevice, OfScalesOfManyRows) {
  if (!any_device()) GTEST_SKIP() << "no device";
  struct Rows {
    int64_t rows, n;
  };
  for (const Rows& c : {Rows{7001, 768}, Rows{6337, 1024}, Rows{3, 768}, Rows{1, 64}, Rows{20011, 8}, Rows{20011, 40}, Rows{7001, 100},
                        Rows{1500, 1500}, Rows{1000, 2056}, Rows{600, 7168}, Rows{300, 8200}}) {
    for (DType type : kFloatTypes) {
      const Dims dims = {c.rows, c.n};
      const RuntimeValue dy = numbers(type, dims, -1, 1, 1), x = numbers(type, dims, -2, 3, 2);
      const Tolerance sums = {norm_tolerance(type).relative, norm_tolerance(type).absolute + sums_of(type, c.rows).absolute};
      for (const char* op : {"LayerNormalizationGradScale", "RMSNormalizationGradScale"})
        expect_same_on_device(gradient(op, {dy, x}, {attribute("epsilon", 0.01f)}), sums);
    }
  }
}

TEST(GradientsOnDevice, OfGatherAddUpWhatOneRowIsAskedFor) {
  if (!any_device()) GTEST_SKIP() << "no device";
  struct GatherCase {
    Dims x, indices;
    int64_t axis;
  };
  for (const GatherCase& g : {GatherCase{{500, 96}, {40, 50}, 0}, GatherCase{{7, 768}, {3000}, 0}, GatherCase{{3, 9, 5}, {11}, 1},
                              GatherCase{{4, 6}, {2, 3}, -1}, GatherCase{{1000, 65}, {100}, 0}}) {
    Dims dims = g.x;
    const auto at = dims.begin() + (g.axis < 0 ? g.axis + static_cast<int64_t>(dims.size()) : g.axis);
    const int64_t rows = *at;
    dims.insert(dims.erase(at), g.indices.begin(), g.indices.end());
    std::vector<int64_t> indices;
    for (int64_t i = 0; i < count_of(g.indices); ++i) indices.push_back(i % 3 == 0 ? -1 : i * i % rows);  // some more often than others
    for (DType type : kFloatTypes) {
      const RuntimeValue dy = numbers(type, dims);
      expect_same_on_device(
          gradient("GatherGrad", {dy, tensor<int64_t>(g.indices, indices), int_list(g.x)}, {attribute("axis", g.axis)}, 1, {2}),
          sums_of(type, count_of(g.indices)));
    }
  }
}

TEST(GradientsOnDevice, SumToOfBroadcastOperands) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : kFloatTypes) {
    const RuntimeValue x = numbers(type, {6, 5, 4, 16});
    for (const Dims& shape : {Dims{6, 5, 4, 16}, Dims{5, 1, 16}, Dims{1, 1, 4, 1}, Dims{16}, Dims{1}, Dims{}, Dims{6, 1, 4, 1}})
      expect_same_on_device(gradient("SumTo", {x, int_list(shape)}, {}, 1, {1}), sums_of(type, 1920));
    // Columns, of whole packs and others.
    for (int64_t n : {96, 1003}) {
      const RuntimeValue rows = numbers(type, {8, 130, n});
      for (const Dims& shape : {Dims{n}, Dims{1, n}, Dims{1, 1, n}, Dims{130, n}, Dims{130, 1}})
        expect_same_on_device(gradient("SumTo", {rows, int_list(shape)}, {}, 1, {1}), sums_of(type, 1040));
    }
  }
}

TEST(GradientsOnDevice, OfLosses) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const Dims& dims : std::vector<Dims>{{37, 10}, {5, 1000}, {2, 50257}, {3, 21, 9, 8}}) {
    Dims label_dims = dims;
    label_dims.erase(label_dims.begin() + 1);
    std::vector<int64_t> labels;
    for (int64_t i = 0; i < count_of(label_dims); ++i) labels.push_back(i % 5 == 4 ? -100 : i * 7 % dims[1]);
    for (const char* op : {"SoftmaxCrossEntropyLossGrad", "NegativeLogLikelihoodLossGrad"}) {
      for (const std::string reduction : {"mean", "sum", "none"}) {
        for (DType type : kFloatTypes) {
          const RuntimeValue dloss = numbers(type, reduction == "none" ? label_dims : Dims{}, 0.5, 1, 1), x = numbers(type, dims, -3, 3, 2);
          const Attributes at = {attribute("reduction", reduction), attribute("ignore_index", int64_t{-100})};
          expect_same_on_device(gradient(op, {dloss, x, tensor<int64_t>(label_dims, labels)}, at), tolerance_for(type), reduction);
          expect_same_on_device(gradient(op, {dloss, x, tensor<int64_t>(label_dims, labels), numbers(type, {dims[1]}, 0.5, 2, 3)}, at),
                                tolerance_for(type), reduction + " with weights");
        }
      }
    }
  }
}

// The squared norms of all gradients.
TEST(GradientsOnDevice, SumsOfManyTensors) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : {DType::float32, DType::float64}) {
    for (const Dims& dims : {Dims{}, Dims{300}}) {
      for (uint32_t count : {2U, 40U, 256U, 600U}) {
        std::vector<RuntimeValue> inputs;
        for (uint32_t i = 0; i < count; ++i) inputs.push_back(numbers(type, dims, -1, 1, i));
        expect_same_on_device({"Sum", inputs}, sums_of(type, count));
      }
    }
  }
}

TEST(GradientsOnDevice, DropoutDropsWhatTheCpuDrops) {
  if (!any_device()) GTEST_SKIP() << "no device";
  RuntimeValue yes = make_value(DType::boolean, {}), no = make_value(DType::boolean, {});
  *yes.tensor.as<bool>() = true, *no.tensor.as<bool>() = false;
  for (DType type : kFloatTypes) {
    for (int64_t n : {1, 6, 4096, 10007}) {
      for (double ratio : {0.0, 0.3}) {
        for (const RuntimeValue& training : {yes, no}) {
          DeviceCase c{
              "Dropout", {numbers(type, {n}), numbers(DType::float32, {}, ratio, ratio), training}, {attribute("seed", int64_t{5})}, 2};
          c.output_types = {type, DType::boolean};
          expect_same_on_device(c, tolerance_for(type));
          c.constants = {1, 2};
          expect_same_on_device(c, tolerance_for(type), "constant");
        }
      }
    }
  }
}

RuntimeValue integers(const std::vector<int64_t>& values, bool is_scalar = false) {
  RuntimeValue made = make_value(DType::int64, is_scalar ? Dims{} : Dims{std::ssize(values)});
  std::copy(values.begin(), values.end(), made.tensor.as<int64_t>());
  return made;
}

TEST(GradientsOnDevice, NumbersByTheirPlaceAreThoseOfTheCpu) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const int64_t first : {0, 3}) {
    const RuntimeValue shape = integers({4, 5, 7}), samples = integers({first, 4}), counter = integers({11}, true);
    DeviceCase mask{"DropoutMask", {shape, samples, counter}, {attribute("ratio", 0.3f), attribute("key", int64_t{77})}};
    mask.domain = "ai.fretsaw", mask.output_types = {DType::boolean};
    expect_same_on_device(mask, {0, 0});
    for (const int64_t normal : {0, 1}) {
      DeviceCase drawn{"RandomAt", {shape, samples, counter}, {attribute("normal", normal), attribute("key", int64_t{78})}};
      drawn.domain = "ai.fretsaw", drawn.output_types = {DType::float32};
      expect_same_on_device(drawn, {1e-6, 1e-6});
      if (normal) continue;
      for (const Dims& limits : {Dims{}, Dims{4, 5, 7}}) {
        DeviceCase limited = drawn;
        limited.inputs.push_back(numbers(DType::float32, limits, 0.3, 0.6));
        expect_same_on_device(limited, {0, 0});
      }
    }
  }
}

}  // namespace
}  // namespace fretsaw::testing
