// What a training run says while it goes on.
#include "tools/train_progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "tools/text.h"

namespace fretsaw {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kOnTerminal{200}, kElsewhere{10000};

}  // namespace

int64_t peak_bytes(const std::vector<RankReport>& ranks) {
  int64_t most = 0;
  for (const RankReport& rank : ranks) most = std::max(most, rank.peak_bytes);
  return most;
}

double idle_share(const std::vector<RankReport>& ranks) {
  double busy = 0;
  for (const RankReport& rank : ranks) busy += rank.busy_share;
  return ranks.empty() ? 0 : std::clamp(1 - busy / static_cast<double>(ranks.size()), 0.0, 1.0);
}

std::string progress_line(const TrainFigures& f, const std::vector<RankReport>& ranks) {
  std::string text = fmt::format("step {}/{}   loss {:.4f}", f.done, f.steps, f.loss);
  if (f.evaluation) text += fmt::format("   eval {:.4f}", *f.evaluation);
  return text + fmt::format("   lr {:.3g}   {:.0f} {}/s   {}   idle {}", f.learning_rate, f.per_second, f.unit,
                            human_bytes(static_cast<double>(peak_bytes(ranks))), human_percent(idle_share(ranks)));
}

TrainProgress::TrainProgress(int64_t steps, std::string unit) : terminal_(isatty(STDERR_FILENO) == 1), last_(Clock::now()) {
  figures_.steps = steps, figures_.unit = std::move(unit);
}

TrainProgress::~TrainProgress() {
  if (shown_ && terminal_) std::fprintf(stderr, "\r\x1b[K");
}

void TrainProgress::step(int64_t done, double loss, double learning_rate, int64_t amount, const std::vector<RankReport>& ranks) {
  const auto now = Clock::now();
  amount_ += static_cast<double>(amount);
  if (now - last_ < (terminal_ ? kOnTerminal : kElsewhere)) return;
  figures_.done = done, figures_.loss = loss, figures_.learning_rate = learning_rate;
  figures_.per_second = amount_ / std::chrono::duration<double>(now - last_).count();
  std::fprintf(stderr, terminal_ ? "\r%s\x1b[K" : "%s\n", progress_line(figures_, ranks).c_str());
  std::fflush(stderr);
  last_ = now, amount_ = 0, shown_ = true;
}

}  // namespace fretsaw
