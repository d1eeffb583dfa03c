// A thread that reads batches.
#include "runtime/training/read_ahead.h"

#include <omp.h>

#include <algorithm>
#include <utility>

namespace fretsaw {
namespace {

constexpr int kThreads = 4;  // that copy to devices beside the ranks' own

}  // namespace

ReadAhead::ReadAhead(DataSource& source, int64_t samples, int64_t count, std::function<void(Batch&)> prepare)
    : source_(source), prepare_(std::move(prepare)), thread_([this, samples, count] { read(samples, count); }) {}

ReadAhead::~ReadAhead() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void ReadAhead::read(int64_t samples, int64_t count) {
  omp_set_num_threads(std::min(kThreads, omp_get_num_procs()));
  for (int64_t i = 0; i < count; ++i) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stop_ || !read_; });
    if (stop_) return;
    lock.unlock();
    Read read;
    std::exception_ptr failure;
    try {
      read.batch = source_.next(samples);
      read.after = source_.position();
      prepare_(read.batch);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    if (failure)
      failure_ = failure;
    else
      read_ = std::move(read);
    changed_.notify_all();
    if (failure) return;
  }
}

ReadAhead::Read ReadAhead::next() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return read_ || failure_; });
  if (!read_) std::rethrow_exception(failure_);
  Read read = std::move(*read_);
  read_.reset();
  changed_.notify_all();
  return read;
}

}  // namespace fretsaw
