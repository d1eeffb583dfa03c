// From a model to a plan that trains: the model with its loss, divided over tensor ranks, cut into stages, differentiated, and the graphs
// of the end of a step.
#include "partitioner/training.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_set>

#include "graph/errors.h"
#include "graph/gradients.h"
#include "graph/passes.h"
#include "graph/training/attention.h"
#include "graph/training/batch_norm.h"
#include "graph/training/dropout.h"
#include "graph/training/name_pattern.h"
#include "graph/training/pad_classes.h"
#include "partitioner/assign.h"
#include "partitioner/batch.h"
#include "partitioner/cost.h"
#include "partitioner/likely_sizes.h"
#include "partitioner/sharding/shard.h"
#include "partitioner/stages.h"
#include "partitioner/statistic_stages.h"
#include "partitioner/training_job.h"
#include "partitioner/training_memory.h"
#include "partitioner/training_schedules.h"
#include "partitioner/units.h"

namespace fretsaw {
namespace {

// Constants become what the source said, loops their passes, patterns single operators; normalisation stays out of convolutions, as it
// learns.
std::vector<Pass> training_passes() {
  std::vector<Pass> passes = normalise_passes();
  passes.push_back({"unroll-loops", [](Model& model) { unroll_loops(model); }});
  passes.push_back({"stack-lists", stack_lists});
  passes.push_back({"batch-norms-for-inference", [](Model& model) { batch_norms_for_inference(*model.graph); }});
  passes.push_back({"remove-identities", remove_identities});
  passes.push_back({"split-gathers", split_gathers});
  for (Pass& p : pattern_passes())
    if (p.name != "fold-batch-norm") passes.push_back(std::move(p));
  passes.push_back({"fold-shapes", fold_shapes});
  return passes;
}

void check_options(const PartitionOptions& o, const TrainingOptions& t) {
  const auto wrong = [](const std::string& what, const std::string& hint) { throw Error(what, hint, ErrorCode::usage); };
  if (t.recompute != "none" && t.recompute != "all" && t.recompute != "auto")
    wrong("--recompute " + t.recompute + " is none of none, all, auto", "see `fretsaw train --help`");
  if (o.mesh.data < 1 || o.mesh.pipeline < 1 || o.mesh.tensor < 1 || o.micro_batches < 1)
    wrong("a mesh axis or the number of micro-batches is below 1", "use at least 1");
  if (t.chunks < 1) wrong("there are no chunks", "use at least 1");
  if (t.chunks > 1 && o.schedule != "interleaved")
    wrong(fmt::format("the schedule '{}' takes one chunk a rank", o.schedule), "use the schedule interleaved, or one chunk");
  if (t.precision != "fp32" && t.precision != "fp16" && t.precision != "bf16")
    wrong("there is no precision '" + t.precision + "' to train in", "use fp32, fp16 or bf16");
  if (!(t.bucket_mb > 0)) wrong(fmt::format("buckets of {} MiB hold nothing", t.bucket_mb), "use more than 0");
  if (t.zero < 0 || t.zero > 3) wrong(fmt::format("--zero {} is none of 0, 1, 2, 3", t.zero), "see `fretsaw train --help`");
  if (!o.cuts.empty() && (static_cast<int>(o.cuts.size()) + 1) % t.chunks != 0)
    wrong(fmt::format("{} cuts make {} stages, which are no {} chunks for each rank", o.cuts.size(), o.cuts.size() + 1, t.chunks),
          "give one --cut for each boundary between chunks");
}

class TrainingPartitioner {
 public:
  TrainingPartitioner(Model model, const PartitionOptions& options, const TrainingOptions& training)
      : model_(std::move(model)), options_(options), training_(training), job_{options_, training_, load_target(options.target)} {}

  TrainingPlan run() {
    check_options(options_, training_);
    prepare();
    find_parameters();
    expand_functions();
    divide_over_tensor_ranks();
    divide_over_data_ranks();
    assign_forward();
    add_graphs();
    make_schedule();
    return std::move(result_);
  }

 private:
  Graph& graph() { return *model_.graph; }
  Plan& plan() { return *result_.plan; }
  int parts_of_batch() const { return options_.mesh.data * options_.micro_batches; }

