// Orders of forward and backward passes, and their formulas.
#include "partitioner/training_schedules.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "graph/errors.h"
#include "partitioner/schedules.h"

namespace fretsaw {
namespace {

[[noreturn]] void refuse_name(const std::string& name) {
  throw Error("there is no schedule '" + name + "'", "the schedules are gpipe, 1f1b, interleaved, zero-bubble-h1 and zero-bubble-h2",
              ErrorCode::usage);
}

// What one rank runs, in its order.
class RankOrder {
 public:
  RankOrder(const TrainingProblem& problem, int rank)
      : p_(problem), rank_(rank), ranks_(ranks_of(problem.problem)), chunks_(problem.forward / ranks_) {}

  std::vector<StageRun> named(const std::string& name) {
    if (name == "gpipe")
      gpipe();
    else if (name == "1f1b" || (name == "interleaved" && chunks_ == 1))
      one_forward_one_backward();
    else if (name == "interleaved")
      interleaved();
    else if (name == "zero-bubble-h1")
      zero_bubble(ranks_ - rank_, rank_);
    else
      zero_bubble(2 * (ranks_ - rank_) - 1, 2 * rank_);
    return std::move(runs_);
  }

 private:
  void gpipe() {
    for (int c = 0; c < chunks_; ++c)
      for (int m = 0; m < micro_batches(); ++m) forward(m, c);
    for (int c = chunks_; c-- > 0;)
      for (int m = 0; m < micro_batches(); ++m) backward(m, c), weight(m, c);
  }

  void one_forward_one_backward() {
    const int ahead = ranks_ - 1 - rank_;
    for (int m = 0; m < ahead; ++m) forward(m);
    for (int m = 0; m < micro_batches(); ++m) forward(m + ahead), backward(m), weight(m);
  }

  // Runs are counted through groups of `ranks_` micro-batches, each of which passes through all chunks before the next group.
  void interleaved() {
    const int group = ranks_ * chunks_, groups = (micro_batches() + ranks_ - 1) / ranks_;
    const auto chunk = [&](int i) { return i % group / ranks_; };
    const auto micro_batch = [&](int i) { return i / group * ranks_ + i % ranks_; };
    const int all = groups * group, ahead = std::min(2 * (ranks_ - 1 - rank_) + (chunks_ - 1) * ranks_, all);
    for (int i = 0; i < ahead; ++i) forward(micro_batch(i), chunk(i));
    for (int i = 0; i < all; ++i) {
      if (i + ahead < all) forward(micro_batch(i + ahead), chunk(i + ahead));
      const int c = chunks_ - 1 - chunk(i);
      backward(micro_batch(i), c), weight(micro_batch(i), c);
    }
  }

  // `ahead` forward before the first backward; weight gradients wait for `late` later ones, and fill the end. Those that another rank's
  // weight gradients need don't wait: that rank would.
  void zero_bubble(int ahead, int late) {
    if (others_need_weights()) late = 0;
    for (int m = 0; m < ahead; ++m) forward(m);
    for (int m = 0; m < micro_batches(); ++m) backward(m), weight(m - late), forward(m + ahead);
    for (int m = micro_batches() - late; m < micro_batches(); ++m) weight(m);
  }

  bool others_need_weights() const {
    for (int s = 2 * p_.forward; s < p_.problem.stages; ++s)
      for (int from : p_.problem.needs[static_cast<size_t>(s)])
        if (from >= 2 * p_.forward && rank_of(from) == rank_ && rank_of(s) != rank_) return true;
    return false;
  }

  // Micro-batches that there are not are left out.
  void forward(int m, int chunk = 0) { add(stage(chunk), m); }
  void backward(int m, int chunk = 0) { add(2 * p_.forward - 1 - stage(chunk), m); }
  void weight(int m, int chunk = 0) {
    const int number = 3 * p_.forward - 1 - stage(chunk);
    if (number < p_.problem.stages && rank_of(number) == rank_) add(number, m);
  }
  void add(int number, int m) {
    if (m >= 0 && m < micro_batches()) runs_.push_back({number, m});
  }
  int rank_of(int number) const { return p_.problem.rank_of_stage[static_cast<size_t>(number)]; }
  int stage(int chunk) const { return chunk * ranks_ + rank_; }
  int micro_batches() const { return p_.problem.micro_batches; }

