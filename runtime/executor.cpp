// Runs a program: binds its values to the arena, calls its steps in order, and hands its outputs over.
#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "graph/errors.h"
#include "runtime/anomaly.h"
#include "runtime/collectives.h"
#include "runtime/program.h"

namespace fretsaw {
namespace {

using Place = Slot::Place;

// Where the outputs of the running step go.
class StepMemory : public KernelMemory {
 public:
  StepMemory(Program& program, RankContext& rank) : program_(program), rank_(rank) {}
  void start(const Step& step) { step_ = &step; }

  void* output(size_t index, DType dtype, const Dims& dims, Layout layout) override {
    int number = step_->outputs[index];
    const Slot& slot = program_.slots[static_cast<size_t>(number)];
    if (slot.fixed && (slot.dtype != dtype || slot.layout != layout || slot.dims != dims)) {
      throw ShapeMismatch(Error("makes " + std::string(name_of(dtype)) + to_string(dims) + " where shape inference expects " +
                                    std::string(name_of(slot.dtype)) + to_string(slot.dims),
                                "check the shapes in the model")
                              .at_node(step_->node->name, step_->node->op),
                          step_->node->name);
    }
    RuntimeValue& value = program_.values[static_cast<size_t>(number)];
    RankMemory& memory = memory_of(slot.memory);
    if (slot.place == Place::arena || slot.place == Place::bound) return value.tensor.data;
    if (index == 0 && step_->view && shares_input(dtype, dims, layout)) {
      value.owner = step_->input_values[0]->owner;
      return step_->input_values[0]->tensor.data;
    }
    if (dtype == DType::string) {
      RuntimeValue strings;
      make_pooled(rank_.memory.pool, strings, dtype, dims);
      value.owner = strings.owner;
      return strings.tensor.data;
    }
    value.owner = memory.pool.take(bytes_of(dtype, dims, layout));
    return value.owner.get();
  }
  void* scratch(size_t bytes) override { return memory_of(step_->on_device ? Memory::device : Memory::host).scratch.reserve(bytes); }

 private:
  RankMemory& memory_of(Memory memory) { return memory == Memory::device ? *rank_.device_memory : rank_.memory; }
  bool shares_input(DType dtype, const Dims& dims, Layout layout) const {
    int from = step_->inputs.empty() ? -1 : step_->inputs[0];
    if (from < 0 || dtype == DType::string || layout != Layout::plain) return false;
    const Slot& slot = program_.slots[static_cast<size_t>(from)];
    const RuntimeValue& value = *step_->input_values[0];
    return !slot.external && slot.place == Place::pool && value.kind == RuntimeValue::Kind::tensor && value.owner.use_count() > 0 &&
           value.tensor.bytes() == bytes_of(dtype, dims, layout);
  }

