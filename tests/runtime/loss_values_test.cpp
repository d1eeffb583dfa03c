// Losses against their definitions in double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "graph/errors.h"
#include "graph/training/loss.h"
#include "tests/runtime/plans.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

struct Result {
  double sum = 0, loss = 0;
  int64_t count = 0;
};

// The loss of `output` (as the model's only value) and `target`.
Result run_loss(const std::string& spec, const RuntimeValue& output, const RuntimeValue& target) {
  auto model = new_model();
  Value* x = add_input(*model, "x", output.tensor.dtype, shape_of(output.tensor.dims));
  model->graph->outputs.push_back(add_node(*model->graph, "Identity", {x}, "y"));
  append_loss(*model, parse_loss(spec));
  model->graph->outputs.erase(model->graph->outputs.begin());
  Session session(make_plan({model}));
  std::map<std::string, RuntimeValue> inputs = {{"x", output}};
  if (target.kind == RuntimeValue::Kind::tensor) inputs["target"] = target;
  const auto results = session.run(inputs);
  return {elements<float>(results[0])[0], elements<float>(results[2])[0], elements<int64_t>(results[1])[0]};
}

void expect_loss(const Result& got, double sum, int64_t count) {
  const double mean = sum / static_cast<double>(count);
  EXPECT_NEAR(got.sum, sum, 2e-6 * std::abs(sum) + 1e-7);
  EXPECT_EQ(got.count, count);
  EXPECT_NEAR(got.loss, mean, 2e-6 * std::abs(mean) + 1e-7);
}

// sum and count as PyTorch documents CrossEntropyLoss: (1 - E) (-log p[t]) + E / C sum of -log p.
void expect_cross_entropy(const std::string& spec, Dims dims, const std::vector<float>& logits, const std::vector<int64_t>& targets,
                          std::optional<int64_t> ignored, double smoothing) {
  const auto classes = static_cast<size_t>(dims.back());
  double sum = 0;
  int64_t count = 0;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (targets[i] == ignored) continue;
    const float* row = &logits[i * classes];
    double largest = row[0], total = 0, all = 0;
    for (size_t c = 0; c < classes; ++c) largest = std::max<double>(largest, row[c]);
    for (size_t c = 0; c < classes; ++c) total += std::exp(row[c] - largest);
    const auto log_p = [&](size_t c) { return row[c] - largest - std::log(total); };
    for (size_t c = 0; c < classes; ++c) all += log_p(c);
    sum -= (1 - smoothing) * log_p(static_cast<size_t>(targets[i])) + smoothing / static_cast<double>(classes) * all;
    ++count;
  }
  Dims target_dims(dims.begin(), dims.end() - 1);
  expect_loss(run_loss(spec, float_value(dims, logits), int_value(target_dims, targets)), sum, count);
}

TEST(CrossEntropy, ImagesTokensAndASingleRow) {
  expect_cross_entropy("softmax_cross_entropy", {4, 3}, noise(12, 1), {0, 2, 1, 2}, {}, 0);
  expect_cross_entropy("softmax_cross_entropy", {2, 3, 5}, noise(30, 2), {0, 4, 1, 2, 3, 3}, {}, 0);
  expect_cross_entropy("softmax_cross_entropy", {5}, noise(5, 3), {3}, {}, 0);
}

TEST(CrossEntropy, IgnoredTargets) {
  expect_cross_entropy("softmax_cross_entropy:ignore_index=-100", {2, 3, 5}, noise(30, 4), {0, -100, 1, -100, 3, 3}, -100, 0);
  expect_cross_entropy("softmax_cross_entropy:ignore_index=1", {2, 3, 5}, noise(30, 5), {0, 4, 1, 2, 1, 3}, 1, 0);
  const Result none = run_loss("softmax_cross_entropy:ignore_index=-1", float_value({2, 3}, noise(6, 6)), int_value({2}, {-1, -1}));
  EXPECT_EQ(none.sum, 0);
  EXPECT_EQ(none.count, 0);
  EXPECT_EQ(none.loss, 0);
}

TEST(CrossEntropy, LabelSmoothing) {
  expect_cross_entropy("softmax_cross_entropy:label_smoothing=0.1", {4, 3}, noise(12, 7), {0, 2, 1, 2}, {}, 0.1);
  expect_cross_entropy("softmax_cross_entropy:label_smoothing=0.3,ignore_index=2", {4, 3}, noise(12, 8), {0, 2, 1, 2}, 2, 0.3);
  expect_cross_entropy("softmax_cross_entropy:label_smoothing=1", {4, 3}, noise(12, 9), {0, 2, 1, 2}, {}, 1);
}

