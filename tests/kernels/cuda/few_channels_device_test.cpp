// The convolution of few channels against the one that computes each output by itself. Steps choose by time which one runs, so that tests
// of steps may never see it.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/convolution.h"
#include "tests/kernels/device_case.h"
#include "tests/kernels/single_op.h"

namespace fretsaw::cuda {
namespace {

struct FewChannelsCase {
  std::string name;
  Dims x, w;  // [N, C, H, W], [O, C, KH, KW]
  int64_t stride_h, stride_w;
  Dims pads_begin, pads_end;
  FusedActivation activation;
  bool bias = true;
};

Convolution convolution_of(const FewChannelsCase& c, DType type, Layout layout) {
  Convolution out;
  out.dtype = type, out.channels_last = true, out.x_layout = layout;
  out.x = c.x, out.w = c.w, out.x_channels = c.x[1];
  out.strides = {c.stride_h, c.stride_w}, out.dilations = {1, 1}, out.pads_begin = c.pads_begin, out.pads_end = c.pads_end;
  out.y = {c.x[0], c.w[0]};
  for (size_t d = 0; d < 2; ++d) out.y.push_back((c.x[2 + d] + c.pads_begin[d] + c.pads_end[d] - c.w[2 + d]) / out.strides[d] + 1);
  out.bias = c.bias, out.activation = c.activation;
  return out;
}

class OnDevice {
 public:
  explicit OnDevice(Device& device) : device_(device) {}
  void* empty(size_t bytes) {
    memory_.emplace_back(device_.allocate(bytes), [this](void* p) { device_.release(p); });
    return memory_.back().get();
  }
  void* copy(const RuntimeValue& value) {
    void* to = empty(value.tensor.bytes());
    device_.upload(to, value.tensor.data, value.tensor.bytes());
    return to;
  }

