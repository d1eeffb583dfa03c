// The graphs of a plan that trains: the model with its loss and gradients as one graph, cut into forward and backward, and the updates.
#include "partitioner/training.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/gradients.h"
#include "graph/passes.h"
#include "graph/training/batch_norm.h"
#include "graph/training/name_pattern.h"
#include "partitioner/assign.h"
#include "partitioner/batch.h"
#include "partitioner/stages.h"
#include "partitioner/training_schedules.h"
#include "partitioner/units.h"

namespace fretsaw {
namespace {

// Constants become what the source said, patterns single operators; normalisation stays out of convolutions, as it learns.
std::vector<Pass> training_passes() {
  std::vector<Pass> passes = normalise_passes();
  for (Pass& p : pattern_passes())
    if (p.name != "fold-batch-norm") passes.push_back(std::move(p));
  passes.push_back({"fold-shapes", [](Model& m) {
                      ShapeFacts facts = infer_shapes(m);
                      if (fold_shape_arithmetic(m, facts) > 0) remove_dead_nodes(*m.graph);
                    }});
  return passes;
}

void check_options(const PartitionOptions& o, const TrainingOptions& t) {
  const auto refuse = [](const std::string& what) { throw Error(what + " is not in this build", "leave it out", ErrorCode::usage); };
  if (t.chunks > 1) refuse("training with several chunks a rank");
  if (t.zero > 0) refuse("a sharded optimizer");
  if (t.recompute != "none") refuse("recomputation");
  if (t.precision != "fp32") refuse("training in half precision");
  if (o.mesh.tensor > 1) throw Error("training with a tensor axis is not in this build", "use data and pipeline axes", ErrorCode::usage);
  if (o.mesh.data < 1 || o.mesh.pipeline < 1 || o.micro_batches < 1)
    throw Error("a mesh axis or the number of micro-batches is below 1", "use at least 1", ErrorCode::usage);
}

class TrainingPartitioner {
 public:
  TrainingPartitioner(Model model, const PartitionOptions& options, const TrainingOptions& training)
      : model_(std::move(model)), options_(options), training_(training), target_(load_target(options.target)) {}

  TrainingPlan run() {
    check_options(options_, training_);
    prepare();
    find_parameters();
    assign_forward();
    share_parameters();
    make_states();
    differentiate();
    keep_received_values();
    mark_groups(model_);
    cut();
    add_update_graphs();
    make_schedule();
    return std::move(result_);
  }

 private:
  Graph& graph() { return *model_.graph; }

  // The model with its loss, normalised, with a symbolic batch where it is to be divided.
  void prepare() {
    for (const Value* v : graph().initializers()) initializers_.insert(v->name);
    source_ = clone(model_);
    set_input_shapes(model_, options_.shapes);
    batch_norms_for_inference(graph());  // batches are divided as there: what training mixes is seen to afterwards
    run_passes(model_, training_passes());
    infer_shapes(model_);
    for (const Value* v : graph().inputs)
      if (!v->is_constant()) axes_[v] = 0;
    if (options_.mesh.data * options_.micro_batches > 1) {
      BatchFacts facts = analyse_batch(model_, options_.batch_axes, options_.merges);
      make_batch_symbolic(model_, facts);
      for (auto& [value, axis] : axes_) axis = -1;
      for (const auto& [value, axis] : facts.inputs) axes_[value] = axis;
      plan().batch = facts.batch;
    }
    const int norm_ranks = training_.sync_batch_norm ? options_.mesh.data : 1;
    statistics_ = train_batch_norms(model_, norm_ranks);
    if (norm_ranks > 1 && !statistics_.empty()) result_.least_batch = int64_t{norm_ranks} * options_.micro_batches;
    loss_ = append_loss(model_, training_.loss);
    if (loss_.target) axes_[loss_.target] = 0, result_.target = loss_.target->name;
    result_.loss_sum = loss_.sum->name, result_.loss_count = loss_.count->name;
    graph().outputs = {loss_.sum, loss_.count};
    for (const RunningStatistic& one : statistics_) graph().outputs.push_back(one.next);
    remove_dead_nodes(graph());
    graph().outputs.resize(2);        // statistics come back under names of their own
    for (Node* node : graph().nodes)  // backward nodes say which they belong to
      if (node->name.empty()) node->name = graph().fresh_name(node->op);
    infer_shapes(model_);
  }

