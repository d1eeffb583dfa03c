// Executes a rank's action list: receives are posted early, sends never wait for their receivers (up to a bound), forward runs a program.
#include "runtime/rank.h"

#include <algorithm>
#include <utility>

#include "graph/errors.h"
#include "graph/passes.h"
#include "graph/training/dropout.h"
#include "runtime/weights.h"

namespace fretsaw {
namespace {

bool runs_a_graph(Action::Kind kind) {
  return kind == Action::Kind::forward || kind == Action::Kind::reduce || kind == Action::Kind::step;
}

int pipeline_rank_of(const Plan& plan, int stage) {
  for (size_t r = 0; r < plan.schedule.ranks.size(); ++r) {
    for (const Action& action : plan.schedule.ranks[r]) {
      if (runs_a_graph(action.kind) && action.stage == stage) return static_cast<int>(r);
    }
  }
  throw Error("no rank of the plan runs stage " + std::to_string(stage), "partition the model again");
}

size_t place_of(const std::vector<Value*>& values, const std::string& name, int stage) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i]->name == name) return i;
  }
  throw Error("the graph of stage " + std::to_string(stage) + " has no value '" + name + "' at its border", "partition the model again");
}

// The stage's model with weights and activations in another type; the model's own inputs and outputs keep theirs.
std::shared_ptr<const Model> in_precision(const std::shared_ptr<const Model>& model, const Plan& plan, int stage,
                                          const std::string& precision) {
  if (precision != "fp16" && precision != "bf16") return model;
  PrecisionOptions options;
  for (const PlanInput& input : plan.inputs) options.keep.insert(input.name);
  for (const PlanOutput& output : plan.outputs)
    if (output.stage == stage) options.keep.insert(output.name);
  auto changed = std::make_shared<Model>(clone(*model));
  set_precision(*changed, precision == "fp16" ? DType::float16 : DType::bfloat16, options);
  return changed;
}

}  // namespace

Rank::Rank(std::shared_ptr<const Plan> plan, const SessionOptions& options, int data, int pipeline, int tensor, int threads,
           double (*now_us)(), OnDevice on_device)
    : plan_(std::move(plan)),
      data_(data),
      pipeline_(pipeline),
      tensor_(tensor),
      on_device_(std::move(on_device)),
      before_forward_(options.before_forward) {
  context_.tf32 = options.precision == "tf32";
  if (on_device_.device) {
    context_.device = on_device_.device;
    context_.device_memory = std::make_unique<RankMemory>(context_.device.get());
    context_.pinned = std::make_unique<BufferPool>(context_.memory.count, context_.device);
    if (on_device_.open_again) context_.staged = std::make_unique<StagedInputs>(on_device_.open_again(), context_.device_memory->count);
  }
  context_.rank = plan_->mesh.rank(data, pipeline, tensor);
  context_.threads = threads;
  context_.random_seed = options.random_seed;
  context_.trace = options.trace;
  context_.detect_anomaly = options.detect_anomaly;
  context_.now_us = now_us;
  if (static_cast<size_t>(pipeline) >= plan_->schedule.ranks.size())
    throw Error("the plan's schedule has too few ranks", "partition the model again");
  actions_ = &plan_->schedule.ranks[static_cast<size_t>(pipeline)];
  for (const Action& action : *actions_) {
    bool known = std::any_of(stages_.begin(), stages_.end(), [&](const auto& s) { return s->number == action.stage; });
    if (runs_a_graph(action.kind) && !known) add_stage(action.stage, options);
  }
  add_states();
  add_reduction(options);
  find_crossings();
  std::vector<std::shared_ptr<const Model>> models;
  for (const auto& stage : stages_) models.push_back(stage->model);
  weight_bytes_ = fretsaw::weight_bytes(models);
}

// What a failed step left under way goes to memory that is about to go.
Rank::~Rank() {
  for (Fetched& fetched : abandoned_) {
    try {
      fetched.end->wait();
    } catch (const Error&) {  // the device does nothing any more
    }
  }
}

