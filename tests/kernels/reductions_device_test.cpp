// Reductions, running sums, softmax and losses on the device, over the shapes that take different ways through the kernels.
#include "tests/kernels/device_case.h"

namespace fretsaw::testing {
namespace {

const char* const kReductionOps[] = {"ReduceSum",    "ReduceMean",      "ReduceL1",   "ReduceL2",  "ReduceSumSquare",
                                     "ReduceLogSum", "ReduceLogSumExp", "ReduceProd", "ReduceMin", "ReduceMax"};

struct AxesCase {
  Dims dims;
  std::vector<int64_t> axes;
};

const AxesCase kAxes[] = {
    {{7}, {0}},
    {{3, 5}, {1}},
    {{1, 1}, {0, 1}},
    {{70000, 3}, {1}},             // many short rows
    {{300, 1024}, {1}},            // rows read in packs
    {{300, 1021}, {1}},            // rows that begin anywhere
    {{2, 60001}, {1}},             // rows in parts
    {{40000}, {0}},                // one row in parts
    {{5000, 7}, {0}},              // few columns in parts
    {{4096, 64}, {0}},             // packed columns in parts
    {{3, 100000}, {0}},            // short columns
    {{64, 129, 33}, {1}},          // columns in the middle
    {{16, 8, 28, 28}, {0, 2, 3}},  // rows in pieces
    {{16, 8, 28, 28}, {2, 3}},
    {{3, 4, 5, 6, 7}, {0, 2, 4}},
    {{3, 4, 5, 6, 7}, {1, 3}},
};

TEST(ReductionsOnDevice, EveryWayThroughTheKernels) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const AxesCase& c : kAxes) {
    for (DType type : kFloatTypes) {
      const RuntimeValue x = numbers(type, c.dims, 0.2, 1), axes = int_list(c.axes);
      for (const char* op : kReductionOps) expect_same_on_device({op, {x, axes}, {}, 1, {1}}, tolerance_for(type));
    }
  }
}

// Leading axes: columns that are summed by one kernel or by two, and those that the kernels for any shape sum.
TEST(ReductionsOnDevice, Columns) {
  if (!any_device()) GTEST_SKIP() << "no device";
  const AxesCase cases[] = {
      {{4099, 768}, {0}},            // in parts
      {{16, 301, 2304}, {0, 1}},     // two axes
      {{7, 1, 900, 1, 64}, {0, 2}},  // with others of one element between them
      {{70001, 16}, {0}},            // two packs of a row, or four, or eight
      {{9001, 24}, {0}},             // a number of packs that is no power of two
      {{6500, 8}, {0}},              // one pack, or a few
      {{191, 1000}, {0}},            // the most rows of one part
      {{193, 1000}, {0}},
      {{40, 140000}, {0}},  // many columns
      {{32, 40}, {0}},      // as few rows as are taken
      {{31, 40}, {0}},
      {{1, 768}, {0}},
      {{2000, 1004}, {0}},  // no whole packs in 16 bits
      {{2000, 1003}, {0}},  // nor in more
      {{0, 64}, {0}},
      {{100, 0}, {0}},
  };
  for (const AxesCase& c : cases) {
    for (DType type : kFloatTypes) {
      // Numbers of both signs: their sums differ from column to column.
      const RuntimeValue x = numbers(type, c.dims), axes = int_list(c.axes);
      const double relative = tolerance_for(type).relative, absolute = type == DType::float64 ? 1e-9 : 2e-3;
      const double each = static_cast<double>(count_of(c.dims)) / static_cast<double>(std::max<int64_t>(c.dims.back(), 1));
      const double of_mean = absolute / std::max(each, 1.0) + (type == DType::float16 ? 1e-7 : 0);  // the distance of its smallest numbers
      for (int64_t keep : {0, 1}) {
        const std::vector<Attribute> attributes = {attribute("keepdims", keep)};
        expect_same_on_device({"ReduceSum", {x, axes}, attributes, 1, {1}}, {relative, absolute});
        expect_same_on_device({"ReduceMean", {x, axes}, attributes, 1, {1}}, {relative, of_mean});
      }
    }
  }
}