  void find_parameters() {
    std::set<const Value*> statistics;
    for (const RunningStatistic& one : statistics_) statistics.insert(one.running);
    const std::unordered_set<const Value*> used = reaches_loss();
    for (Value* v : graph().initializers()) {
      const bool wanted = initializers_.contains(v->name) && is_float(v->type.dtype) && !statistics.contains(v) &&
                          (training_.train.empty() || matches_any(training_.train, v->name)) && !matches_any(training_.freeze, v->name);
      if (!wanted) continue;
      if (used.contains(v))
        parameters_.push_back(v);
      else
        plan().notes.push_back(fmt::format("parameter '{}' has no part in the loss: it stays as it is", v->name));
    }
    if (parameters_.empty())
      throw Error("no parameter is left to train", "check --train and --freeze, and that the model's weights are initializers",
                  ErrorCode::usage);
  }
  std::unordered_set<const Value*> reaches_loss() {
    std::unordered_set<const Value*> found{loss_.sum};
    for (auto it = graph().nodes.rbegin(); it != graph().nodes.rend(); ++it) {
      const bool used = std::any_of((*it)->outputs.begin(), (*it)->outputs.end(), [&](const Value* v) { return v && found.contains(v); });
      if (!used) continue;
      for (const Value* v : (*it)->inputs)
        if (v) found.insert(v);
      for (const Value* v : captures(**it)) found.insert(v);
    }
    return found;
  }

  void assign_forward() {
    GraphIndex index(graph());
    const int stages = options_.mesh.pipeline;
    const StageAssignment assignment = assign(index, graph(), *source_.graph, options_, nullptr, target_, stages);
    forward_stages_ = assignment.stages;
    for (size_t i = 0; i < index.nodes.size(); ++i) stage_of_[index.nodes[i]] = assignment.stage_of[i];
    std::vector<Node*> ordered;
    for (int position : assignment.order) ordered.push_back(index.nodes[static_cast<size_t>(position)]);
    graph().nodes = std::move(ordered);
    settle_copies();
  }

  // What is made of parameters alone would be copied into each stage that uses it; it changes from step to step, and is made where it is
  // used first.
  void settle_copies() {
    std::unordered_set<const Value*> learns(parameters_.begin(), parameters_.end());
    for (const Node* node : graph().nodes)
      if (std::any_of(node->inputs.begin(), node->inputs.end(), [&](const Value* v) { return v && learns.contains(v); }))
        learns.insert(node->outputs.begin(), node->outputs.end());
    learns.erase(nullptr);
    std::unordered_map<const Value*, int> first_use;
    for (auto it = graph().nodes.rbegin(); it != graph().nodes.rend(); ++it) {
      int& stage = stage_of_.at(*it);
      const bool copied =
          stage < 0 && std::any_of((*it)->outputs.begin(), (*it)->outputs.end(), [&](const Value* v) { return learns.contains(v); });
      if (copied) {
        stage = forward_stages_ - 1;
        for (const Value* v : (*it)->outputs)
          if (const auto use = first_use.find(v); use != first_use.end()) stage = std::min(stage, use->second);
      }
      if (stage < 0) continue;
      for (const Value* v : (*it)->inputs)
        if (v) first_use.insert({v, stage}).first->second = std::min(first_use[v], stage);
    }
  }

  // A parameter lives in the first stage that uses it; later ones are sent it, and its gradient comes back the same way.
  void share_parameters() {
    std::unordered_map<const Value*, std::vector<Node*>> users;
    for (Node* node : graph().nodes)
      for (const Value* v : node->inputs)
        if (v) users[v].push_back(node);
    for (Value* parameter : parameters_) {
      int home = forward_stages_;
      for (const Node* node : users[parameter]) home = std::min(home, std::max(0, stage_of_.at(node)));
      home_[parameter] = home;
      Value* sent = nullptr;
      for (Node* node : users[parameter]) {
        if (stage_of_.at(node) <= home) continue;
        if (!sent) sent = add_copy(parameter, home);
        std::replace(node->inputs.begin(), node->inputs.end(), parameter, sent);
      }
    }
    sort_nodes(graph());
  }
  // The value under a name of its own, in this stage.
  Value* add_copy(Value* value, int stage) {
    Node* copy = graph().add_node("Identity", {value}, {graph().fresh_name(fmt::format("{}_stage{}", value->name, stage))});
    copy->name = copy->outputs[0]->name;
    copy->outputs[0]->type = value->type;
    stage_of_[copy] = stage;
    return copy->outputs[0];
  }

