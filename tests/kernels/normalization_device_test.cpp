// Normalizations on the device, over the lengths and layouts that take different ways through the kernels.
#include "tests/kernels/device_case.h"

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
