// Where each value of a program lives: the arena for what has a known size and stays inside, the pool for the rest.
#include <algorithm>
#include <numeric>

#include "runtime/memory_plan.h"
#include "runtime/program.h"

namespace fretsaw {
namespace {

using Place = Slot::Place;

// Slots that share bytes, through views of known shape or because a step overwrites its input.
class Buffers {
 public:
  Buffers(const Program& program) : parent_(program.slots.size()), lives_(program.slots.size()), offsets_(program.slots.size()) {
    std::iota(parent_.begin(), parent_.end(), 0);
    for (auto& life : lives_) life = {};
    int count = static_cast<int>(program.steps.size());
    for (int s = 0; s < count; ++s) {
      for (int slot : program.steps[static_cast<size_t>(s)].inputs) {
        if (slot >= 0) lives_[static_cast<size_t>(slot)].last = s;
      }
      for (int slot : program.steps[static_cast<size_t>(s)].outputs) {
        if (slot >= 0)
          lives_[static_cast<size_t>(slot)].first = s,
          lives_[static_cast<size_t>(slot)].last = std::max(s, lives_[static_cast<size_t>(slot)].last);
      }
    }
    for (size_t i = 0; i < program.slots.size(); ++i) {
      const Slot& slot = program.slots[i];
      lives_[i].planned = slot.fixed && !slot.external && slot.place == Place::pool && slot.dtype != DType::string;
    }
    // Outputs on the host are handed over; those on the device are copied at the end, so that they have an address that stays.
    for (int slot : program.outputs) {
      Life& life = lives_[static_cast<size_t>(slot)];
      if (program.slots[static_cast<size_t>(slot)].memory == Memory::device) {
        life.last = count;
      } else {
        life.escapes = true;
      }
    }
    for (size_t input : program.consumed) {
      const int slot = program.inputs[input];
      if (slot < 0 || program.slots[static_cast<size_t>(slot)].memory != Memory::device || !program.slots[static_cast<size_t>(slot)].fixed)
        continue;
      lives_[static_cast<size_t>(slot)].consumed = program.binds;
    }
  }

  struct Life {
    int first = -1, last = -1;  // steps
    bool escapes = false;       // outlives the program's run
    bool planned = true;        // of known size, ours
    bool consumed = false;      // an input's, which is ours once it has been read
    bool overwritten = false;   // likewise: and a step writes over it
  };
  int root(int slot) {
    while (parent_[static_cast<size_t>(slot)] != slot)
      slot = parent_[static_cast<size_t>(slot)] = parent_[static_cast<size_t>(parent_[static_cast<size_t>(slot)])];
    return slot;
  }
  Life& life(int slot) { return lives_[static_cast<size_t>(root(slot))]; }
  size_t& offset(int slot) { return offsets_[static_cast<size_t>(slot)]; }  // bytes from the shared buffer's beginning
  void join(int from, int into) {
    from = root(from), into = root(into);
    if (from == into) return;
    Life &a = lives_[static_cast<size_t>(into)], &b = lives_[static_cast<size_t>(from)];
    a.first = std::min(a.first, b.first);
    a.last = std::max(a.last, b.last);
    a.escapes |= b.escapes;
    a.planned &= b.planned;
    parent_[static_cast<size_t>(from)] = into;
  }

