// Communication between the ranks of a group: point to point, and collectives. One interface over threads, MPI and NCCL.
//
// | here           | MPI                | NCCL              |
// | all_reduce     | MPI_Allreduce      | ncclAllReduce     |
// | all_gather     | MPI_Allgather      | ncclAllGather     |
// | reduce_scatter | MPI_Reduce_scatter_block | ncclReduceScatter |
// | all_to_all     | MPI_Alltoall       | ncclSend/Recv in a group |
// | broadcast      | MPI_Bcast          | ncclBroadcast     |
#pragma once
#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "graph/types.h"
#include "kernels/tensor_view.h"

namespace fretsaw {

enum class Reduction : uint8_t { sum, max, min, product, mean };

// Completion of an asynchronous operation. Waiting throws Error (code device) when the group was aborted or the time-out ran out.
class Request {
 public:
  virtual ~Request() = default;
  virtual void wait() = 0;
  virtual bool done() = 0;
};
using RequestPtr = std::shared_ptr<Request>;

// A small message on the host: what a payload will be. Sent ahead of it when shapes are not known to both sides.
struct Header {
  DType dtype = DType::undefined;
  Dims dims;
  Memory memory = Memory::host;  // where the payload is
  bool operator==(const Header&) const = default;
};

// One of several tensors that are exchanged together.
struct Exchanged {
  const void* in = nullptr;
  void* out = nullptr;
  size_t bytes = 0;  // of `in`
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Messages between a pair of ranks with one tag arrive in the order they were sent. Buffers belong to the operation until it is done.
  virtual RequestPtr isend(std::span<const std::byte> data, int to, int tag) = 0;
  virtual RequestPtr irecv(std::span<std::byte> data, int from, int tag) = 0;
  // Host messages of any size below 64 KiB; sending does not wait for the receiver.
  virtual void send_header(const Header& header, int to, int tag) = 0;
  virtual Header recv_header(int from, int tag) = 0;
  // Takes the next header if it is already here, without waiting. False when it is not.
  virtual bool try_recv_header(Header& header, int from, int tag) = 0;

  // Every rank calls with the same sizes. `in` and `out` may be the same memory where they have one size.
  // Results are the same to the bit on every rank and from run to run: ranks are combined in the order 0, 1, 2, ...
  virtual void all_reduce(std::span<const std::byte> in, std::span<std::byte> out, DType dtype, Reduction reduction) = 0;
  virtual void all_gather(std::span<const std::byte> in, std::span<std::byte> out) = 0;  // out: size() blocks of `in`
  virtual void reduce_scatter(std::span<const std::byte> in, std::span<std::byte> out, DType dtype, Reduction reduction) = 0;
  virtual void all_to_all(std::span<const std::byte> in, std::span<std::byte> out) = 0;  // size() equal blocks each
  // What the calls above do, to each tensor, in one exchange.
  virtual void all_reduce_each(std::span<const Exchanged> each, DType dtype, Reduction reduction) = 0;
  virtual void reduce_scatter_each(std::span<const Exchanged> each, DType dtype, Reduction reduction) = 0;
  virtual void broadcast(std::span<std::byte> data, int root) = 0;
  virtual void barrier() = 0;

  // Ends every pending and later operation of every rank of the group with an Error that gives `reason`. The first reason stays.
  virtual void abort(const std::string& reason) = 0;
  virtual bool aborted() const = 0;
  // A communicator over the ranks that give the same colour, ordered by their rank here. Collective.
  virtual std::unique_ptr<Communicator> split(int colour) = 0;
};

// One communicator for each of `size` threads of this process. No operation waits longer than `timeout`.
std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size,
                                                                     std::chrono::milliseconds timeout = std::chrono::minutes(10));

}  // namespace fretsaw
