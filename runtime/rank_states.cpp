// What a rank keeps from step to step: it goes into graphs by the inputs "state:NAME" and comes back by the outputs "next:NAME".
#include <cstring>
#include <string_view>
#include <utility>

#include "graph/errors.h"
#include "runtime/rank.h"

namespace fretsaw {
namespace {

// NAME of "PREFIXNAME"; empty for other names.
std::string after(std::string_view prefix, const std::string& name) {
  return name.starts_with(prefix) ? name.substr(prefix.size()) : std::string();
}

RuntimeValue first_value(const PlanState& state) {
  if (!state.type.is_tensor() || !state.type.shape || !is_static(*state.type.shape))
    throw Error("the shape of the plan's state '" + state.name + "' is not known", "partition the model again");
  RuntimeValue value = make_value(state.type.dtype, dims_of(*state.type.shape));
  if (!state.initial) {
    std::memset(value.tensor.data, 0, value.tensor.bytes());
    return value;
  }
  if (state.initial->bytes() > 0 && !state.initial->data)
    throw Error("the weight '" + state.name + "' has no values: " + state.initial->missing, "give the model its weights' file");
  std::memcpy(value.tensor.data, state.initial->data, value.tensor.bytes());
  return value;
}

}  // namespace

void Rank::add_states() {
  std::map<std::string, const PlanState*> known;
  for (const PlanState& state : plan_->states) known[state.name] = &state;
  const auto kept = [&](std::string_view prefix, const Value* value) -> RuntimeValue* {
    const std::string name = after(prefix, value->name);
    const auto state = known.find(name);
    if (name.empty() || state == known.end()) return nullptr;
    const auto [place, is_new] = states_.try_emplace(name);
    if (is_new) place->second = first_value(*state->second);
    if (is_new && state->second->starts_at_zero) zeros_.push_back(&place->second);
    return &place->second;
  };
  for (auto& stage : stages_) {
    for (const Value* v : stage->model->graph->inputs) stage->state_inputs.push_back(kept(kStateInput, v));
    for (const Value* v : stage->model->graph->outputs) stage->state_outputs.push_back(kept(kStateOutput, v));
  }
}

void Rank::begin_states() {
  for (RuntimeValue* state : zeros_) {
    const TensorView& view = state->tensor;
    if (view.memory == Memory::device)
      context_.device->clear(view.data, view.bytes());
    else
      std::memset(view.data, 0, view.bytes());
  }
}

// A new value takes the place of the old one, which nothing reads any more.
void Rank::keep_states(Stage& stage, MicroBatch& slot) {
  for (size_t i = 0; i < stage.state_outputs.size(); ++i)
    if (stage.state_outputs[i]) *stage.state_outputs[i] = std::exchange(slot.outputs[i], {});
}

void Rank::do_once(const Action& action, const StepInputs& step, Communicator& communicator) {
  if (communicator.aborted()) throw Error("the ranks were stopped", "", ErrorCode::device);
  Stage& target = stage(action.stage);
  gather_arguments(target, 0, step);
  target.cache->run(target.arguments, target.micro_batches[0].outputs, context_, 0);
  keep_states(target, target.micro_batches[0]);
}

RuntimeValue Rank::state(const std::string& name) {
  const auto found = states_.find(name);
  if (found == states_.end()) return {};
  const TensorView& view = found->second.tensor;
  RuntimeValue copy = make_value(view.dtype, view.dims);
  if (view.memory == Memory::device) {
    context_.device->use();
    context_.device->download(copy.tensor.data, view.data, view.bytes());
  } else {
    std::memcpy(copy.tensor.data, view.data, view.bytes());
  }
  return copy;
}

void Rank::set_state(const std::string& name, const RuntimeValue& value) {
  const auto found = states_.find(name);
  if (found == states_.end()) return;
  RuntimeValue copy = make_value(value.tensor.dtype, value.tensor.dims);
  std::memcpy(copy.tensor.data, value.tensor.data, value.tensor.bytes());
  found->second = std::move(copy);
}

}  // namespace fretsaw