void Rank::add_stage(int number, const SessionOptions& options) {
  std::map<std::string, int> own = coordinates();
  const PlanGraph* found = nullptr;
  for (const PlanGraph& graph : plan_->graphs) {
    bool fits = graph.stage == number;
    for (const auto& [axis, index] : graph.coordinates) fits &= own[axis] == index;
    if (fits) found = &graph;
  }
  if (!found || !found->model) throw Error("the plan has no graph for stage " + std::to_string(number), "partition the model again");
  auto stage = std::make_unique<Stage>();
  stage->number = number;
  stage->kind = found->kind;
  const std::shared_ptr<const Model> model = in_precision(found->model, *plan_, number, options.precision);
  stage->model = with_weights(model, {options.random_weights, options.weight_seed, /*later=*/context_.device != nullptr});
  stage->cache = std::make_unique<ProgramCache>(stage->model, stage->model->graph->inputs, /*generalise=*/false);
  for (const Value* v : stage->model->graph->inputs) {
    auto input = std::find_if(plan_->inputs.begin(), plan_->inputs.end(), [&](const PlanInput& i) { return i.name == v->name; });
    if (v->name == kSamplesAtHand) stage->samples_input = static_cast<int>(stage->plan_inputs.size());
    stage->plan_inputs.push_back(input == plan_->inputs.end() ? -1 : static_cast<int>(input - plan_->inputs.begin()));
  }
  stage->micro_batches.resize(static_cast<size_t>(plan_->micro_batches));
  for (MicroBatch& slot : stage->micro_batches) {
    slot.inputs.resize(stage->model->graph->inputs.size());
    slot.outputs.resize(stage->model->graph->outputs.size());
  }
  stage->arguments.resize(stage->model->graph->inputs.size());
  stages_.push_back(std::move(stage));
}

void Rank::find_crossings() {
  for (const Route& route : plan_->routes) {
    int from = pipeline_rank_of(*plan_, route.from_stage), to = pipeline_rank_of(*plan_, route.to_stage);
    Crossing crossing{&route, -1, 0, 0, Layout::plain};
    if (from == pipeline_) {
      const Stage& source = stage(route.from_stage);
      crossing.place = place_of(source.model->graph->outputs, route.from_name, route.from_stage);
      crossing.peer_rank = to == pipeline_ ? -1 : plan_->mesh.rank(data_, to, tensor_);
      if (to != pipeline_)
        stage(route.from_stage).outgoing.push_back(crossing);
      else
        stage(route.from_stage).cache->stays_on_rank(crossing.place);
    }
    if (to == pipeline_) {
      crossing.peer_place = crossing.place;
      Stage& target = stage(route.to_stage);
      crossing.place = place_of(target.model->graph->inputs, route.to_name, route.to_stage);
      crossing.peer_rank = from == pipeline_ ? -1 : plan_->mesh.rank(data_, from, tensor_);
      const Graph& graph = *target.model->graph;
      crossing.layout = layout_of_input(*graph.inputs[crossing.place], graph);
      target.plan_inputs[crossing.place] = -1;
      target.incoming.push_back(crossing);
    }
  }
  for (auto& stage : stages_) {
    for (const Crossing& crossing : stage->incoming)
      if (crossing.peer_rank < 0 && is_taken_once(*crossing.route)) stage->cache->may_overwrite(crossing.place);
    for (MicroBatch& slot : stage->micro_batches) slot.receiving.resize(stage->incoming.size());
  }
  for (const PlanOutput& output : plan_->outputs) {
    OutputPlace place;
    for (size_t s = 0; s < stages_.size(); ++s) {
      if (stages_[s]->number != output.stage) continue;
      place.stage = static_cast<int>(s);
      place.place = place_of(stages_[s]->model->graph->outputs, output.name, output.stage);
    }
    output_places_.push_back(place);
    fetched_.emplace_back(static_cast<size_t>(plan_->micro_batches));
  }
}

// Whether nobody but the route's end takes what it carries.
bool Rank::is_taken_once(const Route& route) const {
  const auto same = [&](int stage, const std::string& name) { return stage == route.from_stage && name == route.from_name; };
  return !route.from_name.starts_with(kStateOutput) &&
         std::count_if(plan_->routes.begin(), plan_->routes.end(), [&](const Route& r) { return same(r.from_stage, r.from_name); }) == 1 &&
         std::none_of(plan_->outputs.begin(), plan_->outputs.end(), [&](const PlanOutput& o) { return same(o.stage, o.name); });
}

