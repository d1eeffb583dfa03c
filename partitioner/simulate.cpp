// Plays a schedule through time: ranks act in order, transfers run beside them.
#include "partitioner/simulate.h"

#include <algorithm>
#include <set>

#include "graph/training/plan_graphs.h"

namespace fretsaw {
namespace {

// How many micro-batches a rank keeps, and their bytes.
class Alive {
 public:
  Alive(const ScheduleProblem& problem, int forward, const std::vector<int64_t>& kept_bytes)
      : p_(problem), forward_(forward), kept_bytes_(kept_bytes), now_(counted(problem)), bytes_(now_.size(), 0) {
    users_.resize(static_cast<size_t>(forward));
    for (int k = 0; k < forward; ++k)
      for (int s = forward; s < p_.stages; ++s)
        if (rank_of(s) == rank_of(k) && uses(s, k)) users_[static_cast<size_t>(k)].push_back(s);
    for (const auto& users : users_) left_.insert(left_.end(), static_cast<size_t>(p_.micro_batches), static_cast<int>(users.size()));
  }
  // The number after the run has begun.
  int begin(int stage, int micro_batch) {
    if (forward_ == 0)
      held_.insert({rank_of(stage), micro_batch});
    else if (stage < forward_)
      ++at(stage), bytes_of_rank(stage) += kept_by(stage);
    return forward_ == 0
               ? static_cast<int>(std::count_if(held_.begin(), held_.end(), [&](const auto& h) { return h.first == rank_of(stage); }))
               : at(stage);
  }
  void end(int stage, int micro_batch) {
    for (int k = 0; k < forward_ && stage >= forward_; ++k) {
      const std::vector<int>& users = users_[static_cast<size_t>(k)];
      if (std::find(users.begin(), users.end(), stage) == users.end()) continue;
      if (--left_[static_cast<size_t>(k) * static_cast<size_t>(p_.micro_batches) + static_cast<size_t>(micro_batch)] == 0)
        --at(k), bytes_of_rank(k) -= kept_by(k);
    }
  }
  int64_t bytes(int stage) const { return bytes_[static_cast<size_t>(rank_of(stage))]; }
  void free(int stage, int micro_batch) { held_.erase({rank_of(stage), micro_batch}); }

 private:
  static std::vector<int> counted(const ScheduleProblem& p) {
    return std::vector<int>(static_cast<size_t>(*std::max_element(p.rank_of_stage.begin(), p.rank_of_stage.end()) + 1), 0);
  }
  int rank_of(int stage) const { return p_.rank_of_stage[static_cast<size_t>(stage)]; }
  int& at(int stage) { return now_[static_cast<size_t>(rank_of(stage))]; }
  int64_t& bytes_of_rank(int stage) { return bytes_[static_cast<size_t>(rank_of(stage))]; }
  int64_t kept_by(int stage) const {
    const auto s = static_cast<size_t>(stage);
    return s < kept_bytes_.size() ? kept_bytes_[s] : 0;
  }
  // Both graphs of a forward stage's way back, and others that need it.
  bool uses(int stage, int forward) const {
    const std::vector<int>& needs = p_.needs[static_cast<size_t>(stage)];
    return stage == 2 * forward_ - 1 - forward || stage == 3 * forward_ - 1 - forward ||
           std::find(needs.begin(), needs.end(), forward) != needs.end();
  }

  const ScheduleProblem& p_;
  int forward_;
  std::set<std::pair<int, int>> held_;   // without training: rank, micro-batch
  std::vector<std::vector<int>> users_;  // of each forward stage: graphs of its rank that use it on the way back
  std::vector<int> left_;                // of each forward stage and micro-batch: those that have not run
  const std::vector<int64_t>& kept_bytes_;
  std::vector<int> now_;  // on each rank
  std::vector<int64_t> bytes_;
};

class Player {
 public:
  Player(const Schedule& schedule, const ScheduleProblem& problem, const ScheduleTimes& times, int forward)
      : schedule_(schedule),
        problem_(problem),
        times_(times),
        alive_(problem, forward, times.kept_bytes),
        now_(schedule.ranks.size(), 0),
        at_(now_.size(), 0) {
    result_.ranks.resize(now_.size());
    first_edge_.push_back(0);
    for (const auto& needs : problem.needs) first_edge_.push_back(first_edge_.back() + needs.size());
    const size_t moved = first_edge_.back() * static_cast<size_t>(problem.micro_batches);
    link_free_.assign(first_edge_.back(), 0);
    posted_.assign(moved, kNotYet), arrived_.assign(moved, kNotYet);
    sent_.assign(static_cast<size_t>(problem.stages) * static_cast<size_t>(problem.micro_batches), 0);
  }