  // Parameters and running statistics become inputs that the ranks keep.
  void make_states() {
    for (Value* parameter : parameters_) {
      result_.parameters.push_back(parameter->name);
      parameter_types_.push_back(parameter->type);
      make_state(parameter);
    }
    for (const RunningStatistic& one : statistics_) {
      if (!one.running->is_constant()) continue;  // two nodes share it: the first one moves it
      const std::string name = one.running->name;
      result_.statistics.push_back(name);
      make_state(one.running);
      one.next->type = one.running->type;
      add_state_output(one.next, name);
    }
  }
  void make_state(Value* value) {
    plan().states.push_back({value->name, value->type, value->constant, false});
    value->source = value->name;
    value->name = kStateInput + value->name;
    value->constant = nullptr;
    graph().inputs.push_back(value);
  }
  void add_state_output(Value* value, const std::string& name) {
    value->source = name;
    value->name = kStateOutput + name;
    graph().outputs.push_back(value);
  }

  // Adds the backward pass, and sums of each parameter's gradient over micro-batches.
  void differentiate() {
    const Gradients gradients = add_gradients(model_, loss_.sum, parameters_);
    plan().notes.insert(plan().notes.end(), gradients.notes.begin(), gradients.notes.end());
    drop_parameters_without_gradient(gradients);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      Value* gradient = gradients.of(parameters_[i]);
      const std::string name = gradient_of(result_.parameters[i]);
      plan().states.push_back({name, gradient->type, nullptr, true});
      Value* before = graph().add_value(kStateInput + name, gradient->type);
      before->source = name;
      graph().inputs.push_back(before);
      Node* sum = graph().add_node("Add", {before, gradient}, {kStateOutput + name});
      sum->name = name;
      sum->outputs[0]->type = gradient->type;
      graph().outputs.push_back(sum->outputs[0]);
      stage_of_[sum] = backward_of(home_.at(parameters_[i]));
    }
    sort_nodes(graph());
  }
  // They stay as they are; the notes name them.
  void drop_parameters_without_gradient(const Gradients& gradients) {
    for (size_t i = parameters_.size(); i-- > 0;) {
      if (gradients.of(parameters_[i])) continue;
      const auto at = static_cast<std::ptrdiff_t>(i);
      parameters_.erase(parameters_.begin() + at), parameter_types_.erase(parameter_types_.begin() + at);
      result_.parameters.erase(result_.parameters.begin() + at);
    }
    if (parameters_.empty()) throw Error("no parameter has a gradient", "check what the loss depends on", ErrorCode::usage);
  }
  int backward_of(int stage) const { return 2 * forward_stages_ - 1 - stage; }

  // A backward graph takes what its forward graph was sent from there, and is not sent it once more.
  void keep_received_values() {
    const std::unordered_map<const Node*, int> stages = stages_of_nodes();
    std::map<std::pair<const Value*, int>, Value*> kept;
    for (Node* node : std::vector<Node*>(graph().nodes)) {
      const int own = stages.at(node), forward = 2 * forward_stages_ - 1 - own;
      if (own < forward_stages_) continue;
      for (Value*& v : node->inputs) {
        const int from = v && v->producer ? stages.at(v->producer) : -1;
        if (from < 0 || from >= forward) continue;
        Value*& copy = kept[{v, forward}];
        if (!copy) copy = add_copy(v, forward);
        v = copy;
      }
    }
    sort_nodes(graph());
  }

