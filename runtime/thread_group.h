// What the ranks of a thread communicator share: message queues, a barrier, the collectives' posts and the abort flag.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "runtime/communicator.h"

namespace fretsaw {

class ThreadGroup;

// One side of a message. A send and a receive that match are copied by whichever side came last, outside the lock.
class ThreadRequest : public Request {
 public:
  enum class State : uint8_t { pending, copying, done, failed };

  void wait() override;
  bool done() override;

 private:
  friend class ThreadGroup;
  std::weak_ptr<ThreadGroup> group_;  // weak: the group keeps its requests to use them again
  State state_ = State::done;         // guarded by the group's mutex, like the rest
  std::string error_;
  const std::byte* from_bytes_ = nullptr;
  std::byte* to_bytes_ = nullptr;
  size_t size_ = 0;
  int from_ = 0, to_ = 0, tag_ = 0;
};

class ThreadGroup : public std::enable_shared_from_this<ThreadGroup> {
 public:
  // `spin`: how long a rank looks for the others before it sleeps, as waking a thread takes longer than most collectives.
  ThreadGroup(int size, std::chrono::milliseconds timeout, std::chrono::microseconds spin)
      : lists(size), timeout_(timeout), spin_(spin), posts_(size), requests_(size), arrived_(size), size_(size) {}

  int size() const { return size_; }
  RequestPtr start(bool is_send, const std::byte* from_bytes, std::byte* to_bytes, size_t size, int from, int to, int tag);
  void wait(ThreadRequest& request);
  bool done(ThreadRequest& request);
  void put_header(const Header& header, int from, int to, int tag);
  bool take_header(Header& header, int from, int to, int tag, bool wait);

  // What each rank brings to a collective. `collect` publishes it and returns when all ranks have; the posts stay until the next.
  struct Post {
    const char* operation = "";
    const std::byte* in = nullptr;
    std::byte* out = nullptr;
    size_t bytes = 0;    // must be the same on all ranks
    int64_t detail = 0;  // root, type and reduction: must be the same too (colours of a split: may differ)
    bool detail_differs = false;
  };
  void collect(int rank, const Post& post);
  const Post& post(int rank) const { return posts_[rank]; }
  void barrier(int rank, const char* operation);
  // By rank: what it brings to a collective of several tensors. The list stays until that rank's next one, also where the rank gives up.
  std::vector<std::vector<Exchanged>> lists;
  // Scratch of the group for one collective, made by rank 0 between two barriers.
  std::vector<std::byte> scratch;
  std::vector<std::shared_ptr<ThreadGroup>> made;  // by rank: the group a split gives it

  void abort(const std::string& reason);
  bool aborted() const { return aborted_; }
  // A group of some of these ranks, which is aborted with this one.
  std::shared_ptr<ThreadGroup> make_child(int size);

 private:
  using Key = std::tuple<int, int, int>;  // from, to, tag
  struct Channel {
    std::deque<std::shared_ptr<ThreadRequest>> sends, receives;
    std::list<Header> headers, spare;  // spare: nodes to use again, so that a warm channel allocates nothing
  };
  std::shared_ptr<ThreadRequest> new_request(int rank);
  void copy_pair(std::unique_lock<std::mutex>& lock, ThreadRequest& send, ThreadRequest& receive);
  void forget(ThreadRequest& request);
  [[noreturn]] void throw_aborted() const;
  [[noreturn]] void time_out(std::unique_lock<std::mutex>& lock, const std::string& what);
  bool spin_past(uint64_t generation) const;
  std::string missing_ranks(uint64_t generation) const;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  const std::chrono::milliseconds timeout_;
  const std::chrono::microseconds spin_;
  std::atomic<bool> aborted_{false};  // set under the mutex, after the reason
  std::string reason_;
  std::map<Key, Channel> channels_;
  std::vector<Post> posts_;
  std::vector<std::vector<std::shared_ptr<ThreadRequest>>> requests_;  // by rank, used again when nobody else holds them
  std::vector<std::weak_ptr<ThreadGroup>> children_;
  // The barrier. The last rank to arrive raises the generation; those that have waited long enough sleep until it tells them.
  std::vector<std::atomic<uint64_t>> arrived_;  // by rank: the generation that follows its last arrival, for messages
  alignas(64) std::atomic<int> waiting_{0};
  std::atomic<int> sleeping_{0};
  alignas(64) std::atomic<uint64_t> generation_{0};  // apart from what arriving ranks write
  const int size_;
};

}  // namespace fretsaw
