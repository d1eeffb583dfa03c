// Orders of forward and backward passes.
#include "partitioner/training_schedules.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "graph/errors.h"
#include "partitioner/schedules.h"

namespace fretsaw {
namespace {

class RankOrder {
 public:
  RankOrder(const TrainingProblem& problem, int rank) : p_(problem), rank_(rank) {}

  std::vector<StageRun> gpipe() {
    for (int m = 0; m < micro_batches(); ++m) forward(m);
    for (int m = 0; m < micro_batches(); ++m) backward(m);
    return runs_;
  }
  std::vector<StageRun> one_forward_one_backward() {
    const int ahead = std::min(ranks_of(p_.problem) - 1 - rank_, micro_batches());
    for (int m = 0; m < ahead; ++m) forward(m);
    for (int m = 0; m < micro_batches(); ++m) {
      if (m + ahead < micro_batches()) forward(m + ahead);
      backward(m);
    }
    return runs_;
  }

 private:
  int micro_batches() const { return p_.problem.micro_batches; }
  bool is_here(int stage) const { return stage >= 0 && p_.problem.rank_of_stage[static_cast<size_t>(stage)] == rank_; }
  void forward(int micro_batch) {
    for (int s = 0; s < p_.forward; ++s)
      if (is_here(s)) runs_.push_back({s, micro_batch});
  }
  void backward(int micro_batch) {
    for (int s = p_.forward; s < p_.problem.stages; ++s)
      if (is_here(s)) runs_.push_back({s, micro_batch});
  }

  const TrainingProblem& p_;
  int rank_;
  std::vector<StageRun> runs_;
};

}  // namespace

Schedule make_training_schedule(const std::string& name, const TrainingProblem& problem) {
  if (name != "gpipe" && name != "1f1b") {
    static constexpr std::array<std::string_view, 3> kLater = {"interleaved", "zero-bubble-h1", "zero-bubble-h2"};
    if (std::find(kLater.begin(), kLater.end(), name) != kLater.end())
      throw Error("training by the schedule '" + name + "' is not in this build", "use gpipe or 1f1b", ErrorCode::usage);
    throw Error("there is no schedule '" + name + "'", "the schedules are gpipe, 1f1b, interleaved, zero-bubble-h1 and zero-bubble-h2",
                ErrorCode::usage);
  }
  Schedule schedule;
  schedule.name = name;
  for (int r = 0; r < ranks_of(problem.problem); ++r) {
    RankOrder order(problem, r);
    const bool in_turns = name == "1f1b";
    schedule.ranks.push_back(
        actions_around(problem.problem, r, in_turns ? order.one_forward_one_backward() : order.gpipe(), /*far_ahead=*/in_turns ? 2 : 0));
  }
  return schedule;
}

}  // namespace fretsaw
