// What a rank has to do with the reduction of gradients that runs beside its micro-batches.
#include <algorithm>
#include <string_view>
#include <utility>

#include "runtime/rank.h"

namespace fretsaw {
namespace {

// The state that a graph's output is the new value of; "": none.
std::string state_of(const Value* output) {
  const std::string_view prefix = kStateOutput;
  return output->name.starts_with(prefix) ? output->name.substr(prefix.size()) : std::string();
}

}  // namespace

void Rank::add_reduction(const SessionOptions& options) {
  const bool on_device = context_.device != nullptr;
  reduces_beside_ = options.reduce_beside && (!on_device || on_device_.open_again) && fretsaw::reduces_beside(*plan_, on_device);
  const auto reduce = std::find_if(stages_.begin(), stages_.end(), [](const auto& stage) { return stage->kind == "reduce"; });
  if (!reduces_beside_ || reduce == stages_.end()) return;
  if (parts_of_reduction(*(*reduce)->model).empty()) return;  // nothing is exchanged
  std::shared_ptr<Device> device = on_device ? on_device_.open_again() : nullptr;
  reduction_ = std::make_unique<GradientReduction>(
      *(*reduce)->model, (*reduce)->number, context_, std::move(device), [this](const std::string& state) { return &states_.at(state); },
      options.before_reduction);
  const std::vector<std::vector<std::string>>& awaited = reduction_->awaited();
  std::map<std::string, std::pair<const Action*, size_t>> last;  // writers of states that are awaited: the action, and the stage's output
  for (const Action& action : *actions_) {
    if (action.kind != Action::Kind::forward) continue;
    const std::vector<Value*>& outputs = stage(action.stage).model->graph->outputs;
    for (size_t o = 0; o < outputs.size(); ++o) {
      const std::string state = state_of(outputs[o]);
      if (reduction_->awaits(state)) last[state] = {&action, o};
    }
  }
  for (const auto& [state, writer] : last) final_states_[writer.first].push_back(writer.second);
  for (auto& stage : stages_) {
    if (stage->kind == "reduce" || stage->kind == "update") continue;
    std::vector<std::vector<size_t>> sets;
    for (const std::vector<std::string>& states : awaited) {
      std::vector<size_t> outputs;
      for (size_t o = 0; o < stage->model->graph->outputs.size(); ++o)
        if (std::count(states.begin(), states.end(), state_of(stage->model->graph->outputs[o]))) outputs.push_back(o);
      if (!outputs.empty()) sets.push_back(std::move(outputs));
    }
    stage->cache->await(std::move(sets));
  }
}

// While the graph that writes them last still runs.
void Rank::pass_on(Stage& source, const std::vector<size_t>& finals, Program& program, const Milestone& milestone) {
  std::shared_ptr<DeviceEvent> there;
  for (const size_t o : milestone.outputs) {
    if (!std::count(finals.begin(), finals.end(), o)) continue;
    const RuntimeValue& made = program.values[static_cast<size_t>(program.outputs[o])];
    const bool is_kept = kept_in(program, o) != nullptr;  // it lies where the state does
    if (!is_kept && !owns_memory(made)) continue;
    if (context_.device && !there) there = context_.device->record();
    reduction_->give(state_of(source.model->graph->outputs[o]), is_kept ? *source.state_outputs[o] : made, there);
  }
}

// When it has run: what was not given meanwhile.
void Rank::give_finals(Stage& source, const std::vector<size_t>& outputs) {
  std::shared_ptr<DeviceEvent> there;
  for (const size_t o : outputs) {
    const std::string state = state_of(source.model->graph->outputs[o]);
    if (reduction_->has(state)) continue;
    if (context_.device && !there) there = context_.device->record();
    reduction_->give(state, *source.state_outputs[o], there);
  }
}

void Rank::finish_reduction() {
  std::shared_ptr<DeviceEvent> there = context_.device ? context_.device->record() : nullptr;
  for (const std::vector<std::string>& states : reduction_->awaited())
    for (const std::string& state : states)
      reduction_->give(state, states_.at(state), there);  // those that no micro-batch of this rank wrote
  const std::shared_ptr<DeviceEvent> end = reduction_->finish();
  if (end) context_.device->wait_for(*end);
  for (auto& [state, value] : reduction_->results()) states_.at(state) = std::move(value);
  reduction_->results().clear();
  RankContext& beside = reduction_->context();
  busy_us_ += reduction_->busy_us();
  const bool counting = std::exchange(context_.counts_communication, true);
  for (const CommunicationCount& c : beside.communication)
    context_.count_communication(c.op, c.axis, static_cast<size_t>(c.bytes), c.count);
  context_.counts_communication = counting;
  if (!context_.trace) return;
  context_.events.insert(context_.events.end(), beside.events.begin(), beside.events.end());
  for (std::vector<DeviceSpan>* spans : {&beside.device_runs, &beside.device_steps})
    std::move(spans->begin(), spans->end(), std::back_inserter(context_.device_steps));
}

void Rank::stop_reduction() {
  if (reduction_) reduction_->stop();
}

}  // namespace fretsaw
