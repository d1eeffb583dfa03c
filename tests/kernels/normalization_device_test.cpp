// Normalizations on the device, over the lengths and layouts that take different ways through the kernels.
#include "tests/kernels/device_case.h"
#include "tests/kernels/fused_step.h"

namespace fretsaw::testing {
namespace {

// Statistics are sums of many terms: the CPU's float32 sums differ by more than a rounding.
Tolerance looser(DType type) {
  const Tolerance tolerance = tolerance_for(type);
  return {4 * tolerance.relative, type == DType::float32 ? 4e-5 : type == DType::float64 ? 1e-10 : 8 * tolerance.absolute};
}

// Of LayerNormalization's outputs: Mean and InvStdDev are float32 whatever X is.
std::vector<DType> statistics_in_float(DType type) {
  return {type, DType::float32, DType::float32};
}

TEST(NormalizationsOnDevice, RowsOfAllLengths) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (int64_t n : {1, 2, 7, 31, 64, 100, 128, 129, 768, 1000, 1024, 4096, 5000, 8192, 8193, 16384, 32768, 32769, 40000}) {
    for (DType type : kFloatTypes) {
      const RuntimeValue x = numbers(type, {n > 1000 ? 3 : 37, n}, -2, 3), scale = numbers(type, {n}, 0.5, 2, 2),
                         bias = numbers(type, {n}, -1, 1, 3);
      expect_same_on_device({"LayerNormalization", {x, scale, bias}, {}, 3, {}, false, statistics_in_float(type)}, looser(type));
      expect_same_on_device({"LayerNormalization", {x, scale}}, looser(type));
      expect_same_on_device({"RMSNormalization", {x, scale}, {}, 1, {}, true}, looser(type));
    }
  }
}

TEST(NormalizationsOnDevice, AxesAndBroadcastOperands) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : kFloatTypes) {
    const RuntimeValue x = numbers(type, {2, 3, 5, 8}, -2, 3);
    const std::vector<Attribute> axis = {attribute("axis", int64_t{2}), attribute("epsilon", 0.01f)};
    for (const Dims& dims : {Dims{5, 8}, Dims{8}, Dims{5, 1}, Dims{1, 8}, Dims{1}, Dims{}}) {
      const RuntimeValue scale = numbers(type, dims, 0.5, 2, 2);
      expect_same_on_device(
          {"LayerNormalization", {x, scale, numbers(type, {5, 8}, -1, 1, 3)}, axis, 3, {}, false, statistics_in_float(type)}, looser(type));
      expect_same_on_device({"LayerNormalization", {x, scale, numbers(type, {8}, -1, 1, 3)}, axis}, looser(type));
      expect_same_on_device({"RMSNormalization", {x, scale}, axis}, looser(type));
    }
  }
  // Rows whose mean is large beside their deviation.
  const RuntimeValue far = numbers(DType::float32, {4, 1000}, 999, 1001);
  expect_same_on_device({"LayerNormalization", {far, numbers(DType::float32, {1000}, 1, 1)}}, {1e-3, 1e-3});
}

TEST(NormalizationsOnDevice, GroupsInBothLayouts) {
  if (!any_device()) GTEST_SKIP() << "no device";
  struct Shape {
    Dims dims;
    int64_t groups;
  };
  const Shape shapes[] = {{{2, 32, 16, 16}, 8}, {{1, 32, 7, 7}, 4}, {{2, 6, 3, 5}, 3}, {{1, 8, 130, 129}, 2}, {{3, 8, 12, 12}, 1}};
  for (const Shape& s : shapes) {
    for (DType type : kFloatTypes) {
      for (Layout layout : {Layout::plain, Layout::nhwc}) {
        const RuntimeValue x = reordered(numbers(type, s.dims, -2, 3), layout);
        const RuntimeValue scale = numbers(type, {s.dims[1]}, 0.5, 2, 2), bias = numbers(type, {s.dims[1]}, -1, 1, 3);
        expect_same_on_device({"GroupNormalization", {x, scale, bias}, {attribute("num_groups", s.groups)}}, looser(type));
        expect_same_on_device({"InstanceNormalization", {x, scale, bias}}, looser(type));
      }
    }
  }
  const RuntimeValue sound = numbers(DType::float32, {2, 4, 3000}), ones = numbers(DType::float32, {4}, 1, 1);
  expect_same_on_device({"InstanceNormalization", {sound, ones, ones}, {}, 1, {}, true}, looser(DType::float32));
}

TEST(NormalizationsOnDevice, BatchesInBothLayouts) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const Dims& dims : {Dims{2, 32, 16, 16}, Dims{3, 5, 7, 9}, Dims{1, 24, 3, 3}}) {
    for (DType type : kFloatTypes) {
      for (Layout layout : {Layout::plain, Layout::nhwc}) {
        const DType wide = type == DType::float64 ? type : DType::float32;
        const RuntimeValue x = reordered(numbers(type, dims), layout);
        const RuntimeValue scale = numbers(type, {dims[1]}, 0.5, 2, 2), bias = numbers(type, {dims[1]}, -1, 1, 3),
                           mean = numbers(wide, {dims[1]}, -1, 1, 4), variance = numbers(wide, {dims[1]}, 0.5, 2, 5);
        const std::vector<RuntimeValue> inputs = {x, scale, bias, mean, variance};
        expect_same_on_device({"BatchNormalization", inputs}, tolerance_for(type), "given");
        expect_same_on_device({"BatchNormalization", inputs, {}, 1, {1, 2, 3, 4}}, tolerance_for(type), "constant");
      }
    }
  }
  const RuntimeValue one = numbers(DType::float32, {1}, 0.5, 1), row = numbers(DType::float32, {9});
  expect_same_on_device({"BatchNormalization", {row, one, one, one, one}}, tolerance_for(DType::float32));
}

