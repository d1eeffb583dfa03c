// Fill and drain, and the names of schedules.
#include "partitioner/schedules.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <set>
#include <string_view>

#include "graph/errors.h"

namespace fretsaw {
namespace {

// The actions around a rank's runs, in their order.
class ListWriter {
 public:
  ListWriter(const ScheduleProblem& problem, int rank, std::vector<StageRun> runs, int far_ahead)
      : p_(problem), rank_(rank), far_ahead_(far_ahead), runs_(std::move(runs)), posted_(runs_.size()) {}

  std::vector<Action> actions() {
    release_.resize(runs_.size());
    for (size_t i = 0; i < runs_.size(); ++i) release_[last_use(i)].push_back(runs_[i]);
    receives(0);
    for (size_t i = 0; i < runs_.size(); ++i) {
      receives(i + 1);
      add(Action::Kind::forward, runs_[i]);
      // What is dropped here was sent a run ago; its buffers are free before this run's are handed over.
      for (const StageRun& r : release_[i])
        if (sends_any(r.stage) && r.micro_batch != runs_[i].micro_batch) add(Action::Kind::free, r);
      for (int to : users(runs_[i].stage))
        if (rank_of(to) != rank_) list_.push_back({Action::Kind::send, runs_[i].stage, runs_[i].micro_batch, to});
      for (const StageRun& r : release_[i])
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
    const StageRun& run = runs_[i];
    const std::vector<int> to = users(run.stage);
    const bool has_next = sends_any(run.stage) && run.micro_batch + 1 < p_.micro_batches;
    auto left = std::count_if(to.begin(), to.end(), [&](int s) { return rank_of(s) == rank_; }) + has_next;
    for (size_t k = i + 1; k < runs_.size() && left > 0; ++k) {
      const bool uses = runs_[k].micro_batch == run.micro_batch && std::find(to.begin(), to.end(), runs_[k].stage) != to.end();
      const bool next = has_next && runs_[k].stage == run.stage && runs_[k].micro_batch == run.micro_batch + 1;
      if (uses || next) last = k, --left;
    }
    return last;
  }
  // Of run `next`, and of later ones what comes from far.
  void receives(size_t next) {
    const auto end = std::min(runs_.size(), next + 1 + static_cast<size_t>(far_ahead_) * static_cast<size_t>(ranks_of(p_)));
    for (size_t k = next; k < end; ++k) {
      for (int from : p_.needs[static_cast<size_t>(runs_[k].stage)]) {
        const int distance = std::abs(rank_of(from) - rank_);
        const bool due = k == next || (distance > 1 && k - next <= static_cast<size_t>(far_ahead_ * distance));
        if (distance > 0 && due && posted_[k].insert(from).second)
          list_.push_back({Action::Kind::recv, runs_[k].stage, runs_[k].micro_batch, from});
      }
    }
  }
  void add(Action::Kind kind, const StageRun& run) { list_.push_back({kind, run.stage, run.micro_batch, -1}); }

  const ScheduleProblem& p_;
  int rank_, far_ahead_;
  std::vector<StageRun> runs_;
  std::vector<std::set<int>> posted_;           // of each run: the stages whose values it is ready for
  std::vector<std::vector<StageRun>> release_;  // after each run: what is dropped then
  std::vector<Action> list_;
};

}  // namespace

std::vector<Action> actions_around(const ScheduleProblem& problem, int rank, std::vector<StageRun> runs, int far_ahead) {
  return ListWriter(problem, rank, std::move(runs), far_ahead).actions();
}

int ranks_of(const ScheduleProblem& problem) {
  return *std::max_element(problem.rank_of_stage.begin(), problem.rank_of_stage.end()) + 1;
}

Schedule gpipe(const ScheduleProblem& problem) {
  Schedule schedule;
  schedule.name = "gpipe";
  for (int r = 0; r < ranks_of(problem); ++r) {
    std::vector<StageRun> runs;
    for (int m = 0; m < problem.micro_batches; ++m)
      for (int s = 0; s < problem.stages; ++s)
        if (problem.rank_of_stage[static_cast<size_t>(s)] == r) runs.push_back({s, m});
    schedule.ranks.push_back(actions_around(problem, r, std::move(runs)));
  }
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