 private:
  Device& device_;
  std::vector<std::shared_ptr<void>> memory_;
};

// Y as it lies in memory, [N, OH, OW, O].
std::vector<double> result(Device& device, const Convolution& c, const void* y) {
  RuntimeValue host = make_value(c.dtype, {count_of(c.y)});
  device.synchronize();
  device.download(host.tensor.data, y, host.tensor.bytes());
  return testing::doubles_of(host);
}

void expect_equal_to_direct(GpuDevice& device, const FewChannelsCase& test, DType type, Layout layout) {
  const Convolution c = convolution_of(test, type, layout);
  SCOPED_TRACE(test.name + " " + std::string(name_of(type)) + (layout == Layout::nhwc ? " channels last" : " plain"));
  ASSERT_TRUE(has_few_channels(c));
  const auto stream = static_cast<cudaStream_t>(device.stream());
  OnDevice memory(device);
  const RuntimeValue x = testing::numbers(type, c.x, -1, 1, 1), w = testing::numbers(type, c.w, -1, 1, 2);
  const RuntimeValue last = testing::reordered(x, Layout::nhwc), bias = testing::numbers(type, {c.w[0]}, -1, 1, 3);
  const size_t y_bytes = bytes_of(type, count_of(c.y));
  ConvolutionAddresses direct, few;
  direct.x = memory.copy(last), direct.w = memory.copy(testing::reordered(w, Layout::nhwc)), direct.y = memory.empty(y_bytes);
  few.given_x = layout == Layout::nhwc ? direct.x : memory.copy(x), few.y = memory.empty(y_bytes);
  direct.bias = few.bias = memory.copy(bias);
  void* packed = memory.empty(few_channels_weight_bytes(c));
  pack_few_channels_weights(c, memory.copy(w), packed, stream);
  few.w = packed;
  FRETSAW_CUDA_CHECK(cudaMemsetAsync(few.y, 0xff, y_bytes, stream));  // NaN where nothing is written
  run_direct(c, direct, stream);
  run_few_channels(c, few, device.multiprocessors(), stream);
  const std::vector<double> wanted = result(device, c, direct.y), got = result(device, c, few.y);
  const double step = type == DType::float16 ? 0x1p-9 : 0x1p-6;  // two roundings of the type
  size_t wrong = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (std::abs(got[i] - wanted[i]) <= step * std::max(1.0, std::abs(wanted[i]))) continue;
    if (++wrong <= 3) ADD_FAILURE() << "element " << i << " is " << got[i] << ", wanted " << wanted[i];
  }
  EXPECT_EQ(wrong, 0u) << "of " << wanted.size();
}

TEST(FewChannelsOnDevice, EqualToDirect) {
  Device* device = testing::any_device();
  if (!device) GTEST_SKIP() << "no device";
  using Kind = FusedActivation::Kind;
  const std::vector<FewChannelsCase> cases = {
      {"residual network", {2, 3, 70, 64}, {64, 3, 7, 7}, 2, 2, {3, 3}, {3, 3}, {Kind::relu}},
      {"more tiles than blocks", {24, 3, 128, 128}, {64, 3, 7, 7}, 2, 2, {3, 3}, {3, 3}, {Kind::relu}},
      {"mobile network", {3, 3, 33, 48}, {24, 3, 3, 3}, 2, 2, {0, 0}, {1, 1}, {Kind::clip, 0, 0.5f}},
      {"plain stride", {1, 3, 20, 24}, {72, 3, 3, 3}, 1, 1, {1, 1}, {1, 1}, {Kind::swish, 1}},
      {"digits", {4, 1, 28, 32}, {32, 1, 5, 5}, 1, 1, {2, 2}, {2, 2}, {}, false},
      {"two channels", {1, 2, 19, 16}, {8, 2, 3, 5}, 3, 1, {1, 2}, {1, 2}, {}},
      {"four channels in patches", {2, 4, 32, 32}, {200, 4, 2, 2}, 2, 2, {0, 0}, {0, 0}, {}},
      {"wide window", {1, 1, 24, 40}, {16, 1, 15, 15}, 1, 1, {7, 7}, {7, 7}, {}},
      {"padding beyond the image", {1, 3, 8, 8}, {16, 3, 3, 3}, 1, 1, {9, 9}, {9, 9}, {}},
  };
  for (const FewChannelsCase& c : cases) {
    for (DType type : {DType::float16, DType::bfloat16}) {
      for (Layout layout : {Layout::plain, Layout::nhwc}) expect_equal_to_direct(static_cast<GpuDevice&>(*device), c, type, layout);
    }
  }
}

// What lies beyond the window's row, and is multiplied by 0, must not count.
TEST(FewChannelsOnDevice, NeighboursThatAreNotFinite) {
  Device* device = testing::any_device();
  if (!device) GTEST_SKIP() << "no device";
  auto& gpu = static_cast<GpuDevice&>(*device);
  for (Layout layout : {Layout::plain, Layout::nhwc}) {
    const Convolution c = convolution_of({"", {1, 3, 16, 32}, {8, 3, 3, 3}, 1, 1, {1, 1}, {1, 1}, {}}, DType::float16, layout);
    ASSERT_TRUE(has_few_channels(c));
    std::vector<double> values(3 * 16 * 32, 1.0);
    for (size_t row = 0; row < 3 * 16; ++row) values[row * 32 + 20] = INFINITY;
    const RuntimeValue x = testing::tensor_as(DType::float16, c.x, values);
    const RuntimeValue w = testing::numbers(DType::float16, c.w, 0.5, 1, 2), bias = testing::numbers(DType::float16, {8}, -1, 1, 3);
    OnDevice memory(gpu);
    const auto stream = static_cast<cudaStream_t>(gpu.stream());
    ConvolutionAddresses at;
    void* packed = memory.empty(few_channels_weight_bytes(c));
    pack_few_channels_weights(c, memory.copy(w), packed, stream);
    at.given_x = memory.copy(testing::reordered(x, layout)), at.w = packed, at.bias = memory.copy(bias);
    at.y = memory.empty(bytes_of(c.dtype, count_of(c.y)));
    run_few_channels(c, at, gpu.multiprocessors(), stream);
    const std::vector<double> got = result(gpu, c, at.y);
    for (int64_t pixel = 0; pixel < 16 * 32; ++pixel) {
      const bool sees = std::abs(pixel % 32 - 20) <= 1;
      for (int64_t o = 0; o < 8; ++o) EXPECT_EQ(std::isinf(got[static_cast<size_t>(pixel * 8 + o)]), sees) << pixel << " " << o;
    }
  }
}

}  // namespace
}  // namespace fretsaw::cuda
