// Checkpoints that are written while training goes on.
#include "runtime/training/background_checkpoints.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "graph/errors.h"

namespace fretsaw {
namespace {

// Rows [first, last) along the first axis.
CheckpointPiece rows_of(const CheckpointPiece& whole, int64_t first, int64_t last) {
  CheckpointPiece rows = whole;
  rows.start[0] = first, rows.shape[0] = last - first;
  const size_t row_bytes = bytes_of(whole.dtype, rows.shape, Layout::plain) / static_cast<size_t>(last - first);
  rows.data = static_cast<const std::byte*>(whole.data) + static_cast<size_t>(first) * row_bytes;
  return rows;
}

// How many of `rows` rows end before the border at byte `border`, when they begin at byte `at`; at least what `done` are.
int64_t rows_before(size_t border, size_t at, size_t bytes, int64_t rows, int64_t done) {
  if (border >= at + bytes) return rows;
  const double share = static_cast<double>(border - at) / static_cast<double>(bytes);
  return std::clamp(static_cast<int64_t>(share * static_cast<double>(rows) + 0.5), done, rows);
}

}  // namespace

std::vector<std::vector<CheckpointPiece>> divide_tensors(const std::map<std::string, RuntimeValue>& tensors, int writers) {
  const auto count = static_cast<size_t>(std::max(1, writers));
  size_t total = 0, at = 0, writer = 0;
  for (const auto& [name, value] : tensors) total += value.tensor.bytes();
  std::vector<std::vector<CheckpointPiece>> shares(count);
  const auto border = [&](size_t w) { return w + 1 == count ? total : total / count * (w + 1); };
  for (const auto& [name, value] : tensors) {
    const CheckpointPiece whole = whole_piece(name, value.tensor);
    const size_t bytes = value.tensor.bytes();
    while (writer + 1 < count && border(writer) <= at) ++writer;
    const int64_t rows = whole.shape.empty() ? 1 : whole.shape[0];
    if (rows < 2 || bytes == 0 || border(writer) >= at + bytes) {
      shares[writer].push_back(whole);
    } else {
      for (int64_t done = 0; done < rows; ++writer) {
        const int64_t until = writer + 1 == count ? rows : rows_before(border(writer), at, bytes, rows, done);
        if (until > done) shares[writer].push_back(rows_of(whole, done, until));
        done = until;
        if (done == rows) break;
      }
    }
    at += bytes;
  }
  return shares;
}

BackgroundCheckpoints::BackgroundCheckpoints(std::string root, int writers, int keep)
    : root_(std::move(root)), writers_(std::max(1, writers)), keep_(keep) {}

BackgroundCheckpoints::~BackgroundCheckpoints() {
  if (thread_.joinable()) thread_.join();
}

void BackgroundCheckpoints::write(const CheckpointState& state, const std::map<std::string, RuntimeValue>& tensors) const {
  CheckpointWriter writer(root_, state);
  const std::vector<std::vector<CheckpointPiece>> shares = divide_tensors(tensors, writers_);
  std::mutex mutex;
  std::exception_ptr failure;
  std::vector<std::thread> threads;
  for (size_t r = 0; r < shares.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        writer.write("rank" + std::to_string(r), shares[r]);
      } catch (...) {
        const std::lock_guard lock(mutex);
        failure = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
  writer.commit(keep_);
}

void BackgroundCheckpoints::begin(const CheckpointState& state, std::map<std::string, RuntimeValue> tensors) {
  finish();
  over_ = false;
  thread_ = std::thread([this, state, tensors = std::move(tensors)] {
    try {
      write(state, tensors);
    } catch (...) {
      failure_ = std::current_exception();
    }
    over_ = true;
  });
}

void BackgroundCheckpoints::check() {
  if (over_) finish();
}

void BackgroundCheckpoints::finish() {
  if (thread_.joinable()) thread_.join();
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

}  // namespace fretsaw
