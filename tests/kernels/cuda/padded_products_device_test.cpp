// Large products whose lines are no whole packs of 16 bytes, against the plain kernel. Which way is taken is chosen by time: copies are
// checked by themselves too.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/matmul_padding.h"
#include "kernels/cuda/matmul_simple.h"
#include "tests/kernels/device_case.h"
#include "tests/kernels/single_op.h"

namespace fretsaw::cuda {
namespace {

struct PaddedCase {
  std::string name;
  int64_t M, N, K;
  bool a_turned, b_turned;  // A is [K, M] in memory, B [N, K]
  bool pads;                // whether an operand is copied
  bool bias = false;
  ProductActivation activation = ProductActivation::none;
  DType out = DType::undefined;
};

ProductSpec spec_of(const PaddedCase& c, DType type) {
  ProductSpec s;
  s.type = type, s.out = c.out, s.M = c.M, s.N = c.N, s.K = c.K;
  s.a_row = c.a_turned ? 1 : c.K, s.a_column = c.a_turned ? c.M : 1;
  s.b_row = c.b_turned ? 1 : c.N, s.b_column = c.b_turned ? c.K : 1;
  s.bias = c.bias, s.activation = c.activation;
  return s;
}

class PaddedProduct : public ::testing::TestWithParam<PaddedCase> {
 protected:
  void SetUp() override {
    device_ = static_cast<GpuDevice*>(testing::any_device());
    if (!device_) GTEST_SKIP() << "there is no GPU";
    stream_ = static_cast<cudaStream_t>(device_->stream());
  }
  void* empty(size_t bytes) {
    memory_.emplace_back(device_->allocate(bytes), [this](void* p) { device_->release(p); });
    return memory_.back().get();
  }
  void* noise(DType type, int64_t count) {
    void* to = empty(bytes_of(type, count));
    fill_noise(type, to, count, stream_);
    return to;
  }
  std::vector<double> values(DType type, const void* from, int64_t count) {
    RuntimeValue host = make_value(type, {count});
    device_->synchronize();
    device_->download(host.tensor.data, from, host.tensor.bytes());
    return testing::doubles_of(host);
  }

  GpuDevice* device_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::vector<std::shared_ptr<void>> memory_;
};

// `rounding`: what an element may be rounded by besides, relative to itself.
void expect_close(const std::vector<double>& got, const std::vector<double>& wanted, double tolerance, double rounding) {
  double largest = 0;
  for (double v : wanted) largest = std::max(largest, std::fabs(v));
  ASSERT_GT(largest, 0);
  for (size_t i = 0; i < wanted.size(); ++i)
    ASSERT_NEAR(got[i], wanted[i], tolerance * largest + rounding * std::fabs(wanted[i])) << "element " << i;
}

TEST_P(PaddedProduct, EqualsThePlainKernel) {
  for (DType type : {DType::bfloat16, DType::float16}) {
    SCOPED_TRACE(name_of(type));
    const ProductSpec spec = spec_of(GetParam(), type);
    ASSERT_TRUE(is_large_product(spec));
    ASSERT_EQ(takes_padding(spec), GetParam().pads);
    ProductOperands o;
    o.a = noise(type, spec.M * spec.K), o.b = noise(type, spec.K * spec.N);
    if (spec.bias) o.bias = noise(type, spec.N);
    const int64_t count = spec.M * spec.N;
    void* plain = o.d = empty(bytes_of(output_type(spec), count));
    run_simple_product(spec, o, stream_);
    Product product(*device_, spec);
    o.d = empty(bytes_of(output_type(spec), count));
    product.run(o, empty(product.scratch_bytes() + 1), stream_);
    const bool widened = output_type(spec) == DType::float32;  // D may be staged in the operands' type, which rounds each element once
    const double tolerance = widened ? 1e-4 : type == DType::float16 ? 2e-3 : 1.6e-2;
    const double rounding = !widened ? 0 : type == DType::float16 ? 0x1p-11 : 0x1p-8;
    expect_close(values(output_type(spec), o.d, count), values(output_type(spec), plain, count), tolerance, rounding);
    memory_.clear();
  }
}

// The padded operands, multiplied by the plain kernel, give the same bits: what was added is zero, and all else is where it was.
TEST_P(PaddedProduct, OfCopiesIsTheSame) {
  const ProductSpec spec = spec_of(GetParam(), DType::bfloat16);
  if (!takes_padding(spec)) GTEST_SKIP() << "no operand is copied";
  const ProductSpec form = padded_form(spec);
  ProductOperands o;
  o.a = noise(spec.type, spec.M * spec.K), o.b = noise(spec.type, spec.K * spec.N);
  if (spec.bias) o.bias = noise(spec.type, spec.N);
  const int64_t count = spec.M * spec.N;
  const size_t bytes = padded_bytes(spec);
  void* scratch = empty(bytes);
  FRETSAW_CUDA_CHECK(cudaMemsetAsync(scratch, 0xff, bytes, stream_));  // numbers that are none
  ProductOperands padded = pad_operands(spec, o, scratch, stream_);
  o.d = empty(bytes_of(output_type(spec), count)), padded.d = empty(bytes_of(output_type(spec), count));
  run_simple_product(spec, o, stream_);
  run_simple_product(form, padded, stream_);
  EXPECT_EQ(values(output_type(spec), padded.d, count), values(output_type(spec), o.d, count));
}

INSTANTIATE_TEST_SUITE_P(
    Some, PaddedProduct,
    ::testing::Values(PaddedCase{"RaggedColumnsOfB", 2048, 2501, 2048, false, false, true},                                     //
                      PaddedCase{"RaggedResult", 2048, 2501, 2048, false, true, true},                                          //
                      PaddedCase{"RaggedResultWithBias", 2048, 2501, 2048, false, true, false, true},                           //
                      PaddedCase{"RaggedResultOfTurned", 2049, 2502, 2048, true, true, true},                                   //
                      PaddedCase{"RaggedInner", 2048, 2560, 2003, false, true, true},                                           //
                      PaddedCase{"RaggedInnerOfA", 2048, 2560, 2001, false, false, true},                                       //
                      PaddedCase{"RaggedInnerOfB", 2048, 2560, 2005, true, true, true},                                         //
                      PaddedCase{"RaggedRowsOfA", 2047, 2560, 2048, true, false, true},                                         //
                      PaddedCase{"AllRagged", 2045, 2507, 2009, false, false, true},                                            //
                      PaddedCase{"AllRaggedAndTurned", 2043, 2509, 2015, true, true, true},                                     //
                      PaddedCase{"WithBias", 2048, 2501, 2003, false, true, true, true},                                        //
                      PaddedCase{"WithBiasAndGelu", 2048, 2502, 2002, false, false, true, true, ProductActivation::gelu_tanh},  //
                      PaddedCase{"WithRelu", 2048, 2504, 2004, false, false, true, false, ProductActivation::relu},             //
                      PaddedCase{"ToFloat32", 2048, 2501, 2006, true, false, true, false, ProductActivation::none, DType::float32}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fretsaw::cuda