Rank::Stage& Rank::stage(int number) {
  for (auto& stage : stages_) {
    if (stage->number == number) return *stage;
  }
  throw Error("stage " + std::to_string(number) + " is not on this rank", "partition the model again");
}

void Rank::run_step(const StepInputs& step, Communicator& communicator) {
  double start_us = context_.now_us();
  allocations_before_ = allocations();
  if (step.update && has_updated_ahead()) {
    settle_update();
    return forget_step();
  }
  if (!step.update) take_back_update();  // of a step that nobody has brought to its end
  if (!step.update)
    busy_us_ = 0, step_us_ = 0, timed_.clear(), updated_ = std::exchange(updating_, {});  // an update belongs to the step before
  if (!step.update && squared_sum_.end) abandoned_.push_back(std::exchange(squared_sum_, {}));
  context_.communication.clear();
  if (!step.update) context_.events.clear();  // an update is traced behind its step
  if (context_.device) context_.device->use();
  if (!step.update) forget_step();
  if (context_.device && context_.trace) align_clocks();
  if (context_.groups.empty()) join_groups(communicator);
  const bool has_samples = !step.batches.parts[static_cast<size_t>(data_)].empty();
  if (!step.update && reduction_) reduction_->begin();
  if (!step.update) begin_states(has_samples);
  std::shared_ptr<DeviceEvent> results;  // when the step's are there; null: when all is done
  for (const Action& action : *actions_) {
    running_stage_ = action.stage;
    if (action.kind == Action::Kind::step) {
      if (!step.update && !(step.update_ahead && ahead_)) continue;
      const size_t runs_before = context_.device_runs.size();
      if (context_.device && !context_.trace) results = context_.device->record();
      make_update(action, step, communicator);
      const auto begin = context_.device_runs.begin() + static_cast<std::ptrdiff_t>(runs_before);
      if (results) updating_.assign(std::make_move_iterator(begin), std::make_move_iterator(context_.device_runs.end()));
      if (results) context_.device_runs.erase(begin, context_.device_runs.end());
    } else if (step.update) {
      continue;
    } else if (action.kind == Action::Kind::reduce) {
      do_once(action, step, communicator);
    } else if (has_samples) {
      do_micro_batch(action, step, communicator);
    }
  }
  running_stage_ = -1;
  finish_step(results.get());
  if (step.update) forget_step();  // while a device makes it
  if (!step.update) ++steps_run_;
  step_us_ += context_.now_us() - start_us;
}

void Rank::do_micro_batch(const Action& action, const StepInputs& step, Communicator& communicator) {
  switch (action.kind) {
    case Action::Kind::recv: {
      Stage& target = stage(action.stage);
      auto index = std::find_if(stages_.begin(), stages_.end(), [&](const auto& s) { return s.get() == &target; }) - stages_.begin();
      MicroBatch& slot = target.micro_batches[static_cast<size_t>(action.micro_batch)];
      if (!std::exchange(slot.posted, true)) posted_.emplace_back(static_cast<int>(index), action.micro_batch);
      return;
    }
    case Action::Kind::forward:
      return do_forward(action, step, communicator);
    case Action::Kind::send:
      return do_send(action, communicator);
    case Action::Kind::free:
      return do_free(action);
    default:
      throw Error("the schedule holds the action " + to_string(action) + ", which this build does not do", "partition the model again");
  }
}

