// A session: one thread for each rank, which run a step when it is asked for.
#include "runtime/session.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "graph/errors.h"
#include "runtime/device_group.h"
#include "runtime/rank.h"
#include "runtime/state_parts.h"

namespace fretsaw {
namespace {

double now_us() {
  static const auto start = std::chrono::steady_clock::now();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

int usable_cores() {
  return std::max(1, omp_get_num_procs());
}

std::atomic<bool> left_something_running{false};

}  // namespace

bool must_exit_at_once() {
  return left_something_running;
}

struct Session::Impl {
  std::shared_ptr<const Plan> plan;
  SessionOptions options;
  int threads = 1;
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<std::unique_ptr<Communicator>> communicators;
  DeviceGroup group;  // of "cuda"
  std::vector<bool> has_default;
  std::unique_ptr<WholeOutputs> wholes;                    // outputs that the ranks write their parts of in place
  BufferPool merged{std::make_shared<AllocationCount>()};  // outputs put together from parts afterwards

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::thread> workers;
  StepInputs step;
  uint64_t step_number = 0;
  size_t working = 0;
  bool stop = false;
  bool left_running = false;  // a rank did not stop when it should have
  bool can_rejoin = true;     // false: the devices' communicators were aborted, and no new ones can be made
  int64_t allocations = 0;
  std::exception_ptr failure;  // the first of the step
  bool states_differ = false;  // a failed step has left some ranks' states updated

  const PlanState& state_named(const std::string& name) const {
    for (const PlanState& state : plan->states)
      if (state.name == name) return state;
    throw Error("the plan keeps nothing under the name '" + name + "'", "see the names of the model's initializers");
  }

  void start() {
    find_defaults();
    int count = plan->mesh.size();
    threads = options.threads > 0 ? options.threads : std::max(1, usable_cores() / count);
    if (options.device == "cuda") group = open_devices(options.devices, count);
    for (int d = 0; d < plan->mesh.data; ++d) {
      for (int p = 0; p < plan->mesh.pipeline; ++p) {
        for (int t = 0; t < plan->mesh.tensor; ++t)
          ranks.push_back(std::make_unique<Rank>(plan, options, d, p, t, threads, now_us, group.of_rank(static_cast<int>(ranks.size()))));
      }
    }
    check_device_memory(group, ranks);
    wholes = std::make_unique<WholeOutputs>(plan, group.devices.empty() ? nullptr : group.devices[0]);
    step.wholes = wholes.get();
    communicators = make_thread_communicators(count);
    for (int r = 0; r < count; ++r) workers.emplace_back([this, r] { work(r); });
  }

  // An input that has an initializer of its name may be left out.
  void find_defaults() {
    for (const PlanInput& input : plan->inputs) {
      bool found = false;
      for (const PlanGraph& graph : plan->graphs) {
        if (!graph.model) continue;
        for (const Value* v : graph.model->graph->inputs) found |= v->name == input.name && v->constant != nullptr;
      }
      has_default.push_back(found);
    }
  }

