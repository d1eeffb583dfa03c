// The communicator over threads of one process: messages by rendezvous, collectives through memory that all ranks see.
#include <omp.h>

#include <algorithm>
#include <cstring>

#include "graph/errors.h"
#include "kernels/cpu/parallel.h"
#include "runtime/reduce.h"
#include "runtime/thread_group.h"

namespace fretsaw {
namespace {

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadGroup> group, int rank) : group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }

  RequestPtr isend(std::span<const std::byte> data, int to, int tag) override {
    check_rank(to);
    return group_->start(true, data.data(), nullptr, data.size(), rank_, to, tag);
  }
  RequestPtr irecv(std::span<std::byte> data, int from, int tag) override {
    check_rank(from);
    return group_->start(false, nullptr, data.data(), data.size(), from, rank_, tag);
  }
  void send_header(const Header& header, int to, int tag) override {
    check_rank(to);
    group_->put_header(header, rank_, to, tag);
  }
  Header recv_header(int from, int tag) override {
    check_rank(from);
    Header header;
    group_->take_header(header, from, rank_, tag, /*wait=*/true);
    return header;
  }
  bool try_recv_header(Header& header, int from, int tag) override {
    check_rank(from);
    return group_->take_header(header, from, rank_, tag, /*wait=*/false);
  }

  void all_reduce(std::span<const std::byte> in, std::span<std::byte> out, DType dtype, Reduction reduction) override;
  void all_gather(std::span<const std::byte> in, std::span<std::byte> out) override;
  void reduce_scatter(std::span<const std::byte> in, std::span<std::byte> out, DType dtype, Reduction reduction) override;
  void all_to_all(std::span<const std::byte> in, std::span<std::byte> out) override;
  void all_reduce_each(std::span<const Exchanged> each, DType dtype, Reduction reduction) override;
  void reduce_scatter_each(std::span<const Exchanged> each, DType dtype, Reduction reduction) override;
  void broadcast(std::span<std::byte> data, int root) override;
  void barrier() override { group_->barrier(rank_, "barrier"); }
  void abort(const std::string& reason) override { group_->abort(reason); }
  bool aborted() const override { return group_->aborted(); }
  std::unique_ptr<Communicator> split(int colour) override;

 private:
  void check_rank(int other) const {
    if (other < 0 || other >= size()) {
      throw Error("there is no rank " + std::to_string(other) + " in a group of " + std::to_string(size()), "", ErrorCode::device);
    }
  }
  static void check_size(bool ok, const char* operation) {
    if (!ok) throw Error(std::string(operation) + ": the buffers' sizes don't fit together", "", ErrorCode::device);
  }
  // What the ranks bring to a reduction of one tensor, and where they want its result.
  struct Places {
    std::vector<const std::byte*> in;
    std::vector<std::byte*> out;
  };
  // Of this call; the lists keep their room from call to call.
  const Places& places() {
    places_.in.clear(), places_.out.clear();
    for (int r = 0; r < size(); ++r) places_.in.push_back(group_->post(r).in), places_.out.push_back(group_->post(r).out);
    return places_;
  }
  const Places& places_of(size_t i);
  void collect_each(const char* name, std::span<const Exchanged> each, DType dtype, Reduction reduction);
  void share_reduced(const Places& places, size_t bytes, DType dtype, Reduction reduction) const;
  void share_reduced(const Places& places, size_t first, size_t last, DType dtype, Reduction reduction) const;
  // Scratch of `bytes` that all ranks see; between two barriers.
  std::byte* group_scratch(size_t bytes, const char* operation) {
    if (rank_ == 0 && group_->scratch.size() < bytes) group_->scratch.resize(bytes);
    group_->barrier(rank_, operation);
    return group_->scratch.data();
  }

  std::shared_ptr<ThreadGroup> group_;
  int rank_;
  Places places_;
};

constexpr int64_t elements_a_thread = 1 << 16;  // a reduction of fewer is not worth another thread of the rank
constexpr size_t share_grain = 64;              // elements; ranks' shares begin on cache lines of their own

int64_t detail_of(DType dtype, Reduction reduction) {
  return static_cast<int64_t>(dtype) * 16 + static_cast<int64_t>(reduction);
}

