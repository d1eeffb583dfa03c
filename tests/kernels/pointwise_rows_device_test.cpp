// Rows over the last axis on a device, with elementwise nodes before and after: softmax, normalisation, reductions, lengths.
#include <span>

#include "tests/kernels/fused_step.h"

namespace fretsaw::testing {
namespace {

constexpr int64_t kRowLengths[] = {7, 768, 8193, 2, 49, 64, 256, 1001, 4096, 16384};

TEST(RowsDevice, RowsOfEveryLength) {
  FRETSAW_DEVICE_OR_SKIP(device);
  for (DType dtype : kHalfAndWide) {
    const bool all = dtype == DType::float32;
    for (int64_t n : std::span(kRowLengths).first(all ? std::size(kRowLengths) : 3)) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(n));
      const int64_t rows = n < 300 ? 37 : 3;
      {
        FusedStep step;  // masked softmax of scores
        Value* x = step.input(random_tensor(dtype, {rows, n}, 1, -8, 8));
        Value* scaled = step.add("Mul", {x, step.constant(tensor_as(dtype, {}, {0.25}))});
        Value* y = step.add("Softmax", {step.add("Add", {scaled, step.input(random_tensor(dtype, {1, n}, 2))})});
        expect_step(*device, step, {y});
      }
      {
        FusedStep step;  // residual, then normalisation; the sum is used again
        Value* x = step.input(random_tensor(dtype, {1, rows, n}, 1));
        Value* sum = step.add("Add", {x, step.input(random_tensor(dtype, {1, rows, n}, 2))});
        Value* y =
            step.add("LayerNormalization", {sum, step.constant(random_tensor(dtype, {n}, 3)), step.constant(random_tensor(dtype, {n}, 4))});
        expect_step(*device, step, {sum, y});
      }
      {
        FusedStep step;
        Value* x = step.input(random_tensor(dtype, {rows, n}, 1));
        Value* y = step.add("RMSNormalization", {x, step.constant(random_tensor(dtype, {n}, 3))});
        Value* z = step.add("Mul", {y, step.add("Sigmoid", {x})});
        expect_step(*device, step, {z});
      }
    }
  }
}

TEST(RowsDevice, ReductionsOfRows) {
  FRETSAW_DEVICE_OR_SKIP(device);
  for (const char* op : {"ReduceSum", "ReduceMean", "ReduceProd", "ReduceMin", "ReduceMax", "ReduceL1", "ReduceL2", "ReduceSumSquare",
                         "ReduceLogSum", "ReduceLogSumExp"}) {
    for (int64_t keep : {0, 1}) {
      for (int64_t n : {6, 31, 640}) {
        SCOPED_TRACE(op + std::to_string(n));
        FusedStep step;
        Value* x = step.input(random_tensor(DType::float32, {2, 9, n}, 1, 0.9, 1.1));
        Value* y = step.add("Abs", {step.add("Mul", {x, step.input(random_tensor(DType::float32, {2, 1, 1}, 2, 0.99, 1.01))})});
        Value* r = step.add(op, {y, step.constant(tensor_as(DType::int64, {1}, {-1}))}, {attribute("keepdims", keep)});
        const RuntimeValue got = step.run_fused(*device, step.context({r}))[0];
        EXPECT_EQ(difference(got, step.wanted(r), {2e-5, 1e-5}), "");
      }
    }
  }
}

TEST(RowsDevice, NormalisationInItsParts) {
  FRETSAW_DEVICE_OR_SKIP(device);
  for (DType dtype : {DType::float32, DType::float16}) {
    FusedStep step;
    Value* axes = step.constant(tensor_as(DType::int64, {1}, {-1}));
    Value* x = step.input(random_tensor(dtype, {5, 4, 384}, 1));
    Value* centred = step.add("Sub", {x, step.add("ReduceMean", {x, axes})});
    Value* squares = step.add("Pow", {centred, step.constant(tensor_as(dtype, {}, {2}))});
    Value* variance = step.add("ReduceMean", {squares, axes});
    Value* root = step.add("Sqrt", {step.add("Add", {variance, step.constant(tensor_as(dtype, {}, {1e-3}))})});
    Value* scaled = step.add("Mul", {step.add("Div", {centred, root}), step.constant(random_tensor(dtype, {384}, 2))});
    Value* y = step.add("Add", {scaled, step.constant(random_tensor(dtype, {384}, 3))});
    expect_step(*device, step, {y, root});
  }
}

TEST(RowsDevice, StatisticsOfLayerNormalisation) {
  FRETSAW_DEVICE_OR_SKIP(device);
  FusedStep step;
  Value* x = step.input(random_tensor(DType::float32, {6, 96}, 1));
  Value* y = step.add("LayerNormalization", {x, step.input(random_tensor(DType::float32, {96}, 2))}, {attribute("axis", int64_t{1})}, 3);
  expect_step(*device, step, {y, step.output(1), step.output(2)});
}

}  // namespace
}  // namespace fretsaw::testing