  const TrainingProblem& p_;
  int rank_, ranks_, chunks_;
  std::vector<StageRun> runs_;
};

constexpr std::array<std::string_view, 5> kNames = {"gpipe", "1f1b", "interleaved", "zero-bubble-h1", "zero-bubble-h2"};

bool takes_chunks(const std::string& name) {
  return name == "gpipe" || name == "interleaved";
}

void check(const std::string& name, const TrainingProblem& p) {
  if (std::find(kNames.begin(), kNames.end(), name) == kNames.end()) refuse_name(name);
  const ScheduleProblem& graphs = p.problem;
  const int n = p.forward, ranks = graphs.rank_of_stage.empty() ? 0 : ranks_of(graphs);
  const auto wrong = [](const std::string& what) {
    throw Error("a training schedule cannot be made: " + what, "number the graphs as TrainingProblem says");
  };
  if (n < 1 || ranks < 1 || n % ranks != 0) wrong(fmt::format("{} forward stages do not divide over {} ranks", n, ranks));
  if (graphs.stages != 2 * n && graphs.stages != 3 * n) wrong(fmt::format("{} graphs of {} forward stages", graphs.stages, n));
  if (graphs.micro_batches < 1) wrong("no micro-batch");
  if (graphs.needs.size() != static_cast<size_t>(graphs.stages) || graphs.rank_of_stage.size() != graphs.needs.size())
    wrong("not every graph has its needs and its rank");
  for (int s = 0; s < graphs.stages; ++s) {
    const int rank = graphs.rank_of_stage[static_cast<size_t>(s)], expected = rank_of_training_stage(s, n, ranks);
    if (rank != expected && !(rank == -1 && s >= 2 * n)) wrong(fmt::format("graph {} is on rank {} instead of {}", s, rank, expected));
  }
  if (n > ranks && !takes_chunks(name))
    throw Error(fmt::format("schedule '{}' runs one stage a rank, and {} are given", name, n / ranks),
                "use the schedule interleaved for several chunks, or one chunk", ErrorCode::usage);
}

// Only the order of events matters: a forward graph takes one unit, and so does each half of the way back.
std::vector<double> nominal_times(const TrainingProblem& p) {
  std::vector<double> times(static_cast<size_t>(p.problem.stages), 1);
  if (p.problem.stages == 2 * p.forward) std::fill(times.begin() + p.forward, times.end(), 2);
  return times;
}

}  // namespace

int rank_of_training_stage(int number, int forward, int ranks) {
  if (number < forward) return number % ranks;
  return ((number < 2 * forward ? 2 : 3) * forward - 1 - number) % ranks;
}

char letter_of_training_stage(int number, int forward) {
  return number < forward ? 'F' : number < 2 * forward ? 'B' : 'W';
}

TrainingProblem training_chain(int ranks, int chunks, int micro_batches, bool weights_apart) {
  TrainingProblem training;
  const int n = training.forward = ranks * chunks;
  ScheduleProblem& p = training.problem;
  p.stages = (weights_apart ? 3 : 2) * n, p.micro_batches = micro_batches;
  for (int s = 0; s < p.stages; ++s) {
    p.rank_of_stage.push_back(rank_of_training_stage(s, n, ranks));
    std::vector<int>& needs = p.needs.emplace_back();
    if (s < n && s > 0) needs = {s - 1};
    if (s >= n && s < 2 * n) needs = {2 * n - 1 - s};
    if (s > n && s < 2 * n) needs.push_back(s - 1);
    if (s >= 2 * n) needs = {3 * n - 1 - s, s - n};
  }
  return training;
}

Schedule make_training_schedule(const std::string& name, const TrainingProblem& problem) {
  Schedule schedule;
  schedule.name = name;
  std::vector<std::vector<StageRun>> runs;
  check(name, problem);
  for (int r = 0; r < ranks_of(problem.problem); ++r) runs.push_back(RankOrder(problem, r).named(name));
  schedule.ranks = actions_around(problem.problem, runs, nominal_times(problem));
  return schedule;
}

ScheduleFormula schedule_formula(const std::string& name, int ranks, int chunks, int micro_batches, const TrainingTimes& times) {
  const auto [F, B, W] = times;
  const double others = ranks - 1;
  ScheduleFormula formula;
  const auto peaks = [&](auto of_rank) {
    for (int r = 0; r < ranks; ++r) formula.peak_of_rank.push_back(std::min(micro_batches * chunks, of_rank(r)));
  };
  if (name == "gpipe" || name == "1f1b" || (name == "interleaved" && chunks == 1)) {
    formula.idle_us = others * times.sum_us();
    formula.exact = chunks == 1;
    peaks([&](int r) { return name == "gpipe" ? micro_batches * chunks : ranks - r; });
  } else if (name == "interleaved") {
    formula.idle_us = others * times.sum_us() / chunks;
    formula.exact = micro_batches % ranks == 0;
    peaks([&](int r) { return 2 * (ranks - 1 - r) + (chunks - 1) * ranks + 1; });
  } else if (name == "zero-bubble-h1") {
    formula.idle_us = others * (B + std::max(0.0, F - W));
    formula.exact = micro_batches >= ranks;
    peaks([&](int) { return ranks; });
  } else if (name == "zero-bubble-h2") {
    formula.idle_us = others * std::max({0.0, B - F, F + B - 2 * W});
    formula.exact = micro_batches >= 2 * ranks - 1;
    peaks([&](int) { return 2 * ranks - 1; });
  } else {
    refuse_name(name);
  }
  return formula;
}

}  // namespace fretsaw
