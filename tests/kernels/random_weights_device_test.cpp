// Weights that a device makes itself: bit for bit those of the host.
#include <gtest/gtest.h>

#include <cstring>

#include "graph/tensor_bytes.h"
#include "kernels/random_weights.h"
#include "tests/kernels/on_device.h"

namespace fretsaw::testing {
namespace {

TensorPtr generated(DType dtype, Dims dims, std::function<void(uint64_t, std::span<std::byte>)> generate) {
  auto tensor = std::make_shared<Tensor>();
  tensor->dtype = dtype;
  tensor->dims = std::move(dims);
  tensor->generate = std::move(generate);
  return tensor;
}

TensorPtr random_weights(DType dtype, const Dims& dims, const ValuePart* part = nullptr) {
  return generated(dtype, dims, RandomWeights(0x1234567890abcdefu, dtype, dims, part));
}

void expect_same_as_host(Device& device, const TensorPtr& tensor) {
  device.use();
  const TensorPtr wanted = with_bytes(tensor);
  const std::shared_ptr<void> memory = device.constant(tensor);
  EXPECT_TRUE(device.holds(tensor));
  std::vector<std::byte> made(tensor->bytes(), std::byte{0xcd});
  device.download(made.data(), memory.get(), made.size());
  const auto differs = std::mismatch(made.begin(), made.end(), wanted->data).first;
  EXPECT_EQ(differs, made.end()) << name_of(tensor->dtype) << to_string(tensor->dims) << " at byte " << differs - made.begin();
}

TEST(RandomWeightsOnDevice, AllTypes) {
  Device* device = any_device();
  if (!device) GTEST_SKIP();
  for (DType dtype : {DType::float32, DType::float64, DType::float16, DType::bfloat16, DType::int8, DType::uint8, DType::int64}) {
    for (const Dims& dims : {Dims{1}, Dims{7}, Dims{129, 255}, Dims{64, 3, 7, 7}, Dims{1024, 2048}})
      expect_same_as_host(*device, random_weights(dtype, dims));
  }
}

TEST(RandomWeightsOnDevice, Parts) {
  Device* device = any_device();
  if (!device) GTEST_SKIP();
  for (DType dtype : {DType::float32, DType::bfloat16}) {
    for (int dim : {0, 1, 2}) {
      for (const Intervals& intervals : {Intervals{{0, 5}}, Intervals{{3, 8}}, Intervals{{1, 2}, {4, 7}, {10, 11}}}) {
        ValuePart part;
        part.of = "w";
        part.dim = dim;
        part.size = 11;
        part.intervals = intervals;
        Dims dims = {11, 11, 11};
        dims[static_cast<size_t>(dim)] = size_of(intervals);
        expect_same_as_host(*device, random_weights(dtype, dims, &part));
      }
    }
  }
}

TEST(RandomWeightsOnDevice, JoinedAndMadeByTheHost) {
  Device* device = any_device();
  if (!device) GTEST_SKIP();
  const std::vector<TensorPtr> parts = {random_weights(DType::float16, {64, 96}), random_weights(DType::float16, {64, 33}),
                                        with_bytes(random_weights(DType::float16, {64, 8}))};
  expect_same_as_host(*device, generated(DType::float16, {64, 137}, JoinedTensors{parts, 64}));
  expect_same_as_host(*device, generated(DType::float16, {137, 64}, JoinedTensors{parts, 1}));
  const auto counting = [](uint64_t first, std::span<std::byte> bytes) {
    for (std::byte& b : bytes) b = static_cast<std::byte>(first++ * 37 >> 3);
  };
  expect_same_as_host(*device, generated(DType::uint8, {150, 1000, 1000}, counting));  // in several pieces
}

}  // namespace
}  // namespace fretsaw::testing
