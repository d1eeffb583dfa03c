// Collectives among GPUs by NCCL, one communicator for each group of ranks; what our own kernels do through peer memory is theirs.
#include "runtime/cuda/nccl.h"

#include <cuda_runtime.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>

#include "graph/errors.h"
#include "runtime/cuda/peer_collectives.h"

namespace fretsaw {
namespace {

constexpr auto connection_time = std::chrono::seconds(60);
constexpr auto longest_call = std::chrono::seconds(1);  // that an abort waits for
constexpr const char* hint =
    "run with NCCL_DEBUG=INFO to see why; NCCL_P2P_DISABLE=1 avoids a broken link between the GPUs, --devices a GPU that does not answer";

bool failed(ncclResult_t status) {
  return status != ncclSuccess && status != ncclInProgress;
}

void check(ncclResult_t status, const char* call) {
  if (!failed(status)) return;
  throw Error(std::string(call) + " failed: " + ncclGetErrorString(status), hint, ErrorCode::device);
}

ncclRedOp_t operation_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
      return ncclSum;
    case Reduction::max:
      return ncclMax;
    case Reduction::min:
      return ncclMin;
    case Reduction::product:
      return ncclProd;
    case Reduction::mean:
      return ncclAvg;
  }
  return ncclSum;
}

// False for types that NCCL does not reduce.
bool find_type(DType dtype, ncclDataType_t& type) {
  switch (dtype) {
    case DType::float32:
      type = ncclFloat32;
      return true;
    case DType::float16:
      type = ncclFloat16;
      return true;
    case DType::bfloat16:
      type = ncclBfloat16;
      return true;
    case DType::float64:
      type = ncclFloat64;
      return true;
    case DType::int8:
      type = ncclInt8;
      return true;
    case DType::uint8:
      type = ncclUint8;
      return true;
    case DType::int32:
      type = ncclInt32;
      return true;
    case DType::uint32:
      type = ncclUint32;
      return true;
    case DType::int64:
      type = ncclInt64;
      return true;
    case DType::uint64:
      type = ncclUint64;
      return true;
    default:
      return false;
  }
}

