// What a training run says while it goes on, on stderr: a line that is rewritten on a terminal, otherwise one every few seconds.
//
//   step 120/1000   loss 2.3456   eval 2.4102   lr 0.00098   7412 tokens/s   214 MiB   idle 12%
#pragma once
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "runtime/session.h"

namespace fretsaw {

struct TrainFigures {
  int64_t done = 0, steps = 0;  // of how many
  double loss = 0;
  std::optional<double> evaluation;  // the last loss on other data
  double learning_rate = 0;
  double per_second = 0;  // of `unit`
  std::string unit;       // "tokens" or "samples"
};
std::string progress_line(const TrainFigures& figures, const std::vector<RankReport>& ranks);

class TrainProgress {
 public:
  // `unit`: what `amount` below counts, "tokens" or "samples".
  TrainProgress(int64_t steps, std::string unit);
  ~TrainProgress();  // wipes the line of a terminal
  TrainProgress(const TrainProgress&) = delete;
  TrainProgress& operator=(const TrainProgress&) = delete;

  // After a step, `done` of them being over.
  void step(int64_t done, double loss, double learning_rate, int64_t amount, const std::vector<RankReport>& ranks);
  void evaluated(double loss) { figures_.evaluation = loss; }

 private:
  TrainFigures figures_;
  bool terminal_, shown_ = false;
  std::chrono::steady_clock::time_point last_;
  double amount_ = 0;  // since the last line
};

// The largest memory of a rank, and the mean share of the step in which ranks do not compute.
int64_t peak_bytes(const std::vector<RankReport>& ranks);
double idle_share(const std::vector<RankReport>& ranks);

}  // namespace fretsaw
