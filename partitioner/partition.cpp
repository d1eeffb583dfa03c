// The way from a model to a plan, one step after another.
#include "partitioner/partition.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "graph/errors.h"
#include "graph/merge.h"
#include "graph/sizes.h"
#include "partitioner/annotate.h"
#include "partitioner/assign.h"
#include "partitioner/batch.h"
#include "partitioner/cost.h"
#include "partitioner/from_annotations.h"
#include "partitioner/likely_sizes.h"
#include "partitioner/plan_metadata.h"
#include "partitioner/schedules.h"
#include "partitioner/sharding/shard.h"
#include "partitioner/stages.h"

namespace fretsaw {
namespace {

void check_options(const PartitionOptions& o) {
  if (o.mesh.data < 1 || o.mesh.pipeline < 1 || o.mesh.tensor < 1)
    throw Error("a mesh axis is below 1", "give each axis at least one rank", ErrorCode::usage);
  if (o.micro_batches < 1) throw Error(fmt::format("{} micro-batches are asked for", o.micro_batches), "use at least 1", ErrorCode::usage);
  if (o.memory_bytes && *o.memory_bytes <= 0) throw Error("--memory is not positive", "give the memory of one device", ErrorCode::usage);
  if (!o.cuts.empty() && o.mesh.pipeline > 1 && static_cast<int>(o.cuts.size()) != o.mesh.pipeline - 1)
    throw Error(fmt::format("{} cuts make {} stages, and the mesh has pipeline={}", o.cuts.size(), o.cuts.size() + 1, o.mesh.pipeline),
                "give one --cut for each boundary", ErrorCode::usage);
  for (const auto& cut : o.cuts)
    if (cut.empty()) throw Error("a --cut names no value", "name the values after which a stage ends", ErrorCode::usage);
}

// Tensors that --shard names must be there; normalising may take them away later.
void check_pins(const Graph& source, const PartitionOptions& options, std::vector<std::string>& notes) {
  if (options.pins.empty()) return;
  std::map<std::string, const Value*> values;
  for (const Value& v : source.all_values()) values.try_emplace(v.name, &v);
  for (const auto& [name, pin] : options.pins) {
    if (!values.count(name))
      throw Error(fmt::format("--shard names '{}', and there is no such tensor", name), "name an input, a weight or the result of a node",
                  ErrorCode::usage);
    if (options.mesh.tensor == 1) notes.push_back(fmt::format("--shard {} has nothing to do: the mesh has no tensor axis", name));
    for (const std::string& axis : pin.axes)
      if (!axis.empty() && options.mesh.tensor > 1 && (axis == "tensor") != (options.mesh.tensor_y == 1))
        throw Error(fmt::format("--shard names the axis '{}' for '{}', which the mesh does not have", axis, name),
                    options.mesh.tensor_y == 1 ? "write tensor" : "write tensor_x or tensor_y", ErrorCode::usage);
  }
}

void check_annotated(const PartitionOptions& o) {
  if (!o.from_annotations && !o.configuration.empty())
    throw Error("--configuration chooses among annotations", "add --from-annotations", ErrorCode::usage);
  if (o.from_annotations && !o.cuts.empty())
    throw Error("--cut and --from-annotations both say where stages end", "use one of them", ErrorCode::usage);
}

std::vector<Pass> preparing_passes() {
  std::vector<Pass> passes = normalise_passes();
  for (Pass& p : pattern_passes()) passes.push_back(std::move(p));
  passes.push_back({"fold-shapes", fold_shapes});
  passes.push_back({"mark-groups", mark_groups});
  return passes;
}

// Every dimension of the inputs that has no number, as "batch=1".
void note_assumptions(const Graph& graph, const DimSizes& known, std::vector<std::string>& notes) {
  std::set<std::string> names;
  for (const Value* v : graph.inputs) {
    if (!v->type.shape) continue;
    for (size_t k = 0; k < v->type.shape->size(); ++k) {
      const Dim& d = (*v->type.shape)[k];
      if (!d.known() && !known.count(d.symbol)) names.insert((d.symbol.empty() ? fmt::format("{}[{}]", v->name, k) : d.symbol) + "=1");
    }
  }
  if (!names.empty()) notes.push_back(fmt::format("unknown dimensions count as 1 in times and sizes: assumed {}", fmt::join(names, ", ")));
}

void describe_borders(const Graph& graph, const BatchFacts& facts, Plan& plan) {
  for (const Value* v : graph.inputs) {
    PlanInput& input = plan.inputs.emplace_back();
    input.name = v->name;
    input.type = v->type;
    for (const auto& [value, axis] : facts.inputs)
      if (value == v) input.batch_axis = axis;
  }
  for (const Value* v : graph.outputs) {
    PlanOutput& output = plan.outputs.emplace_back();
    output.name = v->name;
    output.type = v->type;
    auto rule = facts.outputs.find(v->name);
    output.merge = rule == facts.outputs.end() ? "same" : rule->second.merge;  // an output that does not depend on the batch
    output.axis = rule == facts.outputs.end() ? 0 : rule->second.axis;
  }
}

// Names that --batch and --merge give must be there even where nothing is divided.
void check_names(const Graph& graph, const PartitionOptions& options) {
  const auto find = [](const std::vector<Value*>& values, const std::string& name) {
    return std::any_of(values.begin(), values.end(), [&](const Value* v) { return v->name == name; });
  };
  for (const auto& [name, axis] : options.batch_axes)
    if (!find(graph.inputs, name))
      throw Error(fmt::format("--batch names '{}', which is no input of the model", name), "see `fretsaw inspect`", ErrorCode::usage);
  for (const auto& [name, rule] : options.merges)
    if (!find(graph.outputs, name))
      throw Error(fmt::format("--merge names '{}', which is no output of the model", name), "see `fretsaw inspect`", ErrorCode::usage);
}

void check_batch(int64_t batch, const PartitionOptions& options) {
  if (int64_t{options.mesh.data} * options.micro_batches <= batch) return;
  std::string parts = fmt::format("{} micro-batches", options.micro_batches);
  if (options.mesh.data > 1) parts += fmt::format(" on each of {} data ranks", options.mesh.data);
  throw Error(fmt::format("the model is given a batch of {}, which does not fill {}", batch, parts),
              "use fewer micro-batches, or give the model a larger or symbolic batch");
}

// A symbolic batch to which --shape gives a number stays a symbol while the batch is divided: what depends on it is then still seen to.
class GivenBatch {
 public:
  // Before the shapes are set.
  GivenBatch(const Model& model, const PartitionOptions& options) {
    if (options.mesh.data * options.micro_batches == 1) return;
    for (Value* input : model.graph->inputs) {
      const auto told = options.batch_axes.find(input->name);
      const int axis = told == options.batch_axes.end() ? 0 : told->second;
      if (axis < 0 || input->is_constant() || !input->type.is_tensor() || !input->type.shape) continue;
      if (axis >= static_cast<int>(input->type.shape->size())) continue;
      const Dim& dim = (*input->type.shape)[static_cast<size_t>(axis)];
      if (!dim.known() && !dim.symbol.empty()) inputs_.push_back({input, static_cast<size_t>(axis), dim, -1});
    }
  }
  // Once they are.
  void open_again() {
    for (Entry& e : inputs_) {
      Dim& dim = (*e.input->type.shape)[e.axis];
      if (!dim.known()) continue;
      e.number = dim.value;
      dim = e.symbol;
    }
  }
  // Tells the facts the batch's number; inputs that turn out to hold no batch get theirs back. True when some do.
  bool settle(BatchFacts& facts) const {
    bool changed = false;
    for (const Entry& e : inputs_) {
      if (e.number < 0) continue;
      const bool holds = std::any_of(facts.inputs.begin(), facts.inputs.end(), [&](const auto& i) { return i.first == e.input; });
      if (holds)
        facts.batch = e.number;
      else
        (*e.input->type.shape)[e.axis] = Dim(e.number), changed = true;
    }
    return changed;
  }

