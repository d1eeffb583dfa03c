// Running a device's kernels in tests.
#include "tests/kernels/on_device.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "kernels/cuda/devices.h"
#include "tests/kernels/interpreter.h"
#include "tests/kernels/on_device_again.h"
#include "tests/kernels/single_op.h"

namespace fretsaw::testing {
namespace {

// Memory for one step, never used again; filled with rubbish. A second run gets the same addresses, as in a program.
class DeviceMemory : public KernelMemory {
 public:
  DeviceMemory(Device& device, std::vector<RuntimeValue*>& outputs) : device_(device), outputs_(outputs), blocks_(outputs.size()) {}

  void* output(size_t index, DType dtype, const Dims& dims, Layout layout) override {
    const size_t bytes = bytes_of(dtype, dims, layout);
    std::shared_ptr<void>& block = blocks_.at(index);
    if (!block) {
      block = allocate(bytes);
      const std::vector<std::byte> rubbish(bytes, std::byte{0xcd});
      device_.upload(block.get(), rubbish.data(), bytes);
    }
    outputs_.at(index)->owner = block;
    return block.get();
  }
  void* scratch(size_t bytes) override {
    if (!scratch_ || scratch_bytes_ < bytes) scratch_ = allocate(bytes), scratch_bytes_ = bytes;
    return scratch_.get();
  }
  std::shared_ptr<void> allocate(size_t bytes) {
    return {device_.allocate(bytes), [device = &device_](void* memory) { device->release(memory); }};
  }

 private:
  Device& device_;
  std::vector<RuntimeValue*>& outputs_;
  std::vector<std::shared_ptr<void>> blocks_;
  std::shared_ptr<void> scratch_;
  size_t scratch_bytes_ = 0;
};

RuntimeValue downloaded(Device& device, const RuntimeValue& value) {
  if (value.kind != RuntimeValue::Kind::tensor) return {};
  const TensorView& x = value.tensor;
  RuntimeValue block = make_value(DType::uint8, {static_cast<int64_t>(x.bytes())});
  device.download(block.tensor.data, x.data, x.bytes());
  block.tensor.dtype = x.dtype;
  block.tensor.dims = x.dims;
  block.tensor.layout = x.layout;
  return reordered(block, Layout::plain);
}

std::unique_ptr<Device> open_if_there() {
  if (cuda_devices().empty()) {
    std::printf("no CUDA device%s: tests of device kernels are skipped\n", built_with_cuda() ? "" : " (a build without CUDA)");
    return nullptr;
  }
  return open_cuda_device(0);
}

}  // namespace

Device* test_device() {
  static const std::unique_ptr<Device> device = [] {
    const char* name = std::getenv("FRETSAW_TEST_DEVICE");
    return name && std::string(name) == "cuda" ? open_cuda_device(0) : nullptr;
  }();
  return device.get();
}

Device* any_device() {
  static const std::unique_ptr<Device> device = test_device() ? nullptr : open_if_there();
  return test_device() ? test_device() : device.get();
}

std::map<std::string, int>& host_fallbacks() {
  static std::map<std::string, int> counts;
  return counts;
}

namespace {

// Whether two runs gave the same; bit by bit where no tolerance is allowed.
bool same_results(const RuntimeValue& a, const RuntimeValue& b, double tolerance) {
  if (tolerance == 0) return std::memcmp(a.tensor.data, b.tensor.data, a.tensor.bytes()) == 0;
  const std::vector<double> x = doubles_of(a), y = doubles_of(b);
  double largest = 0;
  for (double v : x) largest = std::max(largest, std::abs(v));
  for (size_t i = 0; i < x.size(); ++i)
    if (!(std::abs(x[i] - y[i]) <= tolerance * largest)) return false;
  return true;
}

}  // namespace

std::vector<RuntimeValue> run_on_device(Device& device, CompileContext c, const std::vector<RuntimeValue*>& inputs) {
  return run_on_device_with_noise(device, std::move(c), inputs, 0);
}

std::vector<RuntimeValue> run_on_device_with_noise(Device& device, CompileContext c, const std::vector<RuntimeValue*>& inputs,
                                                   double tolerance) {
  device.use();
  c.device = &device;
  if (const std::string reason = why_unsupported_on_device(c); !reason.empty()) throw Error(reason);
  const KernelRecord& record = *device.kernels().find(c.node().op, c.node().domain);
  const CompiledKernel kernel = record.make(c);

  std::vector<RuntimeValue> given(inputs.size()), results(c.outputs.size());
  std::vector<RuntimeValue*> in(inputs.size()), out(c.outputs.size());
  for (size_t i = 0; i < results.size(); ++i) out[i] = c.outputs[i] ? &results[i] : nullptr;
  DeviceMemory memory(device, out);
  const auto contains = [](const std::vector<size_t>& list, size_t i) { return std::find(list.begin(), list.end(), i) != list.end(); };
  bool changing = false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i] || contains(kernel.packed_inputs, i)) continue;
    given[i] = reordered(*inputs[i], i < kernel.input_layouts.size() ? kernel.input_layouts[i] : Layout::plain);
    in[i] = &given[i];
    if (given[i].kind != RuntimeValue::Kind::tensor) continue;
    if (contains(record.host_inputs, i)) {
      changing |= c.constants[i] == nullptr;
      continue;
    }
    std::shared_ptr<void> block = memory.allocate(given[i].tensor.bytes());
    device.upload(block.get(), given[i].tensor.data, given[i].tensor.bytes());
    given[i].tensor.data = block.get();
    given[i].tensor.memory = Memory::device;
    given[i].owner = block;
  }
  const auto run = [&] {
    RunContext context(in, out, memory, c.threads, &device);
    kernel.run(context);
  };
  const auto take = [&] {
    device.synchronize();
    std::vector<RuntimeValue> taken;
    for (const RuntimeValue& value : results) taken.push_back(downloaded(device, value));
    return taken;
  };
  run();
  std::vector<RuntimeValue> first = take();
  if (!kernel.capturable || changing) return first;
  device.begin_capture();
  try {
    run();
  } catch (...) {
    device.abandon_capture();
    throw;
  }
  const auto captured = device.end_capture();
  for (const RuntimeValue& value : results) {
    if (value.kind == RuntimeValue::Kind::tensor) device.clear(value.tensor.data, value.tensor.bytes());
  }
  device.launch(*captured);
  const std::vector<RuntimeValue> second = take();
  for (size_t i = 0; i < first.size(); ++i) {
    if (first[i].kind != RuntimeValue::Kind::tensor) continue;
    if (!same_results(first[i], second[i], tolerance))
      throw Error("output " + std::to_string(i) + " differs when the step is captured and replayed");
  }
  return first;
}

}  // namespace fretsaw::testing