void Rank::gather_arguments(Stage& target, int micro_batch, const StepInputs& step) {
  MicroBatch& slot = target.micro_batches[static_cast<size_t>(micro_batch)];
  const auto& parts = step.batches.parts[static_cast<size_t>(data_)];
  for (size_t i = 0; i < target.plan_inputs.size(); ++i) {
    target.arguments[i] = target.state_inputs[i];
    int number = target.plan_inputs[i];
    if (number < 0 || !step.inputs[static_cast<size_t>(number)]) continue;
    const RuntimeValue& whole = *step.inputs[static_cast<size_t>(number)];
    int axis = plan_->inputs[static_cast<size_t>(number)].batch_axis;
    bool divided = axis >= 0 && step.batches.batch > 0;
    if (divided) take_part(whole, axis, parts[static_cast<size_t>(micro_batch)], slot.inputs[i], context_.memory.pool);
    target.arguments[i] = divided ? &slot.inputs[i] : &whole;
  }
  if (target.samples_input >= 0) {
    const auto at = static_cast<size_t>(target.samples_input);
    const BatchPart samples = step.batches.batch > 0 ? parts[static_cast<size_t>(micro_batch)] : BatchPart{0, 1};
    make_pooled(context_.memory.pool, slot.inputs[at], DType::int64, {2});
    slot.inputs[at].tensor.as<int64_t>()[0] = samples.begin, slot.inputs[at].tensor.as<int64_t>()[1] = samples.count;
    target.arguments[at] = &slot.inputs[at];
  }
  for (const Crossing& crossing : target.incoming) {
    target.arguments[crossing.place] = &slot.inputs[crossing.place];
    if (crossing.peer_rank < 0) {
      target.arguments[crossing.place] =
          &stage(crossing.route->from_stage).micro_batches[static_cast<size_t>(micro_batch)].outputs[crossing.peer_place];
    }
  }
}

void Rank::do_forward(const Action& action, const StepInputs& step, Communicator& communicator) {
  Stage& target = stage(action.stage);
  if (communicator.aborted()) throw Error("the ranks were stopped", "", ErrorCode::device);
  if (reduction_) reduction_->check();
  if (before_forward_) before_forward_(context_.rank, action.micro_batch);
  if (target.kind != "forward") clear_late_zeros();  // before the device waits for what it receives
  limit_sends(communicator);
  finish_receives(target, action.micro_batch, communicator);
  advance_posted(communicator);
  gather_arguments(target, action.micro_batch, step);
  context_.counts_communication = action.micro_batch == 0;
  run_graph(target, action);
  place_outputs(target, action.micro_batch, step);
}

void Rank::run_graph(Stage& target, const Action& action) {
  MicroBatch& slot = target.micro_batches[static_cast<size_t>(action.micro_batch)];
  const double start_us = context_.now_us(), communicating_us = context_.communicating_us;
  const size_t runs_before = context_.device_runs.size();
  const auto finals = final_states_.find(&action);
  context_.reached = nullptr;
  if (finals != final_states_.end()) {
    context_.reached = [&](Program& program, const Milestone& milestone) { pass_on(target, finals->second, program, milestone); };
  }
  target.cache->run(target.arguments, slot.outputs, context_, 0);
  const double took_us = context_.now_us() - start_us;
  keep_states(target, slot);
  if (finals != final_states_.end()) give_finals(target, finals->second);
  if (!context_.device) busy_us_ += took_us - (context_.communicating_us - communicating_us);
  if (!context_.trace) return;
  Action shown = action;
  if (target.kind == "backward") shown.kind = Action::Kind::backward;
  if (target.kind == "weights") shown.kind = Action::Kind::weight;
  const TraceEvent event{context_.rank, to_string(shown), target.kind, start_us, took_us};
  if (context_.device_runs.size() > runs_before)
    context_.device_runs.back().event = event;
  else
    context_.events.push_back(event);
}

// What is still being sent is kept by `sending_`; outputs of the model stay until they are put together.
void Rank::do_free(const Action& action) {
  Stage& done = stage(action.stage);
  MicroBatch& slot = done.micro_batches[static_cast<size_t>(action.micro_batch)];
  for (RuntimeValue& value : slot.inputs) clear(value);
  for (size_t i = 0; i < slot.outputs.size(); ++i) {
    bool is_output = std::any_of(output_places_.begin(), output_places_.end(), [&](const OutputPlace& p) {
      return p.stage >= 0 && stages_[static_cast<size_t>(p.stage)].get() == &done && p.place == i;
    });
    if (!is_output) clear(slot.outputs[i]);
  }
}

void Rank::finish_step(DeviceEvent* results) {
  let_go_of_parcels(/*wait=*/true);
  for (auto& [request, owner] : sending_) request->wait();
  sending_.clear();
  if (context_.device) finish_on_device(results);
  if (allocations() != allocations_before_) warm_pool();
}