 private:
  struct Entry {
    Value* input;
    size_t axis;
    Dim symbol;
    int64_t number;  // -1: none is given
  };
  std::vector<Entry> inputs_;
};

// Follows the batch where it is to be divided, and makes one that is baked into the file symbolic.
BatchFacts divide_batch(Model& model, const PartitionOptions& options) {
  int parts = options.mesh.data * options.micro_batches;
  if (parts == 1) {
    check_names(*model.graph, options);
    return {};
  }
  BatchFacts facts = analyse_batch(model, options.batch_axes, options.merges);
  if (facts.batch >= 0) check_batch(facts.batch, options);
  make_batch_symbolic(model, facts);
  return facts;
}

void check_memory(const Plan& plan, std::optional<int64_t> memory) {
  if (!memory) return;
  for (size_t s = 0; s < plan.stages.size(); ++s) {
    int64_t needed = plan.stages[s].weight_bytes + plan.stages[s].activation_bytes;
    if (needed > *memory)
      throw Error(
          fmt::format("stage {} needs {} bytes ({} of weights), and {} are available", s, needed, plan.stages[s].weight_bytes, *memory),
          "use more stages, or devices with more memory");
  }
}

// The stage that makes each value, by source name.
std::unordered_map<std::string, int> makers(const Plan& plan) {
  std::unordered_map<std::string, int> stage_of;
  for (const PlanGraph& g : plan.graphs)
    for (const Node* node : g.model->graph->nodes) {
      if (node->op == "Recv" && node->domain == "ai.fretsaw") continue;
      for (const Value* v : node->outputs)
        if (v) stage_of.try_emplace(v->source_name(), g.stage);
    }
  return stage_of;
}

// The graphs of another tensor rank: the same nodes in the same stages, with other parts of the weights.
void add_rank(const Model& local, const StageAssignment& assignment, int tensor, Plan& plan) {
  Plan other;
  other.inputs = plan.inputs;
  other.outputs = plan.outputs;
  other.mesh = plan.mesh;
  GraphIndex index(*local.graph);
  build_stages(local, index, assignment, other, tensor);
  if (other.routes.size() != plan.routes.size())
    throw Error("the ranks' graphs differ", "this is a fault of fretsaw; please report the model");
  for (PlanGraph& graph : other.graphs) plan.graphs.push_back(std::move(graph));
}

// Times a step that is no pass.
class Timer {
 public:
  Timer(std::string name, const Graph& graph)
      : timing_{std::move(name), 0, graph.nodes.size(), graph.nodes.size()}, start_(std::chrono::steady_clock::now()) {}
  ~Timer() {
    timing_.ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_).count();
    report_timing(timing_);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  PassTiming timing_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace

Plan partition(Model model, const PartitionOptions& given_options) {
  check_annotated(given_options);
  PartitionOptions options = given_options.from_annotations ? with_metadata(given_options, model) : given_options;
  check_options(options);
  Target target = load_target(options.target);
  Plan plan;
  plan.source_file = model.path;
  plan.source_digest = model.digest;
  plan.mesh = options.mesh;
  if (!options.cuts.empty()) plan.mesh.pipeline = static_cast<int>(options.cuts.size()) + 1;
  plan.micro_batches = options.micro_batches;
  plan.target = target.name;
  plan.link_bytes_per_us = target.link_bytes_per_us;
  plan.link_latency_us = target.link_latency_us;
  make_schedule(options.schedule, {1, 1, {{}}, {0}});  // a wrong name is said before the work is done
  for (const Value* v : model.graph->initializers()) plan.structure_only = plan.structure_only || v->constant->is_missing();
  Model source = clone(model);
  std::optional<Annotations> annotations;
  if (options.from_annotations) {
    annotations = read_annotations(source, options);
    options.mesh = plan.mesh = annotations->mesh;
  }
  PlanHistory history;
  if (annotations) history.unfollowed = annotations->notes;
  check_pins(*source.graph, options, history.unfollowed);
  remove_metadata(model);

  GivenBatch given(model, options);
  set_input_shapes(model, options.shapes);
  std::map<std::string, Dims> whole = static_inputs(*model.graph);
  given.open_again();
  run_passes(model, preparing_passes());
  {
    Timer timer("infer-shapes", *model.graph);
    infer_shapes(model);
  }
  BatchFacts facts;
  {
    Timer timer("batch", *model.graph);
    facts = divide_batch(model, options);
    if (given.settle(facts)) infer_shapes(model);
    if (facts.batch >= 0) check_batch(facts.batch, options);
  }
  plan.batch = facts.batch;
  plan.notes.insert(plan.notes.end(), model.notes.begin(), model.notes.end());
  plan.notes.insert(plan.notes.end(), facts.notes.begin(), facts.notes.end());
  describe_borders(*model.graph, facts, plan);
  ShardedModel sharded;
  if (options.mesh.tensor > 1) {
    Timer timer("shard", *model.graph);
    infer_shapes(model, {.name_unknown = true});
    const Model sized = at_likely_sizes(model, facts, whole, options.mesh.data * options.micro_batches, plan.notes);
    ShardOptions wanted;
    wanted.ranks = options.mesh.tensor_x();
    wanted.second = options.mesh.tensor_y;
    wanted.target = target;
    wanted.pins = options.pins;
    wanted.sized = [&](const Model& part) {
      std::vector<std::string> said_before;
      return at_likely_sizes(part, facts, whole, options.mesh.data * options.micro_batches, said_before);
    };
    if (annotations) pin_operands(*annotations, *source.graph, *model.graph, wanted, history.unfollowed);
    sharded = shard(model, *sized.graph, wanted);
    history.kept_whole = sharded.kept_whole;
    history.unfollowed.insert(history.unfollowed.end(), sharded.pin_notes.begin(), sharded.pin_notes.end());
    plan.shardings = sharded.shardings;
    plan.notes.insert(plan.notes.end(), sharded.notes.begin(), sharded.notes.end());
  }
  const std::vector<Model>& locals = sharded.models;  // of each tensor rank
  const Model& first = locals.empty() ? model : locals.front();
  {
    Timer timer("cut", *model.graph);
    if (options.note_sizes) note_assumptions(*model.graph, micro_batch_sizes(plan), plan.notes);
    Model sized;
    bool resize = plan.mesh.pipeline > 1 && (facts.batch > 0 || !likely_sizes_are_one(*model.graph));
    if (resize) sized = at_likely_sizes(first, facts, whole, options.mesh.data * options.micro_batches, plan.notes);
    GraphIndex index(*first.graph);
    StageAssignment assignment = assign(index, resize ? *sized.graph : *first.graph, *source.graph, options,
                                        annotations ? &*annotations : nullptr, target, plan.mesh.pipeline);
    if (assignment.stages < plan.mesh.pipeline)
      history.unfollowed.push_back(
          fmt::format("of {} annotated stages {} are left: nothing remains of the others when the model is normalised", plan.mesh.pipeline,
                      assignment.stages));
    plan.mesh.pipeline = assignment.stages;
    build_stages(first, index, assignment, plan);
    for (size_t t = 1; t < locals.size(); ++t) add_rank(locals[t], assignment, static_cast<int>(t), plan);
    Timer annotating("annotate", *source.graph);
    plan.annotated =
        annotate(std::move(source), makers(plan),
                 {plan, options, *model.graph, facts, sharded.operands.empty() ? nullptr : &sharded.operands, index, assignment, history});
  }
  plan.notes.insert(plan.notes.begin(), history.unfollowed.begin(), history.unfollowed.end());
  estimate_stages(plan, target);
  check_memory(plan, memory_limit(options, target));
  plan.schedule = make_schedule(options.schedule, schedule_problem(plan));
  verify(plan.schedule, schedule_problem(plan));
  plan.whole = without_weights(std::move(model));
  return plan;
}

}  // namespace fretsaw
