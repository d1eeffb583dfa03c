// Rendezvous of messages, barriers and aborts between the threads of a group.
#include "runtime/thread_group.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "graph/errors.h"

namespace fretsaw {
namespace {

// Tells the core that this thread only waits.
void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

void ThreadRequest::wait() {
  if (auto group = group_.lock()) group->wait(*this);
}
bool ThreadRequest::done() {
  auto group = group_.lock();
  return !group || group->done(*this);
}

void ThreadGroup::throw_aborted() const {
  throw Error("the ranks were stopped: " + reason_, "", ErrorCode::device);
}

std::shared_ptr<ThreadRequest> ThreadGroup::new_request(int rank) {
  auto& mine = requests_[rank];
  for (auto& request : mine) {
    bool finished = request->state_ == ThreadRequest::State::done || request->state_ == ThreadRequest::State::failed;
    if (request.use_count() == 1 && finished) return request;
  }
  mine.push_back(std::make_shared<ThreadRequest>());
  return mine.back();
}

RequestPtr ThreadGroup::start(bool is_send, const std::byte* from_bytes, std::byte* to_bytes, size_t size, int from, int to, int tag) {
  std::unique_lock lock(mutex_);
  if (aborted_) throw_aborted();
  auto request = new_request(is_send ? from : to);
  request->group_ = weak_from_this();
  request->state_ = ThreadRequest::State::pending;
  request->error_.clear();
  request->from_bytes_ = from_bytes;
  request->to_bytes_ = to_bytes;
  request->size_ = size;
  request->from_ = from, request->to_ = to, request->tag_ = tag;

  Channel& channel = channels_[{from, to, tag}];
  auto& partners = is_send ? channel.receives : channel.sends;
  if (partners.empty()) {
    (is_send ? channel.sends : channel.receives).push_back(request);
    return request;
  }
  auto partner = partners.front();
  partners.pop_front();
  if (is_send) {
    copy_pair(lock, *request, *partner);
  } else {
    copy_pair(lock, *partner, *request);
  }
  return request;
}

void ThreadGroup::copy_pair(std::unique_lock<std::mutex>& lock, ThreadRequest& send, ThreadRequest& receive) {
  using State = ThreadRequest::State;
  if (send.size_ != receive.size_) {
    send.error_ = receive.error_ = "rank " + std::to_string(send.from_) + " sent " + std::to_string(send.size_) + " bytes with tag " +
                                   std::to_string(send.tag_) + " where rank " + std::to_string(send.to_) + " expected " +
                                   std::to_string(receive.size_);
    send.state_ = receive.state_ = State::failed;
    changed_.notify_all();
    return;
  }
  send.state_ = receive.state_ = State::copying;
  lock.unlock();
  if (send.size_ > 0) std::memcpy(receive.to_bytes_, send.from_bytes_, send.size_);
  lock.lock();
  send.state_ = receive.state_ = State::done;
  changed_.notify_all();
}

// A buffer whose wait has given up must not be touched by a partner that comes later.
void ThreadGroup::forget(ThreadRequest& request) {
  Channel& channel = channels_[{request.from_, request.to_, request.tag_}];
  for (auto* queue : {&channel.sends, &channel.receives}) {
    std::erase_if(*queue, [&](const auto& held) { return held.get() == &request; });
  }
  request.state_ = ThreadRequest::State::failed;
}

void ThreadGroup::wait(ThreadRequest& request) {
  using State = ThreadRequest::State;
  std::unique_lock lock(mutex_);
  auto deadline = std::chrono::steady_clock::now() + timeout_;
  // A copy in progress is always waited for: the other thread is inside our buffer.
  auto ready = [&] {
    return request.state_ == State::done || request.state_ == State::failed || (aborted_ && request.state_ == State::pending);
  };
  if (!changed_.wait_until(lock, deadline, ready)) {
    if (request.state_ == State::copying) {
      changed_.wait(lock, ready);
    } else {
      forget(request);
      time_out(lock, "a message from rank " + std::to_string(request.from_) + " to rank " + std::to_string(request.to_) + " with tag " +
                         std::to_string(request.tag_));
    }
  }
  if (request.state_ == State::done) return;
  if (aborted_) throw_aborted();
  throw Error(request.error_, "both sides must agree on the size of a message", ErrorCode::device);
}

bool ThreadGroup::done(ThreadRequest& request) {
  std::unique_lock lock(mutex_);
  if (request.state_ == ThreadRequest::State::done) return true;
  if (request.state_ == ThreadRequest::State::failed) throw Error(request.error_, "", ErrorCode::device);
  if (aborted_ && request.state_ == ThreadRequest::State::pending) throw_aborted();
  return false;
}

void ThreadGroup::put_header(const Header& header, int from, int to, int tag) {
  std::unique_lock lock(mutex_);
  if (aborted_) throw_aborted();
  Channel& channel = channels_[{from, to, tag}];
  if (channel.spare.empty()) channel.spare.emplace_back();
  channel.spare.front() = header;
  channel.headers.splice(channel.headers.end(), channel.spare, channel.spare.begin());
  changed_.notify_all();
}

bool ThreadGroup::take_header(Header& header, int from, int to, int tag, bool wait) {
  std::unique_lock lock(mutex_);
  Channel& channel = channels_[{from, to, tag}];
  auto deadline = std::chrono::steady_clock::now() + timeout_;
  auto ready = [&] { return aborted_ || !channel.headers.empty(); };
  if (!wait && !ready()) return false;
  if (!changed_.wait_until(lock, deadline, ready)) {
    time_out(lock, "a header from rank " + std::to_string(from) + " to rank " + std::to_string(to) + " with tag " + std::to_string(tag));
  }
  if (aborted_) throw_aborted();
  header = channel.headers.front();
  channel.spare.splice(channel.spare.end(), channel.headers, channel.headers.begin());
  return true;
}

std::string ThreadGroup::missing_ranks(uint64_t generation) const {
  std::string missing;
  for (int r = 0; r < size_; ++r) {
    if (arrived_[r] != generation + 1) missing += (missing.empty() ? "" : ", ") + std::to_string(r);
  }
  return missing;
}

// True once the group is past this generation; false when that takes too long, or never will.
bool ThreadGroup::spin_past(uint64_t generation) const {
  constexpr int looks = 64;
  if (spin_.count() == 0) return false;
  const auto deadline = std::chrono::steady_clock::now() + spin_;
  do {
    for (int i = 0; i < looks; ++i) {
      if (generation_.load(std::memory_order_acquire) != generation) return true;
      pause();
    }
    std::this_thread::yield();  // on a busy machine the rank that is waited for may need this core
  } while (!aborted_ && std::chrono::steady_clock::now() < deadline);
  return false;
}

void ThreadGroup::barrier(int rank, const char* operation) {
  const uint64_t mine = generation_.load(std::memory_order_acquire);  // stays until this rank has arrived
  if (aborted_) {
    std::unique_lock lock(mutex_);
    throw_aborted();
  }
  arrived_[rank] = mine + 1;
  if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    waiting_.store(0, std::memory_order_relaxed);
    generation_ = mine + 1;
    // A rank counts itself before it looks at the generation for the last time, so that either it sees the new one or we see it.
    if (sleeping_ > 0) {
      std::unique_lock lock(mutex_);
      changed_.notify_all();
    }
    return;
  }
  if (spin_past(mine)) return;
  std::unique_lock lock(mutex_);
  ++sleeping_;
  bool in_time = changed_.wait_until(lock, std::chrono::steady_clock::now() + timeout_, [&] { return aborted_ || generation_ != mine; });
  --sleeping_;
  if (generation_ != mine) return;
  if (!in_time) time_out(lock, std::string(operation) + ", to which rank " + missing_ranks(mine) + " did not come");
  throw_aborted();
}

void ThreadGroup::collect(int rank, const Post& post) {
  posts_[rank] = post;  // each rank writes its own; the barrier publishes it
  barrier(rank, post.operation);
  for (const Post& other : posts_) {
    bool same = std::strcmp(other.operation, post.operation) == 0 && other.bytes == post.bytes &&
                (post.detail_differs || other.detail == post.detail);
    if (!same) {
      throw Error(std::string("ranks disagree: one calls ") + post.operation + " with " + std::to_string(post.bytes) + " bytes, another " +
                      other.operation + " with " + std::to_string(other.bytes) + " bytes",
                  "every rank of a group must make the same calls", ErrorCode::device);
    }
  }
}

void ThreadGroup::time_out(std::unique_lock<std::mutex>& lock, const std::string& what) {
  auto seconds = std::chrono::duration<double>(timeout_).count();
  std::string text = std::to_string(seconds);
  text.resize(std::max<size_t>(text.find('.') + 2, 3));
  std::string reason = "waited " + text + " s for " + what;
  lock.unlock();
  abort(reason);
  throw Error(reason, "look at what that rank does, or raise the time-out", ErrorCode::device);
}

void ThreadGroup::abort(const std::string& reason) {
  std::vector<std::shared_ptr<ThreadGroup>> children;
  {
    std::unique_lock lock(mutex_);
    if (aborted_) return;
    reason_ = reason;
    aborted_ = true;
    for (auto& [key, channel] : channels_) channel.sends.clear(), channel.receives.clear();
    for (auto& child : children_) {
      if (auto held = child.lock()) children.push_back(held);
    }
    changed_.notify_all();
  }
  for (auto& child : children) child->abort(reason);
}

std::shared_ptr<ThreadGroup> ThreadGroup::make_child(int size) {
  auto child = std::make_shared<ThreadGroup>(size, timeout_, spin_);
  std::unique_lock lock(mutex_);
  std::erase_if(children_, [](const auto& held) { return held.expired(); });
  children_.push_back(child);
  return child;
}

}  // namespace fretsaw