 private:
  std::vector<int> parent_;
  std::vector<Life> lives_;
  std::vector<size_t> offsets_;
};

bool same_bytes(const Slot& a, const Slot& b) {
  return a.memory == b.memory && a.layout == b.layout && bits_of(a.dtype) == bits_of(b.dtype) && count_of(a.dims) == count_of(b.dims) &&
         (a.layout == Layout::plain || a.dims == b.dims);
}

// Lets step `s` overwrite an input that nobody needs afterwards: input `wanted`, or whichever can be.
void overwrite_input(Program& program, Buffers& buffers, int s, int wanted) {
  const Step& step = program.steps[static_cast<size_t>(s)];
  int out = step.outputs.empty() ? -1 : step.outputs[0];
  if (out < 0 || !buffers.life(out).planned || buffers.life(out).escapes) return;
  for (int i = 0; i < static_cast<int>(step.inputs.size()); ++i) {
    const int in = step.inputs[static_cast<size_t>(i)];
    if (in < 0 || (wanted != kOverwriteAny && wanted != i)) continue;
    const Buffers::Life& life = buffers.life(in);
    const bool made_here = life.planned && life.first >= 0;
    // An output that is one of the program's is handed over in memory of its own.
    const bool consumed = life.consumed && buffers.life(out).last < static_cast<int>(program.steps.size());
    const bool dies = (made_here || consumed) && !life.escapes && life.last == s;
    if (!dies || !same_bytes(program.slots[static_cast<size_t>(in)], program.slots[static_cast<size_t>(out)])) continue;
    // A kernel that isn't elementwise may read its other inputs after it has written.
    const auto shares = [&](int other) { return other >= 0 && buffers.root(other) == buffers.root(in); };
    // An elementwise one meets them element by element, if they are the same bytes and no part of them.
    const auto is_part = [&](int other) {
      return shares(other) && (buffers.offset(other) != buffers.offset(in) ||
                               !same_bytes(program.slots[static_cast<size_t>(other)], program.slots[static_cast<size_t>(in)]));
    };
    if (wanted == i && std::count_if(step.inputs.begin(), step.inputs.end(), shares) > 1) continue;
    if (std::any_of(step.inputs.begin(), step.inputs.end(), is_part)) continue;
    buffers.join(out, in);
    buffers.offset(out) = buffers.offset(in);
    if (consumed) buffers.life(in).overwritten = true;
    return;
  }
}

// Lets step `s` write the new value of what the program keeps where the old one lies, if nobody needs that one afterwards.
// `wanted` as for overwrite_input.
void overwrite_kept(Program& program, Buffers& buffers, int s, int wanted) {
  const Step& step = program.steps[static_cast<size_t>(s)];
  const auto slot_of = [&](int number) -> const Slot& { return program.slots[static_cast<size_t>(number)]; };
  const auto overwrite = [&](int made, int kept) {
    const Buffers::Life &now = buffers.life(made), &old = buffers.life(kept);
    if (!now.planned || now.escapes || old.last > s || buffers.root(made) == buffers.root(kept)) return;
    if (slot_of(kept).layout != Layout::plain || !same_bytes(slot_of(made), slot_of(kept))) return;
    const auto shares = [&](int in) { return in >= 0 && buffers.root(in) == buffers.root(kept); };
    const bool meets_one = std::count_if(step.inputs.begin(), step.inputs.end(), shares) == 1;
    for (int i = 0; i < static_cast<int>(step.inputs.size()); ++i) {
      const int in = step.inputs[static_cast<size_t>(i)];
      if (!shares(in)) continue;
      const bool same_place = buffers.offset(in) == buffers.offset(kept) && slot_of(in).layout == Layout::plain &&
                              slot_of(in).dims == slot_of(made).dims && same_bytes(slot_of(in), slot_of(made));
      const bool is_meant = wanted == i && meets_one && made == step.outputs[0];
      if ((!step.elementwise && !is_meant) || !same_place) return;
    }
    buffers.join(made, kept);
    buffers.offset(made) = buffers.offset(kept);
  };
  for (size_t o = 0; o < program.kept.size(); ++o) {
    if (program.kept[o] < 0) continue;
    for (int made : step.outputs)
      if (made >= 0 && buffers.root(made) == buffers.root(program.outputs[o]))
        overwrite(made, program.inputs[static_cast<size_t>(program.kept[o])]);
  }
}

// Where the value itself can be made there: not where it is a part of a larger one.
const RuntimeValue* place_of_output(const Program& program, Buffers& buffers, size_t o) {
  const int output = program.outputs[o];
  if (!program.places[o] || buffers.offset(output) != 0) return nullptr;
  const Slot& own = program.slots[static_cast<size_t>(output)];
  for (int i = 0; i < static_cast<int>(program.slots.size()); ++i) {
    const Slot& slot = program.slots[static_cast<size_t>(i)];
    if (buffers.root(i) != buffers.root(output) || !slot.fixed) continue;
    if (buffers.offset(i) + bytes_of(slot.dtype, slot.dims, slot.layout) > bytes_of(own.dtype, own.dims, own.layout)) return nullptr;
  }
  return program.places[o];
}

// Binds inputs in device memory with what shares it, and outputs there that are kept in other places or handed over.
void bind_slots(Program& program, Buffers& buffers) {
  std::vector<int> number(program.slots.size(), -1);  // of the binding, by root slot
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    const int slot = program.inputs[i];
    if (slot < 0 || program.slots[static_cast<size_t>(slot)].memory != Memory::device) continue;
    number[static_cast<size_t>(buffers.root(slot))] = static_cast<int>(program.bindings.size());
    program.bindings.push_back({.input = static_cast<int>(i), .overwritten = buffers.life(slot).overwritten});
  }
  for (size_t o = 0; o < program.outputs.size(); ++o) {
    const Slot& slot = program.slots[static_cast<size_t>(program.outputs[o])];
    const Buffers::Life& life = buffers.life(program.outputs[o]);
    int& binding = number[static_cast<size_t>(buffers.root(program.outputs[o]))];
    const bool keeps_input = !program.kept.empty() && program.kept[o] >= 0;
    if (keeps_input || binding >= 0 || slot.memory != Memory::device || !life.planned || life.escapes || life.first < 0) continue;
    if (is_small_list(slot.dtype, slot.dims)) continue;
    binding = static_cast<int>(program.bindings.size());
    program.bindings.push_back({.place = place_of_output(program, buffers, o)});
  }
  for (int i = 0; i < static_cast<int>(program.slots.size()); ++i) {
    Slot& slot = program.slots[static_cast<size_t>(i)];
    const int binding = number[static_cast<size_t>(buffers.root(i))];
    if (binding < 0 || !slot.fixed) continue;
    slot.binding = binding, slot.offset = buffers.offset(i);
    if (slot.place == Place::pool) slot.place = Place::bound;
    size_t& bytes = program.bindings[static_cast<size_t>(binding)].bytes;
    bytes = std::max(bytes, slot.offset + bytes_of(slot.dtype, slot.dims, slot.layout));
  }
}

// What is kept goes to memory of a device that holds the same type; the rest is handed over.
void check_kept(Program& program) {
  program.kept.resize(program.binds ? program.outputs.size() : 0, -1);
  program.places.resize(program.kept.size(), nullptr);
  for (size_t o = 0; o < program.kept.size(); ++o) {
    const int input = program.kept[o] < 0 ? -1 : program.inputs[static_cast<size_t>(program.kept[o])];
    const Slot& now = program.slots[static_cast<size_t>(program.outputs[o])];
    const Slot* old = input < 0 ? nullptr : &program.slots[static_cast<size_t>(input)];
    const bool fits = old && old->memory == Memory::device && old->fixed && now.fixed && old->dtype == now.dtype && old->dims == now.dims &&
                      old->layout == now.layout;
    if (!fits) program.kept[o] = -1;
    const RuntimeValue* place = program.places[o];
    const bool fits_place = place && place->tensor.memory == Memory::device && now.memory == Memory::device && now.fixed &&
                            place->tensor.dtype == now.dtype && place->tensor.dims == now.dims && now.layout == Layout::plain;
    if (!fits_place) program.places[o] = nullptr;
  }
}

// Gives what can be planned in one memory its place in the arena there; the arena's size.
size_t place_in_arena(Program& program, Buffers& buffers, Memory memory) {
  std::vector<BufferLife> lives;
  std::vector<int> number(program.slots.size(), -1);  // of the buffer, by root slot
  std::vector<int> placed;
  for (int i = 0; i < static_cast<int>(program.slots.size()); ++i) {
    Slot& slot = program.slots[static_cast<size_t>(i)];
    const Buffers::Life& life = buffers.life(i);
    if (slot.memory != memory || slot.place != Place::pool || !life.planned || life.escapes || life.first < 0) continue;
    slot.place = Place::arena;
    placed.push_back(i);
    size_t bytes = buffers.offset(i) + bytes_of(slot.dtype, slot.dims, slot.layout);
    int& buffer = number[static_cast<size_t>(buffers.root(i))];
    if (buffer < 0) {
      buffer = static_cast<int>(lives.size());
      lives.push_back({bytes, life.first, life.last});
    } else {
      lives[static_cast<size_t>(buffer)].bytes = std::max(lives[static_cast<size_t>(buffer)].bytes, bytes);
    }
  }
  const Placement placement = place_buffers(lives);
  for (int i : placed) {
    const int buffer = number[static_cast<size_t>(buffers.root(i))];
    program.slots[static_cast<size_t>(i)].offset = placement.offsets[static_cast<size_t>(buffer)] + buffers.offset(i);
  }
  return placement.bytes;
}

}  // namespace