  // Of every node of the joint graph: forward ones where they were, backward ones with their forward node or later; -1: copied.
  std::unordered_map<const Node*, int> stages_of_nodes() const {
    std::unordered_map<std::string, int> by_name;
    for (const auto& [node, stage] : stage_of_) by_name.emplace(node->name, stage);
    std::unordered_map<const Node*, int> stages;
    for (const Node* node : model_.graph->nodes) {
      int least = 0;
      for (const Value* v : node->inputs)
        if (v && v->producer) least = std::max(least, stages.at(v->producer));
      stages[node] = stage_of(*node, least, by_name);
    }
    return stages;
  }
  int stage_of(const Node& node, int least, const std::unordered_map<std::string, int>& by_name) const {
    if (const auto known = stage_of_.find(&node); known != stage_of_.end()) return known->second < 0 ? -1 : std::max(known->second, least);
    const auto of = node.metadata.find(kBackwardOf);
    const auto forward = of == node.metadata.end() ? by_name.end() : by_name.find(of->second);
    const int stage = forward == by_name.end() || forward->second < 0 ? forward_stages_ - 1 : forward->second;
    return std::max(least, backward_of(std::min(stage, forward_stages_ - 1)));
  }

  void cut() {
    GraphIndex index(graph());
    const std::unordered_map<const Node*, int> stages = stages_of_nodes();
    StageAssignment assignment;
    assignment.stages = 2 * forward_stages_;
    for (size_t i = 0; i < index.nodes.size(); ++i) {
      assignment.order.push_back(static_cast<int>(i));
      assignment.stage_of.push_back(stages.at(index.nodes[i]));
    }
    describe_borders();
    plan().mesh = options_.mesh;
    plan().mesh.pipeline = forward_stages_;
    plan().micro_batches = options_.micro_batches;
    build_stages(model_, index, assignment, plan());
    for (PlanGraph& g : plan().graphs) {
      if (g.stage < forward_stages_) continue;
      g.kind = "backward";
      g.file = fmt::format("stage{}.backward.onnx", 2 * forward_stages_ - 1 - g.stage);
    }
    estimate_stages(plan(), target_);
  }

  void describe_borders() {
    for (const Value* v : graph().inputs) {
      const auto axis = axes_.find(v);
      if (axis == axes_.end()) continue;  // a state
      PlanInput& input = plan().inputs.emplace_back();
      input.name = v->name, input.type = v->type, input.batch_axis = axis->second;
    }
    for (const Value* v : {loss_.sum, loss_.count}) {
      PlanOutput& output = plan().outputs.emplace_back();
      output.name = v->name, output.type = v->type, output.merge = "sum";
    }
  }

  // --- once a step ---

  void add_update_graphs() {
    for (int p = 0; p < forward_stages_; ++p) {
      std::vector<size_t> own;
      for (size_t i = 0; i < parameters_.size(); ++i)
        if (home_.at(parameters_[i]) == p) own.push_back(i);
      if (own.empty()) continue;
      reduce_of_.emplace_back(p, add_graph(2 * forward_stages_ + p, "reduce", reduce_model(own)));
      update_of_.emplace_back(p, add_graph(3 * forward_stages_ + p, "update", update_model(own)));
    }
    plan().states.push_back({kLearningRate, Type::tensor(DType::float32, Shape{}), nullptr, false});
    plan().states.push_back({kStep, Type::tensor(DType::int64, Shape{}), nullptr, false});
    plan().states.push_back({kScale, Type::tensor(DType::float32, Shape{}), nullptr, false});
    plan().states.push_back({kSquaredSum, Type::tensor(DType::float32, Shape{}), nullptr, false});
  }
  int add_graph(int number, const std::string& kind, Model model) {
    PlanGraph& g = plan().graphs.emplace_back();
    g.stage = number, g.kind = kind;
    g.file = fmt::format("rank{}.{}.onnx", number % forward_stages_, kind);
    g.model = std::make_shared<Model>(std::move(model));
    return number;
  }

  // Sums gradients over data ranks, and their squares.
  Model reduce_model(const std::vector<size_t>& own) {
    Model model = clone_header();
    Graph& g = *model.graph;
    std::vector<Value*> squares;
    for (size_t i : own) {
      const std::string name = gradient_of(result_.parameters[i]);
      Value* gradient = g.add_value(kStateInput + name, parameter_types_[i]);
      g.inputs.push_back(gradient);
      if (options_.mesh.data > 1) {
        const std::vector<Attribute> attributes = {{"axis", std::string("data")}, {"group_size", int64_t{options_.mesh.data}}};
        gradient = g.add_node("AllReduce", {gradient}, {kStateOutput + name}, attributes, kCommunicationDomain)->outputs[0];
        g.outputs.push_back(gradient);
      }
      squares.push_back(
          g.add_node("ReduceSumSquare", {gradient}, {g.fresh_name("square:" + name)}, {{"keepdims", int64_t{0}}})->outputs[0]);
    }
    g.outputs.push_back(g.add_node("Sum", squares, {std::string(kStateOutput) + kSquaredSum})->outputs[0]);
    infer_shapes(model);
    return model;
  }

