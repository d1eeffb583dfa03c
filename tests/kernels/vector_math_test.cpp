// The vectorising functions against libm in double.
#include "kernels/cpu/vector_math.h"

#include <gtest/gtest.h>

#include <cmath>

namespace fretsaw {
namespace {

struct Function {
  const char* name;
  float (*fast)(float);
  double (*exact)(double);
  double low, high;
  bool logarithmic;  // the points are spread over the exponents of (e^low, e^high)
  double ulps;
};

const Function kFunctions[] = {
    {"exp", [](float x) { return math::exp(x); }, [](double x) { return std::exp(x); }, -104, 89, false, 2},
    {"expm1", [](float x) { return math::expm1(x); }, [](double x) { return std::expm1(x); }, -20, 88, false, 2},
    {"expm1 near 0", [](float x) { return math::expm1(x); }, [](double x) { return std::expm1(x); }, -40, 0, true, 2},
    {"log", [](float x) { return math::log(x); }, [](double x) { return std::log(x); }, -103, 88, true, 2},
    {"log near 1", [](float x) { return math::log(x); }, [](double x) { return std::log(x); }, 0.5, 2, false, 2},
    {"log1p", [](float x) { return math::log1p(x); }, [](double x) { return std::log1p(x); }, -40, 20, true, 2},
    {"tanh", [](float x) { return math::tanh(x); }, [](double x) { return std::tanh(x); }, -12, 12, false, 3},
    {"tanh near 0", [](float x) { return math::tanh(x); }, [](double x) { return std::tanh(x); }, -40, 1, true, 3},
    {"erf", [](float x) { return math::erf(x); }, [](double x) { return std::erf(x); }, -6, 6, false, 2},
    {"erf near 0", [](float x) { return math::erf(x); }, [](double x) { return std::erf(x); }, -40, 1, true, 2},
};

TEST(VectorMath, StaysWithinItsUlps) {
  for (const Function& f : kFunctions) {
    double worst = 0, at = 0;
    for (int i = 0; i <= 20000; ++i) {
      const double t = f.low + (f.high - f.low) * i / 20000;
      const auto x = static_cast<float>(f.logarithmic ? std::exp(t) : t);
      const double exact = f.exact(x);
      const float rounded = static_cast<float>(exact);
      if (!std::isfinite(rounded)) {
        EXPECT_EQ(f.fast(x), rounded) << f.name << " of " << x;
        continue;
      }
      const double ulp = std::nextafter(std::fabs(rounded), INFINITY) - std::fabs(rounded);
      const double error = std::fabs(f.fast(x) - exact) / ulp;
      if (!(error <= worst)) worst = error, at = x;
    }
    EXPECT_LE(worst, f.ulps) << f.name << " of " << at;
  }
}

TEST(VectorMath, KeepsSpecialValues) {
  const float nan = NAN, inf = INFINITY;
  for (const Function& f : kFunctions) EXPECT_TRUE(std::isnan(f.fast(nan))) << f.name;
  EXPECT_EQ(math::exp(inf), inf);
  EXPECT_EQ(math::exp(-inf), 0.0f);
  EXPECT_EQ(math::expm1(-inf), -1.0f);
  EXPECT_EQ(math::log(0.0f), -inf);
  EXPECT_EQ(math::log(inf), inf);
  EXPECT_TRUE(std::isnan(math::log(-1.0f)));
  EXPECT_EQ(math::log1p(inf), inf);
  EXPECT_EQ(math::tanh(-inf), -1.0f);
  EXPECT_EQ(math::erf(inf), 1.0f);
  EXPECT_TRUE(std::isnan(math::max(nan, 1.0f)) && std::isnan(math::max(1.0f, nan)));
  EXPECT_TRUE(std::isnan(math::min(nan, 1.0f)) && std::isnan(math::min(1.0f, nan)));
}

TEST(VectorMath, IntegersHaveNoUndefinedCases) {
  EXPECT_EQ(math::divide(7, 0), 0);
  EXPECT_EQ(math::divide(INT32_MIN, -1), INT32_MIN);
  EXPECT_EQ(math::divide(-7, 2), -3);
  EXPECT_EQ(math::modulus(-7, 3, 0), 2);
  EXPECT_EQ(math::modulus(-7, 3, 1), -1);
  EXPECT_EQ(math::modulus(7, -3, 0), -2);
  EXPECT_EQ(math::modulus(INT64_MIN, int64_t{-1}, int64_t{0}), 0);
  EXPECT_EQ(math::power(3, 4), 81);
  EXPECT_EQ(math::power(2, -1), 0);
  EXPECT_EQ(math::power(-1, -3), -1);
  EXPECT_EQ(math::shift_left(int8_t{1}, int8_t{8}), 0);
  EXPECT_EQ(math::shift_right(int8_t{-5}, int8_t{-1}), -1);
}

}  // namespace
}  // namespace fretsaw