  Program& program_;
  RankContext& rank_;
  const Step* step_ = nullptr;
};

void bind_arena(Program& program, RankContext& rank, size_t depth) {
  std::byte* arena = rank.memory.arena(depth).reserve(program.arena_bytes);
  std::byte* on_device = program.device ? rank.device_memory->arena(depth).reserve(program.device_arena_bytes) : nullptr;
  if (arena == program.bound_arena && on_device == program.bound_device_arena) return;
  for (size_t i = 0; i < program.slots.size(); ++i) {
    const Slot& slot = program.slots[i];
    if (slot.place == Place::arena) program.values[i].tensor.data = (slot.memory == Memory::device ? on_device : arena) + slot.offset;
  }
  program.bound_arena = arena;
  program.bound_device_arena = on_device;
  forget_captured(program);
}

void run_alias(Program& program, const Step& step) {
  RuntimeValue& out = *step.output_values[0];
  const RuntimeValue& in = *step.input_values[0];
  out.kind = RuntimeValue::Kind::tensor;
  out.tensor.data = static_cast<std::byte*>(in.tensor.data) + step.alias_offset;
  const Place place = program.slots[static_cast<size_t>(step.outputs[0])].place;
  if (place != Place::arena && place != Place::bound) out.owner = in.owner;
}

// Between the two memories. An input of the program may be in either.
void run_copy(Program& program, const Step& step, RankContext& rank) {
  const RuntimeValue& in = *step.input_values[0];
  RuntimeValue& out = *step.output_values[0];
  const Slot& slot = program.slots[static_cast<size_t>(step.outputs[0])];
  BufferPool& pool = slot.memory == Memory::device ? rank.device_memory->pool : rank.memory.pool;
  if (in.kind != RuntimeValue::Kind::tensor) return copy_pooled(pool, in, out, rank.device.get());
  if (slot.place != Place::arena && slot.place != Place::bound) make_pooled(pool, out, in.tensor.dtype, in.tensor.dims, in.tensor.layout);
  out.kind = RuntimeValue::Kind::tensor;
  const size_t bytes = in.tensor.bytes();
  const void* there = rank.staged && in.tensor.memory == Memory::host ? rank.staged->find(in.tensor.data, bytes) : nullptr;
  if (there)
    rank.device->copy(out.tensor.data, there, bytes);
  else
    copy_bytes(out.tensor, in.tensor, bytes, rank.device.get());
}

// Kernels fill outputs anew; one they leave out stays an empty optional.
void reset_outputs(Program& program, const Step& step) {
  for (size_t i = 0; i < step.outputs.size(); ++i) {
    if (!step.output_values[i]) continue;
    step.output_values[i]->kind = RuntimeValue::Kind::absent;
    if (program.slots[static_cast<size_t>(step.outputs[i])].place == Place::pool) step.output_values[i]->owner.reset();
  }
}

// Later kernels are made for the shapes that inference gives.
void check_control_outputs(const Program& program, const Step& step) {
  for (size_t i = 0; i < step.outputs.size(); ++i) {
    if (step.outputs[i] < 0) continue;
    const Slot& slot = program.slots[static_cast<size_t>(step.outputs[i])];
    const RuntimeValue& value = *step.output_values[i];
    if (!slot.fixed || (value.kind == RuntimeValue::Kind::tensor && value.tensor.dtype == slot.dtype && value.tensor.dims == slot.dims))
      continue;
    throw ShapeMismatch(Error("output " + std::to_string(i) + " is " + to_string(value.tensor.dims) + " where shape inference expects " +
                                  to_string(slot.dims),
                              "check the shapes in the node's bodies")
                            .at_node(step.node->name, step.node->op),
                        step.node->name);
  }
}

void run_step(Program& program, Step& step, StepMemory& memory, RankContext& rank, size_t depth) {
  switch (step.kind) {
    case Step::Kind::alias:
      run_alias(program, step);
      return;
    case Step::Kind::control:
      reset_outputs(program, step);
      run_control_flow(*step.control, step, rank, depth + 1);
      check_control_outputs(program, step);
      return;
    case Step::Kind::copy:
      reset_outputs(program, step);
      run_copy(program, step, rank);
      return;
    case Step::Kind::kernel: {
      reset_outputs(program, step);
      memory.start(step);
      RunContext context(step.input_values, step.output_values, memory, rank.threads, step.on_device ? rank.device.get() : nullptr);
      step.kernel.run(context);
    }
  }
}

TraceEvent event_of(const Step& step, const RankContext& rank, double start_us) {
  std::string name = step.node ? step.node->name : "";
  std::string category = step.reorders ? "reorder" : step.node ? step.node->op : "";
  if (step.node && !step.reorders && is_collective(*step.node)) category = "collective";
  return {rank.rank, name, category, start_us, rank.now_us() - start_us};
}

Error located(const Error& e, const Step& step) {
  if (!step.node) return e;
  return e.at_node(step.node->name, step.node->op);
}

// Whether a step of the host reads the slot.
bool read_on_host(const Program& program, int slot) {
  return std::any_of(program.steps.begin(), program.steps.end(), [&](const Step& step) {
    return step.kind != Step::Kind::copy && std::count(step.inputs.begin(), step.inputs.end(), slot) > 0;
  });
}

void take_inputs(Program& program, std::span<const RuntimeValue* const> inputs, RankContext& rank) {
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    if (program.inputs[i] < 0 || !inputs[i]) continue;
    RuntimeValue& value = program.values[static_cast<size_t>(program.inputs[i])];
    const bool bound = program.slots[static_cast<size_t>(program.inputs[i])].binding >= 0;
    if (!bound && inputs[i]->tensor.memory == Memory::device && inputs[i]->kind == RuntimeValue::Kind::tensor &&
        read_on_host(program, program.inputs[i])) {
      copy_pooled(rank.memory.pool, *inputs[i], value, rank.device.get());
    } else {
      value = *inputs[i];
    }
  }
}

// What the caller may keep: pool memory is handed over, anything else copied.
void give_outputs(Program& program, std::span<RuntimeValue> outputs, RankContext& rank) {
  for (size_t i = 0; i < program.outputs.size(); ++i) {
    auto number = static_cast<size_t>(program.outputs[i]);
    const RuntimeValue& value = program.values[number];
    const int binding = program.slots[number].binding;
    if (!program.kept.empty() && (program.kept[i] >= 0 || program.places[i])) continue;
    const Binding* own = binding >= 0 ? &program.bindings[static_cast<size_t>(binding)] : nullptr;
    if (own && own->input < 0 && !own->place) {
      outputs[i] = value;
      outputs[i].owner = own->memory;
    } else if (value.kind == RuntimeValue::Kind::tensor && value.tensor.memory == Memory::device) {
      copy_pooled(is_small_list(value.tensor.dtype, value.tensor.dims) ? rank.memory.pool : rank.device_memory->pool, value, outputs[i],
                  rank.device.get());
    } else if (value.kind != RuntimeValue::Kind::absent && (program.slots[number].external || !owns_memory(value))) {
      copy_pooled(rank.memory.pool, value, outputs[i], rank.device.get());
    } else {
      outputs[i] = value;
    }
  }
  keep_values(program, outputs, rank);
  for (int number : program.outputs) {
    if (program.slots[static_cast<size_t>(number)].place == Place::pool) program.values[static_cast<size_t>(number)].owner.reset();
  }
  for (int number : program.inputs) {
    if (number >= 0) program.values[static_cast<size_t>(number)].owner.reset();
  }
}

}  // namespace

