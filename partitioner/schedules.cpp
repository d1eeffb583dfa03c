// Fill and drain, and the names of schedules.
#include "partitioner/schedules.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "graph/errors.h"

namespace fretsaw {
namespace {

// Who uses each stage's values, and where in its rank's order each run stands.
class Orders {
 public:
  Orders(const ScheduleProblem& problem, const std::vector<std::vector<StageRun>>& runs) : problem(problem), runs(runs) {
    const auto stages = static_cast<size_t>(problem.stages);
    users.resize(stages), position_.assign(stages * static_cast<size_t>(problem.micro_batches), kNowhere);
    for (size_t s = 0; s < stages; ++s)
      for (int from : problem.needs[s]) users[static_cast<size_t>(from)].push_back(static_cast<int>(s));
    for (const auto& rank : runs)
      for (size_t i = 0; i < rank.size(); ++i) position_[index(rank[i].stage, rank[i].micro_batch)] = i;
  }
  static constexpr size_t kNowhere = static_cast<size_t>(-1);
  int rank_of(int stage) const { return problem.rank_of_stage[static_cast<size_t>(stage)]; }
  size_t index(int stage, int micro_batch) const {
    return static_cast<size_t>(stage) * static_cast<size_t>(problem.micro_batches) + static_cast<size_t>(micro_batch);
  }
  size_t position(int stage, int micro_batch) const { return position_[index(stage, micro_batch)]; }

  const ScheduleProblem& problem;
  const std::vector<std::vector<StageRun>>& runs;
  std::vector<std::vector<int>> users;

 private:
  std::vector<size_t> position_;
};

// When runs start and end where values arrive as they are made.
class Timeline {
 public:
  Timeline(const Orders& orders, const std::vector<double>& time_of_stage)
      : o_(orders), time_of_stage_(time_of_stage), starts_(orders.runs.size()), now_(orders.runs.size(), 0) {
    ends_.assign(static_cast<size_t>(o_.problem.stages) * static_cast<size_t>(o_.problem.micro_batches), -1);
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t r = 0; r < starts_.size(); ++r)
        while (starts_[r].size() < o_.runs[r].size() && play(r)) moved = true;
    }
    for (size_t r = 0; r < starts_.size(); ++r) {
      if (starts_[r].size() == o_.runs[r].size()) continue;
      const StageRun& stuck = o_.runs[r][starts_[r].size()];
      throw Error("rank " + std::to_string(r) + " waits for ever before stage " + std::to_string(stuck.stage) + " runs micro-batch " +
                      std::to_string(stuck.micro_batch) + ": ranks need each other's values in a circle",
                  "use another schedule, or cut the model elsewhere");
    }
  }
  // The last of the rank's runs that start before `time`; the first one where there is none.
  size_t running_before(size_t rank, double time) const {
    const auto after = std::lower_bound(starts_[rank].begin(), starts_[rank].end(), time);
    return after == starts_[rank].begin() ? 0 : static_cast<size_t>(after - starts_[rank].begin()) - 1;
  }
  double end(int stage, int micro_batch) const { return ends_[o_.index(stage, micro_batch)]; }

 private:
  bool play(size_t rank) {
    const StageRun& run = o_.runs[rank][starts_[rank].size()];
    double start = now_[rank];
    for (int from : o_.problem.needs[static_cast<size_t>(run.stage)]) {
      const double made = end(from, run.micro_batch);
      if (made < 0) return false;
      start = std::max(start, made);
    }
    starts_[rank].push_back(start);
    now_[rank] = ends_[o_.index(run.stage, run.micro_batch)] = start + time_of_stage_[static_cast<size_t>(run.stage)];
    return true;
  }

  const Orders& o_;
  const std::vector<double>& time_of_stage_;
  std::vector<std::vector<double>> starts_;
  std::vector<double> now_, ends_;
};

// The actions around one rank's runs, in their order.
class ListWriter {
 public:
  // With a timeline, receives are posted before their senders are done in it.
  ListWriter(const Orders& orders, int rank, const Timeline* timeline)
      : o_(orders), rank_(rank), timeline_(timeline), runs_(orders.runs[static_cast<size_t>(rank)]) {}

