// The text form of actions, and the proof that a schedule is sound.
#include "graph/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <tuple>

#include "graph/errors.h"

namespace fretsaw {
namespace {

constexpr std::string_view kLetters = "FBWSRGUD";  // in the order of Action::Kind

bool has_peer(Action::Kind kind) {
  return kind == Action::Kind::send || kind == Action::Kind::recv;
}

}  // namespace

std::string to_string(const Action& a) {
  char letter = kLetters[static_cast<size_t>(a.kind)];
  std::string text = fmt::format("{}{}{}", a.stage, letter, a.micro_batch);
  if (a.kind == Action::Kind::send) text += fmt::format(">{}", a.peer);
  if (a.kind == Action::Kind::recv) text += fmt::format("<{}", a.peer);
  return text;
}

Action parse_action(const std::string& text) {
  auto wrong = [&] { return Error("'" + text + "' is no action", "actions read like 0F1, 0S1>2, 2R1<0 and 0D1"); };
  const char *at = text.data(), *end = at + text.size();
  auto number = [&] {
    int v = 0;
    auto [next, error] = std::from_chars(at, end, v);
    if (error != std::errc() || v < 0 || *at == '+') throw wrong();
    at = next;
    return v;
  };
  Action a;
  a.stage = number();
  size_t kind = at == end ? std::string_view::npos : kLetters.find(*at++);
  if (kind == std::string_view::npos) throw wrong();
  a.kind = static_cast<Action::Kind>(kind);
  a.micro_batch = number();
  if (has_peer(a.kind)) {
    if (at == end || *at++ != (a.kind == Action::Kind::send ? '>' : '<')) throw wrong();
    a.peer = number();
  }
  if (at != end) throw wrong();
  return a;
}

namespace {

// Executes the lists rank by rank as far as each can go; where none can go on, that is a deadlock.
class Verifier {
 public:
  Verifier(const Schedule& schedule, const ScheduleProblem& problem) : schedule_(schedule), problem_(problem) {}

  void run() {
    check_problem();
    for (size_t r = 0; r < schedule_.ranks.size(); ++r)
      for (size_t i = 0; i < schedule_.ranks[r].size(); ++i) check_alone(r, i);
    check_complete();
    execute();
  }

 private:
  using Key = std::tuple<int, int, int>;  // stage, peer, micro-batch
  static Key moved(const Action& a) {     // the same for a send and its receive: from, to, micro-batch
    return a.kind == Action::Kind::send ? Key{a.stage, a.peer, a.micro_batch} : Key{a.peer, a.stage, a.micro_batch};
  }
  [[noreturn]] void fault(size_t rank, size_t index, const std::string& what) const {
    throw Error(fmt::format("schedule '{}': rank {}, action {} ({}) {}", schedule_.name, rank, index,
                            to_string(schedule_.ranks[rank][index]), what),
                "the schedule cannot run as it is");
  }
  bool needs(int stage, int from) const {
    const auto& n = problem_.needs[static_cast<size_t>(stage)];
    return std::find(n.begin(), n.end(), from) != n.end();
  }
  int rank_of(int stage) const { return problem_.rank_of_stage[static_cast<size_t>(stage)]; }
  bool is_absent(int stage) const { return rank_of(stage) == -1; }  // a number that no graph has

  void check_problem() const {
    auto stages = static_cast<size_t>(problem_.stages);
    if (problem_.stages < 1 || problem_.micro_batches < 1 || problem_.needs.size() != stages || problem_.rank_of_stage.size() != stages)
      throw Error("a schedule needs at least one stage and one micro-batch, and a rank for each stage");
    for (size_t s = 0; s < stages; ++s) {
      if (is_absent(static_cast<int>(s)) && problem_.needs[s].empty()) continue;
      if (problem_.rank_of_stage[s] < 0 || static_cast<size_t>(problem_.rank_of_stage[s]) >= schedule_.ranks.size())
        throw Error(
            fmt::format("schedule '{}' has no list for rank {}, which runs stage {}", schedule_.name, problem_.rank_of_stage[s], s));
      for (int from : problem_.needs[s])
        if (from < 0 || from >= problem_.stages) throw Error(fmt::format("stage {} needs values of stage {}, which there is not", s, from));
    }
  }