RankContext::Group* RankContext::group(const std::string& axis) {
  auto found = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.axis == axis; });
  return found == groups.end() ? nullptr : &*found;
}

void RankContext::count_communication(const std::string& op, const std::string& axis, size_t bytes, int64_t count) {
  if (!counts_communication) return;
  auto same = [&](const CommunicationCount& c) { return c.op == op && c.axis == axis; };
  auto found = std::find_if(communication.begin(), communication.end(), same);
  if (found == communication.end()) found = communication.insert(found, {op, axis, 0, 0});
  found->count += count;
  found->bytes += static_cast<int64_t>(bytes);
}

namespace {

// One step, with what it throws located, its time in the trace, and what it was the last to need let go.
void run_traced(Program& program, Step& step, StepMemory& memory, RankContext& rank, size_t depth) {
  const double start_us = rank.trace ? rank.now_us() : 0;
  const std::shared_ptr<DeviceEvent> begin = rank.trace && step.on_device ? rank.device->record(/*timed=*/true) : nullptr;
  try {
    run_step(program, step, memory, rank, depth);
    if (rank.detect_anomaly) check_finite(step, rank);
  } catch (const ShapeMismatch&) {
    throw;
  } catch (const Error& e) {
    throw located(e, step);
  } catch (const std::bad_alloc&) {
    throw located(Error("no memory is left", "use smaller inputs, more micro-batches or more stages", ErrorCode::device), step);
  } catch (const std::exception& e) {
    throw located(Error(std::string("the kernel failed: ") + e.what(), "check the shapes and types of its inputs"), step);
  }
  if (begin)
    rank.device_steps.push_back({event_of(step, rank, start_us), begin, rank.device->record(/*timed=*/true)});
  else if (rank.trace && step.kind != Step::Kind::alias)
    rank.events.push_back(event_of(step, rank, start_us));
  for (int slot : step.releases) clear(program.values[static_cast<size_t>(slot)]);
}

// Records the segment's work; null when something in it can't be recorded, so that it is to run as it is.
Segment::Captured* capture(Program& program, Segment& segment, StepMemory& memory, RankContext& rank, size_t depth) {
  // What its collectives count is kept, to be counted whenever it is replayed.
  std::vector<CommunicationCount> before = std::exchange(rank.communication, {});
  const bool counting = std::exchange(rank.counts_communication, true);
  std::vector<int64_t> calls;
  for (const auto& group : rank.groups) calls.push_back(group.calls);
  std::exception_ptr failure;
  Segment::Captured made{program.addresses, nullptr, rank.device_memory->scratch.data(), {}, program.runs};
  rank.device->begin_capture();
  try {
    for (size_t i = segment.first; i <= segment.last; ++i) run_step(program, program.steps[i], memory, rank, depth);
    made.work = rank.device->end_capture();
  } catch (const Error&) {
    rank.device->abandon_capture();
    segment.refused = true;
  } catch (...) {
    rank.device->abandon_capture();
    failure = std::current_exception();
  }
  made.communication = std::exchange(rank.communication, std::move(before));
  rank.counts_communication = counting;
  for (size_t i = 0; i < calls.size(); ++i) rank.groups[i].calls = calls[i];
  if (failure) std::rethrow_exception(failure);
  if (segment.refused) return nullptr;
  segment.captured.push_back(std::move(made));
  return &segment.captured.back();
}

// How many sets of addresses a segment is captured for; with others it runs as it is. Where there are as many, those go that did not come
// for so many runs.
constexpr size_t kMostCaptured = 16;
constexpr int64_t kRunsKept = 256;

// The segment's work for the addresses at hand; null where there is none.
Segment::Captured* captured_work(Program& program, Segment& segment, StepMemory& memory, RankContext& rank, size_t depth) {
  const void* scratch = rank.device_memory->scratch.data();  // steps that ran before it in this run may have moved it
  std::erase_if(segment.captured, [&](const Segment::Captured& c) { return c.scratch != scratch; });
  for (Segment::Captured& c : segment.captured)
    if (c.addresses == program.addresses) return &c;
  if (!program.ran_before) return nullptr;
  if (segment.captured.size() >= kMostCaptured)
    std::erase_if(segment.captured, [&](const Segment::Captured& c) { return program.runs - c.last_run > kRunsKept; });
  if (segment.captured.size() >= kMostCaptured) return nullptr;
  return capture(program, segment, memory, rank, depth);
}

// The first run makes what kernels make once (workspaces, connections); the second is captured.
bool run_segment(Program& program, Segment& segment, StepMemory& memory, RankContext& rank, size_t depth) {
  if (program.runs == 0 || segment.refused || rank.trace || rank.detect_anomaly) return false;
  Segment::Captured* captured = captured_work(program, segment, memory, rank, depth);
  if (!captured) return false;
  captured->last_run = program.runs;
  rank.device->launch(*captured->work);
  for (const CommunicationCount& c : captured->communication) {
    rank.group(c.axis)->calls += c.count;
    rank.count_communication(c.op, c.axis, static_cast<size_t>(c.bytes), c.count);
  }
  return true;
}

}  // namespace