void place_values(Program& program, const std::vector<int>& overwrites) {
  check_kept(program);
  Buffers buffers(program);
  for (const Step& step : program.steps) {
    if (step.kind == Step::Kind::alias) buffers.join(step.outputs[0], step.inputs[0]);
  }
  for (int s = 0; s < static_cast<int>(program.steps.size()); ++s) {
    const Step& step = program.steps[static_cast<size_t>(s)];
    if (step.kind == Step::Kind::alias) buffers.offset(step.outputs[0]) = buffers.offset(step.inputs[0]) + step.alias_offset;
    const int wanted = overwrites[static_cast<size_t>(s)];
    if (!program.kept.empty()) overwrite_kept(program, buffers, s, wanted);
    if (wanted != kOverwriteNone) overwrite_input(program, buffers, s, wanted);
  }
  if (program.binds) bind_slots(program, buffers);
  program.arena_bytes = place_in_arena(program, buffers, Memory::host);
  program.device_arena_bytes = place_in_arena(program, buffers, Memory::device);
  std::vector<int> last_use(program.slots.size(), -1);
  for (int s = 0; s < static_cast<int>(program.steps.size()); ++s) {
    const Step& step = program.steps[static_cast<size_t>(s)];
    for (const auto* slots : {&step.inputs, &step.outputs}) {
      for (int slot : *slots) {
        if (slot >= 0) last_use[static_cast<size_t>(slot)] = s;
      }
    }
  }
  for (int slot : program.outputs) last_use[static_cast<size_t>(slot)] = -1;
  for (int i = 0; i < static_cast<int>(program.slots.size()); ++i) {
    Slot& slot = program.slots[static_cast<size_t>(i)];
    if (slot.place == Place::pool && last_use[static_cast<size_t>(i)] >= 0) {
      program.steps[static_cast<size_t>(last_use[static_cast<size_t>(i)])].releases.push_back(i);
    }
  }
}

}  // namespace fretsaw
