// Runs a program: binds its values to the arena, calls its steps in order, and hands its outputs over.
#include <algorithm>
#include <cstring>
#include <new>

#include "graph/errors.h"
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
    if (slot.place == Place::arena) return value.tensor.data;
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
    value.owner = rank_.memory.pool.take(bytes_of(dtype, dims, layout));
    return value.owner.get();
  }
  void* scratch(size_t bytes) override { return rank_.memory.scratch.reserve(bytes); }

 private:
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
  if (arena == program.bound_arena) return;
  for (size_t i = 0; i < program.slots.size(); ++i) {
    if (program.slots[i].place == Place::arena) program.values[i].tensor.data = arena + program.slots[i].offset;
  }
  program.bound_arena = arena;
}

void run_alias(Program& program, const Step& step) {
  RuntimeValue& out = *step.output_values[0];
  const RuntimeValue& in = *step.input_values[0];
  out.kind = RuntimeValue::Kind::tensor;
  out.tensor.data = in.tensor.data;
  if (program.slots[static_cast<size_t>(step.outputs[0])].place != Place::arena) out.owner = in.owner;
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
    case Step::Kind::kernel: {
      reset_outputs(program, step);
      memory.start(step);
      RunContext context(step.input_values, step.output_values, memory, rank.threads);
      step.kernel.run(context);
    }
  }
}

void trace_step(const Step& step, RankContext& rank, double start_us) {
  std::string name = step.node ? step.node->name : "";
  std::string category = step.reorders ? "reorder" : step.node ? step.node->op : "";
  if (step.node && !step.reorders && is_collective(*step.node)) category = "collective";
  rank.events.push_back({rank.rank, name, category, start_us, rank.now_us() - start_us});
}

Error located(const Error& e, const Step& step) {
  if (!step.node) return e;
  return e.at_node(step.node->name, step.node->op);
}

void take_inputs(Program& program, std::span<const RuntimeValue* const> inputs) {
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    if (program.inputs[i] < 0 || !inputs[i]) continue;
    program.values[static_cast<size_t>(program.inputs[i])] = *inputs[i];
  }
}

// What the caller may keep: pool memory is handed over, anything else copied.
void give_outputs(Program& program, std::span<RuntimeValue> outputs, RankContext& rank) {
  for (size_t i = 0; i < program.outputs.size(); ++i) {
    auto number = static_cast<size_t>(program.outputs[i]);
    const RuntimeValue& value = program.values[number];
    if (value.kind != RuntimeValue::Kind::absent && (program.slots[number].external || !owns_memory(value))) {
      copy_pooled(rank.memory.pool, value, outputs[i]);
    } else {
      outputs[i] = value;
    }
  }
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

void RankContext::count_communication(const std::string& op, const std::string& axis, size_t bytes) {
  if (!counts_communication) return;
  auto same = [&](const CommunicationCount& c) { return c.op == op && c.axis == axis; };
  auto found = std::find_if(communication.begin(), communication.end(), same);
  if (found == communication.end()) found = communication.insert(found, {op, axis, 0, 0});
  ++found->count;
  found->bytes += static_cast<int64_t>(bytes);
}

void run_program(Program& program, std::span<const RuntimeValue* const> inputs, std::span<RuntimeValue> outputs, RankContext& rank,
                 size_t depth) {
  if (depth > 64) throw Error("control flow is nested more than 64 deep", "flatten the model");
  bind_arena(program, rank, depth);
  take_inputs(program, inputs);
  StepMemory memory(program, rank);
  for (Step& step : program.steps) {
    double start_us = rank.trace ? rank.now_us() : 0;
    try {
      run_step(program, step, memory, rank, depth);
    } catch (const ShapeMismatch&) {
      throw;
    } catch (const Error& e) {
      throw located(e, step);
    } catch (const std::bad_alloc&) {
      throw located(Error("no memory is left", "use smaller inputs, more micro-batches or more stages", ErrorCode::device), step);
    } catch (const std::exception& e) {
      throw located(Error(std::string("the kernel failed: ") + e.what(), "check the shapes and types of its inputs"), step);
    }
    if (rank.trace && step.kind != Step::Kind::alias) trace_step(step, rank, start_us);
    for (int slot : step.releases) clear(program.values[static_cast<size_t>(slot)]);
  }
  give_outputs(program, outputs, rank);
}

}  // namespace fretsaw