  // The model with its loss, normalised, with a symbolic batch where it is to be divided.
  void prepare() {
    for (const Value* v : graph().initializers()) initializers_.insert(v->name);
    check_patterns();
    source_ = clone(model_);
    set_input_shapes(model_, options_.shapes);
    whole_inputs_ = static_inputs(graph());
    const std::set<std::string> frozen = frozen_running_means(graph());
    batch_norms_for_inference(graph());  // batches are divided as there: what training mixes is seen to afterwards
    run_passes(model_, training_passes());
    infer_shapes(model_);
    frozen_statistics_ = write_frozen_batch_norms(model_, frozen);
    const auto kept = std::count_if(frozen.begin(), frozen.end(), [&](const std::string& mean) { return initializers_.contains(mean); });
    if (kept > 0)
      plan().notes.push_back(fmt::format("{} BatchNormalization{} not in training in the file, unlike others: {} as in inference", kept,
                                         kept == 1 ? " is" : "s are", kept == 1 ? "it stays" : "they stay"));
    graph().outputs = {loss_output(graph(), training_.loss)};  // how others come together from parts of a batch is nobody's concern
    own_loss_ = split_own_loss(graph(), training_.loss);
    if (parts_of_batch() > 1 && !own_loss_.targets) count_all_targets();
    find_settings();
    const SampleDims samples = find_batch();
    if (count_draws(model_, std::string(kStateInput) + kRandomCounter, samples)) {
      result_.draws_masks = true;
      plan().states.push_back({kRandomCounter, Type::tensor(DType::int64, Shape{}), nullptr, false, {}});
    }
    if (training_.precision != "fp32") {
      fuse_attention();
      narrow_activations();
    }
    const int norm_ranks = training_.sync_batch_norm ? options_.mesh.data : 1;
    statistics_ = train_batch_norms(model_, norm_ranks);
    note_idle_options();
    loss_ = append_loss(model_, training_.loss, own_loss_, options_.mesh.tensor > 1 ? LossForm::operators : LossForm::rows);
    if (loss_.target) job_.batch_axes[loss_.target->name] = target_axis_, result_.target = loss_.target->name;
    result_.loss_sum = loss_.sum->name, result_.loss_count = loss_.count->name;
    graph().outputs = {loss_.sum, loss_.count};
    for (const RunningStatistic& one : statistics_) graph().outputs.push_back(one.next);
    remove_dead_nodes(graph());
    refuse_uncounted_draws(graph());
    for (Node* node : graph().nodes)  // backward nodes say which they belong to
      if (node->name.empty()) node->name = graph().fresh_name(node->op);
    infer_shapes(model_);
    pad_classes(model_);
    const bool meet_in_micro_batches = training_.zero >= 2 || (training_.sync_batch_norm && !statistics_.empty());
    if (options_.mesh.data > 1 && meet_in_micro_batches) result_.least_batch = parts_of_batch();
  }

  void count_all_targets() {
    remove_dead_nodes(graph());  // other losses are nobody's concern either
    const std::vector<const Node*> means = demand_all_targets(graph(), training_.loss);
    for (const Node* node : means)
      plan().notes.push_back(
          fmt::format("'{}' ({}) is taken for a mean over all targets, and fails where one is ignored: train with one data rank and one "
                      "micro-batch if there are such",
                      node->name, node->op));
    if (!means.empty()) infer_shapes(model_);
  }