  Simulation run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t r = 0; r < at_.size(); ++r)
        while (at_[r] < schedule_.ranks[r].size() && step(r)) {
          ++at_[r];
          moved = true;
        }
    }
    finish();
    return std::move(result_);
  }

 private:
  static constexpr double kNotYet = -1;

  // The place of a value that goes from one graph to another: among what the second one needs.
  size_t edge(int from, int to) const {
    const std::vector<int>& needs = problem_.needs[static_cast<size_t>(to)];
    return first_edge_[static_cast<size_t>(to)] + static_cast<size_t>(std::find(needs.begin(), needs.end(), from) - needs.begin());
  }
  size_t moved(size_t edge, int micro_batch) const {
    return edge * static_cast<size_t>(problem_.micro_batches) + static_cast<size_t>(micro_batch);
  }
  double& sent(const Action& a) { return sent_[moved(static_cast<size_t>(a.stage), a.micro_batch)]; }
  double transfer_us(int from, int to) const {
    const auto found = times_.transfer_us.find({from, to});
    return found == times_.transfer_us.end() ? 0 : found->second;
  }

  // One action of the rank; false when what it waits for has not been played yet.
  bool step(size_t rank) {
    const Action& a = schedule_.ranks[rank][at_[rank]];
    double start = now_[rank];
    switch (a.kind) {
      case Action::Kind::recv:
        posted_[moved(edge(a.peer, a.stage), a.micro_batch)] = start;
        break;
      case Action::Kind::send:
        return send(rank, a);
      case Action::Kind::forward:
        return forward(rank, a);
      case Action::Kind::free:
        start = std::max(start, sent(a));
        alive_.free(a.stage, a.micro_batch);
        break;
      default:
        break;
    }
    now_[rank] = start;
    record(rank, a, start, start);
    return true;
  }

  bool send(size_t rank, const Action& a) {
    const size_t to = edge(a.stage, a.peer), value = moved(to, a.micro_batch);
    if (posted_[value] == kNotYet) return false;
    const double begin = std::max({now_[rank], posted_[value], link_free_[to]});  // transfers between two graphs follow one another
    link_free_[to] = arrived_[value] = begin + transfer_us(a.stage, a.peer);
    sent(a) = std::max(sent(a), arrived_[value]);
    record(rank, a, begin, arrived_[value]);
    return true;
  }

  bool forward(size_t rank, const Action& a) {
    double start = now_[rank];
    for (int from : problem_.needs[static_cast<size_t>(a.stage)]) {
      if (problem_.rank_of_stage[static_cast<size_t>(from)] == static_cast<int>(rank)) continue;
      const double arrived = arrived_[moved(edge(from, a.stage), a.micro_batch)];
      if (arrived == kNotYet) return false;
      start = std::max(start, arrived);
    }
    const double end = start + times_.run_us[static_cast<size_t>(a.stage)];
    SimulatedRank& result = result_.ranks[rank];
    if (result.end_us == 0) result.begin_us = start;
    result.end_us = end;
    result.busy_us += end - start;
    result.peak_micro_batches = std::max(result.peak_micro_batches, alive_.begin(a.stage, a.micro_batch));
    result.peak_kept_bytes = std::max(result.peak_kept_bytes, alive_.bytes(a.stage));
    alive_.end(a.stage, a.micro_batch);
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
      result_.step_us = std::max(result_.step_us, rank.end_us - rank.begin_us);
      for (SimulatedAction& a : rank.actions)
        if (a.action.kind == Action::Kind::recv) a.end_us = arrived_[moved(edge(a.action.peer, a.action.stage), a.action.micro_batch)];
    }
    const auto idle_share = [&](double time_us) {
      return time_us > 0 ? 1 - busy / (time_us * static_cast<double>(result_.ranks.size())) : 0;
    };
    result_.idle_share = idle_share(result_.time_us);
    result_.step_idle_share = idle_share(result_.step_us);
  }

  const Schedule& schedule_;
  const ScheduleProblem& problem_;
  const ScheduleTimes& times_;
  Alive alive_;
  std::vector<double> now_;
  std::vector<size_t> at_, first_edge_;
  std::vector<double> link_free_;         // of each edge
  std::vector<double> posted_, arrived_;  // of each edge and micro-batch
  std::vector<double> sent_;              // of each graph and micro-batch: when the last of its values arrives
  Simulation result_;
};

