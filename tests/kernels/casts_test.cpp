// Conversions between element types, and casts of tensors.
#include <cmath>
#include <limits>

#include "tests/kernels/single_op.h"

namespace fretsaw::testing {
namespace {

RuntimeValue cast_to(const RuntimeValue& x, DType to, std::vector<Attribute> attributes = {}) {
  attributes.push_back(attribute("to", static_cast<int64_t>(to)));
  return run_op("Cast", {x}, attributes)[0];
}

// The nearest number of the type among all its codes; ties go to the even code.
template <typename Small>
uint8_t nearest_code(float value, int codes) {
  int best = -1;
  double distance = INFINITY;
  for (int code = 0; code < codes; ++code) {
    const double candidate = Small::decode(static_cast<uint8_t>(code));
    if (!std::isfinite(candidate) || std::signbit(candidate) != std::signbit(value)) continue;
    const double d = std::fabs(candidate - value);
    if (d < distance || (d == distance && code % 2 == 0)) {
      distance = d;
      best = code;
    }
  }
  return static_cast<uint8_t>(best);
}

template <typename Small>
void check_rounding(const char* name, int codes, double largest) {
  for (int i = -4000; i <= 4000; ++i) {
    const auto value = static_cast<float>((i < 0 ? -1 : 1) * largest * std::exp2(-std::abs(i) / 200.0) * 1.01);
    const uint8_t wanted = nearest_code<Small>(value, codes);
    // FNUZ types have no -0 to round to.
    const float expected = Small::decode(wanted), got = Small::decode(Small::encode(value, true));
    ASSERT_TRUE(got == expected || std::fabs(expected - value) >= std::fabs(value)) << name << " of " << value;
  }
}

TEST(SmallFloats, RoundToTheNearest) {
  check_rounding<Float8E4M3FN>("e4m3fn", 256, 448);
  check_rounding<Float8E4M3FNUZ>("e4m3fnuz", 256, 240);
  check_rounding<Float8E5M2>("e5m2", 256, 57344);
  check_rounding<Float8E5M2FNUZ>("e5m2fnuz", 256, 57344);
  check_rounding<Float4E2M1Code>("e2m1", 16, 6);
}

TEST(SmallFloats, EveryCodeSurvivesARoundTrip) {
  for (int code = 0; code < 256; ++code) {
    const auto c = static_cast<uint8_t>(code);
    auto same = [&](auto small, const char* name) {
      using Small = decltype(small);
      const float value = Small::decode(c);
      if (!std::isfinite(value)) return;
      ASSERT_EQ(Small::encode(value, true), c) << name << " code " << code;
    };
    same(Float8E4M3FN{}, "e4m3fn");
    same(Float8E4M3FNUZ{}, "e4m3fnuz");
    same(Float8E5M2{}, "e5m2");
    same(Float8E5M2FNUZ{}, "e5m2fnuz");
  }
  for (int bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = half_to_float(half), wide = bfloat16_to_float(half);
    ASSERT_TRUE(std::isnan(value) || float_to_half(value) == half) << bits;
    ASSERT_TRUE(std::isnan(wide) || float_to_bfloat16(wide) == half) << bits;
  }
}

TEST(SmallFloats, HalvesRoundToEven) {
  EXPECT_EQ(half_to_float(float_to_half(2049)), 2048);
  EXPECT_EQ(half_to_float(float_to_half(2051)), 2052);
  EXPECT_EQ(half_to_float(float_to_half(65519)), 65504);
  EXPECT_TRUE(std::isinf(half_to_float(float_to_half(65520))));
  EXPECT_EQ(half_to_float(float_to_half(0x1p-25f)), 0);
  EXPECT_EQ(half_to_float(float_to_half(0x1.8p-25f)), 0x1p-24f);
  EXPECT_TRUE(std::isnan(half_to_float(float_to_half(NAN))) && std::isnan(bfloat16_to_float(float_to_bfloat16(NAN))));
  // Twice rounded, this double would become 2052.
  EXPECT_EQ(doubles_of(cast_to(tensor<double>({}, {2049.0000001}), DType::float16)), (std::vector<double>{2050}));
}

TEST(SmallFloats, OverflowFollowsTheSaturateAttribute) {
  const RuntimeValue x = tensor<float>({4}, {1e9f, -1e9f, INFINITY, NAN});
  const std::vector<Attribute> open = {attribute("saturate", int64_t{0})};
  struct Case {
    DType type;
    double largest, beyond;  // saturated, and not
  };
  for (const Case& c : {Case{DType::float8e4m3fn, 448, NAN},
                        {DType::float8e4m3fnuz, 240, NAN},
                        {DType::float8e5m2, 57344, INFINITY},
                        {DType::float8e5m2fnuz, 57344, NAN}}) {
    const auto saturated = doubles_of(cast_to(x, c.type)), not_saturated = doubles_of(cast_to(x, c.type, open));
    EXPECT_EQ(saturated[0], c.largest);
    EXPECT_EQ(saturated[1], -c.largest);
    EXPECT_EQ(saturated[2], c.largest);
    EXPECT_TRUE(std::isnan(saturated[3]));
    EXPECT_TRUE(std::isnan(c.beyond) ? std::isnan(not_saturated[0]) : not_saturated[0] == c.beyond) << name_of(c.type);
  }
}

// Every pair of types on numbers that both hold.
TEST(Casts, EveryPairOfNumericTypesKeepsSmallNumbers) {
  std::vector<DType> types;
  for (int t = 1; t <= static_cast<int>(DType::int2); ++t) {
    const auto type = static_cast<DType>(t);
    if (type != DType::string && type != DType::complex64 && type != DType::complex128) types.push_back(type);
  }
  // 0 and 1, in an odd number that fills chunks and leaves a rest; float8e8m0 has no 0.
  for (DType from : types) {
    for (DType to : types) {
      const bool scales = from == DType::float8e8m0 || to == DType::float8e8m0;
      std::vector<double> values;
      for (int i = 0; i < 1037; ++i) values.push_back(scales || i % 3 == 0 ? 1 : 0);
      const RuntimeValue x = tensor_as(from, {17, 61}, values), y = cast_to(x, to);
      ASSERT_EQ(y.tensor.dtype, to);
      ASSERT_EQ(doubles_of(y), values) << name_of(from) << " to " << name_of(to);
    }
  }
}

TEST(Casts, IntegersWrapAndFloatsTruncate) {
  EXPECT_EQ(values_of<int8_t>(cast_to(tensor<int16_t>({2}, {200, -129}), DType::int8)), (std::vector<int8_t>{-56, 127}));
  EXPECT_EQ(values_of<int32_t>(cast_to(tensor<float>({3}, {2.9f, -2.9f, 0}), DType::int32)), (std::vector<int32_t>{2, -2, 0}));
  EXPECT_EQ(values_of<uint8_t>(cast_to(tensor<float>({1}, {-1}), DType::uint8)), (std::vector<uint8_t>{255}));
  EXPECT_EQ(values_of<bool>(cast_to(tensor<float>({3}, {0.3f, -0.0f, NAN}), DType::boolean)), (std::vector<bool>{true, false, true}));
  EXPECT_EQ(values_of<uint64_t>(cast_to(tensor<double>({1}, {1.5e19}), DType::uint64)), (std::vector<uint64_t>{15000000000000000000u}));
  EXPECT_EQ(values_of<int64_t>(cast_to(tensor<int64_t>({1}, {INT64_MAX}), DType::int64)), (std::vector<int64_t>{INT64_MAX}));
  EXPECT_EQ(values_of<float>(cast_to(tensor<double>({1}, {1e300}), DType::float32)), (std::vector<float>{INFINITY}));
}

TEST(Casts, NumbersAndText) {
  EXPECT_EQ(values_of<float>(cast_to(tensor<std::string>({4}, {"3.5", "1e-5", "-INF", " 7 "}), DType::float32)),
            (std::vector<float>{3.5f, 1e-5f, -INFINITY, 7}));
  EXPECT_TRUE(std::isnan(values_of<float>(cast_to(tensor<std::string>({1}, {"nan"}), DType::float32))[0]));
  EXPECT_EQ(values_of<int64_t>(cast_to(tensor<std::string>({3}, {"9223372036854775807", "100.5", "+4"}), DType::int64)),
            (std::vector<int64_t>{INT64_MAX, 100, 4}));
  EXPECT_THROW(cast_to(tensor<std::string>({1}, {"seven"}), DType::float32), Error);
  EXPECT_EQ(values_of<std::string>(cast_to(tensor<float>({5}, {0.1f, 2, 1e20f, NAN, -INFINITY}), DType::string)),
            (std::vector<std::string>{"0.1", "2.0", "1e+20", "NaN", "-INF"}));
  EXPECT_EQ(values_of<std::string>(cast_to(tensor<int8_t>({1}, {-5}), DType::string)), (std::vector<std::string>{"-5"}));
}

TEST(Casts, ScalesRoundAsAsked) {
  const RuntimeValue x = tensor<float>({3}, {3, 2.5f, 4});
  auto codes = [&](const char* mode) {
    const RuntimeValue y = cast_to(x, DType::float8e8m0, {attribute("round_mode", std::string(mode))});
    return doubles_of(y);
  };
  EXPECT_EQ(codes("up"), (std::vector<double>{4, 4, 4}));
  EXPECT_EQ(codes("down"), (std::vector<double>{2, 2, 4}));
  EXPECT_EQ(codes("nearest"), (std::vector<double>{4, 2, 4}));
}

TEST(Casts, LikeAndBits) {
  const RuntimeValue x = tensor<float>({2}, {1, -2});
  EXPECT_EQ(values_of<int64_t>(run_op("CastLike", {x, tensor<int64_t>({}, {0})})[0]), (std::vector<int64_t>{1, -2}));
  EXPECT_EQ(values_of<int32_t>(run_op("BitCast", {x}, {attribute("to", int64_t{6})})[0]),
            (std::vector<int32_t>{0x3f800000, INT32_MIN + 0x40000000}));
  EXPECT_THROW(run_op("BitCast", {x}, {attribute("to", int64_t{7})}), Error);
}

}  // namespace
}  // namespace fretsaw::testing