// [BatchNormalization Add Relu] and what is left of it, with the statistics of the batch or given ones; x may stand at any place.
TEST(NormalizationsOnDevice, BatchNormalizationWithWhatFollowsIt) {
  FRETSAW_DEVICE_OR_SKIP(device);
  for (const Dims& dims : std::vector<Dims>{{6, 16, 9, 7}, {3, 5, 6, 4}, {2, 72, 3, 3}}) {
    for (DType type : kHalfAndWide) {
      for (int form = 0; form < 16; ++form) {
        const bool trains = form & 1, adds = form & 2, relu = form & 4, last = form & 8;
        if (!adds && !relu) continue;
        FusedStep step;
        std::vector<Value*> inputs = {step.input(random_tensor(type, dims, 1))};
        for (uint32_t i = 0; i < 4; ++i) inputs.push_back(step.input(random_tensor(type, {dims[1]}, 2 + i, 0.5, 2)));
        Value* y = step.add("BatchNormalization", inputs, {attribute("training_mode", int64_t{trains})}, trains ? 3 : 1);
        std::vector<Value*> kept;
        if (trains) kept = {step.output(1), step.output(2)};
        if (adds) y = step.add("Add", {step.input(random_tensor(type, dims, 7)), y});
        if (relu) y = step.add("Relu", {y});
        kept.push_back(y);
        const Layout layout = last ? Layout::nhwc : Layout::plain;
        const CompileContext c = [&] {
          CompileContext made = step.context(kept, layout, dims);
          made.device = device;
          return made;
        }();
        ASSERT_EQ(why_unsupported_on_device(c), "");
        const std::vector<RuntimeValue> got = step.run_fused(*device, c);
        const auto alone = step.run_one_by_one(*device);
        const Tolerance t = looser(type);
        for (size_t i = 0; i < kept.size(); ++i) {
          EXPECT_EQ(difference(got[i], step.wanted(kept[i]), {4 * t.relative, 4 * t.absolute}), "")
              << "output " << i << " of form " << form;
          if (last) continue;  // the nodes alone take another layout
          EXPECT_EQ(difference(got[i], alone.at(kept[i]), {0, 0}), "") << "output " << i << " of form " << form;
        }
      }
    }
  }
}

TEST(NormalizationsOnDevice, BatchNormalizationLeadsNoOtherSteps) {
  FRETSAW_DEVICE_OR_SKIP(device);
  const auto reason = [&](bool keeps_norm, const std::string& op, const Dims& other) {
    FusedStep step;
    std::vector<Value*> inputs = {step.input(random_tensor(DType::float32, {2, 3, 4, 4}, 1))};
    for (uint32_t i = 0; i < 4; ++i) inputs.push_back(step.input(random_tensor(DType::float32, {3}, 2 + i, 0.5, 2)));
    Value* norm = step.add("BatchNormalization", inputs);
    Value* y = other.empty() ? step.add(op, {norm}) : step.add(op, {norm, step.input(random_tensor(DType::float32, other, 3))});
    CompileContext c = step.context(keeps_norm ? std::vector<Value*>{norm, y} : std::vector<Value*>{y});
    c.device = device;
    return why_unsupported_on_device(c);
  };
  EXPECT_EQ(reason(false, "Relu", {}), "");
  EXPECT_EQ(reason(true, "Relu", {}), "a value inside the step that is used outside it");
  EXPECT_EQ(reason(false, "Tanh", {}), "Tanh after BatchNormalization");
  EXPECT_EQ(reason(false, "Add", {3, 1, 1}), "an addition of another shape or type");
  EXPECT_EQ(reason(false, "Add", {2, 3, 4, 4}), "");
}

TEST(NormalizationsOnDevice, LocalOnesAndAxes) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : kFloatTypes) {
    const RuntimeValue x = numbers(type, {2, 7, 5, 6}, -2, 3), long_axis = numbers(type, {3, 20000}, -2, 3);
    for (int64_t size : {1, 2, 3, 5, 20})
      expect_same_on_device({"LRN", {x}, {attribute("size", size), attribute("alpha", 0.3f), attribute("bias", 2.0f)}}, looser(type));
    for (int64_t p : {1, 2}) {
      for (int64_t axis : {0, 1, -1})
        expect_same_on_device({"LpNormalization", {x}, {attribute("p", p), attribute("axis", axis)}}, looser(type));
      expect_same_on_device({"LpNormalization", {long_axis}, {attribute("p", p)}}, looser(type));
    }
    expect_same_on_device({"MeanVarianceNormalization", {x}}, looser(type));
    for (const std::vector<int64_t>& axes : std::vector<std::vector<int64_t>>{{1, 2, 3}, {0}, {3}, {1, 3}, {0, 1, 2, 3}})
      expect_same_on_device({"MeanVarianceNormalization", {x}, {attribute("axes", axes)}}, looser(type));
  }
}

}  // namespace
}  // namespace fretsaw::testing