  Model update_model(const std::vector<size_t>& own) {
    std::vector<TrainedParameter> trained;
    for (size_t i : own) trained.push_back({result_.parameters[i], parameter_types_[i]});
    UpdateModel update = make_update(training_.optimizer, trained);
    const auto input = [](Value* value, const std::string& name) { value->name = kStateInput + name; };
    input(update.scalars.lr, kLearningRate), input(update.scalars.step, kStep), input(update.scalars.scale, kScale);
    const std::vector<std::string> kept = training_.optimizer.states();
    for (const ParameterUpdate& p : update.parameters) {
      input(p.parameter, p.name), input(p.gradient, gradient_of(p.name));
      p.new_parameter->name = kStateOutput + p.name;
      for (size_t s = 0; s < kept.size(); ++s) {
        const std::string name = kept[s] + ":" + p.name;
        input(p.states[s], name);
        p.new_states[s]->name = kStateOutput + name;
        plan().states.push_back({name, p.states[s]->type, nullptr, false});
      }
    }
    return std::move(update.model);
  }
  Model clone_header() const {
    Model model;
    model.ir_version = model_.ir_version;
    model.opsets = model_.opsets;
    model.opsets[kCommunicationDomain] = 1;
    model.graph = std::make_shared<Graph>();
    return model;
  }

  void make_schedule() {
    TrainingProblem training;
    training.forward = forward_stages_;
    ScheduleProblem& problem = training.problem;
    problem.stages = 2 * forward_stages_, problem.micro_batches = plan().micro_batches;
    std::vector<std::set<int>> needs(static_cast<size_t>(problem.stages));
    for (const Route& r : plan().routes) needs[static_cast<size_t>(r.to_stage)].insert(r.from_stage);
    for (const auto& n : needs) problem.needs.emplace_back(n.begin(), n.end());
    for (int s = 0; s < problem.stages; ++s) problem.rank_of_stage.push_back(s < forward_stages_ ? s : backward_of(s));
    plan().schedule = make_training_schedule(options_.schedule, training);
    verify(plan().schedule, problem);
    for (const auto& [p, number] : reduce_of_)
      plan().schedule.ranks[static_cast<size_t>(p)].push_back({Action::Kind::reduce, number, 0, -1});
    for (const auto& [p, number] : update_of_) plan().schedule.ranks[static_cast<size_t>(p)].push_back({Action::Kind::step, number, 0, -1});
  }

  Plan& plan() { return *result_.plan; }

  Model model_, source_;
  const PartitionOptions& options_;
  const TrainingOptions& training_;
  Target target_;
  TrainingPlan result_{.plan = std::make_shared<Plan>()};
  std::set<std::string> initializers_;  // of the source
  std::map<const Value*, int> axes_;    // of the batch, of inputs
  LossValues loss_;
  std::vector<RunningStatistic> statistics_;
  std::vector<Value*> parameters_;
  std::vector<Type> parameter_types_;
  int forward_stages_ = 1;
  std::unordered_map<const Node*, int> stage_of_;           // of forward nodes and sums of gradients; -1: copied
  std::unordered_map<const Value*, int> home_;              // stages of parameters
  std::vector<std::pair<int, int>> reduce_of_, update_of_;  // pipeline rank, graph
};

}  // namespace

TrainingPlan partition_for_training(Model model, const PartitionOptions& options, const TrainingOptions& training) {
  const std::string path = model.path, digest = model.digest;
  TrainingPlan made = TrainingPartitioner(std::move(model), options, training).run();
  made.plan->source_file = path, made.plan->source_digest = digest;
  made.plan->target = options.target;
  return made;
}

}  // namespace fretsaw
