// Which steps of a program do the same work at the same addresses every time, so that a device can replay them.
#include <algorithm>

#include "runtime/program.h"

namespace fretsaw {
namespace {

bool is_milestone(const Program& program, size_t step) {
  return std::any_of(program.milestones.begin(), program.milestones.end(), [&](const Milestone& m) { return m.step == step; });
}

bool is_capturable(const Program& program, const Step& step) {
  const auto slot_at = [&](int number) -> const Slot& { return program.slots[static_cast<size_t>(number)]; };
  const auto in_place = [&](int number) {
    if (number < 0 || slot_at(number).place == Slot::Place::constant || slot_at(number).binding >= 0) return true;
    return slot_at(number).place == Slot::Place::arena && slot_at(number).fixed;
  };
  if (step.kind == Step::Kind::alias) return in_place(step.inputs[0]) && in_place(step.outputs[0]);
  if (step.kind != Step::Kind::kernel || !step.on_device || !step.kernel.capturable) return false;
  for (int number : step.inputs) {
    if (!in_place(number) || (number >= 0 && slot_at(number).memory == Memory::host && slot_at(number).place != Slot::Place::constant))
      return false;
  }
  return std::all_of(step.outputs.begin(), step.outputs.end(), in_place);
}

}  // namespace

void find_segments(Program& program) {
  std::vector<Step>& steps = program.steps;
  for (Step& step : steps) step.capturable = is_capturable(program, step);
  for (size_t i = 0; i < steps.size();) {
    size_t end = i, kernels = 0;
    while (end < steps.size() && steps[end].capturable) {
      kernels += steps[end].kind == Step::Kind::kernel;
      if (is_milestone(program, end++)) break;
    }
    if (kernels > 1) program.segments.push_back({.first = i, .last = end - 1});
    i = std::max(end, i + 1);
  }
}

}  // namespace fretsaw
