// Elementwise kernels: every row against its own double version, broadcasting against plain indexing, layouts against each other.
#include <cmath>
#include <cstring>
#include <functional>
#include <set>

#include "tests/kernels/on_device.h"
#include "tests/kernels/single_op.h"

namespace fretsaw::testing {
namespace {

struct UnaryCase {
  const char* op;
  double low, high;
  std::function<double(double)> exact;
};

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}
double softplus(double x) {
  return std::log1p(std::exp(x));
}

const std::vector<UnaryCase> kUnary = {
    {"Abs", -5, 5, [](double x) { return std::fabs(x); }},
    {"Neg", -5, 5, [](double x) { return -x; }},
    {"Sign", -5, 5, [](double x) { return (x > 0) - (x < 0); }},
    {"Floor", -5, 5, [](double x) { return std::floor(x); }},
    {"Ceil", -5, 5, [](double x) { return std::ceil(x); }},
    {"Round", -5, 5, [](double x) { return std::nearbyint(x); }},
    {"Reciprocal", 0.5, 5, [](double x) { return 1 / x; }},
    {"Sqrt", 0, 5, [](double x) { return std::sqrt(x); }},
    {"Exp", -5, 5, [](double x) { return std::exp(x); }},
    {"Log", 0.1, 5, [](double x) { return std::log(x); }},
    {"Erf", -3, 3, [](double x) { return std::erf(x); }},
    {"Sin", -5, 5, [](double x) { return std::sin(x); }},
    {"Cos", -5, 5, [](double x) { return std::cos(x); }},
    {"Tan", -1, 1, [](double x) { return std::tan(x); }},
    {"Asin", -1, 1, [](double x) { return std::asin(x); }},
    {"Acos", -1, 1, [](double x) { return std::acos(x); }},
    {"Atan", -5, 5, [](double x) { return std::atan(x); }},
    {"Sinh", -3, 3, [](double x) { return std::sinh(x); }},
    {"Cosh", -3, 3, [](double x) { return std::cosh(x); }},
    {"Tanh", -3, 3, [](double x) { return std::tanh(x); }},
    {"Asinh", -3, 3, [](double x) { return std::asinh(x); }},
    {"Acosh", 1, 5, [](double x) { return std::acosh(x); }},
    {"Atanh", -0.9, 0.9, [](double x) { return std::atanh(x); }},
    {"Relu", -5, 5, [](double x) { return std::max(x, 0.0); }},
    {"Sigmoid", -5, 5, sigmoid},
    {"HardSwish", -5, 5, [](double x) { return x * std::clamp(x / 6 + 0.5, 0.0, 1.0); }},
    {"HardSigmoid", -5, 5, [](double x) { return std::clamp(0.2 * x + 0.5, 0.0, 1.0); }},
    {"Mish", -5, 5, [](double x) { return x * std::tanh(softplus(x)); }},
    {"Softplus", -5, 5, softplus},
    {"Softsign", -5, 5, [](double x) { return x / (1 + std::fabs(x)); }},
    {"Swish", -5, 5, [](double x) { return x * sigmoid(x); }},
    {"LeakyRelu", -5, 5, [](double x) { return x < 0 ? 0.01 * x : x; }},
    {"ThresholdedRelu", -5, 5, [](double x) { return x > 1 ? x : 0; }},
    {"Elu", -5, 5, [](double x) { return x < 0 ? std::expm1(x) : x; }},
    {"Celu", -5, 5, [](double x) { return x < 0 ? std::expm1(x) : x; }},
    {"Selu", -5, 5, [](double x) { return 1.05070102214813 * (x < 0 ? 1.67326319217682 * std::expm1(x) : x); }},
    {"Gelu", -5, 5, [](double x) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))); }},
    {"Shrink", -5, 5, [](double x) { return std::fabs(x) > 0.5 ? x : 0; }},
};

