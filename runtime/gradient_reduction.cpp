// A thread that runs the parts of a reduce graph as their states come.
#include "runtime/gradient_reduction.h"

#include <omp.h>

#include <algorithm>
#include <set>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "graph/errors.h"
#include "graph/plan.h"
#include "graph/training/plan_graphs.h"
#include "runtime/collectives.h"

namespace fretsaw {
namespace {

constexpr int kRest = -1;

// The number of the bucket that each node's exchange belongs to, in the graph's order; kRest: it is none. An exchange of states begins a
// bucket, and another one of what comes out of it follows there.
std::unordered_map<const Node*, int> buckets_of(const Graph& graph) {
  std::unordered_map<const Node*, int> numbers;
  int next = 0;
  for (const Node* node : graph.nodes) {
    std::set<int> from;  // buckets
    bool takes_states = true;
    for (const Value* v : node->inputs) {
      if (!v || !v->producer) continue;
      takes_states = false;
      from.insert(numbers.at(v->producer));
    }
    const bool follows = from.size() == 1 && *from.begin() != kRest;
    const bool all_follow =
        follows && std::all_of(node->inputs.begin(), node->inputs.end(), [](const Value* v) { return v && v->producer; });
    numbers[node] = !is_collective(*node) ? kRest : takes_states ? next++ : all_follow ? *from.begin() : kRest;
  }
  return numbers;
}

// The nodes of one bucket, or the rest: what they take from outside becomes a state, and the states they make stay outputs. False where
// something that is no state would have to pass.
bool keep_only(Graph& graph, int bucket) {
  const std::unordered_map<const Node*, int> numbers = buckets_of(graph);
  const std::string_view prefix = kStateOutput;
  std::unordered_set<const Value*> taken;
  for (const Node* node : graph.nodes)
    if (numbers.at(node) == bucket) taken.insert(node->inputs.begin(), node->inputs.end());
  std::vector<Value*> inputs;
  for (Value* v : graph.inputs)
    if (taken.contains(v)) inputs.push_back(v);
  std::vector<Value*> outputs;
  for (Value* v : graph.outputs)
    if (v->producer && numbers.at(v->producer) == bucket) outputs.push_back(v);
  for (const Node* node : graph.nodes) {
    if (numbers.at(node) == bucket) continue;
    for (Value* v : node->outputs) {
      if (!v) continue;
      v->producer = nullptr;
      if (!taken.contains(v)) continue;
      if (!v->name.starts_with(prefix)) return false;
      v->name = kStateInput + v->name.substr(prefix.size());
      inputs.push_back(v);
    }
  }
  std::erase_if(graph.nodes, [&](const Node* node) { return numbers.at(node) != bucket; });
  graph.inputs = std::move(inputs), graph.outputs = std::move(outputs);
  return true;
}

std::vector<std::string> names_of(const std::vector<Value*>& values, std::string_view prefix) {
  std::vector<std::string> names;
  for (const Value* v : values) {
    if (!v->name.starts_with(prefix)) throw Error("the reduce graph has '" + v->name + "', which is no state", "partition the model again");
    names.push_back(v->name.substr(prefix.size()));
  }
  return names;
}

}  // namespace

std::vector<std::shared_ptr<const Model>> parts_of_reduction(const Model& reduce) {
  int buckets = 0;
  for (const auto& [node, number] : buckets_of(*reduce.graph)) buckets = std::max(buckets, number + 1);
  std::vector<std::shared_ptr<const Model>> parts;
  for (int b = 0; buckets > 0 && b <= buckets; ++b) {
    auto part = std::make_shared<Model>(clone(reduce));
    if (!keep_only(*part->graph, b < buckets ? b : kRest)) return {};
    parts.push_back(std::move(part));
  }
  return parts;
}

// On devices the ranks' micro-batches must not communicate otherwise: exchanges of two communicators that wait for each other's place on a
// device could wait forever.
bool reduces_beside(const Plan& plan, bool on_devices) {
  const GraphNumbers numbers = graph_numbers(plan);
  bool reduces = false;
  for (const PlanGraph& g : plan.graphs) {
    if (!g.model) return false;
    const auto& nodes = g.model->graph->nodes;
    const bool meets = std::any_of(nodes.begin(), nodes.end(), [](const Node* node) { return is_collective(*node); });
    if (on_devices && meets && g.stage < numbers.in_micro_batch) return false;
    if (g.kind != "reduce") continue;
    if (meets && parts_of_reduction(*g.model).empty()) return false;
    reduces |= meets;
  }
  return reduces;
}

GradientReduction::GradientReduction(const Model& reduce, int stage, const RankContext& settings, std::shared_ptr<Device> device,
                                     const std::function<const RuntimeValue*(const std::string&)>& place_of,
                                     std::function<void(int, int)> before)
    : stage_(stage), before_(std::move(before)) {
  context_.rank = settings.rank, context_.threads = settings.threads, context_.tf32 = settings.tf32;
  context_.trace = settings.trace, context_.detect_anomaly = settings.detect_anomaly, context_.now_us = settings.now_us;
  if (device) {
    context_.device = std::move(device);
    context_.device_memory = std::make_unique<RankMemory>(context_.device.get());
    context_.pinned = std::make_unique<BufferPool>(context_.memory.count, context_.device);
  }
  std::set<std::string> made;
  for (const auto& model : parts_of_reduction(reduce)) {
    Part& part = parts_.emplace_back();
    part.name = "bucket " + std::to_string(parts_.size() - 1);
    part.inputs = names_of(model->graph->inputs, kStateInput), part.outputs = names_of(model->graph->outputs, kStateOutput);
    part.cache = std::make_unique<ProgramCache>(model, model->graph->inputs, /*generalise=*/false);
    BindingSpec binding{.binds = context_.device != nullptr, .kept = {}};
    for (const std::string& name : part.outputs) {
      const auto input = std::find(part.inputs.begin(), part.inputs.end(), name);
      binding.kept.push_back(input == part.inputs.end() ? -1 : static_cast<int>(input - part.inputs.begin()));
      binding.places.push_back(binding.kept.back() < 0 ? place_of(name) : nullptr);
    }
    if (context_.device) part.cache->bind(std::move(binding));
    std::vector<std::string>& awaited = awaited_.emplace_back();
    for (const std::string& name : part.inputs)
      if (!made.contains(name) && !given_.contains(name)) awaited.push_back(name), given_[name];
    made.insert(part.outputs.begin(), part.outputs.end());
  }
  parts_.back().name = "squares";
  thread_ = std::thread([this] { work(); });
}

GradientReduction::~GradientReduction() {
  {
    std::unique_lock lock(mutex_);
    ends_ = stopped_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void GradientReduction::forget_captured() {
  for (Part& part : parts_) part.cache->forget_captured();
}

// --- the rank's thread ---

void GradientReduction::begin() {
  std::unique_lock lock(mutex_);
  for (auto& [name, given] : given_) given = {};
  results_.clear();
  context_.communication.clear();
  context_.counts_communication = true;
  context_.events.clear(), context_.device_runs.clear(), context_.device_steps.clear();
  ready_us_.assign(parts_.size(), 0);
  busy_us_ = 0;
  end_.reset();
  failure_ = nullptr;
  stopped_ = false;
  running_ = true;
  changed_.notify_all();
}

bool GradientReduction::has(const std::string& state) const {
  std::unique_lock lock(mutex_);
  const auto found = given_.find(state);
  return found != given_.end() && found->second.is_given;
}

void GradientReduction::give(const std::string& state, const RuntimeValue& value, std::shared_ptr<DeviceEvent> there) {
  std::unique_lock lock(mutex_);
  Given& given = given_.at(state);
  if (given.is_given) return;
  given.value = value, given.there = std::move(there), given.is_given = true;
  const auto is_there = [&](const std::string& name) { return given_.at(name).is_given; };
  for (size_t p = 0; p < awaited_.size() && context_.trace; ++p)
    if (ready_us_[p] == 0 && std::all_of(awaited_[p].begin(), awaited_[p].end(), is_there)) ready_us_[p] = context_.now_us();
  changed_.notify_all();
}

void GradientReduction::check() {
  std::unique_lock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

std::shared_ptr<DeviceEvent> GradientReduction::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !running_; });
  if (failure_) std::rethrow_exception(failure_);
  for (auto& [name, given] : given_) given = {};
  for (size_t p = 0; p < parts_.size() && context_.trace; ++p)
    context_.events.push_back({context_.rank, trace_name(parts_[p]), "ready", ready_us_[p], 0});
  return end_;
}

void GradientReduction::stop() {
  std::unique_lock lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return !running_; });
  for (auto& [name, given] : given_) given = {};
  results_.clear();
}