  void work(int r) {
    omp_set_num_threads(threads);
    uint64_t seen = 0;
    while (true) {
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return stop || step_number != seen; });
        if (stop) return;
        seen = step_number;
      }
      try {
        ranks[static_cast<size_t>(r)]->run_step(step, *communicators[static_cast<size_t>(r)]);
      } catch (...) {
        fail(r, std::current_exception());
        ranks[static_cast<size_t>(r)]->stop_reduction();
      }
      std::unique_lock lock(mutex);
      if (--working == 0) changed.notify_all();
    }
  }

  // The first rank that fails says why, and stops the others.
  void fail(int r, const std::exception_ptr& error) {
    Error located = locate(r, error);
    {
      std::unique_lock lock(mutex);
      if (!failure) failure = std::make_exception_ptr(located);
      changed.notify_all();
    }
    communicators[static_cast<size_t>(r)]->abort(located.what());
    for (auto& rank : ranks) {
      const bool rejoins = rank->can_rejoin();
      rank->abort_devices();
      if (rejoins) continue;
      std::unique_lock lock(mutex);
      can_rejoin = false;
      left_something_running = true;
    }
  }

  Error locate(int r, const std::exception_ptr& error) const {
    int stage = ranks[static_cast<size_t>(r)]->running_stage();
    std::string place = "rank " + std::to_string(r) + (stage >= 0 ? ", stage " + std::to_string(stage) : "");
    try {
      std::rethrow_exception(error);
    } catch (const Error& e) {
      if (ranks.size() == 1) return e;
      if (!e.node().empty() || !e.op().empty()) place += ", node '" + e.node() + "' (" + e.op() + ")";
      return Error(place + ": " + e.problem(), e.remedy(), e.code());
    } catch (const std::bad_alloc&) {
      return Error(place + ": no memory is left", "use smaller inputs, more micro-batches or more stages", ErrorCode::device);
    } catch (const std::exception& e) {
      return Error(place + ": " + e.what(), "", ErrorCode::device);
    }
  }

  void run_ranks() {
    if (left_running)
      throw Error("a rank of this session did not stop after an earlier failure", "start the program again", ErrorCode::device);
    if (!can_rejoin)
      throw Error("the GPUs of this session were disconnected after an earlier failure", "start the program again", ErrorCode::device);
    if (communicators[0]->aborted()) {
      for (auto& rank : ranks) rank->leave_groups();
      if (group.mailbox) group.mailbox->clear();
      communicators = make_thread_communicators(plan->mesh.size());
    }
    if (!step.update) wholes->begin(step.batches);
    int64_t before = count_allocations();
    {
      std::unique_lock lock(mutex);
      failure = nullptr;
      working = ranks.size();
      ++step_number;
      changed.notify_all();
      changed.wait(lock, [&] { return working == 0 || failure; });
      const std::chrono::duration<double> limit(options.stop_limit_s);
      left_running = !changed.wait_for(lock, limit, [&] { return working == 0; });
    }
    if (left_running) {
      left_something_running = true;
      std::rethrow_exception(failure);
    }
    allocations = count_allocations() - before;
    if (!failure) return;
    for (auto& rank : ranks) {
      if (can_rejoin) rank->end_device_work();
      take_back_update(*rank);
      rank->forget_step();
    }
    wholes->forget();
    if (group.mailbox) group.mailbox->clear();  // its parcels' memory is their senders'
    std::rethrow_exception(std::exchange(failure, nullptr));
  }

  // Of a step that failed. Devices whose ranks can't meet again are not asked for anything more.
  void take_back_update(Rank& rank) {
    if (!rank.has_updated_ahead()) return;
    try {
      if (!can_rejoin) throw Error("the rank's device was disconnected");
      rank.take_back_update();
    } catch (const Error&) {
      can_rejoin = false, states_differ = true;
    }
  }
  void check_states() const {
    if (states_differ)
      throw Error("some ranks had made their update when a step failed, and others had not", "go on from a checkpoint", ErrorCode::device);
  }

  int64_t count_allocations() const {
    int64_t count = wholes->allocations();
    for (const auto& rank : ranks) count += rank->allocations();
    return count;
  }

  RuntimeValue output(size_t index) {
    if (RuntimeValue whole = wholes->take(index); whole.kind == RuntimeValue::Kind::tensor) return whole;
    std::vector<const RuntimeValue*> parts;
    std::vector<int64_t> samples;
    for (const auto& rank : ranks) {  // data ranks come in order; of tensor ranks the first speaks
      const auto& own = step.batches.parts[static_cast<size_t>(rank->data())];
      if (own.empty() || !rank->output(index, 0) || (!parts.empty() && last_data_ == rank->data())) continue;
      last_data_ = rank->data();
      for (size_t m = 0; m < own.size(); ++m) {
        parts.push_back(rank->output(index, static_cast<int>(m)));
        samples.push_back(own[m].count);
      }
    }
    if (parts.empty()) throw Error("no rank makes output '" + plan->outputs[index].name + "'", "partition the model again");
    return merge_parts(plan->outputs[index], parts, samples, merged);
  }
  int last_data_ = -1;
};

Session::Session(std::shared_ptr<const Plan> plan, const SessionOptions& options) : impl_(std::make_unique<Impl>()) {
  if (options.device != "cpu" && options.device != "cuda")
    throw Error("there is no device '" + options.device + "'", "use --device cpu or cuda", ErrorCode::device);
  if (plan->structure_only && !options.random_weights) {
    throw Error("the plan was made with --structure-only and has no weights", "run it with --random-weights SEED");
  }
  impl_->plan = std::move(plan);
  impl_->options = options;
  impl_->start();
}

Session::~Session() {
  {
    std::unique_lock lock(impl_->mutex);
    impl_->stop = true;
    impl_->changed.notify_all();
  }
  if (impl_->left_running) {
    for (auto& worker : impl_->workers) worker.detach();
    (void)impl_.release();  // the rank that goes on uses it
    return;
  }
  for (auto& worker : impl_->workers) worker.join();
  // Updates may still be under way, which use what several ranks hold.
  for (auto& rank : impl_->ranks)
    if (impl_->can_rejoin) rank->end_device_work();
}