// 1100 elements: whole vectors, chunks of half floats, and a rest.
TEST(Elementwise, UnaryRowsComputeTheirFunctionInEveryFloatType) {
  for (const UnaryCase& c : kUnary) {
    for (auto [dtype, relative, absolute] : {std::tuple{DType::float32, 2e-6, 2e-7},
                                             {DType::float64, 1e-7, 1e-8},
                                             {DType::float16, 2e-3, 1e-3},
                                             {DType::bfloat16, 1e-2, 1e-2}}) {
      const RuntimeValue x = tensor_as(dtype, {11, 100}, spread_values(1100, c.low, c.high));
      const RuntimeValue y = run_op(c.op, {x})[0];
      ASSERT_EQ(y.tensor.dims, x.tensor.dims);
      const std::vector<double> in = doubles_of(x), out = doubles_of(y);
      for (size_t i = 0; i < in.size(); ++i) {
        const double wanted = c.exact(in[i]);
        ASSERT_NEAR(out[i], wanted, absolute + relative * std::fabs(wanted)) << c.op << "(" << in[i] << ") as " << name_of(dtype);
      }
    }
  }
}

TEST(Elementwise, AttributesAreTaken) {
  const RuntimeValue x = tensor<float>({3}, {-2, 0.25, 3});
  EXPECT_EQ(values_of<float>(run_op("LeakyRelu", {x}, {attribute("alpha", 0.5f)})[0]), (std::vector<float>{-1, 0.25, 3}));
  EXPECT_EQ(values_of<float>(run_op("ThresholdedRelu", {x}, {attribute("alpha", 0.0f)})[0]), (std::vector<float>{0, 0.25, 3}));
  EXPECT_EQ(values_of<float>(run_op("HardSigmoid", {x}, {attribute("alpha", 1.0f), attribute("beta", 0.0f)})[0]),
            (std::vector<float>{0, 0.25, 1}));
  const auto gelu = values_of<float>(run_op("Gelu", {x}, {attribute("approximate", std::string("tanh"))})[0]);
  EXPECT_NEAR(gelu[2], 2.99636f, 1e-5);
  EXPECT_THROW(run_op("Gelu", {x}, {attribute("approximate", std::string("cubic"))}), Error);
  const RuntimeValue odd = tensor<float>({4}, {NAN, INFINITY, -INFINITY, 1});
  EXPECT_EQ(values_of<bool>(run_op("IsNaN", {odd})[0]), (std::vector<bool>{true, false, false, false}));
  EXPECT_EQ(values_of<bool>(run_op("IsInf", {odd})[0]), (std::vector<bool>{false, true, true, false}));
  EXPECT_EQ(values_of<bool>(run_op("IsInf", {odd}, {attribute("detect_negative", int64_t{0})})[0]),
            (std::vector<bool>{false, true, false, false}));
}

// --- broadcasting ---

// The element of a tensor of shape `dims` that broadcasts to index `at` of shape `out`.
size_t broadcast_index(size_t at, const Dims& out, const Dims& dims) {
  size_t index = 0, stride = 1;
  for (size_t back = 1; back <= out.size(); ++back) {
    const auto size = static_cast<size_t>(out[out.size() - back]), i = at % size;
    at /= size;
    if (back > dims.size()) continue;
    const auto own = static_cast<size_t>(dims[dims.size() - back]);
    if (own != 1) index += i * stride;
    stride *= own;
  }
  return index;
}

struct ShapePair {
  Dims x, y, out;
};
const std::vector<ShapePair> kShapes = {
    {{}, {}, {}},
    {{5}, {}, {5}},
    {{}, {5}, {5}},
    {{2, 3, 4}, {2, 3, 4}, {2, 3, 4}},
    {{2, 3, 40}, {40}, {2, 3, 40}},
    {{40}, {2, 3, 40}, {2, 3, 40}},
    {{2, 3, 4, 5}, {3, 1, 1}, {2, 3, 4, 5}},
    {{2, 3, 4, 5}, {2, 1, 4, 1}, {2, 3, 4, 5}},
    {{4, 1}, {1, 5}, {4, 5}},
    {{3, 1, 5}, {2, 1}, {3, 2, 5}},
    {{0, 3}, {3}, {0, 3}},
    {{2, 0}, {1, 1}, {2, 0}},
    {{700, 3}, {700, 1}, {700, 3}},
    {{1, 1, 600}, {2, 1, 600}, {2, 1, 600}},
};

