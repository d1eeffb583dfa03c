// Poolings: small cases with known results, and layouts that must not change a bit.
#include <cmath>

#include "graph/errors.h"
#include "tests/kernels/single_op.h"

namespace fretsaw::testing {
namespace {

const Attribute kTwo = attribute("kernel_shape", Dims{2, 2});

RuntimeValue image() {
  return tensor_as(DType::float32, {1, 1, 3, 3}, {1, 2, 3, 4, 5, 6, 7, 8, 9});
}
std::vector<double> pooled(const std::string& op, std::vector<Attribute> attributes) {
  attributes.push_back(kTwo);
  return doubles_of(run_op(op, {image()}, attributes)[0]);
}
using Values = std::vector<double>;

TEST(Pooling, Windows) {
  EXPECT_EQ(pooled("MaxPool", {}), (Values{5, 6, 8, 9}));
  EXPECT_EQ(pooled("AveragePool", {}), (Values{3, 4, 6, 7}));
  EXPECT_EQ(pooled("MaxPool", {attribute("strides", Dims{2, 2}), attribute("ceil_mode", int64_t{1})}), (Values{5, 6, 8, 9}));
  EXPECT_EQ(pooled("AveragePool", {attribute("strides", Dims{2, 2}), attribute("ceil_mode", int64_t{1})}), (Values{3, 4.5, 7.5, 9}));
  EXPECT_EQ(pooled("MaxPool", {attribute("dilations", Dims{2, 2})}), (Values{9}));
  EXPECT_EQ(pooled("AveragePool", {attribute("dilations", Dims{2, 2})}), (Values{5}));
}

// With ceil_mode a window may be larger than the image, as long as a step of it ends beyond.
TEST(Pooling, AWindowLargerThanTheImage) {
  const auto run = [](const std::string& op, const Dims& kernel, int64_t stride, const Dims& pads) {
    return doubles_of(run_op(op, {image()},
                             {attribute("kernel_shape", kernel), attribute("strides", Dims{stride, stride}), attribute("pads", pads),
                              attribute("ceil_mode", int64_t{1})})[0]);
  };
  EXPECT_EQ(run("MaxPool", {4, 4}, 2, {0, 0, 0, 0}), (Values{9}));
  EXPECT_EQ(run("AveragePool", {5, 4}, 3, {0, 0, 0, 0}), (Values{5}));
  EXPECT_EQ(run("MaxPool", {6, 2}, 3, {1, 0, 0, 0}), (Values{8}));
  EXPECT_THROW(run("MaxPool", {5, 4}, 2, {0, 0, 0, 0}), Error);
}

TEST(Pooling, PaddingCountsOnlyWhenAsked) {
  const std::vector<Attribute> pads = {attribute("pads", Dims{1, 1, 0, 0}), attribute("strides", Dims{2, 2})};
  std::vector<Attribute> counted = pads;
  counted.push_back(attribute("count_include_pad", int64_t{1}));
  EXPECT_EQ(pooled("AveragePool", pads), (Values{1, 2.5, 5.5, 7}));
  EXPECT_EQ(pooled("AveragePool", counted), (Values{0.25, 1.25, 2.75, 7}));
}

TEST(Pooling, IndicesInBothOrders) {
  for (int64_t order : {0, 1}) {
    const auto y =
        run_op("MaxPool", {tensor_as(DType::int8, {1, 1, 2, 3}, {1, 9, 3, 4, 5, 6})}, {kTwo, attribute("storage_order", order)}, 2);
    EXPECT_EQ(doubles_of(y[0]), (Values{9, 9}));
    EXPECT_EQ(doubles_of(y[1]), order ? (Values{2, 2}) : (Values{1, 1}));
  }
}

TEST(Pooling, NegativeValuesAndPadding) {
  const RuntimeValue x = tensor_as(DType::float32, {1, 1, 2, 2}, {-4, -3, -2, -1});
  EXPECT_EQ(doubles_of(run_op("MaxPool", {x}, {kTwo, attribute("pads", Dims{1, 1, 1, 1}), attribute("strides", Dims{2, 2})})[0]),
            (Values{-4, -3, -2, -1}));
}

TEST(Pooling, LayoutDoesNotChangeTheBits) {
  const RuntimeValue x = tensor_as(DType::float32, {2, 11, 9, 7}, spread_values(2 * 11 * 63, -1, 1)), last = reordered(x, Layout::nhwc);
  const std::vector<Attribute> attributes = {attribute("kernel_shape", Dims{3, 3}), attribute("strides", Dims{2, 2}),
                                             attribute("pads", Dims{1, 1, 1, 1})};
  for (const char* op : {"MaxPool", "AveragePool"}) {
    for (int threads : {1, 2})
      EXPECT_EQ(doubles_of(run_op(op, {x}, attributes)[0]), doubles_of(run_op(op, {last}, attributes, 1, {.threads = threads})[0])) << op;
  }
  for (const char* op : {"GlobalMaxPool", "GlobalAveragePool"}) {
    for (int threads : {1, 2})
      EXPECT_EQ(doubles_of(run_op(op, {x})[0]), doubles_of(run_op(op, {last}, {}, 1, {.threads = threads})[0])) << op;
  }
}

TEST(Pooling, Global) {
  EXPECT_EQ(doubles_of(run_op("GlobalAveragePool", {image()})[0]), (Values{5}));
  EXPECT_EQ(doubles_of(run_op("GlobalMaxPool", {image()})[0]), (Values{9}));
  EXPECT_NEAR(doubles_of(run_op("GlobalLpPool", {image()}, {attribute("p", int64_t{2})})[0])[0], std::sqrt(285.0), 1e-5);
  EXPECT_NEAR(doubles_of(run_op("LpPool", {image()}, {attribute("kernel_shape", Dims{3, 3}), attribute("p", int64_t{1})})[0])[0], 45, 1e-4);
  EXPECT_EQ(run_op("GlobalAveragePool", {image()})[0].tensor.dims, (Dims{1, 1, 1, 1}));
}

TEST(Pooling, UnpoolPutsValuesBack) {
  const RuntimeValue x = tensor_as(DType::float32, {1, 1, 1, 2}, {5, 6}), at = tensor_as(DType::int64, {1, 1, 1, 2}, {4, 3});
  const RuntimeValue y = run_op("MaxUnpool", {x, at}, {kTwo, attribute("strides", Dims{2, 2})})[0];
  EXPECT_EQ(y.tensor.dims, (Dims{1, 1, 2, 4}));
  EXPECT_EQ(doubles_of(y), (Values{0, 0, 0, 6, 5, 0, 0, 0}));
  const RuntimeValue outside = tensor_as(DType::int64, {1, 1, 1, 2}, {4, 8});
  EXPECT_THROW(run_op("MaxUnpool", {x, outside}, {kTwo, attribute("strides", Dims{2, 2})}), Error);
}

TEST(Pooling, WrongAttributesAreErrors) {
  EXPECT_THROW(run_op("MaxPool", {image()}, {attribute("kernel_shape", Dims{4, 4})}), Error);
  EXPECT_THROW(run_op("MaxPool", {image()}, {attribute("kernel_shape", Dims{2})}), Error);
  EXPECT_THROW(run_op("MaxPool", {image()}), Error);
  EXPECT_THROW(run_op("AveragePool", {image()}, {kTwo, attribute("strides", Dims{0, 1})}), Error);
}

}  // namespace
}  // namespace fretsaw::testing
