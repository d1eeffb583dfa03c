// Quantising and its reverse, at every granularity.
#include <cmath>

#include "tests/kernels/single_op.h"

namespace fretsaw::testing {
namespace {

TEST(Quantization, RoundsToEvenAndSaturates) {
  const RuntimeValue x = tensor<float>({6}, {1, 3, 5, -1e6, 1e6, NAN}), scale = tensor<float>({}, {2});
  EXPECT_EQ(values_of<uint8_t>(run_op("QuantizeLinear", {x, scale, tensor<uint8_t>({}, {128})})[0]),
            (std::vector<uint8_t>{128, 130, 130, 0, 255, 0}));
  EXPECT_EQ(values_of<int8_t>(run_op("QuantizeLinear", {x, scale, tensor<int8_t>({}, {0})})[0]),
            (std::vector<int8_t>{0, 2, 2, -128, 127, -128}));
}

// Scales one for the tensor, for each index of an axis, and for each block of one, against plain indexing.
TEST(Quantization, EveryGranularityFindsItsScale) {
  const Dims dims{2, 7, 3};
  const auto values = spread_values(42, -10, 10);
  struct Case {
    Dims scales;
    int64_t axis, block;
  };
  for (const Case& c : {Case{{}, 1, 0}, {{7}, 1, 0}, {{3}, -1, 0}, {{2}, 0, 0}, {{2, 4, 3}, 1, 2}, {{2, 7, 2}, 2, 2}, {{1, 7, 3}, 0, 2}}) {
    const auto scales = spread_values(count_of(c.scales), 0.1, 0.5, 7);
    std::vector<double> zeros;
    for (double z : spread_values(count_of(c.scales), -20, 20, 8)) zeros.push_back(std::floor(z));
    const RuntimeValue x = tensor_as(DType::float32, dims, values), s = tensor_as(DType::float32, c.scales, scales),
                       z = tensor_as(DType::int8, c.scales, zeros);
    const std::vector<Attribute> attributes = {attribute("axis", c.axis), attribute("block_size", c.block)};
    const RuntimeValue q = run_op("QuantizeLinear", {x, s, z}, attributes)[0], y = run_op("DequantizeLinear", {q, s, z}, attributes)[0];
    const auto in = doubles_of(x), scale_values = doubles_of(s), codes = doubles_of(q), out = doubles_of(y);
    for (int64_t i = 0; i < 42; ++i) {
      int64_t at[] = {i / 21, i / 3 % 7, i % 3};
      const auto axis = static_cast<size_t>(c.axis < 0 ? c.axis + 3 : c.axis);
      if (c.block) at[axis] /= c.block;
      const int64_t k = c.scales.empty() ? 0 : c.scales.size() == 1 ? at[axis] : (at[0] * c.scales[1] + at[1]) * c.scales[2] + at[2];
      const auto e = static_cast<size_t>(i), p = static_cast<size_t>(k);
      const double code = std::clamp(std::nearbyint(in[e] / scale_values[p]) + zeros[p], -128.0, 127.0);
      ASSERT_NEAR(codes[e], code, 0) << to_string(c.scales) << " element " << i;
      ASSERT_NEAR(out[e], (code - zeros[p]) * scale_values[p], 1e-5);
    }
  }
}

TEST(Quantization, PackedAndSmallFloatTypes) {
  const RuntimeValue x = tensor<float>({5}, {-100, -3, 0.5, 2, 100}), scale = tensor<float>({}, {1});
  auto quantized = [&](DType type) {
    return doubles_of(run_op("QuantizeLinear", {x, scale}, {attribute("output_dtype", static_cast<int64_t>(type))})[0]);
  };
  EXPECT_EQ(quantized(DType::int4), (std::vector<double>{-8, -3, 0, 2, 7}));
  EXPECT_EQ(quantized(DType::uint4), (std::vector<double>{0, 0, 0, 2, 15}));
  EXPECT_EQ(quantized(DType::int2), (std::vector<double>{-2, -2, 0, 1, 1}));
  EXPECT_EQ(quantized(DType::float4e2m1), (std::vector<double>{-6, -3, 0.5, 2, 6}));
  EXPECT_EQ(quantized(DType::float8e4m3fn), (std::vector<double>{-96, -3, 0.5, 2, 96}));
}

TEST(Quantization, ScalesThatDoNotFitAreRefused) {
  const RuntimeValue x = tensor<float>({2, 3}, {1, 2, 3, 4, 5, 6});
  EXPECT_THROW(run_op("QuantizeLinear", {x, tensor<float>({2}, {1, 1})}), Error);
  EXPECT_THROW(run_op("QuantizeLinear", {x, tensor<float>({2, 2}, {1, 1, 1, 1})}), Error);
  EXPECT_THROW(run_op("QuantizeLinear", {x, tensor<float>({3}, {1, 1, 1}), tensor<uint8_t>({}, {1})}), Error);
}

TEST(Quantization, DynamicRangeHoldsZero) {
  const auto results = run_op("DynamicQuantizeLinear", {tensor<float>({4}, {0, 2, -3, 7})}, {}, 3);
  EXPECT_NEAR(values_of<float>(results[1])[0], 10.0f / 255, 1e-7);
  EXPECT_EQ(values_of<uint8_t>(results[2]), (std::vector<uint8_t>{76}));
  EXPECT_EQ(values_of<uint8_t>(results[0]), (std::vector<uint8_t>{76, 127, 0, 254}));
  // Positive numbers alone: the zero point is 0. Zeros alone, and nothing at all: any scale will do.
  EXPECT_EQ(values_of<uint8_t>(run_op("DynamicQuantizeLinear", {tensor<float>({2}, {1, 5})}, {}, 3)[2]), (std::vector<uint8_t>{0}));
  EXPECT_EQ(values_of<uint8_t>(run_op("DynamicQuantizeLinear", {tensor<float>({2}, {0, 0})}, {}, 3)[0]), (std::vector<uint8_t>{0, 0}));
  EXPECT_EQ(run_op("DynamicQuantizeLinear", {tensor<float>({0}, {})}, {}, 3)[0].tensor.count(), 0);
}

}  // namespace
}  // namespace fretsaw::testing
