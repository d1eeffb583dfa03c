// Poolings on the device: windows, padding, layouts, indices, types, and planes of all sizes.
#include "tests/kernels/device_case.h"

namespace fretsaw::testing {
namespace {

struct PoolCase {
  Dims x, kernel, strides = {}, dilations = {}, pads = {};
  std::string auto_pad = "";
};

const std::vector<PoolCase> kPools = {
    {{2, 8, 9, 7}, {3, 3}, {2, 2}, {}, {1, 1, 1, 1}},
    {{1, 64, 30, 28}, {3, 3}, {2, 2}, {}, {1, 1, 1, 1}},
    {{2, 11, 9, 8}, {2, 3}, {1, 2}, {2, 1}, {1, 0, 0, 2}},
    {{1, 5, 23}, {4}, {3}, {}, {1, 2}},
    {{1, 3, 5, 6, 7}, {2, 3, 2}, {2, 1, 2}, {}, {0, 1, 1, 1, 1, 0}},
    {{1, 16, 15, 15}, {3, 3}, {2, 2}, {}, {}, "SAME_UPPER"},
    {{1, 16, 15, 15}, {2, 2}, {2, 2}, {}, {}, "SAME_LOWER"},
    {{0, 8, 9, 9}, {3, 3}},
};

std::vector<Attribute> attributes_of(const PoolCase& c) {
  std::vector<Attribute> out = {attribute("kernel_shape", c.kernel)};
  if (!c.strides.empty()) out.push_back(attribute("strides", c.strides));
  if (!c.dilations.empty()) out.push_back(attribute("dilations", c.dilations));
  if (!c.pads.empty()) out.push_back(attribute("pads", c.pads));
  if (!c.auto_pad.empty()) out.push_back(attribute("auto_pad", c.auto_pad));
  return out;
}
std::vector<Attribute> with(std::vector<Attribute> list, std::vector<Attribute> more) {
  list.insert(list.end(), more.begin(), more.end());
  return list;
}
const Attribute kCeil = attribute("ceil_mode", int64_t{1});

TEST(PoolingOnDevice, WindowsInBothLayouts) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const PoolCase& c : kPools) {
    for (DType type : kFloatTypes) {
      for (Layout layout : {Layout::plain, Layout::nhwc}) {
        if (layout == Layout::nhwc && c.x.size() != 4) continue;
        const RuntimeValue x = reordered(numbers(type, c.x, -2, 2), layout);
        const std::vector<Attribute> plain = attributes_of(c);
        expect_same_on_device({"MaxPool", {x}, plain}, {0, 0});
        expect_same_on_device({"MaxPool", {x}, with(plain, {kCeil}), 1, {}, layout == Layout::plain}, {0, 0});
        expect_same_on_device({"AveragePool", {x}, plain}, tolerance_for(type));
        expect_same_on_device({"AveragePool", {x}, with(plain, {kCeil, attribute("count_include_pad", int64_t{1})})}, tolerance_for(type));
        expect_same_on_device({"LpPool", {x}, plain}, tolerance_for(type));
        expect_same_on_device({"LpPool", {x}, with(plain, {attribute("p", int64_t{3})})}, tolerance_for(type));
      }
    }
  }
}

TEST(PoolingOnDevice, IndicesAndBytes) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const PoolCase& c : kPools) {
    for (int64_t order : {0, 1}) {
      const std::vector<Attribute> attributes = with(attributes_of(c), {attribute("storage_order", order)});
      for (DType type : {DType::float32, DType::float16})
        expect_same_on_device({"MaxPool", {numbers(type, c.x, -2, 2)}, attributes, 2}, {0, 0});
      for (DType type : {DType::int8, DType::uint8})
        expect_same_on_device({"MaxPool", {numbers(type, c.x, 0, 100)}, attributes, 2}, {0, 0});
    }
  }
  const RuntimeValue x = reordered(numbers(DType::float16, {2, 16, 9, 9}, -2, 2), Layout::nhwc);
  expect_same_on_device({"MaxPool", {x}, {attribute("kernel_shape", Dims{3, 3})}, 2}, {0, 0});
}

TEST(PoolingOnDevice, WholePlanes) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const Dims& dims :
       {Dims{2, 64, 7, 7}, Dims{3, 5, 1, 1}, Dims{1, 24, 40, 41}, Dims{1, 7, 150, 150}, Dims{2, 3, 17}, Dims{1, 2, 4, 5, 6}}) {
    for (DType type : kFloatTypes) {
      for (Layout layout : {Layout::plain, Layout::nhwc}) {
        if (layout == Layout::nhwc && dims.size() != 4) continue;
        const RuntimeValue x = reordered(numbers(type, dims, -2, 3), layout);
        const Tolerance one = tolerance_for(type), sums{4 * one.relative, 4 * one.absolute};
        expect_same_on_device({"GlobalMaxPool", {x}}, {0, 0});
        expect_same_on_device({"GlobalAveragePool", {x}, {}, 1, {}, layout == Layout::plain}, sums);
        expect_same_on_device({"GlobalLpPool", {x}}, sums);
      }
    }
  }
}

TEST(PoolingOnDevice, LayoutDoesNotChangeTheBits) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const Dims& dims : {Dims{2, 16, 9, 7}, Dims{1, 11, 60, 70}}) {
    for (DType type : kFloatTypes) {
      const RuntimeValue x = numbers(type, dims, -1, 1), last = reordered(x, Layout::nhwc);
      for (const char* op : {"AveragePool", "MaxPool", "LpPool", "GlobalAveragePool", "GlobalLpPool"}) {
        const std::vector<Attribute> attributes = std::string(op).starts_with("Global")
                                                      ? std::vector<Attribute>{}
                                                      : std::vector<Attribute>{attribute("kernel_shape", Dims{3, 3})};
        EXPECT_EQ(doubles_of(run_case({op, {x}, attributes}, any_device())[0]),
                  doubles_of(run_case({op, {last}, attributes}, any_device())[0]))
            << op << " " << name_of(type);
      }
    }
  }
}

}  // namespace
}  // namespace fretsaw::testing