  // The batch axes of inputs, and where values have samples. Of a batch that is run whole nothing has to be proved: without a proof, first
  // dimensions are taken for it.
  SampleDims find_batch() {
    for (const Value* v : graph().inputs)
      if (!v->is_constant()) job_.batch_axes[v->name] = v->type.is_tensor() && v->type.shape && v->type.shape->empty() ? -1 : 0;
    if (parts_of_batch() > 1) {
      facts_ = facts_of_parts();
      target_axis_ = axis_of_output(facts_);
      make_batch_symbolic(model_, facts_);
      plan().batch = facts_.batch;
      return take_axes(facts_, model_);
    }
    Model whole = clone(model_);
    try {
      const BatchFacts facts = analyse_batch(whole, options_.batch_axes, loss_merge(training_.loss.reduction));
      target_axis_ = axis_of_output(facts);
      return take_axes(facts, whole);
    } catch (const Error&) {
      return {};
    }
  }
  // Targets lie as the scores do.
  int axis_of_output(const BatchFacts& facts) const {
    const auto rule = facts.outputs.find(model_.graph->outputs[0]->name);
    return rule != facts.outputs.end() && rule->second.merge == "concat" ? rule->second.axis : 0;
  }
  // How the parts of an output that is itself the loss come together.
  std::map<std::string, MergeRule> loss_merge(LossSpec::Reduction reduction) {
    if (training_.loss.kind != LossSpec::Kind::output) return {};
    return {{graph().outputs[0]->name, {reduction == LossSpec::Reduction::mean && !own_loss_.targets ? "mean" : "sum", 0}}};
  }
  // What is only said of a loss is not enough: another number would be trained than the model's.
  static BatchFacts with_proof(BatchFacts facts) {
    if (facts.unproved.empty()) return facts;
    const MixedCause& cause = facts.unproved.begin()->second;
    throw Error(cause.why).at_node(cause.node->name, cause.node->op);
  }
  BatchFacts facts_of_parts() {
    using Reduction = LossSpec::Reduction;
    const Reduction reduction = training_.loss.reduction;
    try {
      return with_proof(analyse_batch(model_, options_.batch_axes, loss_merge(reduction)));
    } catch (const Error& e) {
      const std::string whole = "train with one data rank and one micro-batch", &name = graph().outputs[0]->name;
      if (training_.loss.kind != LossSpec::Kind::output) throw Error(e.problem(), whole).at_node(e.node(), e.op());
      const bool is_mean = reduction == Reduction::mean;
      const std::string said = is_mean ? "mean" : "sum", other = is_mean ? "sum" : "mean";
      try {
        Model copy = clone(model_);
        with_proof(analyse_batch(copy, options_.batch_axes, loss_merge(is_mean ? Reduction::sum : Reduction::mean)));
      } catch (const Error&) {
        throw Error(
            fmt::format("the loss '{}' can't be made from parts of the batch: it is not proved to be a {} over samples", name, said), whole)
            .at_node(e.node(), e.op());
      }
      throw Error(fmt::format("the loss '{}' is a {} over the batch, and --loss takes it for a {}", name, other, said),
                  fmt::format("use --loss output:{},reduction={}", name, other), ErrorCode::usage);
    }
  }
  SampleDims take_axes(const BatchFacts& facts, Model& of) {
    for (auto& [value, axis] : job_.batch_axes) axis = -1;
    for (const auto& [value, axis] : facts.inputs) job_.batch_axes[value->name] = axis;
    SampleDims dims;
    if (facts.batch == 1) return dims;
    std::map<std::string, int> by_name;
    for (const Value& v : of.graph->all_values()) {
      const auto found = facts.axes.find(&v);
      if (found == facts.axes.end())
        by_name[v.name] = -1;
      else if (found->second.holds_batch() && found->second.outer.is_one())
        by_name[v.name] = found->second.axis;
    }
    for (const Value& v : graph().all_values())
      if (const auto found = by_name.find(v.name); found != by_name.end()) dims[&v] = found->second;
    return dims;
  }

  // A pattern that matches nothing is a slip of the pen.
  void check_patterns() {
    std::vector<std::string> names;
    for (const Value* v : graph().initializers())
      if (is_float(v->type.dtype)) names.push_back(v->name);
    const auto check = [&](const std::string& option, const std::string& pattern) {
      if (std::any_of(names.begin(), names.end(), [&](const std::string& name) { return matches_pattern(pattern, name); })) return;
      const std::string similar = similar_names(pattern, names);
      throw Error(fmt::format("{}: the pattern '{}' matches no parameter", option, pattern),
                  similar.empty() ? "the model has no float initializer" : "the model has " + similar, ErrorCode::usage);
    };
    for (const std::string& pattern : training_.train) check("--train", pattern);
    for (const std::string& pattern : training_.freeze) check("--freeze", pattern);
    for (const OptimizerSpec::DecayRule& rule : training_.optimizer.decay_rules)
      if (rule.pattern != "1d") check("--optimizer", rule.pattern);
  }
  void note_idle_options() {
    if (training_.zero > 0 && options_.mesh.data == 1)
      plan().notes.push_back(fmt::format("--zero {} has nothing to do: there is one data rank", training_.zero));
    if (training_.sync_batch_norm && (options_.mesh.data == 1 || statistics_.empty()))
      plan().notes.push_back(
          fmt::format("--sync-batch-norm has nothing to do: there is {}", statistics_.empty() ? "no BatchNormalization" : "one data rank"));
  }

