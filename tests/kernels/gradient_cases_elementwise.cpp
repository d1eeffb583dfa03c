// Gradients of elementwise operators and reductions.
#include "tests/kernels/gradient_case.h"
#include "tests/kernels/operator_case.h"

namespace fretsaw::testing {

std::vector<GradientCase> unary_gradient_cases() {
  Draw x;
  std::vector<GradientCase> cases;
  for (const char* op : {"Abs",
                         "Neg",
                         "Sign",
                         "Floor",
                         "Ceil",
                         "Round",
                         "Reciprocal",
                         "Exp",
                         "Erf",
                         "Sin",
                         "Cos",
                         "Atan",
                         "Sinh",
                         "Cosh",
                         "Tanh",
                         "Asinh",
                         "Relu",
                         "Sigmoid",
                         "Mish",
                         "Softplus",
                         "Softsign",
                         "LeakyRelu",
                         "ThresholdedRelu",
                         "Elu",
                         "Celu",
                         "Selu",
                         "HardSigmoid",
                         "Swish",
                         "Shrink",
                         "Gelu",
                         "Identity"})
    cases.push_back({.op = op, .inputs = {x({3, 17})}});
  for (const char* op : {"Tan", "Asin", "Acos", "Atanh"}) cases.push_back({.op = op, .inputs = {x({3, 5}, -0.9, 0.9)}});
  for (const char* op : {"Sqrt", "Log"}) cases.push_back({.op = op, .inputs = {x({3, 5}, 0.3, 4)}});
  cases.push_back({.op = "Acosh", .inputs = {x({3, 5}, 1.2, 4)}});
  cases.push_back({.op = "HardSwish", .inputs = {x({3, 17}, -5, 5)}});
  cases.push_back({.op = "Gelu", .inputs = {x({3, 17}, -4, 4)}, .attributes = {{"approximate", std::string("tanh")}}});
  for (const char* op : {"LeakyRelu", "ThresholdedRelu", "Elu", "Celu", "Selu", "HardSigmoid", "Swish"})
    cases.push_back({.op = op, .inputs = {x({2, 9})}, .attributes = {{"alpha", 0.7F}}});
  cases.push_back({.op = "Selu", .inputs = {x({9})}, .attributes = {{"alpha", 0.7F}, {"gamma", 1.3F}}});
  cases.push_back({.op = "Shrink", .inputs = {x({9})}, .attributes = {{"lambd", 0.9F}, {"bias", 0.4F}}});
  cases.push_back({.op = "Tanh", .inputs = {x({})}});
  // Far out, where float16 does not hold x^2.
  cases.push_back({.op = "Gelu",
                   .inputs = {tensor_of({6}, std::vector<double>{1, -3, 300, -300, 60000, -60000})},
                   .attributes = {{"approximate", std::string("tanh")}}});
  return cases;
}

std::vector<GradientCase> broadcasting_gradient_cases() {
  Draw x;
  std::vector<GradientCase> cases;
  for (const char* op : {"Add", "Sub", "Mul", "Div", "Sum", "Mean", "Min", "Max"}) {
    cases.push_back({.op = op, .inputs = {x({2, 3}), x({2, 3}, 0.5, 2)}});
    cases.push_back({.op = op, .inputs = {x({2, 1, 3}), x({4, 1}, 0.5, 2)}});
    cases.push_back({.op = op, .inputs = {x({}), x({2, 3}, 0.5, 2)}});
    cases.push_back({.op = op, .inputs = {x({1, 1}), x({1}, 0.5, 2)}});
  }
  cases.push_back({.op = "Mul", .inputs = {x({2, 3}), x({2, 3})}, .frozen = {1}});
  for (const char* op : {"Sum", "Mean", "Min", "Max"}) {
    cases.push_back({.op = op, .inputs = {x({2, 3}), x({3}), x({2, 1}), x({1, 1})}});
    cases.push_back({.op = op, .inputs = {x({2, 3})}});
  }
  cases.push_back({.op = "PRelu", .inputs = {x({2, 3, 4}), x({3, 1})}});
  cases.push_back({.op = "Mod", .inputs = {x({7}, -9, 9), x({7}, 0.5, 2)}, .attributes = {{"fmod", int64_t{1}}}});
  cases.push_back({.op = "SwiGLU", .inputs = {x({3, 4}), x({3, 4})}, .attributes = {{"alpha", 1.7F}}});
  cases.push_back({.op = "Pow", .inputs = {x({2, 3}, 0.3, 2), x({3})}});
  cases.push_back({.op = "Pow", .inputs = {x({2, 3}), tensor_of({}, std::vector<int64_t>{2})}});
  cases.push_back({.op = "Pow", .inputs = {x({2, 3}), tensor_of({}, std::vector<int64_t>{1})}});
  cases.push_back({.op = "Pow", .inputs = {x({2, 3}), tensor_of({1, 1, 1}, std::vector<float>{3})}});
  cases.push_back({.op = "Pow", .inputs = {x({2, 3}, 0.3, 2), tensor_of({}, std::vector<float>{0.5F})}});
  cases.push_back({.op = "Pow", .inputs = {x({2, 3}, 0.3, 2), tensor_of({}, std::vector<float>{-1.5F})}});
  cases.push_back({.op = "Pow", .inputs = {x({2, 3}), tensor_of({3}, std::vector<int64_t>{0, 2, 3})}});
  const RuntimeValue with_zeros = tensor_of({4}, std::vector<double>{0, 1, -2, 0});
  cases.push_back({.op = "Pow", .inputs = {with_zeros, tensor_of({}, std::vector<int64_t>{0})}});
  cases.push_back({.op = "Pow", .inputs = {with_zeros, tensor_of({}, std::vector<float>{0})}});
  const RuntimeValue flags = tensor_of({2, 1}, std::vector<bool>{true, false});
  cases.push_back({.op = "Where", .inputs = {flags, x({2, 3}), x({3})}});
  cases.push_back({.op = "Where", .inputs = {flags, x({3}), x({})}});
  cases.push_back({.op = "Clip", .inputs = {x({3, 5})}});
  cases.push_back({.op = "Clip", .inputs = {x({3, 5}), x({}, -1, -0.5)}});
  cases.push_back({.op = "Clip", .inputs = {x({3, 5}), nothing(), x({}, 0.5, 1)}});
  cases.push_back({.op = "Clip", .inputs = {x({3, 5}), x({}, -1, -0.5), x({}, 0.5, 1)}});
  cases.push_back({.op = "Clip", .inputs = {x({3, 5}), x({}, 0.5, 1), x({}, -1, -0.5)}});
  cases.push_back({.op = "Cast", .inputs = {x({3, 5})}, .attributes = {{"to", int64_t{11}}}});
  cases.push_back({.op = "Cast", .inputs = {x({3, 5})}, .attributes = {{"to", int64_t{1}}}, .tolerance = 0.05});
  cases.push_back({.op = "CastLike", .inputs = {x({3, 5}), number(1.0F)}, .tolerance = 0.05});
  const RuntimeValue yes = tensor_of({}, std::vector<bool>{true}), no = tensor_of({}, std::vector<bool>{false}), ratio = number(0.4F);
  const std::vector<Attribute> seed = {{"seed", int64_t{3}}};
  cases.push_back({.op = "Dropout", .inputs = {x({4, 9})}, .attributes = seed});
  cases.push_back({.op = "Dropout", .inputs = {x({4, 9}), ratio, no}, .attributes = seed});
  cases.push_back({.op = "Dropout", .inputs = {x({4, 9}), ratio, yes}, .attributes = seed});
  cases.push_back({.op = "Dropout", .inputs = {x({4, 9}), nothing(), yes}, .attributes = seed, .outputs = 2});
  cases.push_back({.op = "Dropout", .inputs = {x({4, 9}), ratio, yes}, .attributes = seed, .fed = {1, 2}});
  cases.push_back({.op = "Dropout", .inputs = {x({4, 9}), ratio, no}, .attributes = seed, .fed = {1, 2}});
  return cases;
}

std::vector<GradientCase> reduction_gradient_cases() {
  Draw x;
  std::vector<GradientCase> cases;
  const std::vector<Attribute> drop = {{"keepdims", int64_t{0}}};
  for (const char* op : {"ReduceSum", "ReduceMean", "ReduceProd", "ReduceMin", "ReduceMax", "ReduceL1", "ReduceL2", "ReduceSumSquare",
                         "ReduceLogSum", "ReduceLogSumExp"}) {
    auto random = [&](const Dims& dims) { return x(dims, op == std::string("ReduceLogSum") ? 0.2 : -2, 2); };
    cases.push_back({.op = op, .inputs = {random({2, 3, 4})}});
    cases.push_back({.op = op, .inputs = {random({2, 3, 4})}, .attributes = drop});
    cases.push_back({.op = op, .inputs = {random({2, 3, 4}), ints({-1})}});
    cases.push_back({.op = op, .inputs = {random({2, 3, 4}), ints({1})}, .attributes = drop});
    cases.push_back({.op = op, .inputs = {random({2, 3, 4}), ints({2, 0})}, .attributes = drop});
    cases.push_back({.op = op, .inputs = {random({2, 3}), ints({})}, .attributes = {{"noop_with_empty_axes", int64_t{1}}}});
    if (op == std::string("ReduceProd")) continue;  // needs its axes
    cases.push_back({.op = op, .inputs = {random({2, 3, 4}), ints({1})}, .attributes = drop, .fed = {1}});
    cases.push_back({.op = op, .inputs = {random({2, 3, 4}), ints({1, 2})}, .fed = {1}});
  }
  // Beyond what float16 holds: counts, products of g and x, and sums.
  cases.push_back({.op = "ReduceMean", .inputs = {x({300, 300})}});
  cases.push_back({.op = "ReduceMean", .inputs = {x({2, 90000}), ints({1})}, .attributes = drop});
  cases.push_back({.op = "ReduceL2", .inputs = {tensor_of({2}, std::vector<double>{50000, 100})}, .least = 1.4});
  cases.push_back({.op = "ReduceLogSum", .inputs = {x({40}, 4000, 6000)}});
  return cases;
}

}  // namespace fretsaw::testing
