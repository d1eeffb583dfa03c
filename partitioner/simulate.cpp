// Plays a schedule through time: ranks act in order, transfers run beside them.
#include "partitioner/simulate.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

namespace fretsaw {
namespace {

class Player {
 public:
  explicit Player(const Plan& plan)
      : plan_(plan), problem_(schedule_problem(plan)), now_(plan.schedule.ranks.size(), 0), at_(now_.size(), 0) {
    result_.ranks.resize(now_.size());
    alive_.resize(now_.size());
    for (const Route& r : plan.routes) {
      double& us = transfer_us_[{r.from_stage, r.to_stage}];
      us = std::max(us, plan.link_latency_us);
    }
    std::map<std::pair<int, int>, double> bytes;
    for (const Route& r : plan.routes) bytes[{r.from_stage, r.to_stage}] += static_cast<double>(bytes_of_route(r));
    for (auto& [edge, us] : transfer_us_)
      if (plan.link_bytes_per_us > 0) us += bytes[edge] / plan.link_bytes_per_us;
  }

  Simulation run() {
    verify(plan_.schedule, problem_);
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t r = 0; r < at_.size(); ++r)
        while (at_[r] < plan_.schedule.ranks[r].size() && step(r)) {
          ++at_[r];
          moved = true;
        }
    }
    finish();
    return std::move(result_);
  }

 private:
  using Edge = std::tuple<int, int, int>;  // from stage, to stage, micro-batch

  static int64_t bytes_of_route(const Route& r) {
    if (!r.type.is_tensor() || !r.type.shape) return 0;
    double bits = bits_of(r.type.dtype);
    for (const Dim& d : *r.type.shape) bits *= d.known() ? static_cast<double>(d.value) : 1.0;
    return static_cast<int64_t>(std::min(bits / 8 + 0.875, 4e18));
  }

  // One action of the rank; false when what it waits for has not been played yet.
  bool step(size_t rank) {
    const Action& a = plan_.schedule.ranks[rank][at_[rank]];
    double start = now_[rank];
    switch (a.kind) {
      case Action::Kind::recv:
        posted_[{a.peer, a.stage, a.micro_batch}] = start;
        break;
      case Action::Kind::send: {
        Edge edge{a.stage, a.peer, a.micro_batch};
        auto posted = posted_.find(edge);
        if (posted == posted_.end()) return false;
        double& link = link_free_[{a.stage, a.peer}];  // transfers between two stages follow one another
        double begin = std::max({start, posted->second, link});
        link = arrived_[edge] = begin + transfer_us_[{a.stage, a.peer}];
        record(rank, a, begin, link);
        return true;
      }
      case Action::Kind::forward:
        return forward(rank, a);
      case Action::Kind::free: {
        for (const auto& [edge, end] : arrived_)
          if (std::get<0>(edge) == a.stage && std::get<2>(edge) == a.micro_batch) start = std::max(start, end);
        alive_[rank].erase(a.micro_batch);
        break;
      }
      default:
        break;
    }
    now_[rank] = start;
    record(rank, a, start, start);
    return true;
  }

  bool forward(size_t rank, const Action& a) {
    double start = now_[rank];
    for (int from : problem_.needs[static_cast<size_t>(a.stage)]) {
      if (problem_.rank_of_stage[static_cast<size_t>(from)] == static_cast<int>(rank)) continue;
      auto arrived = arrived_.find({from, a.stage, a.micro_batch});
      if (arrived == arrived_.end()) return false;
      start = std::max(start, arrived->second);
    }
    double end = start + plan_.stages[static_cast<size_t>(a.stage)].time_us;
    result_.ranks[rank].busy_us += end - start;
    alive_[rank].insert(a.micro_batch);
    result_.ranks[rank].peak_micro_batches = std::max(result_.ranks[rank].peak_micro_batches, static_cast<int>(alive_[rank].size()));
    now_[rank] = end;
    record(rank, a, start, end);
    return true;
  }

  void record(size_t rank, const Action& a, double start, double end) {
    result_.ranks[rank].actions.push_back({a, start, end});
    result_.time_us = std::max(result_.time_us, end);
  }

  // A receive lasts from its posting to the arrival.
  void finish() {
    double busy = 0;
    for (SimulatedRank& rank : result_.ranks) {
      busy += rank.busy_us;
      for (SimulatedAction& a : rank.actions)
        if (a.action.kind == Action::Kind::recv) a.end_us = arrived_[{a.action.peer, a.action.stage, a.action.micro_batch}];
    }
    double all = result_.time_us * static_cast<double>(result_.ranks.size());
    result_.idle_share = all > 0 ? 1 - busy / all : 0;
  }

  const Plan& plan_;
  ScheduleProblem problem_;
  std::vector<double> now_;
  std::vector<size_t> at_;
  std::vector<std::set<int>> alive_;  // micro-batches on each rank
  std::map<std::pair<int, int>, double> transfer_us_, link_free_;
  std::map<Edge, double> posted_, arrived_;
  Simulation result_;
};

}  // namespace

Simulation simulate(const Plan& plan) {
  return Player(plan).run();
}

}  // namespace fretsaw