int64_t bytes_of_route(const Route& r, const DimSizes& sizes) {
  if (!r.type.is_tensor() || !r.type.shape) return 0;
  double bits = bits_of(r.type.dtype);
  for (const Dim& d : *r.type.shape) bits *= static_cast<double>(size_of(d, sizes));
  return static_cast<int64_t>(std::min(bits / 8 + 0.875, 4e18));
}

// Of each stage, what lies between its forward run and the last one that takes something of it. A value that both graphs of the way back
// take is there once; what the first leaves for the second is there when the rest, but for what that one takes too, is not any more.
std::vector<int64_t> kept_bytes(const Plan& plan, const GraphNumbers& numbers, const DimSizes& sizes) {
  struct Kept {
    std::map<std::string, int64_t> all, by_weights, between;  // values
  };
  std::vector<Kept> kept(static_cast<size_t>(numbers.forward));
  for (const Route& r : plan.routes) {
    if (numbers.rank_of(r.from_stage) != numbers.rank_of(r.to_stage)) continue;
    Kept& of = kept[static_cast<size_t>(numbers.forward_of(r.from_stage))];
    const int64_t bytes = bytes_of_route(r, sizes);
    const bool to_weights = r.to_stage >= 2 * numbers.forward;
    if (r.from_stage >= numbers.forward) {
      if (to_weights) of.between[r.value] = bytes;
      continue;
    }
    of.all[r.value] = bytes;
    if (to_weights) of.by_weights[r.value] = bytes;
  }
  const auto sum = [](const std::map<std::string, int64_t>& values) {
    int64_t bytes = 0;
    for (const auto& [name, one] : values) bytes += one;
    return bytes;
  };
  std::vector<int64_t> result;
  for (const Kept& of : kept) result.push_back(std::max(sum(of.all), sum(of.by_weights) + sum(of.between)));
  return result;
}

ScheduleTimes times_of(const Plan& plan, int stages, const DimSizes& sizes) {
  ScheduleTimes times;
  times.run_us.resize(static_cast<size_t>(stages), 0);
  for (size_t s = 0; s < std::min(times.run_us.size(), plan.stages.size()); ++s) times.run_us[s] = plan.stages[s].time_us;
  for (const Route& r : plan.routes) {
    double& us = times.transfer_us.try_emplace({r.from_stage, r.to_stage}, plan.link_latency_us).first->second;
    if (plan.link_bytes_per_us > 0) us += static_cast<double>(bytes_of_route(r, sizes)) / plan.link_bytes_per_us;
  }
  return times;
}

}  // namespace

Simulation simulate(const Schedule& schedule, const ScheduleProblem& problem, const ScheduleTimes& times, int forward) {
  const Schedule verified = of_micro_batches(schedule);
  verify(verified, problem);
  return Player(schedule, problem, times, forward).run();
}

Simulation simulate(const Plan& plan) {
  return simulate(plan, {});
}

Simulation simulate(const Plan& plan, const DimSizes& sizes) {
  const ScheduleProblem problem = schedule_problem(plan);
  const GraphNumbers numbers = graph_numbers(plan);
  ScheduleTimes times = times_of(plan, problem.stages, sizes);
  if (numbers.trains()) times.kept_bytes = kept_bytes(plan, numbers, sizes);
  return simulate(plan.schedule, problem, times, numbers.trains() ? numbers.forward : 0);
}

}  // namespace fretsaw