std::vector<RuntimeValue> Session::run(const std::map<std::string, RuntimeValue>& inputs, bool update_ahead) {
  impl_->step.inputs = check_inputs(*impl_->plan, inputs, impl_->has_default);
  impl_->step.batches = divide_batch(*impl_->plan, impl_->step.inputs);
  impl_->step.update = false, impl_->step.update_ahead = update_ahead;
  impl_->run_ranks();
  std::vector<RuntimeValue> outputs;
  for (size_t i = 0; i < impl_->plan->outputs.size(); ++i) outputs.push_back(impl_->output(i));
  if (!impl_->plan->states.empty()) return outputs;  // an update is waited for: ranks forget the step after it
  for (auto& rank : impl_->ranks) rank->forget_step();
  return outputs;
}

void Session::stage(const std::map<std::string, RuntimeValue>& inputs) {
  if (impl_->group.devices.empty()) return;
  try {
    StepInputs step;
    step.inputs = check_inputs(*impl_->plan, inputs, impl_->has_default);
    step.batches = divide_batch(*impl_->plan, step.inputs);
    for (auto& rank : impl_->ranks) rank->stage_inputs(step);
  } catch (const Error&) {  // the run does without, or says what is wrong
  }
}

void Session::update() {
  impl_->step.update = true, impl_->step.update_ahead = false;
  impl_->run_ranks();
}

bool Session::updates_ahead() const {
  return std::any_of(impl_->ranks.begin(), impl_->ranks.end(), [](const auto& rank) { return rank->updates_ahead(); });
}

void Session::finish_updates() {
  for (auto& rank : impl_->ranks) rank->finish_update();
}

void Session::take_back_updates() {
  for (auto& rank : impl_->ranks) rank->take_back_update();
}

std::vector<RuntimeValue> Session::states(const std::string& name) const {
  impl_->check_states();
  std::vector<RuntimeValue> found;
  for (const auto& rank : impl_->ranks) {
    if (rank->data() != 0 || rank->tensor() != 0) continue;
    RuntimeValue value = rank->state(name);
    if (value.kind != RuntimeValue::Kind::absent) found.push_back(std::move(value));
  }
  return found;
}

RuntimeValue Session::state(const std::string& name) const {
  impl_->check_states();
  const PlanState& state = impl_->state_named(name);
  const auto is_cut_over = [&](const char* axis) {
    return std::any_of(state.parts.begin(), state.parts.end(), [&](const PlanState::Part& part) { return part.axis == axis; });
  };
  RuntimeValue whole;
  for (const auto& rank : impl_->ranks) {
    if ((rank->data() > 0 && !is_cut_over("data")) || (rank->tensor() > 0 && !is_cut_over("tensor"))) continue;
    RuntimeValue value = rank->state(name);
    if (value.kind == RuntimeValue::Kind::absent) continue;
    if (state.parts.empty()) return value;
    if (whole.kind == RuntimeValue::Kind::absent) whole = make_value(state.type.dtype, dims_of(*state.type.shape));
    StatePart(state, rank->coordinates()).put(static_cast<const std::byte*>(value.tensor.data), static_cast<std::byte*>(whole.tensor.data));
  }
  return whole;
}

void Session::set_state(const std::string& name, const RuntimeValue& whole) {
  const PlanState& state = impl_->state_named(name);
  for (auto& rank : impl_->ranks) rank->set_state(state, whole);
  for (const PlanState& copy : impl_->plan->states) {
    if (copy.rounded_from != name) continue;
    const RuntimeValue value = rounded(whole, copy.type.dtype);
    for (auto& rank : impl_->ranks) rank->set_state(copy, value);
  }
}

std::vector<RankReport> Session::ranks() const {
  std::vector<RankReport> reports;
  for (const auto& rank : impl_->ranks) reports.push_back(rank->report());
  return reports;
}

std::vector<CommunicationCount> Session::communication() const {
  std::vector<CommunicationCount> total;
  for (const auto& rank : impl_->ranks) {
    if (rank->data() != 0 || rank->tensor() != 0) continue;
    for (const CommunicationCount& own : rank->communication()) {
      auto same =
          std::find_if(total.begin(), total.end(), [&](const CommunicationCount& c) { return c.op == own.op && c.axis == own.axis; });
      if (same == total.end()) {
        total.push_back(own);
      } else {
        same->count += own.count;
        same->bytes += own.bytes;
      }
    }
  }
  return total;
}

std::vector<TraceEvent> Session::trace() const {
  std::vector<TraceEvent> events;
  for (const auto& rank : impl_->ranks) events.insert(events.end(), rank->events().begin(), rank->events().end());
  return events;
}

int64_t Session::allocations_in_last_step() const {
  return impl_->allocations;
}

}  // namespace fretsaw