TEST(CrossEntropy, LargeLogits) {
  expect_cross_entropy("softmax_cross_entropy", {3, 3}, {1000, 0, -1000, 88, 89, 90, -1e30f, 1e30f, 0}, {0, 0, 1}, {}, 0);
}

TEST(CrossEntropy, TargetsOutOfRangeAreErrors) {
  for (int64_t target : {-1, 3, -100})
    EXPECT_THROW(run_loss("softmax_cross_entropy", float_value({2, 3}, noise(6, 6)), int_value({2}, {0, target})), Error) << target;
}

TEST(CrossEntropy, SumReduction) {
  const RuntimeValue x = float_value({4, 3}, noise(12, 1)), t = int_value({4}, {0, 2, 1, 2});
  const Result mean = run_loss("softmax_cross_entropy", x, t), sum = run_loss("softmax_cross_entropy:reduction=sum", x, t);
  EXPECT_EQ(sum.loss, mean.sum);
  EXPECT_EQ(sum.count, 4);
}

TEST(ElementwiseLosses, MeanSquaredAndAbsoluteError) {
  const std::vector<float> x = noise(24, 1), t = noise(24, 2);
  double squares = 0, absolutes = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    squares += std::pow(double{x[i]} - t[i], 2);
    absolutes += std::abs(double{x[i]} - t[i]);
  }
  expect_loss(run_loss("mse", float_value({2, 3, 4}, x), float_value({2, 3, 4}, t)), squares, 24);
  expect_loss(run_loss("l1", float_value({2, 3, 4}, x), float_value({2, 3, 4}, t)), absolutes, 24);
}

TEST(ElementwiseLosses, BinaryCrossEntropyWithLogits) {
  std::vector<float> x = noise(12, 3), t = {0, 1, 0.25f, 0.5f, 0, 1, 0, 1, 0, 1, 0, 1};
  x[4] = x[5] = 0;
  x[6] = x[7] = 30;  // 1 - sigmoid(30) is 0 in float32, its logarithm is not
  x[8] = x[9] = -30;
  x[10] = x[11] = 300;
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const auto softplus = [](double v) { return std::max(v, 0.0) + std::log1p(std::exp(-std::abs(v))); };
    sum += t[i] * softplus(-double{x[i]}) + (1 - double{t[i]}) * softplus(x[i]);
  }
  expect_loss(run_loss("bce_with_logits", float_value({3, 4}, x), float_value({3, 4}, t)), sum, 12);
  // Each alone: what is far below the others counts too.
  const Result small = run_loss("bce_with_logits", float_value({1}, {30}), float_value({1}, {1}));
  EXPECT_NEAR(small.sum, std::log1p(std::exp(-30.0)), 1e-19);
}

// A scalar output over a batch of 3: mean or sum over samples.
TEST(OwnOutput, CountsSamples) {
  for (const bool mean : {true, false}) {
    auto model = new_model();
    Value* x = add_input(*model, "x", DType::float32, {Dim("batch"), Dim(2)});
    Value* y = add_node(*model->graph, mean ? "ReduceMean" : "ReduceSum", {x}, "y");  // [1, 1]
    model->graph->outputs.push_back(y);
    append_loss(*model, parse_loss(mean ? "output:y" : "output:y,reduction=sum"));
    Session session(make_plan({model}));
    const auto results = session.run({{"x", float_value({3, 2}, {1, 2, 3, 4, 5, 9})}});
    EXPECT_FLOAT_EQ(elements<float>(results[1])[0], mean ? 12 : 24);
    EXPECT_EQ(elements<int64_t>(results[2])[0], 3);
    EXPECT_FLOAT_EQ(elements<float>(results[3])[0], mean ? 4 : 24);
  }
}

// Uneven parts with ignored targets: the mean of the whole is the sum of sums over the sum of counts.
TEST(LossParts, AddUp) {
  const std::vector<float> x = noise(35, 1);
  const std::vector<int64_t> t = {0, -1, 2, -1, -1, 4, 3};
  const std::string spec = "softmax_cross_entropy:ignore_index=-1";
  const Result whole = run_loss(spec, float_value({7, 5}, x), int_value({7}, t));
  double sum = 0;
  int64_t count = 0;
  for (const auto& [from, to] : std::vector<std::pair<int64_t, int64_t>>{{0, 2}, {2, 5}, {5, 7}}) {
    const Result part = run_loss(spec, float_value({to - from, 5}, {x.begin() + from * 5, x.begin() + to * 5}),
                                 int_value({to - from}, {t.begin() + from, t.begin() + to}));
    sum += part.sum;
    count += part.count;
  }
  EXPECT_NEAR(sum / loss_divisor(parse_loss(spec), count), whole.loss, 1e-6);
}

}  // namespace
}  // namespace fretsaw