// How far ranks run ahead of each other differs from step to step: room for the worst case is made while memory is being made anyway.
void Rank::warm_pool() {
  std::vector<std::shared_ptr<void>> held;
  size_t copies = std::min<size_t>(static_cast<size_t>(plan_->micro_batches), sends_in_flight + receives_ahead);
  for (auto& stage : stages_) {
    for (size_t c = 0; c < stage->incoming.size(); ++c) {
      const Header& header = stage->micro_batches[0].receiving[c].header;
      if (stage->incoming[c].peer_rank < 0 || header.dtype == DType::undefined || header.memory != Memory::host) continue;
      for (size_t i = 0; i < copies; ++i) held.push_back(context_.memory.pool.take(bytes_of(header.dtype, header.dims, Layout::plain)));
    }
    for (const Crossing& crossing : stage->outgoing) {
      const TensorView& sent = stage->micro_batches[0].outputs[crossing.place].tensor;
      if (sent.dtype == DType::undefined || sent.memory != Memory::host) continue;
      for (size_t i = 0; i < copies; ++i) held.push_back(context_.memory.pool.take(bytes_of(sent.dtype, sent.dims, Layout::plain)));
    }
  }
}

const RuntimeValue* Rank::output(size_t index, int micro_batch) const {
  const OutputPlace& place = output_places_[index];
  if (place.stage < 0) return nullptr;
  const RuntimeValue& fetched = fetched_[index][static_cast<size_t>(micro_batch)].value;
  if (fetched.kind == RuntimeValue::Kind::tensor) return &fetched;
  return &stages_[static_cast<size_t>(place.stage)]->micro_batches[static_cast<size_t>(micro_batch)].outputs[place.place];
}

void Rank::finish_update() {
  if (!context_.device) return;
  context_.device->use();
  context_.device->synchronize();
}

void Rank::end_device_work() {
  if (!context_.device) return;
  try {
    context_.device->use();
    context_.device->synchronize();
    if (reduction_) reduction_->context().device->synchronize();
    if (context_.staged) context_.staged->forget();
  } catch (const Error&) {  // the step has failed already
  }
}

void Rank::forget_step() {
  posted_.clear();
  reading_.clear();
  context_.device_runs.clear();
  context_.device_steps.clear();
  std::erase_if(abandoned_, [](const Fetched& fetched) { return fetched.end->done(); });
  for (auto& of_output : fetched_) {
    for (Fetched& fetched : of_output) {
      if (fetched.end) abandoned_.push_back(std::exchange(fetched, {}));
      clear(fetched.value);
    }
  }
  sending_.clear();
  for (auto& stage : stages_) {
    for (MicroBatch& slot : stage->micro_batches) {
      for (RuntimeValue& value : slot.inputs) clear(value);
      for (RuntimeValue& value : slot.outputs) clear(value);
      for (Receiving& state : slot.receiving) state = {nullptr, nullptr, false, std::move(state.header), state.place};
      slot.posted = false;
    }
  }
}

RankReport Rank::report() const {
  RankReport report;
  report.rank = context_.rank;
  for (const auto& stage : stages_) report.stages.push_back(stage->number);
  report.device = context_.device ? context_.device->name() : "cpu";
  report.weight_bytes = weight_bytes_;
  const AllocationCount& count = context_.device ? *context_.device_memory->count : *context_.memory.count;
  if (reduction_) {
    const RankContext& beside = reduction_->context();
    report.peak_bytes = beside.device_memory ? beside.device_memory->count->peak_bytes : beside.memory.count->peak_bytes;
  }
  report.peak_bytes += count.peak_bytes + (context_.device ? context_.device->constant_bytes() : weight_bytes_);
  for (const auto& stage : stages_) {
    const Program* program = stage->cache->last_program();
    if (!program) continue;
    for (const HostFallback& f : program->fallbacks) report.host_nodes.push_back(f.node + " (" + f.op + "): " + f.reason);
  }
  double busy_us = busy_us_;
  for (const DeviceSpan& run : timed_) busy_us += run.end->us_since(*run.begin);
  report.busy_ms = busy_us / 1e3;
  report.busy_share = step_us_ > 0 ? busy_us / step_us_ : 0;
  return report;
}

}  // namespace fretsaw