TEST(Elementwise, BinaryBroadcastsAsNumpyDoes) {
  for (const ShapePair& s : kShapes) {
    const auto xs = spread_values(count_of(s.x), 1, 9, 3), ys = spread_values(count_of(s.y), 1, 9, 4);
    for (DType dtype : {DType::float32, DType::float16, DType::int32}) {
      const RuntimeValue x = tensor_as(dtype, s.x, xs), y = tensor_as(dtype, s.y, ys);
      const auto in_x = doubles_of(x), in_y = doubles_of(y);
      const RuntimeValue difference = run_op("Sub", {x, y})[0], less = run_op("Less", {x, y})[0], largest = run_op("Max", {x, y, y})[0];
      const RuntimeValue power = run_op("Pow", {x, y})[0];
      ASSERT_EQ(difference.tensor.dims, s.out);
      ASSERT_EQ(less.tensor.dims, s.out);
      const auto d = doubles_of(difference), l = doubles_of(less), m = doubles_of(largest), p = doubles_of(power);
      for (size_t i = 0; i < d.size(); ++i) {
        const double a = in_x[broadcast_index(i, s.out, s.x)], b = in_y[broadcast_index(i, s.out, s.y)];
        ASSERT_NEAR(d[i], a - b, 4e-3) << to_string(s.x) << to_string(s.y) << i;
        ASSERT_EQ(l[i], a < b) << to_string(s.x) << to_string(s.y) << i;
        ASSERT_EQ(m[i], std::max(a, b)) << to_string(s.x) << to_string(s.y) << i;
        if (dtype == DType::float32) {
          ASSERT_NEAR(p[i], std::pow(a, b), 1e-5 * std::pow(a, b)) << to_string(s.x) << to_string(s.y) << i;
        }
      }
    }
  }
}

TEST(Elementwise, ShapesThatDoNotFitAreRefused) {
  EXPECT_THROW(run_op("Add", {tensor<float>({2}, {1, 2}), tensor<float>({3}, {1, 2, 3})}), Error);
  EXPECT_THROW(run_op("Add", {tensor<float>({1}, {1}), tensor<double>({1}, {1})}), Error);
}

TEST(Elementwise, WhereTakesAnyTypeAndShape) {
  for (const ShapePair& s : kShapes) {
    std::vector<double> flags;
    for (double v : spread_values(count_of(s.x), 0, 1, 9)) flags.push_back(v > 0.5);
    const auto ys = spread_values(count_of(s.y), 1, 9, 4);
    for (DType dtype : {DType::float32, DType::float64, DType::float16, DType::int8}) {
      const RuntimeValue condition = tensor_as(DType::boolean, s.x, flags), y = tensor_as(dtype, s.y, ys), z = tensor_as(dtype, {}, {-1});
      const auto in = doubles_of(y), out = doubles_of(run_op("Where", {condition, y, z})[0]);
      for (size_t i = 0; i < out.size(); ++i) {
        const bool chosen = flags[broadcast_index(i, s.out, s.x)] != 0;
        ASSERT_EQ(out[i], chosen ? in[broadcast_index(i, s.out, s.y)] : -1) << to_string(s.x) << to_string(s.y) << i;
      }
    }
  }
  const RuntimeValue words =
      run_op("Where", {tensor<bool>({2}, {true, false}), tensor<std::string>({2}, {"a", "b"}), tensor<std::string>({1}, {"c"})})[0];
  EXPECT_EQ(values_of<std::string>(words), (std::vector<std::string>{"a", "c"}));
}

