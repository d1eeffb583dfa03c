// Values of a program that lie in memory of its inputs and outputs, whose addresses may differ from run to run.
#include <algorithm>

#include "runtime/program.h"

namespace fretsaw {
namespace {

constexpr size_t kRemembered = 32;  // sets of addresses

// Whether the program ran with these addresses before; notes them.
bool remember(Program& program) {
  if (program.bindings.empty()) return program.runs > 0;
  if (std::find(program.before.begin(), program.before.end(), program.addresses) != program.before.end()) return true;
  if (program.before.size() >= kRemembered) program.before.erase(program.before.begin());
  program.before.push_back(program.addresses);
  return false;
}

// What is written over must be of nobody else: two outputs of the program that made it may be the same memory.
void copy_if_shared(RuntimeValue& value, Binding& binding, RankContext& rank) {
  constexpr int64_t kOwners = 3;  // the pool, this program, and the one who gave it
  if (value.owner && value.owner.use_count() <= kOwners) return;
  const TensorView given = value.tensor;
  binding.memory = rank.device_memory->pool.take(binding.bytes);
  value.tensor.data = binding.memory.get();
  copy_bytes(value.tensor, given, given.bytes(), rank.device.get());
}

// Addresses that the program ran with before, its work captured best, and that it can run with now; null: there are none.
const std::vector<const void*>* known_addresses(const Program& program, const BufferPool& pool) {
  const auto fits = [&](const std::vector<const void*>& known) {
    for (size_t i = 0; i < program.bindings.size(); ++i) {
      const Binding& binding = program.bindings[i];
      const bool is_given = program.addresses[i] != nullptr;
      if (is_given ? program.addresses[i] != known[i] : !pool.is_free(binding.bytes, known[i])) return false;
    }
    return true;
  };
  for (const Segment& segment : program.segments)
    for (const Segment::Captured& captured : segment.captured)
      if (fits(captured.addresses)) return &captured.addresses;
  const auto found = std::find_if(program.before.begin(), program.before.end(), fits);
  return found == program.before.end() ? nullptr : &*found;
}

}  // namespace

void bind_values(Program& program, RankContext& rank) {
  program.settled.assign(program.milestones.empty() ? 0 : program.outputs.size(), false);
  program.addresses.clear();
  for (Binding& binding : program.bindings) {
    if (binding.input >= 0) {
      RuntimeValue& value = program.values[static_cast<size_t>(program.inputs[static_cast<size_t>(binding.input)])];
      if (binding.overwritten) copy_if_shared(value, binding, rank);
      program.addresses.push_back(value.tensor.data);
    } else {
      program.addresses.push_back(binding.place ? binding.place->tensor.data : nullptr);
    }
  }
  BufferPool& pool = rank.device_memory->pool;
  const std::vector<const void*>* known = known_addresses(program, pool);
  for (size_t i = 0; i < program.bindings.size(); ++i) {
    Binding& binding = program.bindings[i];
    if (binding.input >= 0 || binding.place) continue;
    binding.memory = pool.take(binding.bytes, known ? (*known)[i] : nullptr);
    program.addresses[i] = binding.memory.get();
  }
  for (size_t i = 0; i < program.slots.size() && !program.bindings.empty(); ++i) {
    const Slot& slot = program.slots[i];
    if (slot.place != Slot::Place::bound) continue;
    const auto* base = static_cast<const std::byte*>(program.addresses[static_cast<size_t>(slot.binding)]);
    program.values[i].tensor.data = const_cast<std::byte*>(base) + slot.offset;
  }
  program.ran_before = remember(program);
}

// After all outputs that are handed over: one of those may be the old value.
void keep_values(Program& program, std::span<RuntimeValue> outputs, RankContext& rank) {
  for (size_t o = 0; o < program.kept.size(); ++o) {
    const RuntimeValue* old = kept_in(program, o);
    if (!old) continue;
    const TensorView& made = program.values[static_cast<size_t>(program.outputs[o])].tensor;
    const bool settled = o < program.settled.size() && program.settled[o];
    if (!settled && made.data != old->tensor.data) copy_bytes(old->tensor, made, made.bytes(), rank.device.get());
    outputs[o] = *old;
  }
  for (Binding& binding : program.bindings) binding.memory.reset();
}

}  // namespace fretsaw
