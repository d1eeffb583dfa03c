// Collectives among the devices of a group of ranks: put on each rank's stream, over device memory.
//
// Every rank of the group calls with the same sizes, from its own thread. What the ranks exchange is as in runtime/communicator.h; the
// order in which a reduction adds is the implementation's, and the same on every rank and in every run.
#pragma once
#include <cstddef>
#include <memory>

#include "kernels/device.h"
#include "runtime/communicator.h"

namespace fretsaw {

// RMSNormalization of the ranks' sum and a residual:
//   sum = the sum of all ranks' `in` + residual, y = sum / sqrt(mean of a row's squares + epsilon) * scale
struct SumWithNorm {
  int64_t rows = 0, n = 0;
  DType dtype = DType::float32;
  float epsilon = 0;
  const void *in = nullptr, *residual = nullptr;  // [rows, n]
  const void* scale = nullptr;                    // [n], a constant
  void *sum = nullptr, *y = nullptr;              // [rows, n]; `sum` is null where nobody asks for it. Each may be `in`
};

class DeviceCommunicator {
 public:
  virtual ~DeviceCommunicator() = default;
  // Whether calls only put work on the stream, so that they can be captured.
  virtual bool capturable() const = 0;
  // `in` and `out` may be the same memory where they have one size. Bytes are those of `in`.
  virtual void all_reduce(const void* in, void* out, size_t bytes, DType dtype, Reduction reduction) = 0;
  // Whether `sum_with_norm` does such rows in one kernel, on every rank alike. It does what an all-reduce and the two steps after it would.
  virtual bool joins_norm(int64_t /*rows*/, int64_t /*n*/, DType /*dtype*/) const { return false; }
  virtual void sum_with_norm(const SumWithNorm& sum);
  virtual void all_gather(const void* in, void* out, size_t bytes) = 0;
  virtual void reduce_scatter(const void* in, void* out, size_t bytes, DType dtype, Reduction reduction) = 0;
  virtual void all_to_all(const void* in, void* out, size_t bytes) = 0;
  // What the calls above do, to each tensor; one after the other where a communicator has nothing better.
  virtual void all_reduce_each(std::span<const Exchanged> each, DType dtype, Reduction reduction);
  virtual void reduce_scatter_each(std::span<const Exchanged> each, DType dtype, Reduction reduction);
  virtual void broadcast(void* data, size_t bytes, int root) = 0;
  // Ends pending and later calls of this rank with an Error; called from any thread.
  virtual void abort() = 0;
  // Whether the ranks can get new ones in the same process after an abort.
  virtual bool can_rejoin() const { return true; }
};

// Through the host: each rank downloads its part, the ranks of `host` exchange, each uploads the result. It waits, so it can't be captured;
// several ranks may share a device. `host` and `device` must outlive it.
std::unique_ptr<DeviceCommunicator> make_staged_communicator(Communicator& host, Device& device);

}  // namespace fretsaw
