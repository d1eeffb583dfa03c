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
  int64_t more = 0;  // scores behind the classes, which do not count
};
class CrossEntropy : public ::testing::TestWithParam<Rows> {};

TEST_P(CrossEntropy, IsThatOfEachRow) {
  const auto [rows, classes, smoothing, ignored, more] = GetParam();
  RuntimeValue scores = counting({rows, classes + more});
  const std::vector<float> dlosses(static_cast<size_t>(rows), 0.75f);
  RuntimeValue dscores = counting({rows, classes + more});
  std::vector<int64_t> target;
  std::vector<float> losses, lse;
  for (int64_t i = 0; i < rows; ++i) {
    target.push_back(ignored && i % 3 == 1 ? *ignored : i * 7 % classes);
    float *x = scores.tensor.as<float>() + i * (classes + more), *dx = dscores.tensor.as<float>() + i * (classes + more);
    double sum = 0, all = 0;
    for (int64_t k = 0; k < classes; ++k) x[k] = 4 * std::sin(0.37f * static_cast<float>(i * classes + k));
    for (int64_t k = classes; k < classes + more; ++k) x[k] = 50;
    for (int64_t k = 0; k < classes; ++k) sum += std::exp(static_cast<double>(x[k])), all += static_cast<double>(x[k]);
    lse.push_back(static_cast<float>(std::log(sum)));
    const bool counts = !ignored || target.back() != *ignored;
    const double own = counts ? static_cast<double>(x[target.back()]) : 0, share = static_cast<double>(smoothing);
    for (int64_t k = 0; k < classes + more; ++k) {
      const double wanted = std::exp(static_cast<double>(x[k])) / sum - share / static_cast<double>(classes);
      dx[k] = counts && k < classes ? static_cast<float>(0.75 * (wanted - (k == target.back() ? 1 - share : 0))) : 0.0f;
    }
    losses.push_back(counts ? static_cast<float>(std::log(sum) - (1 - share) * own - share * all / static_cast<double>(classes)) : 0);
  }
  std::vector<Attribute> attributes;
  if (smoothing > 0) attributes.push_back({"label_smoothing", smoothing});
  if (ignored) attributes.push_back({"ignore_index", *ignored});
  if (more > 0) attributes.push_back({"classes", classes});
  const std::vector<RuntimeValue> inputs = {scores, tensor_of({rows}, target)};
  EXPECT_EQ(failure_of({"case", "CrossEntropy", attributes, inputs, {tensor_of({rows}, losses), tensor_of({rows}, lse)}, "ai.fretsaw"}),
            "");
  const std::vector<RuntimeValue> back = {tensor_of({rows}, dlosses), scores, tensor_of({rows}, target), tensor_of({rows}, lse)};
  EXPECT_EQ(failure_of({"case", "CrossEntropyGrad", attributes, back, {dscores}, "ai.fretsaw"}), "");
}
INSTANTIATE_TEST_SUITE_P(Some, CrossEntropy,
                         ::testing::Values(Rows{1, 1, 0, {}}, Rows{7, 5, 0, {}}, Rows{9, 1003, 0.1f, {}}, Rows{12, 8, 0, -100},
                                           Rows{33, 50257, 0.2f, 3}, Rows{9, 1003, 0.1f, {}, 21}, Rows{6, 5, 0, 2, 3}));

}  // namespace
}  // namespace fretsaw::testing
