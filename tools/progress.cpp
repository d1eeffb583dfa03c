// A progress bar on stderr: only on a terminal, only for work of more than a second.
#include "tools/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace fretsaw {

using Clock = std::chrono::steady_clock;

Progress::Progress(std::string what, int total)
    : what_(std::move(what)), total_(std::max(1, total)), terminal_(isatty(STDERR_FILENO) == 1), start_(Clock::now()), last_(start_) {}

Progress::~Progress() {
  if (shown_) std::fprintf(stderr, "\r\x1b[K");
}

void Progress::done(int steps) {
  const auto now = Clock::now();
  if (!terminal_ || now - start_ < std::chrono::seconds(1) || now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  shown_ = true;
  constexpr int kWidth = 30;
  const int filled = std::min(kWidth, steps * kWidth / total_);
  const std::string bar = std::string(static_cast<size_t>(filled), '#') + std::string(static_cast<size_t>(kWidth - filled), '.');
  std::fprintf(stderr, "\r%s [%s] %d/%d\x1b[K", what_.c_str(), bar.c_str(), std::min(steps, total_), total_);
  std::fflush(stderr);
}

}  // namespace fretsaw