  // What can be seen from one action by itself, and what stands twice.
  void check_alone(size_t rank, size_t index) {
    const Action& a = schedule_.ranks[rank][index];
    if (a.stage < 0 || a.stage >= problem_.stages) fault(rank, index, "names a stage that there is not");
    if (a.micro_batch < 0 || a.micro_batch >= problem_.micro_batches) fault(rank, index, "names a micro-batch that there is not");
    if (rank_of(a.stage) != static_cast<int>(rank)) fault(rank, index, fmt::format("belongs to rank {}", rank_of(a.stage)));
    if (has_peer(a.kind)) {
      if (a.peer < 0 || a.peer >= problem_.stages) fault(rank, index, "names a peer that there is not");
      bool wanted = a.kind == Action::Kind::send ? needs(a.peer, a.stage) : needs(a.stage, a.peer);
      if (!wanted) fault(rank, index, "moves a value that nobody needs");
      if (rank_of(a.peer) == static_cast<int>(rank)) fault(rank, index, "moves a value to its own rank");
      if (!(a.kind == Action::Kind::send ? sends_ : recvs_).insert(moved(a)).second) fault(rank, index, "is done twice");
      return;
    }
    if (!once_.insert({static_cast<int>(a.kind), a.stage, a.micro_batch}).second) fault(rank, index, "is done twice");
  }

  void check_complete() const {
    for (int s = 0; s < problem_.stages; ++s)
      for (int m = 0; m < problem_.micro_batches && !is_absent(s); ++m) {
        if (!once_.count({static_cast<int>(Action::Kind::forward), s, m})) throw missing(fmt::format("{}F{}", s, m));
        for (int from : problem_.needs[static_cast<size_t>(s)]) {
          if (rank_of(from) == rank_of(s)) continue;
          if (!sends_.count({from, s, m})) throw missing(fmt::format("{}S{}>{}", from, m, s));
          if (!recvs_.count({from, s, m})) throw missing(fmt::format("{}R{}<{}", s, m, from));
        }
      }
  }
  Error missing(const std::string& action) const {
    return Error(fmt::format("schedule '{}' never does {}", schedule_.name, action), "the schedule cannot run as it is");
  }

  void execute() {
    std::vector<size_t> at(schedule_.ranks.size(), 0);
    for (bool moved_on = true; moved_on;) {
      moved_on = false;
      for (size_t r = 0; r < at.size(); ++r)
        while (at[r] < schedule_.ranks[r].size() && step(r, at[r])) {
          ++at[r];
          moved_on = true;
        }
    }
    for (size_t r = 0; r < at.size(); ++r)
      if (at[r] < schedule_.ranks[r].size()) fault(r, at[r], "waits for ever: " + waits_for(schedule_.ranks[r][at[r]]));
  }

  // Does one action; false when it has to wait.
  bool step(size_t rank, size_t index) {
    const Action& a = schedule_.ranks[rank][index];
    std::pair<int, int> own{a.stage, a.micro_batch};
    switch (a.kind) {
      case Action::Kind::recv:
        posted_.insert(moved(a));
        return true;
      case Action::Kind::send:
        if (!done_.count(own)) fault(rank, index, "sends a value before it is made");
        if (freed_.count(own)) fault(rank, index, "sends a value after it was freed");
        if (!posted_.count(moved(a))) return false;
        arrived_.insert(moved(a));
        return true;
      case Action::Kind::forward:
        if (freed_.count(own)) fault(rank, index, "comes after its micro-batch was freed");
        return forward(rank, index);
      case Action::Kind::free:
        if (!done_.count(own)) fault(rank, index, "frees what was not made yet");
        freed_.insert(own);
        return true;
      default:
        return true;
    }
  }

  bool forward(size_t rank, size_t index) {
    const Action& a = schedule_.ranks[rank][index];
    for (int from : problem_.needs[static_cast<size_t>(a.stage)]) {
      Key key{from, a.stage, a.micro_batch};
      if (rank_of(from) == rank_of(a.stage)) {
        if (!done_.count({from, a.micro_batch})) fault(rank, index, fmt::format("uses a value of stage {} before it is made", from));
        if (freed_.count({from, a.micro_batch})) fault(rank, index, fmt::format("uses a value of stage {} after it was freed", from));
        continue;
      }
      if (!posted_.count(key)) fault(rank, index, fmt::format("uses a value of stage {} before it is received", from));
      if (!arrived_.count(key)) return false;
    }
    done_.insert({a.stage, a.micro_batch});
    return true;
  }

  std::string waits_for(const Action& a) const {
    if (a.kind == Action::Kind::send) return fmt::format("stage {} never gets to its receive", a.peer);
    for (int from : problem_.needs[static_cast<size_t>(a.stage)])
      if (rank_of(from) != rank_of(a.stage) && !arrived_.count({from, a.stage, a.micro_batch}))
        return fmt::format("stage {} never gets to its send", from);
    return "nothing lets it go on";
  }

  const Schedule& schedule_;
  const ScheduleProblem& problem_;
  std::set<Key> once_, sends_, recvs_, posted_, arrived_;
  std::set<std::pair<int, int>> done_, freed_;  // stage, micro-batch
};

}  // namespace

void verify(const Schedule& schedule, const ScheduleProblem& problem) {
  Verifier(schedule, problem).run();
}

}  // namespace fretsaw