// --- this thread ---

void GradientReduction::work() {
  omp_set_num_threads(context_.threads);
  while (true) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ends_ || running_; });
      if (ends_) return;
    }
    std::exception_ptr failure;
    try {
      run_parts();
    } catch (...) {
      failure = std::current_exception();
    }
    std::unique_lock lock(mutex_);
    failure_ = failure;
    running_ = false;
    changed_.notify_all();
  }
}

void GradientReduction::run_parts() {
  if (context_.device) context_.device->use();
  for (Part& part : parts_) {
    if (!wait_for(part)) return;
    if (before_) before_(context_.rank, static_cast<int>(&part - parts_.data()));
    run(part);
  }
  if (context_.device) end_ = context_.device->record();
}

bool GradientReduction::wait_for(const Part& part) {
  std::unique_lock lock(mutex_);
  const auto is_there = [&](const std::string& state) {
    const auto given = given_.find(state);
    return given == given_.end() || given->second.is_given;  // or an earlier part has made it
  };
  changed_.wait(lock, [&] { return stopped_ || std::all_of(part.inputs.begin(), part.inputs.end(), is_there); });
  return !stopped_;
}

void GradientReduction::run(Part& part) {
  std::vector<const RuntimeValue*> arguments;
  for (const std::string& state : part.inputs) {
    if (const auto made = results_.find(state); made != results_.end()) {
      arguments.push_back(&made->second);
      continue;
    }
    const Given& given = given_.at(state);
    if (given.there) context_.device->wait_for(*given.there);
    arguments.push_back(&given.value);
  }
  std::vector<RuntimeValue> outputs(part.outputs.size());
  const double start_us = context_.now_us(), communicating_us = context_.communicating_us;
  const size_t runs_before = context_.device_runs.size();
  part.cache->run(arguments, outputs, context_, 0);
  const double took_us = context_.now_us() - start_us;
  if (!context_.device) busy_us_ += took_us - (context_.communicating_us - communicating_us);
  for (size_t i = 0; i < outputs.size(); ++i) results_[part.outputs[i]] = std::move(outputs[i]);
  if (!context_.trace) return;
  const TraceEvent event{context_.rank, trace_name(part), &part == &parts_.back() ? "reduce" : "bucket", start_us, took_us};
  if (context_.device_runs.size() > runs_before)
    context_.device_runs.back().event = event;
  else
    context_.events.push_back(event);
}

}  // namespace fretsaw