class NcclCommunicator : public DeviceCommunicator {
 public:
  NcclCommunicator(Communicator& group, Device& device, bool beside) : group_(group), device_(device) {
    ncclUniqueId id{};
    if (group.rank() == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    group.broadcast(std::as_writable_bytes(std::span(&id, 1)), 0);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;  // so that nothing waits longer than we let it
    check(ncclCommInitRankConfig(&nccl_, group.size(), id, group.rank(), &config), "ncclCommInitRankConfig");
    const std::shared_ptr<void> numbers(device_.allocate(2 * sizeof(float)), [this](void* p) { device_.release(p); });
    try {
      finish("connecting the GPUs");
      try_out(numbers.get());
      if (!beside) peers_ = make_peer_collectives(group, device);
      if (peers_) try_out(numbers.get());
    } catch (...) {
      abort();  // before the memory goes, which waits for kernels that wait for other ranks
      throw;
    }
  }
  ~NcclCommunicator() override {
    if (!aborted_.exchange(true) && nccl_)
      ncclCommAbort(nccl_);  // all work has ended: nothing is lost, and nothing waits for ranks that are gone
  }

  bool capturable() const override { return true; }
  // NCCL clears up after an abort on a thread of its own, once the graphs that hold its kernels are gone. It frees device memory then,
  // which may wait for kernels of new communicators that wait for ranks that wait for it.
  bool can_rejoin() const override { return false; }
  void all_reduce(const void* in, void* out, size_t bytes, DType dtype, Reduction reduction) override {
    if (reduction == Reduction::sum && by_peers([&] { return peers_->sum(in, out, bytes, dtype); })) return;
    const auto [type, count] = elements(bytes, dtype);
    call("ncclAllReduce", [&] { return ncclAllReduce(in, out, count, type, operation_of(reduction), nccl_, stream()); });
  }
  bool joins_norm(int64_t rows, int64_t n, DType dtype) const override { return peers_ && peers_->joins_norm(rows, n, dtype); }
  void sum_with_norm(const SumWithNorm& sum) override {
    const bool done = by_peers([&] {
      peers_->sum_with_norm(sum);
      return true;
    });
    if (!done) DeviceCommunicator::sum_with_norm(sum);
  }
  void all_gather(const void* in, void* out, size_t bytes) override {
    if (by_peers([&] { return peers_->all_gather(in, out, bytes); })) return;
    call("ncclAllGather", [&] { return ncclAllGather(in, out, bytes, ncclUint8, nccl_, stream()); });
  }
  void reduce_scatter(const void* in, void* out, size_t bytes, DType dtype, Reduction reduction) override {
    if (reduction == Reduction::sum && by_peers([&] { return peers_->reduce_scatter(in, out, bytes, dtype); })) return;
    const auto [type, count] = elements(bytes, dtype);
    call("ncclReduceScatter", [&, type = type, count = count / ranks()] {
      return ncclReduceScatter(in, out, count, type, operation_of(reduction), nccl_, stream());
    });
  }
  void all_to_all(const void* in, void* out, size_t bytes) override {
    const size_t block = bytes / ranks();
    if (in == out) throw Error("all_to_all can't run in place on GPUs", "report this as a fault", ErrorCode::device);
    call_group("an all-to-all of ncclSend and ncclRecv", ranks(), [&](size_t r) {
      const int peer = static_cast<int>(r);
      const ncclResult_t status = ncclSend(static_cast<const std::byte*>(in) + r * block, block, ncclUint8, peer, nccl_, stream());
      if (failed(status)) return status;
      return ncclRecv(static_cast<std::byte*>(out) + r * block, block, ncclUint8, peer, nccl_, stream());
    });
  }
  void all_reduce_each(std::span<const Exchanged> each, DType dtype, Reduction reduction) override {
    if (each.size() == 1) return all_reduce(each[0].in, each[0].out, each[0].bytes, dtype, reduction);
    const ncclDataType_t type = type_of(dtype);
    call_group("a group of ncclAllReduce", each.size(), [&](size_t i) {
      const size_t count = each[i].bytes / bytes_of(dtype, 1);
      return ncclAllReduce(each[i].in, each[i].out, count, type, operation_of(reduction), nccl_, stream());
    });
  }
  void reduce_scatter_each(std::span<const Exchanged> each, DType dtype, Reduction reduction) override {
    if (each.size() == 1) return reduce_scatter(each[0].in, each[0].out, each[0].bytes, dtype, reduction);
    const ncclDataType_t type = type_of(dtype);
    call_group("a group of ncclReduceScatter", each.size(), [&](size_t i) {
      const size_t count = each[i].bytes / bytes_of(dtype, 1) / ranks();
      return ncclReduceScatter(each[i].in, each[i].out, count, type, operation_of(reduction), nccl_, stream());
    });
  }
  void broadcast(void* data, size_t bytes, int root) override {
    call("ncclBroadcast", [&] { return ncclBroadcast(data, data, bytes, ncclUint8, root, nccl_, stream()); });
  }
  // The GPUs' kernels that wait for other ranks end. A call of the rank's own thread that is under way ends first, so that the communicator
  // does not go from under it; one that does not end is what the abort is for. NCCL's own call may wait until the process's other
  // communicators of the group are aborted too, whose turn comes after this one's: so it gets a thread to wait in.
  void abort() override {
    if (aborted_.exchange(true)) return;
    if (peers_) peers_->abort();
    std::unique_lock lock(mutex_, std::defer_lock);
    (void)lock.try_lock_for(longest_call);
    if (nccl_) std::thread(ncclCommAbort, nccl_).detach();
  }

 private:
  size_t ranks() const { return static_cast<size_t>(group_.size()); }
  cudaStream_t stream() const { return static_cast<cudaStream_t>(device_.stream()); }
  static ncclDataType_t type_of(DType dtype) {
    ncclDataType_t type;
    if (!find_type(dtype, type)) {
      throw Error("tensors of type " + std::string(name_of(dtype)) + " can't be reduced between GPUs",
                  "partition the model without that axis", ErrorCode::device);
    }
    return type;
  }
  static std::pair<ncclDataType_t, size_t> elements(size_t bytes, DType dtype) { return {type_of(dtype), bytes / bytes_of(dtype, 1)}; }

  // Whether our own kernels do it.
  template <typename Call>
  bool by_peers(const Call& put_on_stream) {
    if (!peers_) return false;
    if (aborted_ || group_.aborted()) throw Error("the ranks were stopped", "", ErrorCode::device);
    return put_on_stream();
  }
  // Calls NCCL while the communicator is there. A call of a communicator that does not block may still be under way afterwards.
  template <typename Call>
  ncclResult_t guarded(const Call& call) {
    std::unique_lock lock(mutex_);
    if (aborted_ || group_.aborted()) throw Error("the ranks were stopped", "", ErrorCode::device);
    return call();
  }
  template <typename Call>
  void call(const char* name, const Call& put_on_stream) {
    const ncclResult_t status = guarded(put_on_stream);
    check(status, name);
    if (status == ncclInProgress) finish(name);
  }
  // Several calls of NCCL, put on the stream as one. `put_one` throws nothing.
  template <typename Call>
  void call_group(const char* name, size_t count, const Call& put_one) {
    call(name, [&] {
      ncclResult_t status = ncclGroupStart();
      if (failed(status)) return status;
      for (size_t i = 0; i < count && !failed(status); ++i) status = put_one(i);
      const ncclResult_t end = ncclGroupEnd();  // also where a call failed: the group must not stay open
      return failed(status) ? status : end;
    });
  }
  void finish(const char* what) {
    const auto end = std::chrono::steady_clock::now() + connection_time;
    ncclResult_t state = ncclInProgress;
    while (true) {
      check(guarded([&] { return ncclCommGetAsyncError(nccl_, &state); }), what);
      check(state, what);
      if (state == ncclSuccess) return;
      if (std::chrono::steady_clock::now() > end) throw Error(std::string(what) + " did not end within 60 s", hint, ErrorCode::device);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  // A tiny all-reduce: a broken set-up shows before the model is loaded, and the connections exist before anything is captured.
  void try_out(void* numbers) {
    const float ones[2] = {1, 1};
    device_.upload(numbers, ones, sizeof ones);
    all_reduce(numbers, numbers, sizeof ones, DType::float32, Reduction::sum);
    const auto done = device_.record();
    const auto end = std::chrono::steady_clock::now() + connection_time;
    while (!done->done()) {
      if (group_.aborted()) throw Error("the ranks were stopped", "", ErrorCode::device);
      if (std::chrono::steady_clock::now() > end)
        throw Error("a first exchange between the GPUs did not end within 60 s", hint, ErrorCode::device);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    float sums[2] = {};
    device_.download(sums, numbers, sizeof sums);
    if (sums[0] != static_cast<float>(ranks()) || sums[1] != sums[0])
      throw Error("a first exchange between the GPUs gave a wrong sum", hint, ErrorCode::device);
  }

  Communicator& group_;
  Device& device_;
  ncclComm_t nccl_ = nullptr;
  std::unique_ptr<PeerCollectives> peers_;  // null: NCCL does all
  std::atomic<bool> aborted_{false};
  std::timed_mutex mutex_;  // held during calls of NCCL
};

}  // namespace

bool built_with_nccl() {
  return true;
}

std::unique_ptr<DeviceCommunicator> make_nccl_communicator(Communicator& group, Device& device, bool beside) {
  return std::make_unique<NcclCommunicator>(group, device, beside);
}

}  // namespace fretsaw