TEST(Elementwise, ClipTakesOneBoundOrBothAndKeepsNaN) {
  const RuntimeValue x = tensor<float>({4}, {-3, 0, 3, NAN}), low = tensor<float>({}, {-1}), high = tensor<float>({}, {2});
  const auto both = values_of<float>(run_op("Clip", {x, low, high})[0]);
  EXPECT_EQ(both[0], -1);
  EXPECT_EQ(both[2], 2);
  EXPECT_TRUE(std::isnan(both[3]));
  EXPECT_EQ(values_of<float>(run_op("Clip", {x, {}, high})[0])[0], -3);
  EXPECT_EQ(values_of<float>(run_op("Clip", {x})[0])[2], 3);
  EXPECT_EQ(values_of<int8_t>(run_op("Clip", {tensor<int8_t>({2}, {-128, 127}), tensor<int8_t>({}, {-5})})[0]),
            (std::vector<int8_t>{-5, 127}));
}

TEST(Elementwise, PowerMixesTypes) {
  const RuntimeValue ints = tensor<int32_t>({3}, {2, 3, 4});
  EXPECT_EQ(values_of<int32_t>(run_op("Pow", {ints, tensor<float>({}, {0.5})})[0]), (std::vector<int32_t>{1, 1, 2}));
  EXPECT_EQ(values_of<float>(run_op("Pow", {tensor<float>({2}, {2, 3}), tensor<int64_t>({2}, {10, -1})})[0]),
            (std::vector<float>{1024, 1.0f / 3}));
  EXPECT_EQ(values_of<float>(run_op("Pow", {tensor<float>({2}, {-2, 3}), tensor<float>({}, {2})})[0]), (std::vector<float>{4, 9}));
}

TEST(Elementwise, EqualComparesStrings) {
  const RuntimeValue x = tensor<std::string>({2, 1}, {"a", "b"}), y = tensor<std::string>({2}, {"a", "c"});
  EXPECT_EQ(values_of<bool>(run_op("Equal", {x, y})[0]), (std::vector<bool>{true, false, false, false}));
}

// --- layouts ---

struct LayoutCase {
  const char* op;
  std::vector<Dims> shapes;
};

// The same bits as in the plain layout, in the layout that was offered, with zeros in the padding.
TEST(Elementwise, LayoutsChangeNoBitAndKeepPaddingZero) {
  const Dims x{2, 20, 3, 5}, pixel{2, 20, 1, 1};
  const std::vector<LayoutCase> cases = {
      {"Relu", {x}},
      {"Sigmoid", {x}},
      {"Exp", {x}},
      {"Add", {x, x}},
      {"Mul", {x, pixel}},
      {"Mul", {pixel, x}},
      {"Add", {x, {}}},
      {"Div", {x, {1}}},
      {"Sub", {x, {20, 1, 1}}},
      {"Pow", {x, {}}},
      {"Sum", {x, x, pixel}},
      {"Mean", {x, x}},
      {"Less", {x, x}},
      {"Clip", {x}},
      {"Add", {x, {3, 5}}},
      {"Add", {x, {2, 1, 3, 5}}},
  };
  for (const LayoutCase& c : cases) {
    std::vector<RuntimeValue> plain;
    for (const Dims& dims : c.shapes) {
      plain.push_back(tensor_as(DType::float32, dims, spread_values(count_of(dims), 0.5, 2, static_cast<uint32_t>(plain.size() + 1))));
    }
    const RuntimeValue wanted = run_op(c.op, plain)[0];
    for (Layout layout : {Layout::nhwc, Layout::nChw8c, Layout::nChw16c}) {
      std::vector<RuntimeValue> offered;
      for (const RuntimeValue& value : plain) offered.push_back(value.tensor.rank() == 4 ? reordered(value, layout) : value);
      const RuntimeValue got = run_op(c.op, offered)[0];
      ASSERT_EQ(doubles_of(got), doubles_of(wanted)) << c.op << " in layout " << static_cast<int>(layout);
      // A reordered copy has zeros in its padding: the whole memory must agree with it.
      const RuntimeValue clean = reordered(wanted, got.tensor.layout);
      ASSERT_EQ(got.tensor.bytes(), clean.tensor.bytes());
      ASSERT_EQ(std::memcmp(got.tensor.data, clean.tensor.data, clean.tensor.bytes()), 0) << c.op << static_cast<int>(layout);
    }
  }
}

