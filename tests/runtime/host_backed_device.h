// A device whose memory is the host's and whose kernels are the CPU's: what a rank does with a device, tried where there is none.
#pragma once
#include <cstdlib>
#include <cstring>

#include "kernels/cpu/reorder.h"
#include "kernels/device.h"
#include "kernels/random_weights.h"

namespace fretsaw::testing_plans {

class HostBackedDevice : public Device {
 public:
  // Nothing is captured: its kernels do their work at once.
  HostBackedDevice() {
    for (const auto& [key, record] : cpu_kernels().all()) {
      KernelRecord own = record;
      records_made()[record.domain + ":" + record.op] = record.make;
      own.make = make_uncaptured;
      own.leads = own.follows = false;
      for (size_t i = 0; i < 8; ++i)
        if (reads_on_host(record.op, i)) own.host_inputs.push_back(i);
      registry_.add(own);
    }
  }
  std::string name() const override { return "host:0"; }
  int index() const override { return 0; }
  const KernelRegistry& kernels() const override { return registry_; }
  void use() override {}

  void* allocate(size_t bytes) override { return std::aligned_alloc(256, (bytes + 511) / 256 * 256); }
  void release(void* memory) noexcept override { std::free(memory); }
  size_t free_bytes() override { return size_t{1} << 40; }
  size_t total_bytes() override { return size_t{1} << 40; }
  void* allocate_pinned(size_t bytes) override { return allocate(bytes); }
  void release_pinned(void* memory) noexcept override { std::free(memory); }

  void* stream() override { return nullptr; }
  void upload(void* to, const void* from, size_t bytes) override { copy(to, from, bytes); }
  void download(void* to, const void* from, size_t bytes) override { copy(to, from, bytes); }
  std::shared_ptr<DeviceEvent> fetch(void* pinned, const void* from, size_t bytes) override {
    copy(pinned, from, bytes);
    return record(false);
  }
  void copy(void* to, const void* from, size_t bytes) override {
    if (bytes) std::memmove(to, from, bytes);
  }
  void copy_rows(void* to, size_t to_stride, const void* from, size_t from_stride, size_t row_bytes, size_t count) override {
    for (size_t i = 0; i < count; ++i)
      copy(static_cast<std::byte*>(to) + i * to_stride, static_cast<const std::byte*>(from) + i * from_stride, row_bytes);
  }
  void clear(void* to, size_t bytes) override {
    if (bytes) std::memset(to, 0, bytes);
  }
  void make_random(void*, const RandomWeights&) override { throw Error("a device of the tests makes no random weights"); }
  void reorder(const TensorView& from, const TensorView& to) override {
    TensorView made = to;
    fretsaw::reorder(from, made);
  }
  void synchronize() override {}
  void synchronize(DeviceEvent&) override {}

  std::shared_ptr<DeviceEvent> record(bool) override { return std::make_shared<Over>(); }
  void wait_for(DeviceEvent&) override {}
  std::shared_ptr<DeviceEvent> copy_from_peer(void* to, const void* from, int, size_t bytes, DeviceEvent&) override {
    copy(to, from, bytes);
    return record(false);
  }
  void begin_capture() override { throw Error("a device of the tests captures nothing"); }
  std::shared_ptr<CapturedWork> end_capture() override { return nullptr; }
  void abandon_capture() noexcept override {}
  void launch(CapturedWork&) override {}

 private:
  struct Over : DeviceEvent {
    bool done() override { return true; }
    void wait() override {}
    double us_since(DeviceEvent&) override { return 0; }
  };
  using Make = CompiledKernel (*)(const CompileContext&);
  static std::map<std::string, Make>& records_made() {
    static std::map<std::string, Make> made;
    return made;
  }
  static CompiledKernel make_uncaptured(const CompileContext& c) {
    CompiledKernel kernel = records_made().at(c.node().domain + ":" + c.node().op)(c);
    kernel.capturable = false;
    return kernel;
  }
  static bool reads_on_host(const std::string& op, size_t i) { return i == 1 && (op == "Reshape" || op == "Expand" || op == "ReduceSum"); }

  KernelRegistry registry_;
};

}  // namespace fretsaw::testing_plans
