// Normalizations and the softmax family against their formulas in double.
#include <cmath>

#include "tests/kernels/single_op.h"

namespace fretsaw::testing {
namespace {

using Values = std::vector<double>;

RuntimeValue random_tensor(const Dims& dims, uint32_t seed, DType type = DType::float32, double low = -2, double high = 2) {
  return tensor_as(type, dims, spread_values(count_of(dims), low, high, seed));
}

void expect_near(const RuntimeValue& got, const Values& wanted, double tolerance) {
  const Values values = doubles_of(got);
  ASSERT_EQ(values.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) ASSERT_NEAR(values[i], wanted[i], tolerance * (1 + std::fabs(wanted[i]))) << "element " << i;
}
double tolerance_of(DType type) {
  return type == DType::float64 ? 1e-6 : type == DType::float32 ? 1e-5 : 2e-2;
}

// Calls f(values of a group of x, their indexes) for groups of `n` elements `stride` apart.
template <typename F>
void for_rows(const Dims& dims, size_t axis, const F& f) {
  int64_t inner = 1;
  for (size_t i = axis + 1; i < dims.size(); ++i) inner *= dims[i];
  const int64_t n = dims[axis], count = count_of(dims) / n;
  for (int64_t i = 0; i < count; ++i) {
    std::vector<size_t> at;
    for (int64_t k = 0; k < n; ++k) at.push_back(static_cast<size_t>(i / inner * n * inner + k * inner + i % inner));
    f(at);
  }
}

TEST(Softmax, EveryAxisAndType) {
  const Dims dims = {3, 19, 37};
  for (DType type : {DType::float32, DType::float64, DType::float16}) {
    const RuntimeValue x = random_tensor(dims, 4, type, -8, 8);
    const Values v = doubles_of(x);
    for (size_t axis = 0; axis < 3; ++axis) {
      Values soft(v.size()), logs(v.size()), hard(v.size());
      for_rows(dims, axis, [&](const std::vector<size_t>& at) {
        double sum = 0;
        size_t best = at[0];
        for (size_t i : at) sum += std::exp(v[i]), best = v[i] > v[best] ? i : best;
        for (size_t i : at) soft[i] = std::exp(v[i]) / sum, logs[i] = v[i] - std::log(sum), hard[i] = i == best;
      });
      const std::vector<Attribute> attributes = {attribute("axis", static_cast<int64_t>(axis) - 3)};
      for (int threads : {1, 2}) {
        expect_near(run_op("Softmax", {x}, attributes, 1, {.threads = threads})[0], soft, tolerance_of(type));
        expect_near(run_op("LogSoftmax", {x}, attributes, 1, {.threads = threads})[0], logs, tolerance_of(type));
        expect_near(run_op("Hardmax", {x}, attributes, 1, {.threads = threads})[0], hard, 0);
      }
    }
  }
}

TEST(Softmax, LargeAndMaskedScores) {
  const double none = -std::numeric_limits<double>::infinity();
  expect_near(run_op("Softmax", {tensor_as(DType::float32, {1, 4}, {1000, none, 1000, -1000})})[0], {0.5, 0, 0.5, 0}, 1e-6);
  EXPECT_THROW(run_op("Softmax", {random_tensor({2, 2}, 1)}, {attribute("axis", int64_t{2})}), Error);
}

TEST(LayerNormalization, AllOutputs) {
  const Dims dims = {2, 3, 5, 7};
  const RuntimeValue x = random_tensor(dims, 1), scale = random_tensor({5, 7}, 2), bias = random_tensor({5, 7}, 3);
  const Values v = doubles_of(x), s = doubles_of(scale), b = doubles_of(bias);
  Values wanted(v.size()), means, inverses;
  for (size_t row = 0; row < 6; ++row) {
    double mean = 0, variance = 0;
    for (size_t i = 0; i < 35; ++i) mean += v[row * 35 + i] / 35;
    for (size_t i = 0; i < 35; ++i) variance += std::pow(v[row * 35 + i] - mean, 2) / 35;
    const double inverse = 1 / std::sqrt(variance + 0.01);
    for (size_t i = 0; i < 35; ++i) wanted[row * 35 + i] = (v[row * 35 + i] - mean) * inverse * s[i] + b[i];
    means.push_back(mean), inverses.push_back(inverse);
  }
  const auto y =
      run_op("LayerNormalization", {x, scale, bias}, {attribute("axis", int64_t{2}), attribute("epsilon", 0.01f)}, 3, {.threads = 2});
  expect_near(y[0], wanted, 1e-5), expect_near(y[1], means, 1e-5), expect_near(y[2], inverses, 1e-5);
  EXPECT_EQ(y[1].tensor.dims, (Dims{2, 3, 1, 1}));
  EXPECT_THROW(run_op("LayerNormalization", {x, random_tensor({6, 7}, 2)}, {attribute("axis", int64_t{2})}), Error);
}

TEST(RMSNormalization, Formula) {
  const Dims dims = {4, 33};
  const RuntimeValue x = random_tensor(dims, 1), scale = random_tensor({33}, 2);
  const Values v = doubles_of(x), s = doubles_of(scale);
  Values wanted(v.size());
  for_rows(dims, 1, [&](const std::vector<size_t>& at) {
    double square = 0;
    for (size_t i : at) square += v[i] * v[i] / 33;
    for (size_t i : at) wanted[i] = v[i] / std::sqrt(square + 1e-5) * s[i % 33];
  });
  expect_near(run_op("RMSNormalization", {x, scale})[0], wanted, 1e-5);
}

TEST(GroupNormalization, ByGroupsAndInstances) {
  const Dims dims = {2, 6, 3, 5};
  const RuntimeValue x = random_tensor(dims, 1), scale = random_tensor({6}, 2), bias = random_tensor({6}, 3);
  const Values v = doubles_of(x), s = doubles_of(scale), b = doubles_of(bias);
  for (size_t groups : {size_t{2}, size_t{6}}) {
    Values wanted(v.size());
    const size_t n = v.size() / 2 / groups;
    for (size_t g = 0; g < 2 * groups; ++g) {
      double mean = 0, variance = 0;
      for (size_t i = 0; i < n; ++i) mean += v[g * n + i] / static_cast<double>(n);
      for (size_t i = 0; i < n; ++i) variance += std::pow(v[g * n + i] - mean, 2) / static_cast<double>(n);
      for (size_t i = g * n; i < (g + 1) * n; ++i) wanted[i] = (v[i] - mean) / std::sqrt(variance + 1e-5) * s[i / 15 % 6] + b[i / 15 % 6];
    }
    expect_near(run_op("GroupNormalization", {x, scale, bias}, {attribute("num_groups", static_cast<int64_t>(groups))})[0], wanted, 1e-5);
    if (groups == 6) expect_near(run_op("InstanceNormalization", {x, scale, bias})[0], wanted, 1e-5);
  }
  EXPECT_THROW(run_op("GroupNormalization", {x, scale, bias}, {attribute("num_groups", int64_t{4})}), Error);
}

TEST(BatchNormalization, InferenceAndTraining) {
  const Dims dims = {3, 4, 2, 5};
  const RuntimeValue x = random_tensor(dims, 1), scale = random_tensor({4}, 2), bias = random_tensor({4}, 3), mean = random_tensor({4}, 4),
                     variance = random_tensor({4}, 5, DType::float32, 0.5, 2);
  const Values v = doubles_of(x), s = doubles_of(scale), b = doubles_of(bias), m = doubles_of(mean), var = doubles_of(variance);
  Values inference(v.size()), training(v.size()), now_mean(4), now_variance(4), running_mean(4), running_variance(4);
  for (size_t i = 0; i < v.size(); ++i) now_mean[i / 10 % 4] += v[i] / 30;
  for (size_t i = 0; i < v.size(); ++i) now_variance[i / 10 % 4] += std::pow(v[i] - now_mean[i / 10 % 4], 2) / 30;
  for (size_t i = 0; i < v.size(); ++i) {
    const size_t c = i / 10 % 4;
    inference[i] = (v[i] - m[c]) / std::sqrt(var[c] + 1e-5) * s[c] + b[c];
    training[i] = (v[i] - now_mean[c]) / std::sqrt(now_variance[c] + 1e-5) * s[c] + b[c];
  }
  for (size_t c = 0; c < 4; ++c)
    running_mean[c] = 0.9 * m[c] + 0.1 * now_mean[c], running_variance[c] = 0.9 * var[c] + 0.1 * now_variance[c];
  const std::vector<RuntimeValue> inputs = {x, scale, bias, mean, variance};
  expect_near(run_op("BatchNormalization", inputs)[0], inference, 1e-5);
  std::vector<RuntimeValue> last = inputs;
  last[0] = reordered(x, Layout::nhwc);
  EXPECT_EQ(doubles_of(run_op("BatchNormalization", last)[0]), doubles_of(run_op("BatchNormalization", inputs)[0]));
  const auto y = run_op("BatchNormalization", inputs, {attribute("training_mode", int64_t{1})}, 3);
  expect_near(y[0], training, 1e-5), expect_near(y[1], running_mean, 1e-5), expect_near(y[2], running_variance, 1e-5);
}

TEST(LocalNormalizations, Formulas) {
  const RuntimeValue x = random_tensor({1, 5, 2, 1}, 1);
  const Values v = doubles_of(x);
  Values wanted(v.size());
  for (size_t i = 0; i < 10; ++i) {
    double sum = 0;
    for (int c = static_cast<int>(i / 2) - 1; c <= static_cast<int>(i / 2) + 1; ++c)
      sum += c < 0 || c > 4 ? 0 : std::pow(v[static_cast<size_t>(c) * 2 + i % 2], 2);
    wanted[i] = v[i] / std::pow(1 + 0.3 / 3 * sum, 0.75);
  }
  expect_near(run_op("LRN", {x}, {attribute("size", int64_t{3}), attribute("alpha", 0.3f)})[0], wanted, 1e-5);
  expect_near(run_op("LpNormalization", {tensor_as(DType::float32, {2, 2}, {3, 4, 0, 0})})[0], {0.6, 0.8, 0, 0}, 1e-6);
  expect_near(run_op("LpNormalization", {tensor_as(DType::float32, {2, 2}, {1, 4, -3, 4})},
                     {attribute("p", int64_t{1}), attribute("axis", int64_t{0})})[0],
              {0.25, 0.5, -0.75, 0.5}, 1e-6);
  expect_near(run_op("MeanVarianceNormalization", {tensor_as(DType::float32, {2, 1, 1, 2}, {1, 3, 3, 1})})[0], {-1, 1, 1, -1}, 1e-6);
}

TEST(Losses, IgnoredLabelsDoNotCount) {
  const RuntimeValue scores = random_tensor({3, 4}, 1), labels = tensor_as(DType::int64, {3}, {2, -7, 1}),
                     weights = tensor_as(DType::float32, {4}, {1, 2, 3, 4});
  const Values v = doubles_of(scores);
  const auto log_prob = [&](size_t row, size_t c) {
    double sum = 0;
    for (size_t k = 0; k < 4; ++k) sum += std::exp(v[row * 4 + k]);
    return v[row * 4 + c] - std::log(sum);
  };
  const Values none = {-3 * log_prob(0, 2), 0, -2 * log_prob(2, 1)};
  const auto loss = [&](const char* reduction) {
    return run_op("SoftmaxCrossEntropyLoss", {scores, labels, weights},
                  {attribute("reduction", std::string(reduction)), attribute("ignore_index", int64_t{-7})}, 2);
  };
  expect_near(loss("none")[0], none, 1e-5);
  expect_near(loss("sum")[0], {none[0] + none[2]}, 1e-5);
  expect_near(loss("mean")[0], {(none[0] + none[2]) / 5}, 1e-5);
  expect_near(run_op("NegativeLogLikelihoodLoss", {loss("sum")[1], labels, weights}, {attribute("ignore_index", int64_t{-7})})[0],
              {(none[0] + none[2]) / 5}, 1e-5);
  EXPECT_THROW(run_op("SoftmaxCrossEntropyLoss", {scores, labels}), Error);
}

}  // namespace
}  // namespace fretsaw::testing