TEST(Elementwise, ABlockedActivationStaysBlocked) {
  if (test_device()) GTEST_SKIP() << "devices have no blocked layout";
  const RuntimeValue x = reordered(tensor_as(DType::float32, {1, 20, 2, 2}, spread_values(80, -1, 1)), Layout::nChw8c);
  EXPECT_EQ(run_op("Relu", {x})[0].tensor.layout, Layout::nChw8c);
  EXPECT_EQ(run_op("Add", {x, x})[0].tensor.layout, Layout::nChw8c);
  EXPECT_EQ(run_op("Mul", {x, tensor<float>({}, {2})})[0].tensor.layout, Layout::nChw8c);
}

// --- memory and threads ---

class FixedMemory : public KernelMemory {
 public:
  explicit FixedMemory(void* data) : data_(data) {}
  void* output(size_t, DType, const Dims&, Layout) override { return data_; }
  void* scratch(size_t) override { return nullptr; }

 private:
  void* data_;
};

// Every kernel that says so can write over its first input.
TEST(Elementwise, InPlaceKernelsMayOverwriteTheirInput) {
  if (test_device()) GTEST_SKIP() << "compares bits of the CPU's kernels";
  const std::set<std::string> binary = {"Add", "Sub", "Mul", "Div", "PRelu"};
  for (const auto& [key, record] : cpu_kernels().all()) {
    const auto row = std::find_if(kUnary.begin(), kUnary.end(), [&](const UnaryCase& c) { return record.op == c.op; });
    const bool unary = row != kUnary.end();
    if (!record.in_place || (!unary && !binary.contains(record.op))) continue;
    Graph graph;
    std::vector<RuntimeValue> in{tensor_as(DType::float32, {3, 700}, spread_values(2100, unary ? row->low : 0.1, unary ? row->high : 0.9))};
    if (!unary) in.push_back(tensor_as(DType::float32, {700}, spread_values(700, 0.1, 0.9, 5)));
    const std::vector<double> wanted = doubles_of(run_op(record.op, in)[0]);
    CompileContext c;
    std::vector<RuntimeValue*> inputs;
    std::vector<Value*> values;
    for (RuntimeValue& value : in) {
      values.push_back(graph.add_value("x"));
      inputs.push_back(&value);
      c.inputs.push_back(values.back());
      c.input_types.push_back(Type::tensor(DType::float32, shape_of(value.tensor.dims)));
      c.offered.push_back(Layout::plain);
      c.constants.push_back(nullptr);
    }
    c.nodes = {graph.add_node(record.op, values, {"y"})};
    RuntimeValue out;
    RuntimeValue* outputs[] = {&out};
    FixedMemory memory(in[0].tensor.data);
    RunContext run(inputs, outputs, memory, 1);
    record.make(c).run(run);
    EXPECT_EQ(doubles_of(out), wanted) << record.op;
  }
}

TEST(Elementwise, ThreadsChangeNoBit) {
  const RuntimeValue x = tensor_as(DType::float32, {300, 333}, spread_values(99900, 0.1, 3)),
                     y = tensor_as(DType::float32, {333}, spread_values(333, 1, 2));
  InterpreterOptions threads;
  threads.threads = 4;
  for (const char* op : {"Add", "Pow", "Less", "Max"}) {
    EXPECT_EQ(doubles_of(run_op(op, {x, y})[0]), doubles_of(run_op(op, {x, y}, {}, 1, threads)[0])) << op;
  }
  EXPECT_EQ(doubles_of(run_op("Gelu", {x})[0]), doubles_of(run_op("Gelu", {x}, {}, 1, threads)[0]));
}

}  // namespace
}  // namespace fretsaw::testing
