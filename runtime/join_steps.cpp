// Groups of alike steps grow while the program is read from its beginning to its end.
#include "runtime/join_steps.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace fretsaw {
namespace {

constexpr size_t kMostBytesHeld = 256 << 10;  // of a value inside the program that an early member reads late

class StepJoiner {
 public:
  StepJoiner(Program& program, std::vector<int>& overwrites)
      : program_(program), overwrites_(overwrites), source_(program.slots.size()), group_of_(program.slots.size(), -1) {
    for (size_t i = 0; i < source_.size(); ++i) source_[i] = static_cast<int>(i);
    is_kept_.resize(program.slots.size());
    for (const int input : program.kept)
      if (input >= 0 && program.inputs[static_cast<size_t>(input)] >= 0)
        is_kept_[number(program.inputs[static_cast<size_t>(input)])] = true;
  }

  void run() {
    find_awaited();
    for (size_t s = 0; s < program_.steps.size(); ++s) visit(s);
    rebuild();
  }

 private:
  struct Group {
    std::vector<size_t> steps;
    std::vector<int> kept;  // slots of what the program keeps that members read
    bool open = true;
  };
  static size_t number(int slot) { return static_cast<size_t>(slot); }
  const Slot& slot_at(int slot) const { return program_.slots[number(slot)]; }

  void visit(size_t s) {
    const Step& step = program_.steps[s];
    for (const int slot : step.inputs)
      if (slot >= 0 && group_of_[number(slot)] >= 0) groups_[number(group_of_[number(slot)])].open = false;
    if (step.kind == Step::Kind::alias) source_[number(step.outputs[0])] = source_[number(step.inputs[0])];
    if (!can_wait(step)) return;
    int& last = last_of_kind_[{step.kernel.joinable->kind(), awaited_by(step)}];
    const std::vector<int> kept = kept_inputs(step);
    if (last == 0 || !groups_[number(last - 1)].open || shares(groups_[number(last - 1)].kept, kept)) {
      groups_.emplace_back();
      last = static_cast<int>(groups_.size());
    }
    Group& group = groups_[number(last - 1)];
    group.steps.push_back(s);
    group.kept.insert(group.kept.end(), kept.begin(), kept.end());
    for (const int slot : step.outputs)
      if (slot >= 0) group_of_[number(slot)] = last - 1;
  }

  // Outputs that somebody waits for together are joined among themselves, so that none comes later than the last of them would.
  void find_awaited() {
    awaited_.assign(program_.slots.size(), 0);
    for (size_t set = 0; set < program_.awaited.size(); ++set)
      for (const size_t o : program_.awaited[set])
        if (program_.outputs[o] >= 0) awaited_[number(program_.outputs[o])] = static_cast<int>(set) + 1;
    for (auto step = program_.steps.rbegin(); step != program_.steps.rend(); ++step)
      if (step->kind == Step::Kind::alias && awaited_[number(step->outputs[0])] != 0)
        awaited_[number(step->inputs[0])] = awaited_[number(step->outputs[0])];
  }
  int awaited_by(const Step& step) const {
    for (const int slot : step.outputs)
      if (slot >= 0 && awaited_[number(slot)] != 0) return awaited_[number(slot)];
    return 0;
  }

  bool can_wait(const Step& step) const {
    if (step.kind != Step::Kind::kernel || !step.on_device || !step.kernel.joinable) return false;
    const auto fixed = [&](int slot) { return slot < 0 || (slot_at(slot).fixed && slot_at(slot).memory == Memory::device); };
    const auto stays = [&](int slot) {
      if (slot < 0) return true;
      const Slot& s = slot_at(slot);
      return s.external || s.place == Slot::Place::constant || bytes_of(s.dtype, s.dims, s.layout) <= kMostBytesHeld;
    };
    return std::all_of(step.inputs.begin(), step.inputs.end(), fixed) && std::all_of(step.outputs.begin(), step.outputs.end(), fixed) &&
           std::all_of(step.inputs.begin(), step.inputs.end(), stays);
  }
  // New values may be written over these while the step runs: no other member may read them.
  std::vector<int> kept_inputs(const Step& step) const {
    std::vector<int> kept;
    for (const int slot : step.inputs)
      if (slot >= 0 && is_kept_[number(source_[number(slot)])]) kept.push_back(source_[number(slot)]);
    return kept;
  }
  static bool shares(const std::vector<int>& a, const std::vector<int>& b) {
    return std::any_of(b.begin(), b.end(), [&](int slot) { return std::find(a.begin(), a.end(), slot) != a.end(); });
  }

  void rebuild() {
    std::vector<int> group_of_step(program_.steps.size(), -1);
    for (size_t g = 0; g < groups_.size(); ++g)
      if (groups_[g].steps.size() > 1)
        for (const size_t s : groups_[g].steps) group_of_step[s] = static_cast<int>(g);
    std::vector<Step> steps;
    std::vector<int> overwrites;
    for (size_t s = 0; s < program_.steps.size(); ++s) {
      const int g = group_of_step[s];
      if (g >= 0 && groups_[number(g)].steps.back() != s) continue;
      steps.push_back(g < 0 ? std::move(program_.steps[s]) : joined(groups_[number(g)].steps));
      overwrites.push_back(g < 0 ? overwrites_[s] : kOverwriteNone);
    }
    program_.steps = std::move(steps);
    overwrites_ = std::move(overwrites);
  }
  Step joined(const std::vector<size_t>& members) const {
    Step made;
    made.on_device = made.elementwise = true;
    made.node = program_.steps[members.front()].node;
    std::vector<std::shared_ptr<const JoinableKernel>> kernels;
    for (const size_t s : members) {
      const Step& member = program_.steps[s];
      made.elementwise &= member.elementwise;
      made.inputs.insert(made.inputs.end(), member.inputs.begin(), member.inputs.end());
      made.outputs.insert(made.outputs.end(), member.outputs.begin(), member.outputs.end());
      kernels.push_back(member.kernel.joinable);
    }
    made.kernel = kernels.front()->join(kernels);
    return made;
  }

  Program& program_;
  std::vector<int>& overwrites_;
  std::vector<int> source_;    // of each slot: the one that it is a view of
  std::vector<int> group_of_;  // of each slot: the group that makes it
  std::vector<bool> is_kept_;
  std::vector<Group> groups_;
  std::vector<int> awaited_;                                 // of each slot: the set of awaited outputs that it is in, from 1; 0: none
  std::map<std::pair<std::string, int>, int> last_of_kind_;  // and of such a set: its number, from 1
};

}  // namespace

void join_alike_steps(Program& program, std::vector<int>& overwrites) {
  StepJoiner(program, overwrites).run();
}

}  // namespace fretsaw