  std::vector<Action> actions() {
    receives_.resize(runs_.size()), release_.resize(runs_.size());
    for (size_t i = 0; i < runs_.size(); ++i) release_[last_use(i)].push_back(runs_[i]), place_receives(i);
    for (size_t i = 0; i < runs_.size(); ++i) {
      list_.insert(list_.end(), receives_[i].begin(), receives_[i].end());
      add(Action::Kind::forward, runs_[i]);
      // What is dropped here was sent a run ago; its buffers are free before this run's are handed over.
      for (const StageRun& r : release_[i])
        if (sends_any(r.stage) && r.micro_batch != runs_[i].micro_batch) add(Action::Kind::free, r);
      for (int to : users(runs_[i].stage))
        if (o_.rank_of(to) != rank_) list_.push_back({Action::Kind::send, runs_[i].stage, runs_[i].micro_batch, to});
      for (const StageRun& r : release_[i])
        if (!sends_any(r.stage) || r.micro_batch == runs_[i].micro_batch) add(Action::Kind::free, r);
    }
    return std::move(list_);
  }

 private:
  const std::vector<int>& users(int stage) const { return o_.users[static_cast<size_t>(stage)]; }
  bool sends_any(int stage) const {
    return std::any_of(users(stage).begin(), users(stage).end(), [&](int s) { return o_.rank_of(s) != rank_; });
  }
  // The run after which run i may be dropped: the last one of this rank that uses it. What is only sent stays until its stage's next run,
  // as the send goes on beside that.
  size_t last_use(size_t i) const {
    const StageRun& run = runs_[i];
    size_t last = i;
    for (int to : users(run.stage)) {
      const size_t use = o_.rank_of(to) == rank_ ? o_.position(to, run.micro_batch) : Orders::kNowhere;
      if (use != Orders::kNowhere) last = std::max(last, use);
    }
    if (last > i || !sends_any(run.stage) || run.micro_batch + 1 == o_.problem.micro_batches) return last;
    const size_t next = o_.position(run.stage, run.micro_batch + 1);
    return next == Orders::kNowhere ? last : std::max(last, next);
  }
  void place_receives(size_t i) {
    const StageRun& run = runs_[i];
    for (int from : o_.problem.needs[static_cast<size_t>(run.stage)]) {
      if (o_.rank_of(from) == rank_) continue;
      size_t before = i > 0 ? i - 1 : 0;
      if (timeline_)
        before = std::min(before, timeline_->running_before(static_cast<size_t>(rank_), timeline_->end(from, run.micro_batch)));
      receives_[before].push_back({Action::Kind::recv, run.stage, run.micro_batch, from});
    }
  }
  void add(Action::Kind kind, const StageRun& run) { list_.push_back({kind, run.stage, run.micro_batch, -1}); }

  const Orders& o_;
  int rank_;
  const Timeline* timeline_;
  const std::vector<StageRun>& runs_;
  std::vector<std::vector<Action>> receives_;   // posted before each run
  std::vector<std::vector<StageRun>> release_;  // after each run: what is dropped then
  std::vector<Action> list_;
};

}  // namespace

std::vector<std::vector<Action>> actions_around(const ScheduleProblem& problem, const std::vector<std::vector<StageRun>>& runs,
                                                const std::vector<double>& time_of_stage) {
  const Orders orders(problem, runs);
  const Timeline timeline(orders, time_of_stage);
  std::vector<std::vector<Action>> lists;
  for (size_t r = 0; r < runs.size(); ++r) lists.push_back(ListWriter(orders, static_cast<int>(r), &timeline).actions());
  return lists;
}

int ranks_of(const ScheduleProblem& problem) {
  return *std::max_element(problem.rank_of_stage.begin(), problem.rank_of_stage.end()) + 1;
}

Schedule gpipe(const ScheduleProblem& problem) {
  Schedule schedule;
  schedule.name = "gpipe";
  std::vector<std::vector<StageRun>> runs(static_cast<size_t>(ranks_of(problem)));
  for (int m = 0; m < problem.micro_batches; ++m)
    for (int s = 0; s < problem.stages; ++s) runs[static_cast<size_t>(problem.rank_of_stage[static_cast<size_t>(s)])].push_back({s, m});
  const Orders orders(problem, runs);
  for (size_t r = 0; r < runs.size(); ++r) schedule.ranks.push_back(ListWriter(orders, static_cast<int>(r), nullptr).actions());
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
