// Collectives of a group of GPUs through each other's memory (kernels/cuda/peer_collectives.h).
#pragma once
#include <memory>

#include "kernels/device.h"
#include "runtime/device_communicator.h"

namespace fretsaw {

class PeerCollectives {
 public:
  virtual ~PeerCollectives() = default;
  // Each puts its work on the device's stream, or returns false where it does not do such sizes, types or addresses: on every rank of the
  // group the same, if their tensors are equally aligned. Bytes are those of `in`.
  virtual bool sum(const void* in, void* out, size_t bytes, DType dtype) = 0;
  virtual bool joins_norm(int64_t rows, int64_t n, DType dtype) const = 0;
  virtual void sum_with_norm(const SumWithNorm& sum) = 0;  // where joins_norm
  virtual bool reduce_scatter(const void* in, void* out, size_t bytes, DType dtype) = 0;
  virtual bool all_gather(const void* in, void* out, size_t bytes) = 0;
  virtual void abort() = 0;  // what waits for other ranks ends; from any thread
};

// Collective over `group`, each rank with its own device; both must outlive it. Null on every rank where one of the devices does not reach
// all others, or FRETSAW_PEER_COLLECTIVES=0 is set.
std::unique_ptr<PeerCollectives> make_peer_collectives(Communicator& group, Device& device);

}  // namespace fretsaw