TEST(ReductionsOnDevice, ColumnsOfInfinitiesAndNaN) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : kFloatTypes) {
    std::vector<double> values = spread_values(500 * 64, -1, 1);
    values[3 * 64 + 5] = INFINITY, values[400 * 64 + 6] = -INFINITY, values[77 * 64 + 7] = NAN;
    values[64 + 8] = INFINITY, values[499 * 64 + 8] = -INFINITY;
    for (const char* op : {"ReduceSum", "ReduceMean"})
      expect_same_on_device({op, {tensor_as(type, {500, 64}, values), int_list({0})}}, {tolerance_for(type).relative, 1e-3});
  }
}

TEST(ReductionsOnDevice, Integers) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : {DType::int8, DType::uint8, DType::int16, DType::uint16, DType::int32, DType::uint32, DType::int64, DType::uint64}) {
    const bool negative = type == DType::int8 || type == DType::int16 || type == DType::int32 || type == DType::int64;
    const RuntimeValue x = numbers(type, {9, 50, 20}, negative ? -9 : 1, 12);
    for (int64_t axis : {0, 1, 2}) {
      // Logarithms of negative sums are no numbers that an integer can hold.
      for (const char* op : {"ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceProd", "ReduceMin", "ReduceMax"})
        expect_same_on_device({op, {x, int_list({axis})}}, {});
      for (const char* op : {"ArgMax", "ArgMin"}) expect_same_on_device({op, {x}, {attribute("axis", axis)}}, {});
    }
  }
  const RuntimeValue large = tensor<uint64_t>({3}, {1, UINT64_MAX, 2});
  for (const char* op : {"ReduceMax", "ReduceMin", "ArgMax", "ArgMin"}) expect_same_on_device({op, {large}}, {});
  const RuntimeValue flags = tensor_as(DType::boolean, {2, 3}, {1, 0, 1, 1, 1, 1});
  for (const char* op : {"ReduceMax", "ReduceMin"}) expect_same_on_device({op, {flags, int_list({1})}}, {});
}

TEST(ReductionsOnDevice, EmptySetsAndSpecialValues) {
  if (!any_device()) GTEST_SKIP() << "no device";
  const RuntimeValue x = tensor<float>({2, 0}, {}), odd = tensor<float>({2, 3}, {1, NAN, 2, -INFINITY, -INFINITY, -INFINITY});
  const RuntimeValue high = tensor<float>({1, 3}, {INFINITY, 1, 1000});
  for (const char* op : kReductionOps) {
    expect_same_on_device({op, {x, int_list({1})}}, {});
    expect_same_on_device({op, {x, int_list({0})}}, {});
    expect_same_on_device({op, {odd, int_list({1})}}, {});
    expect_same_on_device({op, {high, int_list({1})}}, {});
    expect_same_on_device({op, {odd, int_list({})}, {attribute("noop_with_empty_axes", int64_t{1})}}, {});
  }
}

TEST(ReductionsOnDevice, ImagesAsTheyLie) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : kFloatTypes) {
    const RuntimeValue x = reordered(numbers(type, {3, 24, 15, 17}), Layout::nhwc);
    for (const std::vector<int64_t>& axes : std::vector<std::vector<int64_t>>{{2, 3}, {1}, {1, 2, 3}, {0, 2, 3}, {1, 3}, {2}}) {
      for (const char* op : {"ReduceMean", "ReduceMax"}) expect_same_on_device({op, {x, int_list(axes)}, {}, 1, {1}}, tolerance_for(type));
    }
  }
}

TEST(ReductionsOnDevice, WhereTheBestStand) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : kFloatTypes) {
    // Few different numbers: many are equal.
    const std::vector<double> spread = spread_values(5 * 3000 * 8, 0, 20);
    std::vector<double> rounded;
    for (double v : spread) rounded.push_back(std::floor(v));
    const RuntimeValue x = tensor_as(type, {5, 3000, 8}, rounded);
    for (int64_t axis : {0, 1, 2}) {
      for (int64_t last : {0, 1}) {
        for (const char* op : {"ArgMax", "ArgMin"})
          expect_same_on_device({op, {x}, {attribute("axis", axis), attribute("select_last_index", last)}}, {});
      }
    }
  }
  const RuntimeValue odd = tensor<float>({2, 4}, {1, NAN, 2, NAN, 3, 3, -INFINITY, -INFINITY});
  for (int64_t last : {0, 1})
    for (const char* op : {"ArgMax", "ArgMin"})
      expect_same_on_device({op, {odd}, {attribute("axis", int64_t{1}), attribute("select_last_index", last)}}, {});
}

