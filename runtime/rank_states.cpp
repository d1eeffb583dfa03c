// What a rank keeps from step to step: it goes into graphs by the inputs "state:NAME" and comes back by the outputs "next:NAME". On a
// device it stays where it is: graphs read it there, and its new value goes there.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <string_view>
#include <utility>

#include "graph/errors.h"
#include "graph/training/training_plan.h"
#include "runtime/rank.h"
#include "runtime/state_parts.h"

namespace fretsaw {
namespace {

// NAME of "PREFIXNAME"; empty for other names.
std::string after(std::string_view prefix, const std::string& name) {
  return name.starts_with(prefix) ? name.substr(prefix.size()) : std::string();
}

using KnownStates = std::map<std::string, const PlanState*>;

// The rank's part of what the plan says, to be read only: it may be the plan's own memory.
RuntimeValue initial_part(const PlanState& state, const Coordinates& place) {
  if (state.initial->bytes() > 0 && !state.initial->data)
    throw Error("the weight '" + state.name + "' has no values: " + state.initial->missing, "give the model its weights' file");
  RuntimeValue value;
  if (state.parts.empty()) {
    from_constant(state.initial, value, nullptr);
    return value;
  }
  const StatePart part(state, place);
  value = make_value(state.type.dtype, part.dims());
  part.take(state.initial->data, static_cast<std::byte*>(value.tensor.data));
  return value;
}

// Likewise. Of a state without an initial value: nothing, for it starts at zero.
RuntimeValue first_value(const PlanState& state, const KnownStates& known, const Coordinates& place) {
  if (!state.type.is_tensor() || !state.type.shape || !is_static(*state.type.shape))
    throw Error("the shape of the plan's state '" + state.name + "' is not known", "partition the model again");
  if (!state.rounded_from.empty()) {
    PlanState wide = *known.at(state.rounded_from);
    wide.parts = state.parts;
    const RuntimeValue value = first_value(wide, known, place);
    return value.kind == RuntimeValue::Kind::absent ? value : rounded(value, state.type.dtype);
  }
  return state.initial ? initial_part(state, place) : RuntimeValue{};
}

// Memory of its own with the first value: of `device`, in `pool`, or without one the host's.
RuntimeValue begun(const PlanState& state, const KnownStates& known, const Coordinates& place, BufferPool* pool, Device* device) {
  const RuntimeValue first = first_value(state, known, place);
  const bool is_zero = first.kind == RuntimeValue::Kind::absent;
  const Dims dims = StatePart(state, place).dims();
  RuntimeValue value;
  if (!device) {
    value = make_value(state.type.dtype, dims);
    if (!is_zero) std::memcpy(value.tensor.data, first.tensor.data, value.tensor.bytes());
  } else if (is_zero) {
    make_pooled(*pool, value, state.type.dtype, dims);
    device->clear(value.tensor.data, value.tensor.bytes());
  } else {
    copy_pooled(*pool, first, value, device);
  }
  return value;
}

}  // namespace

void Rank::add_states() {
  KnownStates known;
  for (const PlanState& state : plan_->states) known[state.name] = &state;
  const Coordinates place = coordinates();
  if (context_.device) context_.device->use();
  const auto kept = [&](std::string_view prefix, const Value* value) -> RuntimeValue* {
    const std::string name = after(prefix, value->name);
    const auto state = known.find(name);
    if (name.empty() || state == known.end()) return nullptr;
    const auto [kept, is_new] = states_.try_emplace(name);
    if (is_new)
      kept->second = begun(*state->second, known, place, context_.device ? &context_.device_memory->pool : nullptr, context_.device.get());
    if (is_new && state->second->starts_at_zero) made_anew_.push_back(&kept->second);
    return &kept->second;
  };
  for (auto& stage : stages_) {
    for (const Value* v : stage->model->graph->inputs) stage->state_inputs.push_back(kept(kStateInput, v));
    for (const Value* v : stage->model->graph->outputs) stage->state_outputs.push_back(kept(kStateOutput, v));
    if (stage->kind == "update" && fretsaw::updates_ahead(*plan_, pipeline_)) add_ahead(*stage);
    if (!context_.device || states_.empty()) continue;
    if (stage->kind == "reduce") place_together(*stage->model->graph);
    BindingSpec binding{.binds = true, .kept = {}};
    for (const RuntimeValue* output : stage->state_outputs) {
      const auto input = output ? std::find(stage->state_inputs.begin(), stage->state_inputs.end(), output) : stage->state_inputs.end();
      binding.kept.push_back(input == stage->state_inputs.end() ? -1 : static_cast<int>(input - stage->state_inputs.begin()));
      binding.places.push_back(binding.kept.back() < 0 ? output : nullptr);
    }
    stage->cache->bind(std::move(binding));
  }
  const auto is_added_to = [&](RuntimeValue* state) {
    return std::any_of(stages_.begin(), stages_.end(), [&](const auto& stage) {
      const bool once = stage->kind == "reduce" || stage->kind == "update";
      return !once && std::find(stage->state_inputs.begin(), stage->state_inputs.end(), state) != stage->state_inputs.end();
    });
  };
  std::copy_if(made_anew_.begin(), made_anew_.end(), std::back_inserter(zeros_), is_added_to);
  std::erase_if(made_anew_, is_added_to);
  const auto is_read_forward = [&](RuntimeValue* state) {
    return std::any_of(stages_.begin(), stages_.end(), [&](const auto& stage) {
      return stage->kind == "forward" &&
             std::find(stage->state_inputs.begin(), stage->state_inputs.end(), state) != stage->state_inputs.end();
    });
  };
  if (!context_.device) return;
  std::copy_if(zeros_.begin(), zeros_.end(), std::back_inserter(late_zeros_), [&](RuntimeValue* state) { return !is_read_forward(state); });
  std::erase_if(zeros_, [&](RuntimeValue* state) { return !is_read_forward(state); });
}

// States that are added up over ranks together lie in one piece of memory, so that the exchange is one call for all of it
// (neighbours_joined in collectives.cpp).
void Rank::place_together(const Graph& reduce) {
  constexpr size_t kAlignment = 256;
  Device& device = *context_.device;
  for (const Node* node : reduce.nodes) {
    if (node->op != "AllReduce" || node->inputs.size() < 2) continue;
    std::vector<RuntimeValue*> together;
    std::vector<size_t> begins;
    size_t bytes = 0;
    for (const Value* v : node->inputs) {
      const auto state = states_.find(after(kStateInput, v->name));
      if (state == states_.end() || state->second.tensor.memory != Memory::device) break;
      together.push_back(&state->second), begins.push_back(bytes);
      bytes = (bytes + state->second.tensor.bytes() + kAlignment - 1) / kAlignment * kAlignment;
    }
    if (together.size() < node->inputs.size()) continue;
    const auto block = std::make_shared<Block>(bytes, context_.device_memory->count, &device);
    device.clear(block->data(), bytes);  // also what aligns them, which is added up with them
    for (size_t i = 0; i < together.size(); ++i) {
      auto* place = static_cast<std::byte*>(block->data()) + begins[i];
      device.copy(place, together[i]->tensor.data, together[i]->tensor.bytes());
      together[i]->tensor.data = place, together[i]->owner = std::shared_ptr<void>(block, place);
    }
  }
}

void Rank::begin_states(bool has_samples) {
  const auto clear = [&](RuntimeValue* state) {
    const TensorView& view = state->tensor;
    if (view.memory == Memory::device)
      context_.device->clear(view.data, view.bytes());
    else
      std::memset(view.data, 0, view.bytes());
  };
  std::for_each(zeros_.begin(), zeros_.end(), clear);
  if (!has_samples) std::for_each(made_anew_.begin(), made_anew_.end(), clear);
  late_zeros_are_due_ = true;
  if (pipeline_ > 0 || !has_samples) clear_late_zeros();
}

// The first pipeline rank does so before its first backward graph, for which it waits anyway; the others wait for the first forward graph.
void Rank::clear_late_zeros() {
  if (!std::exchange(late_zeros_are_due_, false)) return;
  for (RuntimeValue* state : late_zeros_) context_.device->clear(state->tensor.data, state->tensor.bytes());
}

// A new value takes the place of the old one, which nothing reads any more.
void Rank::keep_states(Stage& stage, MicroBatch& slot) {
  for (size_t i = 0; i < stage.state_outputs.size(); ++i)
    if (stage.state_outputs[i]) *stage.state_outputs[i] = std::exchange(slot.outputs[i], {});
}

void Rank::do_once(const Action& action, const StepInputs& step, Communicator& communicator) {
  if (communicator.aborted()) throw Error("the ranks were stopped", "", ErrorCode::device);
  if (action.kind == Action::Kind::reduce && reduction_) return finish_reduction();
  context_.counts_communication = true;
  Stage& target = stage(action.stage);
  gather_arguments(target, 0, step);
  run_graph(target, action);
}

RuntimeValue Rank::state(const std::string& name) {
  const auto found = states_.find(name);
  if (found == states_.end()) return {};
  const TensorView& view = found->second.tensor;
  RuntimeValue copy = make_value(view.dtype, view.dims);
  if (name == kSquaredSum && squared_sum_.end) {
    squared_sum_.end->wait();
    std::memcpy(copy.tensor.data, squared_sum_.value.tensor.data, view.bytes());
    return copy;
  }
  if (view.memory == Memory::device) {
    context_.device->use();
    context_.device->download(copy.tensor.data, view.data, view.bytes());
  } else {
    std::memcpy(copy.tensor.data, view.data, view.bytes());
  }
  return copy;
}

void Rank::set_state(const PlanState& state, const RuntimeValue& whole) {
  const auto found = states_.find(state.name);
  if (found == states_.end()) return;
  const StatePart part(state, coordinates());
  RuntimeValue own = make_value(whole.tensor.dtype, part.dims());
  part.take(static_cast<const std::byte*>(whole.tensor.data), static_cast<std::byte*>(own.tensor.data));
  const TensorView& kept = found->second.tensor;
  if (kept.memory == Memory::device && kept.dtype == own.tensor.dtype && kept.dims == own.tensor.dims) {
    context_.device->use();
    return context_.device->upload(kept.data, own.tensor.data, kept.bytes());
  }
  found->second = std::move(own);
}

}  // namespace fretsaw
