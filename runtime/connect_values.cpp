// The values of a program whose slots are placed: constants brought to where they are read, and the steps' pointers.
#include <algorithm>
#include <unordered_set>

#include "graph/errors.h"
#include "runtime/program.h"

namespace fretsaw {
namespace {

std::vector<bool> read_slots(const Program& program) {
  std::vector<bool> read(program.slots.size());
  const auto mark = [&](int slot) {
    if (slot >= 0) read[static_cast<size_t>(slot)] = true;
  };
  for (const Step& step : program.steps) std::for_each(step.inputs.begin(), step.inputs.end(), mark);
  std::for_each(program.outputs.begin(), program.outputs.end(), mark);
  return read;
}

}  // namespace

void check_device_memory(const Program& program, const std::vector<TensorPtr>& constants, const RankContext& rank) {
  Device& device = *program.device;
  int64_t weights = 0;
  std::unordered_set<TensorPtr> counted;
  for (size_t i = 0; i < constants.size(); ++i) {
    const TensorPtr& tensor = constants[i];
    if (!tensor || program.slots[i].memory != Memory::device || !counted.insert(tensor).second) continue;
    if (!device.holds(tensor)) weights += static_cast<int64_t>(tensor->bytes());
  }
  const auto arena = static_cast<int64_t>(program.device_arena_bytes);
  const auto held = static_cast<int64_t>(rank.device_memory->arena(0).bytes());  // it goes when a larger one is made
  const int64_t values = arena > held ? arena : 0, available = static_cast<int64_t>(device.free_bytes()) + (values > 0 ? held : 0);
  if (weights + values <= available) return;
  throw Error(device.name() + " needs " + gibibytes(weights) + " for weights and " + gibibytes(values) + " for values between nodes, and " +
                  gibibytes(available) + " of its memory are free",
              "use smaller inputs, more micro-batches, more stages or more devices", ErrorCode::device);
}

void connect_values(Program& program, const std::vector<TensorPtr>& constants, RankContext& rank) {
  program.values.resize(program.slots.size());
  const std::vector<bool> read = read_slots(program);
  for (size_t i = 0; i < program.slots.size(); ++i) {
    const Slot& slot = program.slots[i];
    RuntimeValue& value = program.values[i];
    if (constants[i] && !read[i]) continue;  // the device has it in a form of its own
    if (constants[i] && slot.memory == Memory::device) {
      value.kind = RuntimeValue::Kind::tensor;
      value.owner = program.device->constant(constants[i]);
      value.tensor = {slot.dtype, slot.dims, value.owner.get(), Layout::plain, Memory::device};
    } else if (constants[i]) {
      from_constant(constants[i], value, &rank);
    } else if (slot.fixed) {
      value.tensor = {slot.dtype, slot.dims, nullptr, slot.layout, slot.memory};
    }
  }
  const auto pointers = [&](const std::vector<int>& slots) {
    std::vector<RuntimeValue*> found;
    for (int s : slots) found.push_back(s < 0 ? nullptr : &program.values[static_cast<size_t>(s)]);
    return found;
  };
  for (Step& step : program.steps) {
    step.input_values = pointers(step.inputs);
    step.output_values = pointers(step.outputs);
  }
}

}  // namespace fretsaw