TEST(ReductionsOnDevice, RunningSumsAndProducts) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const Dims& dims : {Dims{5}, Dims{3, 2500}, Dims{4, 100, 300}, Dims{2, 40, 20000}}) {
    for (DType type : {DType::float32, DType::float16, DType::float64, DType::int64, DType::int32, DType::uint8}) {
      const RuntimeValue sums = numbers(type, dims, 0, 3), factors = numbers(type, dims, 0.95, 1.05);
      for (int64_t axis = 0; axis < static_cast<int64_t>(dims.size()); ++axis) {
        for (int64_t mode = 0; mode < 4; ++mode) {
          const std::vector<Attribute> attributes = {attribute("exclusive", mode % 2), attribute("reverse", mode / 2)};
          const Tolerance tolerance{type == DType::float16 ? 4e-3 : 2e-4, 1e-3};  // the CPU adds one after another, in float32
          expect_same_on_device({"CumSum", {sums, int_list({axis})}, attributes}, tolerance);
          expect_same_on_device({"CumProd", {factors, int_list({axis})}, attributes}, tolerance);
        }
      }
    }
  }
}

TEST(SoftmaxOnDevice, RowsOfAllLengths) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (int64_t n : {1, 2, 7, 31, 32, 100, 128, 129, 1000, 1024, 2048, 4096, 5000, 8192, 8193, 16384, 32768, 32769, 40000}) {
    for (DType type : kFloatTypes) {
      const RuntimeValue x = numbers(type, {n > 1000 ? 3 : 37, n}, -6, 6);
      for (const char* op : {"Softmax", "LogSoftmax", "Hardmax"}) expect_same_on_device({op, {x}}, tolerance_for(type));
    }
  }
}

TEST(SoftmaxOnDevice, OtherAxesAndSpecialValues) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const Dims& dims : {Dims{3, 50, 70}, Dims{2, 20000, 3}, Dims{40, 4, 129}, Dims{0, 5, 2}, Dims{1, 1, 1}}) {
    for (DType type : kFloatTypes) {
      for (int64_t axis : {0, 1}) {
        for (const char* op : {"Softmax", "LogSoftmax", "Hardmax"})
          expect_same_on_device({op, {numbers(type, dims, -6, 6)}, {attribute("axis", axis)}}, tolerance_for(type));
      }
    }
  }
  const RuntimeValue masked = tensor<float>({3, 4}, {1000, -INFINITY, 1000, -1000, 1, NAN, 2, 3, -INFINITY, -INFINITY, 0, 0});
  for (const char* op : {"Softmax", "LogSoftmax"}) {
    for (int64_t axis : {0, 1}) expect_same_on_device({op, {masked}, {attribute("axis", axis)}, 1, {}, true}, {});
  }
}

TEST(LossesOnDevice, EveryReduction) {
  if (!any_device()) GTEST_SKIP() << "no device";
  const Dims shapes[] = {{5, 4}, {3, 1000}, {2, 21, 30, 31}, {2, 40000}};
  for (const Dims& dims : shapes) {
    Dims label_dims = dims;
    label_dims.erase(label_dims.begin() + 1);
    const double classes = static_cast<double>(dims[1]);
    for (DType type : {DType::float32, DType::float16, DType::float64}) {
      const RuntimeValue x = numbers(type, dims, -4, 4), weights = numbers(type, {dims[1]}, 0.5, 2);
      for (DType label_type : {DType::int64, DType::int32}) {
        const RuntimeValue labels = numbers(label_type, label_dims, 0, classes);
        for (const char* reduction : {"none", "sum", "mean"}) {
          const std::vector<Attribute> attributes = {attribute("reduction", std::string(reduction)), attribute("ignore_index", int64_t{1})};
          expect_same_on_device({"SoftmaxCrossEntropyLoss", {x, labels, weights}, attributes, 2}, tolerance_for(type));
          expect_same_on_device({"SoftmaxCrossEntropyLoss", {x, labels}, {attributes[0]}}, tolerance_for(type));
          expect_same_on_device({"NegativeLogLikelihoodLoss", {x, labels, weights}, attributes}, tolerance_for(type));
        }
      }
    }
  }
}

}  // namespace
}  // namespace fretsaw::testing
