// Where in a program outputs are final, for those who go on with them beside the rest of it.
#include <algorithm>

#include "runtime/program.h"

namespace fretsaw {
namespace {

// Follows the steps of one program.
class FinalSteps {
 public:
  explicit FinalSteps(const Program& program) : program_(program) {}

  // The step behind which the output is final; -1: it is so only when the program has ended.
  int of(size_t output) const {
    const int made = program_.outputs[output];
    if (made < 0 || !slot(made).fixed || !is_alone(output)) return -1;
    const int last = last_step([&](const Step& step) { return contains(step.outputs, made); });
    if (last < 0) return -1;
    if (slot(made).memory == Memory::host) return slot(made).place == Slot::Place::pool && !slot(made).external ? last : -1;
    // In a device's memory: what is kept has an address that others know.
    if (kept_input(output) < 0 && !place(output)) return -1;
    const int binding = binding_of(output);
    const auto touches = [&](int number) { return number >= 0 && (number == made || (binding >= 0 && slot(number).binding == binding)); };
    return std::max(last, last_step([&](const Step& step) {
                      return std::any_of(step.inputs.begin(), step.inputs.end(), touches) ||
                             std::any_of(step.outputs.begin(), step.outputs.end(), touches);
                    }));
  }

 private:
  const Slot& slot(int number) const { return program_.slots[static_cast<size_t>(number)]; }
  static bool contains(const std::vector<int>& slots, int number) { return std::find(slots.begin(), slots.end(), number) != slots.end(); }
  template <typename Is>
  int last_step(const Is& is) const {
    for (size_t i = program_.steps.size(); i > 0; --i)
      if (is(program_.steps[i - 1])) return static_cast<int>(i - 1);
    return -1;
  }
  int kept_input(size_t output) const { return output < program_.kept.size() ? program_.kept[output] : -1; }
  const RuntimeValue* place(size_t output) const { return output < program_.places.size() ? program_.places[output] : nullptr; }
  // Of the memory that the output is kept in; -1: the program reaches it nowhere else.
  int binding_of(size_t output) const {
    if (const int input = kept_input(output); input >= 0) return slot(program_.inputs[static_cast<size_t>(input)]).binding;
    const int binding = slot(program_.outputs[output]).binding;
    return binding >= 0 && program_.bindings[static_cast<size_t>(binding)].place == place(output) ? binding : -1;
  }
  // Whether no other output lies in the same memory, now or as the old value.
  bool is_alone(size_t output) const {
    const int made = program_.outputs[output], binding = binding_of(output);
    for (size_t o = 0; o < program_.outputs.size(); ++o) {
      if (o == output || program_.outputs[o] < 0) continue;
      if (program_.outputs[o] == made || (binding >= 0 && slot(program_.outputs[o]).binding == binding)) return false;
    }
    return true;
  }

  const Program& program_;
};

// Puts what is kept where it is kept, as the end of the program does otherwise.
void settle(Program& program, size_t output, RankContext& rank) {
  const RuntimeValue* kept = kept_in(program, output);
  if (!kept) return;
  const TensorView &old = kept->tensor, &made = program.values[static_cast<size_t>(program.outputs[output])].tensor;
  if (made.data != old.data) copy_bytes(old, made, made.bytes(), rank.device.get());
  program.settled[output] = true;
}

}  // namespace

const RuntimeValue* kept_in(const Program& program, size_t output) {
  if (program.kept.empty()) return nullptr;
  const int input = program.kept[output];
  return input < 0 ? program.places[output] : &program.values[static_cast<size_t>(program.inputs[static_cast<size_t>(input)])];
}

std::vector<Milestone> find_milestones(const Program& program) {
  const FinalSteps finals(program);
  std::vector<Milestone> found;
  for (const std::vector<size_t>& outputs : program.awaited) {
    int last = -1;
    bool early = !outputs.empty();
    for (const size_t o : outputs) {
      const int step = finals.of(o);
      early &= step >= 0;
      last = std::max(last, step);
    }
    if (early) found.push_back({static_cast<size_t>(last), outputs});
  }
  std::stable_sort(found.begin(), found.end(), [](const Milestone& a, const Milestone& b) { return a.step < b.step; });
  return found;
}

void pass_milestones(Program& program, size_t first, size_t last, RankContext& rank) {
  if (program.milestones.empty() || !rank.reached || program.runs == 0) return;  // a first run may have to be repeated
  for (const Milestone& milestone : program.milestones) {
    if (milestone.step < first || milestone.step > last) continue;
    for (const size_t output : milestone.outputs) settle(program, output, rank);
    rank.reached(program, milestone);
  }
}

}  // namespace fretsaw
