// Products of few rows against those that compute each element by itself. Steps choose by time which one runs, so that tests of steps may
// never see it.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/matmul_simple.h"
#include "kernels/cuda/matmul_small.h"
#include "tests/kernels/device_case.h"
#include "tests/kernels/single_op.h"

namespace fretsaw::cuda {
namespace {

struct SmallCase {
  std::string name;
  int64_t M, K, N;
  int64_t a_row = 0;  // elements from row to row of A where there are more than K
  bool transposed = false, bias = false, residual = false;
  ProductActivation activation = ProductActivation::none;
};

ProductSpec spec_of(const SmallCase& c, DType type) {
  ProductSpec s;
  s.type = type, s.M = c.M, s.N = c.N, s.K = c.K, s.a_row = c.a_row ? c.a_row : c.K, s.constant_b = true;
  s.b_row = c.transposed ? 1 : c.N, s.b_column = c.transposed ? c.K : 1;
  s.bias = c.bias, s.beta = c.residual ? 0.5 : 0, s.activation = c.activation;
  return s;
}

class SmallProducts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (Device* any = fretsaw::testing::any_device())
      device = static_cast<GpuDevice*>(any);
    else
      GTEST_SKIP() << "no device";
  }
  cudaStream_t stream() const { return static_cast<cudaStream_t>(device->stream()); }
  // Filled with bytes of NaN.
  void* empty(DType type, int64_t count) {
    memory_.emplace_back(device->allocate(bytes_of(type, count)), [this](void* p) { device->release(p); });
    FRETSAW_CUDA_CHECK(cudaMemsetAsync(memory_.back().get(), 0xff, bytes_of(type, count), stream()));
    return memory_.back().get();
  }
  void* numbers(DType type, int64_t count, double size, uint32_t seed) {
    const RuntimeValue host = fretsaw::testing::numbers(type, {count}, -size, size, seed);
    void* to = empty(type, count);
    device->upload(to, host.tensor.data, host.tensor.bytes());
    return to;
  }
  std::vector<double> values(const void* from, DType type, int64_t count) {
    RuntimeValue host = make_value(type, {count});
    device->download(host.tensor.data, from, host.tensor.bytes());
    return fretsaw::testing::doubles_of(host);
  }
  ProductOperands operands(const ProductSpec& s) {
    const ProductExtents e = extents_of(s);
    ProductOperands o;
    o.a = numbers(s.type, e.a, 1, 1), o.b = numbers(s.type, e.b, 1.0 / std::sqrt(static_cast<double>(s.K)), 2);
    if (s.bias) o.bias = numbers(s.type, s.N, 1, 3);
    if (s.beta != 0) o.c = numbers(s.type, e.d, 1, 4);
    o.d = empty(s.type, e.d);
    return o;
  }
  void expect_equal_to_simple(const ProductSpec& s) {
    ASSERT_TRUE(takes_small_product(s));
    const ProductOperands o = operands(s);
    ProductOperands simple = o;
    simple.d = empty(s.type, s.M * s.N);
    run_simple_product(s, simple, stream());
    run_small_product(s, o, device->multiprocessors(), stream());
    const std::vector<double> got = values(o.d, s.type, s.M * s.N), wanted = values(simple.d, s.type, s.M * s.N);
    const double step = s.type == DType::float16 ? 0x1p-9 : s.type == DType::bfloat16 ? 0x1p-6 : 0x1p-16;
    size_t wrong = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (std::abs(got[i] - wanted[i]) <= step * std::max(1.0, std::abs(wanted[i]))) continue;
      if (++wrong <= 3) ADD_FAILURE() << "element " << i << " is " << got[i] << ", wanted " << wanted[i];
    }
    EXPECT_EQ(wrong, 0u) << "of " << wanted.size();
    run_small_product(s, o, device->multiprocessors(), stream());
    if (s.beta == 0) {
      EXPECT_EQ(values(o.d, s.type, s.M * s.N), got) << "sums are added in another order each time";
    }
  }

  GpuDevice* device = nullptr;

 private:
  std::vector<std::shared_ptr<void>> memory_;
};

TEST_F(SmallProducts, EqualToSimple) {
  const std::vector<SmallCase> cases = {
      {"one row of a large layer", 1, 4096, 6144},
      {"as many blocks as fit", 1, 2048, 4096},
      {"more tiles than blocks at a time", 1, 512, 40960},
      {"a part of K for each of eight blocks", 1, 5504, 512},
      {"more of K than is staged at a time", 1, 50000, 64},
      {"two rows", 2, 4096, 1024},
      {"three rows", 3, 1000, 136},
      {"four rows, more of K than is staged", 4, 7000, 256},
      {"eight rows", 8, 5504, 512},
      {"seven rows, odd K", 7, 1111, 264},
      {"few columns", 5, 640, 8},
      {"fewer rows of B than a batch", 1, 3, 72},
      {"rows of A far apart", 4, 300, 128, 1024},
      {"rows of A at odd addresses", 6, 300, 128, 301},
      {"what follows", 2, 600, 320, 0, false, true, true, ProductActivation::gelu_tanh},
      {"transposed", 1, 4096, 1024, 0, true},
      {"transposed, eight rows", 8, 1024, 333, 0, true},
  };
  for (const SmallCase& c : cases) {
    for (DType type : {DType::float32, DType::float16, DType::bfloat16}) {
      SCOPED_TRACE(c.name + " " + std::string(name_of(type)));
      expect_equal_to_simple(spec_of(c, type));
    }
  }
}

// Each product begins to read its matrix while the one before it still runs, and must wait for what it multiplies with.
TEST_F(SmallProducts, OneBehindTheOther) {
  constexpr int64_t n = 2048;
  constexpr int kLayers = 24;
  const ProductSpec spec = spec_of({"", 1, n, n}, DType::float32);
  std::vector<ProductOperands> layers(kLayers);
  for (int i = 0; i < kLayers; ++i) {
    layers[i].a = i == 0 ? numbers(spec.type, n, 1, 7) : layers[i - 1].d;
    layers[i].b = numbers(spec.type, n * n, std::sqrt(3.0 / n), static_cast<uint32_t>(i) + 8);
    layers[i].d = empty(spec.type, n);
  }
  for (const ProductOperands& o : layers) run_simple_product(spec, o, stream());
  const std::vector<double> wanted = values(layers.back().d, spec.type, n);
  const auto chain = [&] {
    for (const ProductOperands& o : layers) run_small_product(spec, o, device->multiprocessors(), stream());
  };
  device->begin_capture();
  chain();
  const auto captured = device->end_capture();
  for (bool replays : {false, true}) {
    for (const ProductOperands& o : layers) FRETSAW_CUDA_CHECK(cudaMemsetAsync(o.d, 0xff, bytes_of(spec.type, n), stream()));
    if (replays)
      device->launch(*captured);
    else
      chain();
    const std::vector<double> got = values(layers.back().d, spec.type, n);
    double size = 0, difference = 0;
    for (size_t i = 0; i < got.size(); ++i) size = std::max(size, std::abs(wanted[i])), difference += std::abs(got[i] - wanted[i]);
    EXPECT_LE(difference / n, 1e-4 * size) << (replays ? "replayed" : "as it is");
    EXPECT_GT(size, 0);
  }
}

}  // namespace
}  // namespace fretsaw::cuda
