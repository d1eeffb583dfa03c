// Fill and drain, and the names of schedules.
#include "partitioner/schedules.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "graph/errors.h"

namespace fretsaw {
namespace {

// One forward run of a rank: which stage, which micro-batch.
struct Run {
  int stage, micro_batch;
};

class FillDrain {
 public:
  FillDrain(const ScheduleProblem& problem, int rank) : p_(problem), rank_(rank) {
    for (int m = 0; m < p_.micro_batches; ++m)
      for (int s = 0; s < p_.stages; ++s)
        if (rank_of(s) == rank) runs_.push_back({s, m});
  }

  std::vector<Action> actions() {
    release_.resize(runs_.size());
    for (size_t i = 0; i < runs_.size(); ++i) release_[last_use(i)].push_back(runs_[i]);
    if (!runs_.empty()) receives(runs_[0]);
    for (size_t i = 0; i < runs_.size(); ++i) {
      if (i + 1 < runs_.size()) receives(runs_[i + 1]);
      add(Action::Kind::forward, runs_[i]);
      // What is dropped here was sent a run ago; its buffers are free before this run's are handed over.
      for (const Run& r : release_[i])
        if (sends_any(r.stage) && r.micro_batch != runs_[i].micro_batch) add(Action::Kind::free, r);
      for (int to : users(runs_[i].stage))
        if (rank_of(to) != rank_) list_.push_back({Action::Kind::send, runs_[i].stage, runs_[i].micro_batch, to});
      for (const Run& r : release_[i])
        if (!sends_any(r.stage) || r.micro_batch == runs_[i].micro_batch) add(Action::Kind::free, r);
    }
    return std::move(list_);
  }

 private:
  int rank_of(int stage) const { return p_.rank_of_stage[static_cast<size_t>(stage)]; }
  std::vector<int> users(int stage) const {
    std::vector<int> found;
    for (int s = 0; s < p_.stages; ++s)
      if (std::count(p_.needs[static_cast<size_t>(s)].begin(), p_.needs[static_cast<size_t>(s)].end(), stage)) found.push_back(s);
    return found;
  }
  bool sends_any(int stage) const {
    std::vector<int> to = users(stage);
    return std::any_of(to.begin(), to.end(), [&](int s) { return rank_of(s) != rank_; });
  }
  // The run after which run i may be dropped: its stage's next one when it sends, and not before stages of this rank that use it.
  size_t last_use(size_t i) const {
    size_t last = i;
    std::vector<int> to = users(runs_[i].stage);
    bool sends = sends_any(runs_[i].stage);
    for (size_t k = i + 1; k < runs_.size(); ++k) {
      bool uses = runs_[k].micro_batch == runs_[i].micro_batch && std::find(to.begin(), to.end(), runs_[k].stage) != to.end();
      bool next = sends && runs_[k].stage == runs_[i].stage && runs_[k].micro_batch == runs_[i].micro_batch + 1;
      if (uses || next) last = k;
      if (runs_[k].micro_batch > runs_[i].micro_batch + 1) break;
    }
    return last;
  }
  void receives(const Run& run) {
    for (int from : p_.needs[static_cast<size_t>(run.stage)])
      if (rank_of(from) != rank_) list_.push_back({Action::Kind::recv, run.stage, run.micro_batch, from});
  }
  void add(Action::Kind kind, const Run& run) { list_.push_back({kind, run.stage, run.micro_batch, -1}); }

  const ScheduleProblem& p_;
  int rank_;
  std::vector<Run> runs_;
  std::vector<std::vector<Run>> release_;  // after each run: what is dropped then
  std::vector<Action> list_;
};

}  // namespace

Schedule gpipe(const ScheduleProblem& problem) {
  Schedule schedule;
  schedule.name = "gpipe";
  int ranks = 0;
  for (int r : problem.rank_of_stage) ranks = std::max(ranks, r + 1);
  for (int r = 0; r < ranks; ++r) schedule.ranks.push_back(FillDrain(problem, r).actions());
  return schedule;
}

Schedule make_schedule(const std::string& name, const ScheduleProblem& problem) {
  static constexpr std::array<std::string_view, 4> kTraining = {"1f1b", "interleaved", "zero-bubble-h1", "zero-bubble-h2"};
  if (name == "gpipe") return gpipe(problem);
  if (std::find(kTraining.begin(), kTraining.end(), name) != kTraining.end())
    throw Error("schedule '" + name + "' orders forward and backward passes and needs training", "use gpipe for inference",
                ErrorCode::usage);
  throw Error("there is no schedule '" + name + "'", "the schedules are gpipe, 1f1b, interleaved, zero-bubble-h1 and zero-bubble-h2",
              ErrorCode::usage);
}

}  // namespace fretsaw
