// Reductions against plain loops in double, over many shapes and axes.
#include <cmath>
#include <functional>

#include "tests/kernels/single_op.h"

namespace fretsaw::testing {
namespace {

struct Reduction {
  const char* op;
  std::function<double(const std::vector<double>&)> exact;
};

double sum_of(const std::vector<double>& v, const std::function<double(double)>& f) {
  double sum = 0;
  for (double x : v) sum += f(x);
  return sum;
}

const std::vector<Reduction> kReductions = {
    {"ReduceSum", [](const auto& v) { return sum_of(v, [](double x) { return x; }); }},
    {"ReduceMean", [](const auto& v) { return sum_of(v, [](double x) { return x; }) / static_cast<double>(v.size()); }},
    {"ReduceL1", [](const auto& v) { return sum_of(v, [](double x) { return std::fabs(x); }); }},
    {"ReduceL2", [](const auto& v) { return std::sqrt(sum_of(v, [](double x) { return x * x; })); }},
    {"ReduceSumSquare", [](const auto& v) { return sum_of(v, [](double x) { return x * x; }); }},
    {"ReduceLogSum", [](const auto& v) { return std::log(sum_of(v, [](double x) { return x; })); }},
    {"ReduceLogSumExp", [](const auto& v) { return std::log(sum_of(v, [](double x) { return std::exp(x); })); }},
    {"ReduceMax", [](const auto& v) { return *std::max_element(v.begin(), v.end()); }},
    {"ReduceMin", [](const auto& v) { return *std::min_element(v.begin(), v.end()); }},
};

struct AxesCase {
  Dims dims;
  std::vector<int64_t> axes;
};
const std::vector<AxesCase> kAxes = {
    {{7}, {0}},
    {{3, 5}, {0}},
    {{3, 5}, {1}},
    {{3, 5}, {0, 1}},
    {{3, 700}, {-1}},
    {{700, 3}, {0}},
    {{2, 3, 4, 5}, {1}},
    {{2, 3, 4, 5}, {2, 3}},
    {{2, 3, 4, 5}, {0, 2}},
    {{2, 3, 4, 5}, {1, 3}},
    {{2, 3, 4, 5}, {0, 1, 3}},
    {{3, 1, 5}, {1}},
    {{2, 300, 2}, {0}},
    {{4, 2, 300}, {0}},
    {{5000}, {0}},
    {{2, 3, 1, 70}, {0, 3}},
};

// The groups of elements that fold into each result, in order of the results.
std::vector<std::vector<double>> groups(const std::vector<double>& x, const Dims& dims, const std::vector<bool>& reduce) {
  int64_t results = 1;
  for (size_t i = 0; i < dims.size(); ++i) results *= reduce[i] ? 1 : dims[i];
  std::vector<std::vector<double>> out(static_cast<size_t>(results));
  for (size_t at = 0; at < x.size(); ++at) {
    size_t index = 0, stride = 1, rest = at;
    for (size_t i = dims.size(); i-- > 0;) {
      const size_t position = rest % static_cast<size_t>(dims[i]);
      rest /= static_cast<size_t>(dims[i]);
      if (reduce[i]) continue;
      index += position * stride;
      stride *= static_cast<size_t>(dims[i]);
    }
    out[index].push_back(x[at]);
  }
  return out;
}

TEST(Reductions, FoldTheRightElements) {
  for (const AxesCase& c : kAxes) {
    std::vector<bool> reduce(c.dims.size());
    for (int64_t axis : c.axes) reduce[static_cast<size_t>(axis < 0 ? axis + static_cast<int64_t>(c.dims.size()) : axis)] = true;
    Dims kept, squeezed;
    for (size_t i = 0; i < c.dims.size(); ++i) {
      kept.push_back(reduce[i] ? 1 : c.dims[i]);
      if (!reduce[i]) squeezed.push_back(c.dims[i]);
    }
    const RuntimeValue axes = tensor<int64_t>({static_cast<int64_t>(c.axes.size())}, c.axes);
    for (DType dtype : {DType::float32, DType::float64, DType::float16}) {
      const RuntimeValue x = tensor_as(dtype, c.dims, spread_values(count_of(c.dims), 0.1, 1));
      const auto wanted = groups(doubles_of(x), c.dims, reduce);
      for (const Reduction& r : kReductions) {
        const RuntimeValue y = run_op(r.op, {x, axes})[0];
        ASSERT_EQ(y.tensor.dims, kept) << r.op;
        ASSERT_EQ(run_op(r.op, {x, axes}, {attribute("keepdims", int64_t{0})})[0].tensor.dims, squeezed) << r.op;
        const auto got = doubles_of(y);
        const double relative = dtype == DType::float16 ? 2e-3 : dtype == DType::float32 ? 1e-6 : 1e-12;
        for (size_t i = 0; i < got.size(); ++i) {
          const double exact = r.exact(wanted[i]);
          ASSERT_NEAR(got[i], exact, relative * (1 + std::fabs(exact))) << r.op << to_string(c.dims) << " result " << i;
        }
      }
    }
  }
}

TEST(Reductions, AxesMayBeLeftOutOrEmpty) {
  const RuntimeValue x = tensor<float>({2, 2}, {1, 2, 3, 4}), none = tensor<int64_t>({0}, {});
  EXPECT_EQ(values_of<float>(run_op("ReduceSum", {x})[0]), (std::vector<float>{10}));
  EXPECT_EQ(values_of<float>(run_op("ReduceSum", {x, none})[0]), (std::vector<float>{10}));
  const auto noop = attribute("noop_with_empty_axes", int64_t{1});
  EXPECT_EQ(values_of<float>(run_op("ReduceSumSquare", {x, none}, {noop})[0]), (std::vector<float>{1, 4, 9, 16}));
  EXPECT_THROW(run_op("ReduceSum", {x, tensor<int64_t>({1}, {2})}), Error);
  EXPECT_EQ(values_of<float>(run_op("ReduceSum", {tensor<float>({}, {5})})[0]), (std::vector<float>{5}));
}

TEST(Reductions, EmptySetsGiveTheStartingValue) {
  const RuntimeValue x = tensor<float>({2, 0}, {}), axes = tensor<int64_t>({1}, {1});
  EXPECT_EQ(values_of<float>(run_op("ReduceSum", {x, axes})[0]), (std::vector<float>{0, 0}));
  EXPECT_EQ(values_of<float>(run_op("ReduceProd", {x, axes})[0]), (std::vector<float>{1, 1}));
  EXPECT_EQ(values_of<float>(run_op("ReduceMax", {x, axes})[0]), (std::vector<float>{-INFINITY, -INFINITY}));
  EXPECT_EQ(values_of<float>(run_op("ReduceLogSumExp", {x, axes})[0]), (std::vector<float>{-INFINITY, -INFINITY}));
  EXPECT_EQ(run_op("ReduceSum", {x, tensor<int64_t>({1}, {0})})[0].tensor.dims, (Dims{1, 0}));
  EXPECT_EQ(values_of<bool>(run_op("ReduceMax", {tensor<bool>({0}, {})})[0]), (std::vector<bool>{false}));
}

TEST(Reductions, IntegersBooleansAndSpecialValues) {
  EXPECT_EQ(values_of<int32_t>(run_op("ReduceMean", {tensor<int32_t>({4}, {1, 2, 3, 5})})[0]), (std::vector<int32_t>{2}));
  EXPECT_EQ(values_of<int64_t>(run_op("ReduceSum", {tensor<int64_t>({2}, {INT64_MAX - 1, 1})})[0]), (std::vector<int64_t>{INT64_MAX}));
  EXPECT_EQ(values_of<uint8_t>(run_op("ReduceMin", {tensor<uint8_t>({3}, {9, 4, 200})})[0]), (std::vector<uint8_t>{4}));
  EXPECT_EQ(values_of<bool>(run_op("ReduceMin", {tensor<bool>({2}, {true, false})})[0]), (std::vector<bool>{false}));
  EXPECT_TRUE(std::isnan(values_of<float>(run_op("ReduceMax", {tensor<float>({3}, {1, NAN, 2})})[0])[0]));
  // Large numbers do not overflow on the way.
  EXPECT_NEAR(values_of<float>(run_op("ReduceLogSumExp", {tensor<float>({2}, {1000, 1000})})[0])[0], 1000.6931f, 1e-3);
}

TEST(Reductions, LongSumsKeepTheirPrecision) {
  const int64_t n = 1 << 22;
  const RuntimeValue x = tensor_as(DType::float32, {n}, std::vector<double>(static_cast<size_t>(n), 0.1));
  EXPECT_NEAR(values_of<float>(run_op("ReduceMean", {x})[0])[0], 0.1f, 1.2e-7);
}

TEST(Reductions, ThreadsChangeNoBit) {
  const RuntimeValue x = tensor_as(DType::float32, {64, 33, 50}, spread_values(64 * 33 * 50, -1, 1));
  InterpreterOptions threads;
  threads.threads = 3;
  for (int64_t axis = 0; axis < 3; ++axis) {
    const RuntimeValue axes = tensor<int64_t>({1}, {axis});
    EXPECT_EQ(doubles_of(run_op("ReduceSum", {x, axes})[0]), doubles_of(run_op("ReduceSum", {x, axes}, {}, 1, threads)[0]));
  }
}

TEST(Reductions, ArgMaxAndArgMin) {
  const RuntimeValue x = tensor<float>({2, 3}, {1, 5, 5, 4, 0, 4});
  EXPECT_EQ(values_of<int64_t>(run_op("ArgMax", {x}, {attribute("axis", int64_t{1})})[0]), (std::vector<int64_t>{1, 0}));
  EXPECT_EQ(values_of<int64_t>(run_op("ArgMax", {x}, {attribute("axis", int64_t{-1}), attribute("select_last_index", int64_t{1})})[0]),
            (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(values_of<int64_t>(run_op("ArgMin", {x}, {attribute("keepdims", int64_t{0})})[0]), (std::vector<int64_t>{0, 1, 1}));
  EXPECT_EQ(values_of<int64_t>(run_op("ArgMax", {tensor<float>({3}, {1, NAN, 2})})[0]), (std::vector<int64_t>{1}));
  EXPECT_THROW(run_op("ArgMax", {tensor<float>({0}, {})}), Error);
}

TEST(Reductions, CumulativeSumsAndProducts) {
  const RuntimeValue x = tensor<float>({2, 3}, {1, 2, 3, 4, 5, 6}), axis = tensor<int64_t>({}, {1});
  const auto exclusive = attribute("exclusive", int64_t{1}), reverse = attribute("reverse", int64_t{1});
  EXPECT_EQ(values_of<float>(run_op("CumSum", {x, axis})[0]), (std::vector<float>{1, 3, 6, 4, 9, 15}));
  EXPECT_EQ(values_of<float>(run_op("CumSum", {x, axis}, {exclusive})[0]), (std::vector<float>{0, 1, 3, 0, 4, 9}));
  EXPECT_EQ(values_of<float>(run_op("CumSum", {x, axis}, {reverse})[0]), (std::vector<float>{6, 5, 3, 15, 11, 6}));
  EXPECT_EQ(values_of<float>(run_op("CumSum", {x, axis}, {exclusive, reverse})[0]), (std::vector<float>{5, 3, 0, 11, 6, 0}));
  EXPECT_EQ(values_of<float>(run_op("CumProd", {x, tensor<int64_t>({1}, {0})})[0]), (std::vector<float>{1, 2, 3, 4, 10, 18}));
}

}  // namespace
}  // namespace fretsaw::testing