// Reduces elements [first, last) of all ranks into the result of each. In pieces, which are still in the cache when they are copied; a
// piece of every input is read before any result is written, so that ranks may reduce in place.
void ThreadCommunicator::share_reduced(const Places& places, size_t first, size_t last, DType dtype, Reduction reduction) const {
  constexpr size_t piece = 4096;
  const size_t element_bytes = bytes_of(dtype, 1);
  std::byte* own = places.out[static_cast<size_t>(rank_)];
  parallel_for(static_cast<int64_t>(last - first), elements_a_thread, omp_get_max_threads(), [&](int64_t begin, int64_t end) {
    for (size_t at = first + static_cast<size_t>(begin); at < first + static_cast<size_t>(end); at += piece) {
      const size_t count = std::min(piece, first + static_cast<size_t>(end) - at);
      std::byte* made = own + at * element_bytes;
      reduce_parts(places.in, made, at, count, dtype, reduction);
      for (std::byte* out : places.out) {
        if (out != own) std::memcpy(out + at * element_bytes, made, count * element_bytes);
      }
    }
  });
}

// Each rank reduces its share of the elements for all.
void ThreadCommunicator::share_reduced(const Places& places, size_t bytes, DType dtype, Reduction reduction) const {
  const size_t element_bytes = bytes_of(dtype, 1);
  const size_t count = element_bytes ? bytes / element_bytes : 0;
  auto border = [&](int rank) {
    return rank == size() ? count : count * static_cast<size_t>(rank) / static_cast<size_t>(size()) / share_grain * share_grain;
  };
  share_reduced(places, border(rank_), border(rank_ + 1), dtype, reduction);
}

void ThreadCommunicator::all_reduce(std::span<const std::byte> in, std::span<std::byte> out, DType dtype, Reduction reduction) {
  const char* name = "all_reduce";
  check_size(in.size() == out.size(), name);
  group_->collect(rank_,
                  {.operation = name, .in = in.data(), .out = out.data(), .bytes = in.size(), .detail = detail_of(dtype, reduction)});
  share_reduced(places(), in.size(), dtype, reduction);
  group_->barrier(rank_, name);
}

// The tensors' sizes go into what all ranks must agree on.
void ThreadCommunicator::collect_each(const char* name, std::span<const Exchanged> each, DType dtype, Reduction reduction) {
  auto detail = static_cast<uint64_t>(detail_of(dtype, reduction));
  size_t bytes = 0;
  for (const Exchanged& e : each) detail = (detail ^ e.bytes) * 0x100000001b3u, bytes += e.bytes;
  group_->lists[static_cast<size_t>(rank_)].assign(each.begin(), each.end());
  group_->collect(rank_, {.operation = name, .bytes = bytes, .detail = static_cast<int64_t>(detail)});
}
const ThreadCommunicator::Places& ThreadCommunicator::places_of(size_t i) {
  places_.in.clear(), places_.out.clear();
  for (int r = 0; r < size(); ++r) {
    const Exchanged& theirs = group_->lists[static_cast<size_t>(r)][i];
    places_.in.push_back(static_cast<const std::byte*>(theirs.in)), places_.out.push_back(static_cast<std::byte*>(theirs.out));
  }
  return places_;
}

void ThreadCommunicator::all_reduce_each(std::span<const Exchanged> each, DType dtype, Reduction reduction) {
  const char* name = "all_reduce_each";
  collect_each(name, each, dtype, reduction);
  for (size_t i = 0; i < each.size(); ++i) share_reduced(places_of(i), each[i].bytes, dtype, reduction);
  group_->barrier(rank_, name);
}

void ThreadCommunicator::reduce_scatter_each(std::span<const Exchanged> each, DType dtype, Reduction reduction) {
  const char* name = "reduce_scatter_each";
  collect_each(name, each, dtype, reduction);
  const size_t element_bytes = std::max<size_t>(bytes_of(dtype, 1), 1), ranks = static_cast<size_t>(size());
  for (size_t i = 0; i < each.size(); ++i) {
    check_size(each[i].bytes % (ranks * element_bytes) == 0, name);
    const size_t count = each[i].bytes / ranks / element_bytes;
    reduce_parts(places_of(i).in, static_cast<std::byte*>(each[i].out), count * static_cast<size_t>(rank_), count, dtype, reduction);
  }
  group_->barrier(rank_, name);
}

