// Collectives among devices through host memory.
#include <vector>

#include "runtime/device_communicator.h"

namespace fretsaw {
namespace {

class StagedCommunicator : public DeviceCommunicator {
 public:
  StagedCommunicator(Communicator& host, Device& device) : host_(host), device_(device) {}

  bool capturable() const override { return false; }
  void all_reduce(const void* in, void* out, size_t bytes, DType dtype, Reduction reduction) override {
    through_host(in, bytes, out, bytes, [&] { host_.all_reduce(in_, out_, dtype, reduction); });
  }
  void all_gather(const void* in, void* out, size_t bytes) override {
    through_host(in, bytes, out, bytes * ranks(), [&] { host_.all_gather(in_, out_); });
  }
  void reduce_scatter(const void* in, void* out, size_t bytes, DType dtype, Reduction reduction) override {
    through_host(in, bytes, out, bytes / ranks(), [&] { host_.reduce_scatter(in_, out_, dtype, reduction); });
  }
  void all_to_all(const void* in, void* out, size_t bytes) override {
    through_host(in, bytes, out, bytes, [&] { host_.all_to_all(in_, out_); });
  }
  void all_reduce_each(std::span<const Exchanged> each, DType dtype, Reduction reduction) override {
    each_through_host(each, 1, [&](std::span<const Exchanged> staged) { host_.all_reduce_each(staged, dtype, reduction); });
  }
  void reduce_scatter_each(std::span<const Exchanged> each, DType dtype, Reduction reduction) override {
    each_through_host(each, ranks(), [&](std::span<const Exchanged> staged) { host_.reduce_scatter_each(staged, dtype, reduction); });
  }
  void broadcast(void* data, size_t bytes, int root) override {
    in_.resize(bytes);
    if (host_.rank() == root) device_.download(in_.data(), data, bytes);
    host_.broadcast(in_, root);
    if (host_.rank() != root) device_.upload(data, in_.data(), bytes);
  }
  void abort() override {}  // the host's communicator ends the calls

 private:
  size_t ranks() const { return static_cast<size_t>(host_.size()); }
  template <typename Exchange>
  void through_host(const void* in, size_t in_bytes, void* out, size_t out_bytes, const Exchange& exchange) {
    in_.resize(in_bytes), out_.resize(out_bytes);
    device_.download(in_.data(), in, in_bytes);
    exchange();
    device_.upload(out, out_.data(), out_bytes);
  }

  // What comes out is `parts` times as small as what goes in.
  template <typename Exchange>
  void each_through_host(std::span<const Exchanged> each, size_t parts, const Exchange& exchange) {
    size_t bytes = 0;
    for (const Exchanged& e : each) bytes += e.bytes;
    in_.resize(bytes), out_.resize(bytes / parts);
    std::vector<Exchanged> staged;
    size_t at = 0;
    for (const Exchanged& e : each) {
      staged.push_back({in_.data() + at, out_.data() + at / parts, e.bytes});
      device_.download(in_.data() + at, e.in, e.bytes);
      at += e.bytes;
    }
    exchange(staged);
    for (size_t i = 0; i < each.size(); ++i) device_.upload(each[i].out, staged[i].out, each[i].bytes / parts);
  }

  Communicator& host_;
  Device& device_;
  std::vector<std::byte> in_, out_;
};

}  // namespace

void DeviceCommunicator::sum_with_norm(const SumWithNorm& /*sum*/) {
  throw Error("these devices do not take a sum with a norm", "report this as a fault", ErrorCode::device);
}

void DeviceCommunicator::all_reduce_each(std::span<const Exchanged> each, DType dtype, Reduction reduction) {
  for (const Exchanged& e : each) all_reduce(e.in, e.out, e.bytes, dtype, reduction);
}
void DeviceCommunicator::reduce_scatter_each(std::span<const Exchanged> each, DType dtype, Reduction reduction) {
  for (const Exchanged& e : each) reduce_scatter(e.in, e.out, e.bytes, dtype, reduction);
}

std::unique_ptr<DeviceCommunicator> make_staged_communicator(Communicator& host, Device& device) {
  return std::make_unique<StagedCommunicator>(host, device);
}

}  // namespace fretsaw
