// Gradients of norms, Softmax and losses.
#include "tests/kernels/gradient_case.h"
#include "tests/kernels/operator_case.h"

namespace fretsaw::testing {

namespace {

using Ints = std::vector<int64_t>;

}  // namespace

std::vector<GradientCase> normalization_gradient_cases() {
  Draw x;
  std::vector<GradientCase> cases;
  for (const Dims& dims : std::vector<Dims>{{4, 3, 5, 2}, {6, 3}, {4, 3, 5}}) {
    cases.push_back({.op = "BatchNormalization", .inputs = {x(dims), x({3}), x({3}), x({3}), x({3}, 0.5, 2)}});
    cases.push_back({.op = "BatchNormalization",
                     .inputs = {x(dims), x({3}), x({3}), x({3}), x({3}, 0.5, 2)},
                     .attributes = {{"training_mode", int64_t{1}}, {"epsilon", 0.01F}},
                     .outputs = 3,
                     .in_loss = 1,
                     .frozen = {3, 4}});
  }
  for (int64_t axis : {-1, 1, 2, 0}) {
    const Dims dims = {2, 3, 4}, row(dims.begin() + (axis + 3) % 3, dims.end());
    const std::vector<Attribute> at = {{"axis", axis}, {"epsilon", 0.02F}};
    cases.push_back({.op = "LayerNormalization", .inputs = {x(dims), x(row), x(row)}, .attributes = at});
    cases.push_back({.op = "LayerNormalization", .inputs = {x(dims), x(row)}, .attributes = at});
    cases.push_back({.op = "LayerNormalization", .inputs = {x(dims), x({1}), x({4})}, .attributes = at});
    cases.push_back({.op = "RMSNormalization", .inputs = {x(dims), x(row)}, .attributes = at});
    cases.push_back({.op = "RMSNormalization", .inputs = {x(dims), x({1})}, .attributes = at});
  }
  for (const Dims& dims : std::vector<Dims>{{2, 6, 3, 2}, {2, 6, 5}}) {
    cases.push_back(
        {.op = "GroupNormalization", .inputs = {x(dims), x({6}), x({6})}, .attributes = {{"num_groups", int64_t{3}}, {"epsilon", 0.01F}}});
    cases.push_back({.op = "InstanceNormalization", .inputs = {x(dims), x({6}), x({6})}, .attributes = {{"epsilon", 0.01F}}});
  }
  cases.push_back({.op = "MeanVarianceNormalization", .inputs = {x({2, 3, 2, 2})}});
  cases.push_back({.op = "MeanVarianceNormalization", .inputs = {x({4, 3})}, .attributes = {{"axes", Ints{0}}}});
  for (int64_t p : {1, 2})
    cases.push_back({.op = "LpNormalization", .inputs = {x({2, 3, 4})}, .attributes = {{"p", p}, {"axis", int64_t{1}}}});
  // Of statistics in another type than X.
  const auto row = [](float first) { return tensor_of({3}, std::vector<float>{first, 0.7F, 1.3F}); };
  cases.push_back({.op = "BatchNormalization", .inputs = {x({4, 3, 5}), row(0.4F), row(-0.2F), row(0.1F), row(0.9F)}});
  cases.push_back({.op = "BatchNormalization", .inputs = {x({4, 3, 5}), x({3}), x({3}), row(0.1F), row(0.9F)}});
  // No samples.
  cases.push_back({.op = "BatchNormalization",
                   .inputs = {x({0, 3, 2}), x({3}), x({3}), x({3}), x({3}, 0.5, 2)},
                   .attributes = {{"training_mode", int64_t{1}}},
                   .outputs = 3,
                   .in_loss = 1,
                   .frozen = {3, 4}});
  cases.push_back({.op = "GroupNormalization", .inputs = {x({0, 6, 3}), x({6}), x({6})}, .attributes = {{"num_groups", int64_t{3}}}});
  cases.push_back({.op = "InstanceNormalization", .inputs = {x({0, 6, 3}), x({6}), x({6})}});
  cases.push_back({.op = "LRN", .inputs = {x({0, 5, 3})}, .attributes = {{"size", int64_t{3}}}});
  // Gradients that nearly cancel, in 16 bits. (What bfloat16 leaves of y is too little for that.)
  cases.push_back({.op = "MeanVarianceNormalization", .inputs = {x({2, 3, 2, 2})}, .coarse = false, .least = 300, .most = 303});
  cases.push_back({.op = "LpNormalization", .inputs = {x({2, 8}, 1, 1.01)}, .coarse = false, .least = 300, .most = 303});
  for (int64_t size : {1, 3, 4})
    cases.push_back(
        {.op = "LRN", .inputs = {x({2, 5, 3, 2})}, .attributes = {{"size", size}, {"alpha", 0.3F}, {"beta", 0.6F}, {"bias", 1.5F}}});
  return cases;
}

std::vector<GradientCase> loss_gradient_cases() {
  Draw x;
  std::vector<GradientCase> cases;
  for (const char* op : {"Softmax", "LogSoftmax"}) {
    for (int64_t axis : {-1, 0, 1}) cases.push_back({.op = op, .inputs = {x({2, 3, 4})}, .attributes = {{"axis", axis}}});
    cases.push_back({.op = op, .inputs = {x({5})}});
  }
  // Gradients that nearly cancel, likewise, and a sum that float16 does not hold.
  cases.push_back({.op = "Softmax", .inputs = {x({2, 9})}, .coarse = false, .least = 300, .most = 303});
  cases.push_back({.op = "LogSoftmax", .inputs = {x({1, 70000})}});
  cases.push_back({.op = "Hardmax", .inputs = {x({2, 4})}});
  const RuntimeValue labels = tensor_of({4}, Ints{2, 0, 1, 2}), deep = tensor_of({2, 3}, std::vector<int32_t>{2, 0, 1, -1, 1, 0});
  for (const char* op : {"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"}) {
    for (const char* reduction : {"mean", "sum", "none"}) {
      const std::vector<Attribute> plain = {{"reduction", std::string(reduction)}};
      const std::vector<Attribute> ignoring = {{"reduction", std::string(reduction)}, {"ignore_index", int64_t{-1}}};
      cases.push_back({.op = op, .inputs = {x({4, 3}), labels}, .attributes = plain});
      cases.push_back({.op = op, .inputs = {x({4, 3}), labels, x({3}, 0.5, 2)}, .attributes = plain, .frozen = {2}});
      cases.push_back({.op = op, .inputs = {x({2, 3, 3}), deep}, .attributes = ignoring});
      cases.push_back({.op = op, .inputs = {x({2, 3, 3}), deep, x({3}, 0.5, 2)}, .attributes = ignoring, .frozen = {2}, .fed = {1}});
    }
  }
  cases.push_back({.op = "SoftmaxCrossEntropyLoss", .inputs = {x({4, 3}), labels}, .outputs = 2});
  return cases;
}

}  // namespace fretsaw::testing