void forget_captured(Program& program) {
  for (Segment& segment : program.segments) segment.captured.clear(), segment.refused = false;
  program.runs = 0;
}

void run_program(Program& program, std::span<const RuntimeValue* const> inputs, std::span<RuntimeValue> outputs, RankContext& rank,
                 size_t depth) {
  if (depth > 64) throw Error("control flow is nested more than 64 deep", "flatten the model");
  bind_arena(program, rank, depth);
  take_inputs(program, inputs, rank);
  bind_values(program, rank);
  StepMemory memory(program, rank);
  auto segment = program.segments.begin();
  std::shared_ptr<DeviceEvent> beginning;
  for (size_t i = 0; i < program.steps.size(); ++i) {
    if (program.device && !beginning && program.steps[i].kind != Step::Kind::copy) beginning = program.device->record(/*timed=*/true);
    if (segment != program.segments.end() && segment->first == i) {
      Segment& whole = *segment++;
      if (run_segment(program, whole, memory, rank, depth)) {
        pass_milestones(program, i, whole.last, rank);
        i = whole.last;
        continue;
      }
    }
    run_traced(program, program.steps[i], memory, rank, depth);
    pass_milestones(program, i, i, rank);
  }
  if (beginning) rank.device_runs.push_back({{}, std::move(beginning), program.device->record(/*timed=*/true)});
  give_outputs(program, outputs, rank);
  ++program.runs;
}

}  // namespace fretsaw
