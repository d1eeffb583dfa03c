// Connects the memory that a group's GPUs exchange through.
#include "runtime/cuda/peer_collectives.h"

#include <algorithm>
#include <cstdlib>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/cuda/peer_collectives.h"

namespace fretsaw {
namespace {

// Each rank's own, in the order of ranks.
template <typename T>
std::vector<T> gathered(Communicator& group, const T& own) {
  std::vector<T> all(static_cast<size_t>(group.size()));
  group.all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  return all;
}

bool wanted(const Communicator& group) {
  const char* setting = std::getenv("FRETSAW_PEER_COLLECTIVES");
  return group.size() > 1 && group.size() <= cuda::kMostPeers && !(setting && std::string_view(setting) == "0");
}

class ConnectedMemory : public PeerCollectives {
 public:
  ConnectedMemory(Communicator& group, Device& device) : device_(device) {
    peers_.rank = group.rank(), peers_.ranks = group.size();
    const size_t bytes = cuda::peer_memory_bytes(peers_.ranks);
    memory_ = {device_.allocate(bytes), [this](void* p) { device_.release(p); }};
    device_.clear(memory_.get(), bytes);
    device_.synchronize();
    stop_ = {static_cast<uint32_t*>(device_.allocate_pinned(sizeof(uint32_t))), [this](uint32_t* p) { device_.release_pinned(p); }};
    *stop_ = 0;
    peers_.stop = stop_.get();
    const std::vector<void*> memory = gathered(group, memory_.get());  // also the meeting after which all of it holds zeros
    for (size_t r = 0; r < memory.size(); ++r) peers_.memory[r] = static_cast<char*>(memory[r]);
  }

  bool sum(const void* in, void* out, size_t bytes, DType dtype) override {
    if (cuda::takes_small_sum(peers_.ranks, bytes, dtype, in, out)) {
      cuda::run_small_sum(peers_, in, out, bytes, dtype, stream());
      return true;
    }
    const size_t piece = bytes / static_cast<size_t>(peers_.ranks);
    char* own = static_cast<char*>(out) + static_cast<size_t>(peers_.rank) * piece;
    return reduce_scatter(in, own, bytes, dtype) && all_gather(own, out, piece);  // which takes what the first one took
  }
  bool joins_norm(int64_t rows, int64_t n, DType dtype) const override { return cuda::takes_small_sum_norm(peers_.ranks, rows, n, dtype); }
  void sum_with_norm(const SumWithNorm& s) override {
    cuda::run_small_sum_norm(peers_, {s.rows, s.n, s.dtype, s.epsilon, s.in, s.residual, s.scale, s.sum, s.y}, stream());
  }
  bool reduce_scatter(const void* in, void* out, size_t bytes, DType dtype) override {
    if (!cuda::takes_reduce_scatter(peers_.ranks, bytes, dtype, in, out)) return false;
    cuda::run_reduce_scatter(peers_, in, out, bytes, dtype, stream());
    return true;
  }
  bool all_gather(const void* in, void* out, size_t bytes) override {
    if (!cuda::takes_all_gather(bytes, in, out)) return false;
    cuda::run_all_gather(peers_, in, out, bytes, stream());
    return true;
  }
  void abort() override { *static_cast<volatile uint32_t*>(stop_.get()) = 1; }

 private:
  cudaStream_t stream() const { return static_cast<cudaStream_t>(device_.stream()); }

  Device& device_;
  std::shared_ptr<void> memory_;
  std::shared_ptr<uint32_t> stop_;
  cuda::PeerGroup peers_;
};

}  // namespace

std::unique_ptr<PeerCollectives> make_peer_collectives(Communicator& group, Device& device) {
  if (!wanted(group)) return nullptr;
  const std::vector<int> reached = gathered(group, static_cast<int>(cuda::reach_peers(device.index(), gathered(group, device.index()))));
  if (std::find(reached.begin(), reached.end(), 0) != reached.end()) return nullptr;
  return std::make_unique<ConnectedMemory>(group, device);
}

}  // namespace fretsaw