  // Devices have kernels for attention and its gradient in 16 bits; in float32 its products do as well one by one.
  void fuse_attention() {
    TrainedAttentionOptions options;
    options.evaluate = training_.evaluate;
    for (const Value* v : graph().initializers())
      if (may_learn(*v)) options.learned.insert(v);
    fuse_trained_attention(model_, options);
  }
  bool may_learn(const Value& v) const {
    return initializers_.contains(v.name) && !frozen_statistics_.contains(v.name) && is_float(v.type.dtype) && !is_left_setting(v) &&
           (training_.train.empty() || matches_any(training_.train, v.name)) && !matches_any(training_.freeze, v.name);
  }
  // Scalars that say what an operator does, as exporters write them: exponents of Pow and bounds of Clip. They learn where --train names
  // them.
  void find_settings() {
    for (const Node* node : graph().nodes)
      for (size_t i : {1, 2}) {
        const Value* v = node->input(i);
        const bool sets = node->is("Clip") || (node->is("Pow") && i == 1);
        if (sets && v && v->is_constant() && is_float(v->type.dtype) && v->type.shape && v->type.shape->empty()) settings_.insert(v->name);
      }
  }
  bool is_left_setting(const Value& v) const {
    return training_.train.empty() && settings_.contains(v.name) && initializers_.contains(v.name) &&
           !matches_any(training_.freeze, v.name);
  }

  // Weights and activations in 16 bits, each from a float32 tensor that stays: what learns and is kept is that one.
  void narrow_activations() {
    const std::vector<Value*> inputs = graph().inputs;
    PrecisionOptions options;
    for (Value* v : graph().initializers())
      if (initializers_.contains(v->name) && v->type.dtype == DType::float32 && std::find(inputs.begin(), inputs.end(), v) == inputs.end())
        graph().inputs.push_back(v);  // an input that is kept is cast where it is used
    for (const Value* v : graph().inputs) options.keep.insert(v->name);
    set_precision(model_, training_.precision == "fp16" ? DType::float16 : DType::bfloat16, options);
    graph().inputs = inputs;
    result_.scales_loss = training_.precision == "fp16";
  }

  void find_parameters() {
    std::set<const Value*> running;
    for (size_t i = 0; i < statistics_.size(); ++i) {
      const Value* v = statistics_[i].running;
      running.insert(v);
      job_.statistics.push_back({v->name, 2 + i});
      keep_source(*v);
    }
    const std::unordered_set<const Value*> used = reaches_loss();
    for (const Value* v : graph().initializers()) {
      if (is_left_setting(*v) && used.contains(v))
        plan().notes.push_back(fmt::format("'{}' is an exponent or a bound: it stays as it is, as --train does not name it", v->name));
      if (!may_learn(*v) || running.contains(v)) continue;
      if (used.contains(v)) {
        job_.parameters.push_back(v->name);
        keep_source(*v);
      } else {
        plan().notes.push_back(fmt::format("parameter '{}' has no part in the loss: it stays as it is", v->name));
      }
    }
    if (job_.parameters.empty())
      throw Error("no parameter is left to train", "check --train and --freeze, and that the model's weights are initializers",
                  ErrorCode::usage);
  }
  // What has no gradient of its own becomes nodes that have, before stages are chosen.
  void expand_functions() {
    std::vector<Value*> learning;
    for (Value* v : graph().initializers())
      if (std::count(job_.parameters.begin(), job_.parameters.end(), v->name)) learning.push_back(v);
    const std::vector<std::string> notes = expand_for_gradients(model_, loss_.sum, learning);
    plan().notes.insert(plan().notes.end(), notes.begin(), notes.end());
    for (Node* node : graph().nodes)
      if (node->name.empty()) node->name = graph().fresh_name(node->op);
  }
  void keep_source(const Value& v) {
    job_.types[v.name] = v.type;
    job_.initial[v.name] = v.constant;
  }
  std::unordered_set<const Value*> reaches_loss() {
    std::unordered_set<const Value*> found{loss_.sum};
    for (auto it = graph().nodes.rbegin(); it != graph().nodes.rend(); ++it) {
      const bool used = std::any_of((*it)->outputs.begin(), (*it)->outputs.end(), [&](const Value* v) { return v && found.contains(v); });
      if (!used) continue;
      for (const Value* v : operands(**it)) found.insert(v);
    }
    return found;
  }