void ThreadCommunicator::all_gather(std::span<const std::byte> in, std::span<std::byte> out) {
  const char* name = "all_gather";
  check_size(out.size() == in.size() * size(), name);
  group_->collect(rank_, {.operation = name, .in = in.data(), .bytes = in.size()});
  for (int r = 0; r < size(); ++r) {
    std::byte* to = out.data() + r * in.size();
    if (!in.empty() && to != group_->post(r).in) std::memcpy(to, group_->post(r).in, in.size());
  }
  group_->barrier(rank_, name);
}

void ThreadCommunicator::reduce_scatter(std::span<const std::byte> in, std::span<std::byte> out, DType dtype, Reduction reduction) {
  const char* name = "reduce_scatter";
  check_size(in.size() == out.size() * size(), name);
  group_->collect(rank_, {.operation = name, .in = in.data(), .bytes = in.size(), .detail = detail_of(dtype, reduction)});
  size_t element_bytes = bytes_of(dtype, 1);
  size_t count = element_bytes ? out.size() / element_bytes : 0;
  reduce_parts(places().in, out.data(), count * rank_, count, dtype, reduction);
  group_->barrier(rank_, name);
}

// Through scratch [to][from][block] where a rank's `in` and `out` are the same memory.
void ThreadCommunicator::all_to_all(std::span<const std::byte> in, std::span<std::byte> out) {
  const char* name = "all_to_all";
  check_size(in.size() == out.size() && in.size() % size() == 0, name);
  group_->collect(rank_, {.operation = name, .in = in.data(), .out = out.data(), .bytes = in.size()});
  const size_t block = in.size() / size();
  if (block == 0) return group_->barrier(rank_, name);
  bool in_place = false;
  for (int r = 0; r < size(); ++r) in_place |= group_->post(r).in == group_->post(r).out;
  if (!in_place) {
    for (int r = 0; r < size(); ++r) std::memcpy(out.data() + r * block, group_->post(r).in + rank_ * block, block);
  } else {
    std::byte* whole = group_scratch(in.size() * size(), name);
    for (int to = 0; to < size(); ++to) std::memcpy(whole + to * in.size() + rank_ * block, in.data() + to * block, block);
    group_->barrier(rank_, name);
    std::memcpy(out.data(), whole + rank_ * in.size(), out.size());
  }
  group_->barrier(rank_, name);
}

void ThreadCommunicator::broadcast(std::span<std::byte> data, int root) {
  const char* name = "broadcast";
  check_rank(root);
  group_->collect(rank_, {.operation = name, .in = data.data(), .bytes = data.size(), .detail = root});
  if (rank_ != root && !data.empty()) std::memcpy(data.data(), group_->post(root).in, data.size());
  group_->barrier(rank_, name);
}

std::unique_ptr<Communicator> ThreadCommunicator::split(int colour) {
  const char* name = "split";
  group_->collect(rank_, {.operation = name, .detail = colour, .detail_differs = true});
  std::vector<int> members;
  for (int r = 0; r < size(); ++r) {
    if (group_->post(r).detail == colour) members.push_back(r);
  }
  if (rank_ == 0) group_->made.resize(size());
  group_->barrier(rank_, name);
  if (members.front() == rank_) {  // the lowest rank of a colour makes its group
    auto child = group_->make_child(static_cast<int>(members.size()));
    for (int r : members) group_->made[r] = child;
  }
  group_->barrier(rank_, name);
  std::shared_ptr<ThreadGroup> mine = std::move(group_->made[rank_]);
  int place = 0;
  while (members[place] != rank_) ++place;
  group_->barrier(rank_, name);
  return std::make_unique<ThreadCommunicator>(mine, place);
}

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size, std::chrono::milliseconds timeout) {
  // Ranks that outnumber the cores would keep each other from running.
  const auto spin = std::chrono::microseconds(size <= omp_get_num_procs() ? 50 : 0);
  auto group = std::make_shared<ThreadGroup>(size, timeout, spin);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(std::make_unique<ThreadCommunicator>(group, r));
  return ranks;
}

}  // namespace fretsaw
