// Updates that a rank makes before all ranks have said whether the step counts, and how it takes them back.
//
//   rank 0   ... B W | update | F of the next step ...      its own work is over F earlier than the last rank's
//   rank 1   ...   B   W | update | F ...
//                        ^ now it is known: rank 0 goes on, or takes its update back
#include <algorithm>
#include <utility>

#include "graph/training/training_plan.h"
#include "runtime/rank.h"
#include "runtime/state_parts.h"

namespace fretsaw {

// What micro-batches read stays where it is: their graphs are captured with its address.
void Rank::add_ahead(Stage& update) {
  ahead_ = std::make_unique<Ahead>();
  ahead_->in_turn.reserve(update.state_outputs.size());  // the graph is bound to their addresses
  const auto is_read_elsewhere = [&](const RuntimeValue* state) {
    return std::any_of(stages_.begin(), stages_.end(), [&](const auto& other) {
      return other.get() != &update && std::count(other->state_inputs.begin(), other->state_inputs.end(), state) > 0;
    });
  };
  std::map<const RuntimeValue*, const PlanState*> states;
  std::map<std::string, const PlanState*> by_name;
  for (const PlanState& state : plan_->states) {
    by_name[state.name] = &state;
    if (const auto own = states_.find(state.name); own != states_.end()) states[&own->second] = &state;
  }
  for (RuntimeValue*& output : update.state_outputs) {
    if (!output) continue;
    RuntimeValue* state = output;
    const TensorView& view = state->tensor;
    const std::string& wide = states.at(state)->rounded_from;
    const auto from = wide.empty() ? states_.end() : states_.find(wide);
    if (!context_.device) {
      ahead_->aside.push_back({state, {}});
    } else if (!is_read_elsewhere(state)) {
      ahead_->in_turn.push_back({state, {}});
      output = &ahead_->in_turn.back().value;
      make_pooled(context_.device_memory->pool, *output, view.dtype, view.dims);
    } else if (from != states_.end() && same_parts(*states.at(state), *by_name.at(wide))) {
      ahead_->rounded.emplace_back(state, &from->second);
    } else {
      ahead_->aside.push_back({state, {}});
      make_pooled(context_.device_memory->pool, ahead_->aside.back().value, view.dtype, view.dims);
    }
  }
}

void Rank::make_update(const Action& action, const StepInputs& step, Communicator& communicator) {
  if (!ahead_) return do_once(action, step, communicator);
  if (step.update_ahead) {
    for (auto& [state, value] : ahead_->aside) {
      if (context_.device)
        context_.device->copy(value.tensor.data, state->tensor.data, value.tensor.bytes());
      else
        value = *state;
    }
    const auto sum = states_.find(kSquaredSum);
    if (sum != states_.end() && sum->second.tensor.memory == Memory::device) {
      const TensorView& view = sum->second.tensor;
      make_pooled(*context_.pinned, squared_sum_.value, view.dtype, view.dims);
      fetch(squared_sum_, sum->second);
    }
    ahead_->stand = Ahead::Stand::begun;
  }
  do_once(action, step, communicator);
  for (auto& [state, value] : ahead_->in_turn) std::swap(*state, value);
  if (step.update_ahead) ahead_->stand = Ahead::Stand::made;
}

// All ranks have agreed to it.
void Rank::settle_update() {
  ahead_->stand = Ahead::Stand::none;
  if (context_.device) return;
  for (auto& [state, value] : ahead_->aside) clear(value);
}

void Rank::take_back_update() {
  if (!has_updated_ahead()) return;
  if (std::exchange(ahead_->stand, Ahead::Stand::begun) == Ahead::Stand::made)
    for (auto& [state, value] : ahead_->in_turn) std::swap(*state, value);
  if (!context_.device) {
    for (auto& [state, value] : ahead_->aside) *state = std::exchange(value, {});
    ahead_->stand = Ahead::Stand::none;
    return;
  }
  context_.device->use();
  for (auto& [state, value] : ahead_->aside) context_.device->copy(state->tensor.data, value.tensor.data, value.tensor.bytes());
  for (const auto& [state, from] : ahead_->rounded) {
    RuntimeValue wide = make_value(from->tensor.dtype, from->tensor.dims);
    context_.device->download(wide.tensor.data, from->tensor.data, wide.tensor.bytes());
    const RuntimeValue narrow = fretsaw::rounded(wide, state->tensor.dtype);
    context_.device->upload(state->tensor.data, narrow.tensor.data, narrow.tensor.bytes());
  }
  ahead_->stand = Ahead::Stand::none;
}

}  // namespace fretsaw