  // The forward graph of each tensor rank.
  void divide_over_tensor_ranks() {
    OuterParts outer;
    if (options_.mesh.tensor > 1) {
      infer_shapes(model_, {.name_unknown = true});
      ShardOptions wanted;
      wanted.ranks = options_.mesh.tensor_x(), wanted.second = options_.mesh.tensor_y;
      wanted.sized = [&](const Model& part) {
        std::vector<std::string> said_before;
        return at_likely_sizes(part, facts_, whole_inputs_, parts_of_batch(), said_before);
      };
      wanted.target = job_.target;
      wanted.pins = options_.pins;
      const Model sized = at_likely_sizes(model_, facts_, whole_inputs_, parts_of_batch(), plan().notes);
      ShardedModel sharded = shard(model_, *sized.graph, wanted);
      locals_ = std::move(sharded.models);
      outer = std::move(sharded.outer_parts);
      plan().shardings = std::move(sharded.shardings);
      plan().notes.insert(plan().notes.end(), sharded.pin_notes.begin(), sharded.pin_notes.end());
      plan().notes.insert(plan().notes.end(), sharded.notes.begin(), sharded.notes.end());
    } else {
      locals_.push_back(clone(model_));
    }
    std::vector<Graph*> graphs;
    for (Model& local : locals_) graphs.push_back(local.graph.get());
    std::vector<std::string> names = job_.parameters, whole;
    for (const TrainedStatistic& one : job_.statistics) names.push_back(one.name), whole.push_back(one.name);
    SettledStates settled = settle_states({graphs, options_.mesh.tensor_y, outer}, graph(), names, whole);
    job_.layouts = std::move(settled.layouts);
    values_ = std::move(settled.values);
  }

  void divide_over_data_ranks() {
    if (training_.zero == 0 || options_.mesh.data == 1) return;
    std::vector<std::string> whole;
    for (const std::string& name : job_.parameters) {
      if (auto part = data_part(job_.types.at(name), job_.layouts.at(name), options_.mesh.data))
        job_.data.emplace(name, std::move(*part));
      else
        whole.push_back(name);
    }
    if (!whole.empty())
      plan().notes.push_back(fmt::format(
          "{} parameters do not divide evenly over {} data ranks and are kept whole on each: {}{}", whole.size(), options_.mesh.data,
          fmt::join(whole.begin(), whole.begin() + std::min<long>(3, std::ssize(whole)), ", "), whole.size() > 3 ? ", ..." : ""));
  }

  void assign_forward() {
    const Model& first = locals_.front();
    Model sized;
    const int ranks = options_.cuts.empty() ? options_.mesh.pipeline : (static_cast<int>(options_.cuts.size()) + 1) / training_.chunks;
    const bool resize = ranks * training_.chunks > 1 && (facts_.batch > 0 || !likely_sizes_are_one(*first.graph));
    if (resize) sized = at_likely_sizes(first, facts_, whole_inputs_, parts_of_batch(), plan().notes);
    const GraphIndex index(*first.graph);
    job_.forward =
        assign(index, resize ? *sized.graph : *first.graph, *source_.graph, options_, nullptr, job_.target, ranks * training_.chunks);
    keep_statistics_together(index, job_.forward.stage_of);
    if (job_.forward.stages % training_.chunks != 0)
      throw Error(fmt::format("{} stages are no {} chunks for each rank", job_.forward.stages, training_.chunks), "use fewer chunks",
                  ErrorCode::usage);
  }

