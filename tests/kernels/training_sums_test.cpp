// SquaredSum and CrossEntropy against sums in double precision.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/kernels/operator_case.h"
#include "tests/kernels/single_op.h"

namespace fretsaw::testing {
namespace {

TEST(SquaredSum, AddsTheSquaresOfAllTensors) {
  const std::vector<Dims> shapes = {{3}, {}, {0, 4}, {70000}, {129, 300}, {1, 1, 5}};
  std::vector<RuntimeValue> values;
  double wanted = 0;
  for (const Dims& dims : shapes) {
    RuntimeValue& value = values.emplace_back(counting(dims));
    for (int64_t i = 0; i < value.tensor.count(); ++i) {
      float& x = value.tensor.as<float>()[i];
      x = std::sin(x);
      wanted += static_cast<double>(x) * static_cast<double>(x);
    }
  }
  for (int repeats : {1, 60}) {  // of many tensors a device takes a part at a time
    std::vector<RuntimeValue> all;
    for (int k = 0; k < repeats; ++k) all.insert(all.end(), values.begin(), values.end());
    const OperatorCase c{"case",      "SquaredSum", {}, all, {tensor_of({}, std::vector<float>{static_cast<float>(wanted * repeats)})},
                         "ai.fretsaw"};
    EXPECT_EQ(failure_of(c), "") << repeats;
  }
}

struct Rows {
  int64_t rows, classes;
  float smoothing;
  std::optional<int64_t> ignored;
};
class CrossEntropy : public ::testing::TestWithParam<Rows> {};

TEST_P(CrossEntropy, IsThatOfEachRow) {
  const auto [rows, classes, smoothing, ignored] = GetParam();
  RuntimeValue scores = counting({rows, classes});
  std::vector<int64_t> target;
  std::vector<float> losses, lse;
  for (int64_t i = 0; i < rows; ++i) {
    target.push_back(ignored && i % 3 == 1 ? *ignored : i * 7 % classes);
    float* x = scores.tensor.as<float>() + i * classes;
    double sum = 0, all = 0;
    for (int64_t k = 0; k < classes; ++k) x[k] = 4 * std::sin(0.37f * static_cast<float>(i * classes + k));
    for (int64_t k = 0; k < classes; ++k) sum += std::exp(static_cast<double>(x[k])), all += static_cast<double>(x[k]);
    lse.push_back(static_cast<float>(std::log(sum)));
    const bool counts = !ignored || target.back() != *ignored;
    const double own = counts ? static_cast<double>(x[target.back()]) : 0, share = static_cast<double>(smoothing);
    losses.push_back(counts ? static_cast<float>(std::log(sum) - (1 - share) * own - share * all / static_cast<double>(classes)) : 0);
  }
  std::vector<Attribute> attributes;
  if (smoothing > 0) attributes.push_back({"label_smoothing", smoothing});
  if (ignored) attributes.push_back({"ignore_index", *ignored});
  const std::vector<RuntimeValue> inputs = {scores, tensor_of({rows}, target)};
  EXPECT_EQ(failure_of({"case", "CrossEntropy", attributes, inputs, {tensor_of({rows}, losses), tensor_of({rows}, lse)}, "ai.fretsaw"}),
            "");
}
INSTANTIATE_TEST_SUITE_P(Some, CrossEntropy,
                         ::testing::Values(Rows{1, 1, 0, {}}, Rows{7, 5, 0, {}}, Rows{9, 1003, 0.1f, {}}, Rows{12, 8, 0, -100},
                                           Rows{33, 50257, 0.2f, 3}));

}  // namespace
}  // namespace fretsaw::testing
