// A device that runs a rank's kernels beside the CPU: its memory, its stream and its kernels.
//
// One rank, one Device, one thread. Work is put on the device's stream and runs there in that order, so that memory may be used again
// as soon as the last kernel that reads it has been put on the stream. Calls return before the work is done unless they say otherwise.
// Failures are Errors of the code `device`; a kernel's failure may show at a later call.
#pragma once
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "kernels/kernel.h"

namespace fretsaw {

struct JoinedTensors;
class RandomWeights;

// A point in a device's stream. Other devices' streams can wait for it.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  virtual bool done() = 0;
  virtual void wait() = 0;                            // on the host
  virtual double us_since(DeviceEvent& earlier) = 0;  // both done, of one device and timed
};

// Work that was recorded from the stream, to be put there again as one.
class CapturedWork {
 public:
  virtual ~CapturedWork() = default;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;  // "cuda:0"
  virtual int index() const = 0;
  virtual const KernelRegistry& kernels() const = 0;
  virtual void use() = 0;  // the calling thread's other calls are about this device

  // Memory, 256-byte aligned. Throws Error that says how much was asked for and how much is free.
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* memory) noexcept = 0;
  virtual size_t free_bytes() = 0;
  virtual size_t total_bytes() = 0;
  // Host memory that the device reads and writes directly.
  virtual void* allocate_pinned(size_t bytes) = 0;
  virtual void release_pinned(void* memory) noexcept = 0;

  virtual void* stream() = 0;                                           // a cudaStream_t
  virtual void upload(void* to, const void* from, size_t bytes) = 0;    // `from` has been read when it returns
  virtual void download(void* to, const void* from, size_t bytes) = 0;  // waits: `to` has been written when it returns
  // To pinned memory, after what is on the stream now and beside what comes later; the event is its end.
  virtual std::shared_ptr<DeviceEvent> fetch(void* pinned, const void* from, size_t bytes) = 0;
  virtual void copy(void* to, const void* from, size_t bytes) = 0;
  // `count` rows of `row_bytes`, whose beginnings are `to_stride` and `from_stride` bytes apart.
  virtual void copy_rows(void* to, size_t to_stride, const void* from, size_t from_stride, size_t row_bytes, size_t count) = 0;
  virtual void clear(void* to, size_t bytes) = 0;                          // zeros
  virtual void make_random(void* to, const RandomWeights& weights) = 0;    // the same numbers as on the host
  virtual void reorder(const TensorView& from, const TensorView& to) = 0;  // between the layouts plain and nhwc
  virtual void synchronize() = 0;                                          // waits for all work; throws when some of it failed
  virtual void synchronize(DeviceEvent& until) = 0;                        // likewise for the work before that point

  virtual std::shared_ptr<DeviceEvent> record(bool timed = false) = 0;
  virtual void wait_for(DeviceEvent& event) = 0;  // the stream's later work waits; the host does not
  // Copies from another device's memory (or this one's) on a stream of its own, after `ready`; the event is the copy's end.
  virtual std::shared_ptr<DeviceEvent> copy_from_peer(void* to, const void* from, int from_device, size_t bytes, DeviceEvent& ready) = 0;

  // Between the two, work on the stream is recorded instead of done. Only capturable kernels may run there.
  virtual void begin_capture() = 0;
  virtual std::shared_ptr<CapturedWork> end_capture() = 0;
  virtual void abandon_capture() noexcept = 0;
  virtual void launch(CapturedWork& work) = 0;

  // The constant in device memory, in the form of that name: made once by `fill` (which is given `bytes` of device memory and puts its
  // work on the stream) and shared by all who hold it. "" is the tensor's own bytes.
  std::shared_ptr<void> constant(const TensorPtr& tensor, const std::string& form, size_t bytes, const std::function<void(void*)>& fill);
  std::shared_ptr<void> constant(const TensorPtr& tensor);
  bool holds(const TensorPtr& tensor) const;  // whether its own bytes are here already
  int64_t constant_bytes() const { return constant_bytes_; }
  // The tensor's own bytes in device memory: uploaded, or made. What the device can't make comes from the host piece by piece.
  void put(void* to, const Tensor& tensor);

 private:
  void put_side_by_side(void* to, const Tensor& tensor, const JoinedTensors& joined);
  void put_in_pieces(void* to, const Tensor& tensor);
  struct Constant {
    std::weak_ptr<const void> tensor;
    std::weak_ptr<void> memory;
  };
  std::map<std::pair<const void*, std::string>, Constant> constants_;
  int64_t constant_bytes_ = 0;
};

// Whether the node looks at the dimensions of its input alone: it runs on the host wherever the input is, and misses no kernel.
bool reads_only_dims(const Node& node);
// Why the operator of this node (or fused step) has no kernel on `context.device`; "" when it has one.
std::string why_unsupported_on_device(const CompileContext& context);
// The same of the device whose kernels these are; it need not be there.
std::string why_unsupported(const KernelRegistry& kernels, const CompileContext& context);

}  // namespace fretsaw