  void add_graphs() {
    job_.recomputes = training_.recompute == "all";
    plan().mesh = options_.mesh;
    plan().mesh.pipeline = job_.pipeline_ranks();
    plan().micro_batches = options_.micro_batches;
    describe_borders();
    std::map<std::string, int> homes;
    for (size_t t = 0; t < locals_.size(); ++t) add_micro_batch_graphs(job_, locals_[t], values_[t], static_cast<int>(t), plan(), homes);
    std::erase_if(job_.parameters, [&](const std::string& name) { return job_.without_gradient.contains(name); });
    estimate_stages(plan(), job_.target, sizes_of_micro_batch(plan(), training_.dims));
    step_graphs_ = add_step_graphs(job_, homes, plan());
    result_.parameters = job_.parameters;
    for (const TrainedStatistic& one : job_.statistics) result_.statistics.push_back(one.name);
    result_.statistics.insert(result_.statistics.end(), job_.without_gradient.begin(), job_.without_gradient.end());
  }
  void describe_borders() {
    for (const Value* v : graph().inputs) {
      const auto axis = job_.batch_axes.find(v->name);
      if (axis == job_.batch_axes.end()) continue;  // a weight with a default, or what the ranks fill in
      PlanInput& input = plan().inputs.emplace_back();
      input.name = v->name, input.type = v->type, input.batch_axis = axis->second;
    }
    for (const Value* v : {loss_.sum, loss_.count}) {
      PlanOutput& output = plan().outputs.emplace_back();
      output.name = v->name, output.type = v->type, output.merge = "sum";
    }
  }

  void make_schedule() {
    TrainingProblem training;
    training.forward = job_.stages();
    training.problem = schedule_problem(plan());
    plan().schedule = make_training_schedule(options_.schedule, training);
    verify(plan().schedule, training.problem);
    for (const auto& [p, number] : step_graphs_.reduce)
      plan().schedule.ranks[static_cast<size_t>(p)].push_back({Action::Kind::reduce, number, 0, -1});
    for (const auto& [p, number] : step_graphs_.update)
      plan().schedule.ranks[static_cast<size_t>(p)].push_back({Action::Kind::step, number, 0, -1});
  }

  Model model_, source_;
  const PartitionOptions& options_;
  const TrainingOptions& training_;
  TrainingJob job_;
  TrainingPlan result_{.plan = std::make_shared<Plan>()};
  std::set<std::string> initializers_;  // of the source
  std::set<std::string> settings_;      // exponents and bounds
  std::map<std::string, Dims> whole_inputs_;
  BatchFacts facts_;
  int target_axis_ = 0;  // of the batch
  LossBatch own_loss_;
  std::set<std::string> frozen_statistics_;  // of BatchNormalizations that stay as in inference
  LossValues loss_;
  std::vector<RunningStatistic> statistics_;
  std::vector<Model> locals_;        // of each tensor rank
  std::vector<StateValues> values_;  // likewise
  StepGraphs step_graphs_;
};

void drop_repeated(std::vector<std::string>& notes) {
  std::set<std::string> seen;
  std::erase_if(notes, [&](const std::string& note) { return !seen.insert(note).second; });
}

}  // namespace

TrainingPlan partition_for_training(Model model, const PartitionOptions& options, const TrainingOptions& training) {
  const std::string path = model.path, digest = model.digest;
  const bool may_recompute = training.recompute == "auto";
  const std::optional<int64_t> memory = memory_limit(options, load_target(options.target));
  Model again = may_recompute && memory ? clone(model) : Model{};
  TrainingOptions chosen = training;
  if (may_recompute) chosen.recompute = "none";
  TrainingPlan made = TrainingPartitioner(std::move(model), options, chosen).run();
  const DimSizes sizes = sizes_of_micro_batch(*made.plan, training.dims);
  const int64_t needed = may_recompute && memory ? bytes_of_fullest_rank(*made.plan, sizes) : 0;
  if (memory && needed > *memory) {
    chosen.recompute = "all";
    made = TrainingPartitioner(std::move(again), options, chosen).run();
    made.plan->notes.push_back(
        fmt::format("activations are computed again in the backward pass: a rank would need {} bytes, and has {}; now {}", needed, *memory,
                    bytes_of_fullest_rank(*made.plan, sizes)));
  }
  if (memory && (may_recompute || options.memory_bytes)) note_open_sizes(sizes, *made.plan);
  if (options.memory_bytes) check_training_memory(*made.plan, sizes, *memory, chosen.recompute);
  drop_repeated(made.plan->notes);
  made.plan->source_file = path, made.plan->source_digest = digest;
  made.plan->target = options.target;
  return made;
}

}  // namespace fretsaw
