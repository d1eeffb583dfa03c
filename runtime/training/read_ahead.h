// Batches read ahead: a thread reads the next one while a step runs with the one before.
#pragma once
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "runtime/training/data.h"

namespace fretsaw {

// While it lives, `source` is the thread's alone.
class ReadAhead {
 public:
  struct Read {
    Batch batch;
    DataPosition after;  // where the source's next batch begins
  };
  // `count` batches of `samples` in all; see DataSource::next. `prepare` is called on the thread with each of them.
  ReadAhead(DataSource& source, int64_t samples, int64_t count, std::function<void(Batch&)> prepare);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // Waits for the next batch, of which there is one more. Throws what reading it threw.
  Read next();

 private:
  void read(int64_t samples, int64_t count);

  DataSource& source_;
  std::function<void(Batch&)> prepare_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Read> read_;  // not taken yet
  std::exception_ptr failure_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace fretsaw
