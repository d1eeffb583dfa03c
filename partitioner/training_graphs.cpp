// Forward and backward as one graph, in which parameters are states, cut into stages.
#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/gradients.h"
#include "graph/passes.h"
#include "graph/passes/rewrite.h"
#include "graph/training/training_plan.h"
#include "partitioner/gradient_buckets.h"
#include "partitioner/node_numbers.h"
#include "partitioner/recompute.h"
#include "partitioner/rounded_uses.h"
#include "partitioner/training_job.h"
#include "partitioner/units.h"

namespace fretsaw {
namespace {

class JointGraph {
 public:
  JointGraph(TrainingJob& job, Model& model, const StateValues& values, int tensor, Plan& plan, std::map<std::string, int>& homes)
      : job_(job), model_(model), values_(values), tensor_(tensor), plan_(plan), homes_(homes) {}

  void run() {
    place_forward_nodes();
    settle_copies();
    share_parameters();
    make_states();
    differentiate();
    share_on_the_way_back();
    if (job_.recomputes) recompute();
    take_copies();
    keep_received_values();
    mark_groups(model_);
    cut();
  }

 private:
  Graph& graph() { return *model_.graph; }
  bool is_first_rank() const { return tensor_ == 0; }
  Value* parameter(const std::string& name) const { return values_.at(name); }

  void place_forward_nodes() {
    const std::vector<Node*> nodes = graph().nodes;
    std::unordered_set<std::string> names;  // backward nodes name the node that they belong to; sharding makes some of one name
    for (Node* node : nodes) {
      const std::string name = node->name;
      for (int again = 1; !names.insert(node->name).second; ++again) node->name = fmt::format("{}_{}", name, again);
    }
    for (size_t i = 0; i < nodes.size(); ++i) stage_of_[nodes[i]] = job_.forward.stage_of[i];
    graph().nodes.clear();
    for (const int position : job_.forward.order) graph().nodes.push_back(nodes[static_cast<size_t>(position)]);
  }

  // What is made of parameters alone would be copied into each stage that uses it; it changes from step to step, and is made where it is
  // used first.
  void settle_copies() {
    std::unordered_set<const Value*> learns;
    for (const std::string& name : job_.parameters) learns.insert(parameter(name));
    for (const Node* node : graph().nodes) {
      const std::vector<Value*> taken = operands(*node);
      if (std::any_of(taken.begin(), taken.end(), [&](const Value* v) { return learns.contains(v); }))
        learns.insert(node->outputs.begin(), node->outputs.end());
    }
    learns.erase(nullptr);
    std::unordered_map<const Value*, int> first_use;
    for (auto it = graph().nodes.rbegin(); it != graph().nodes.rend(); ++it) {
      int& stage = stage_of_.at(*it);
      const bool copied =
          stage < 0 && std::any_of((*it)->outputs.begin(), (*it)->outputs.end(), [&](const Value* v) { return learns.contains(v); });
      if (copied) {
        stage = job_.stages() - 1;
        for (const Value* v : (*it)->outputs)
          if (const auto use = first_use.find(v); use != first_use.end()) stage = std::min(stage, use->second);
      }
      if (stage < 0) continue;
      for (const Value* v : operands(**it)) first_use[v] = std::min(first_use.try_emplace(v, stage).first->second, stage);
    }
  }

  // A parameter lives in the first stage that uses it; later ones are sent it, and its gradient comes back the same way.
  void share_parameters() {
    std::unordered_map<const Value*, std::vector<Node*>> users;
    for (Node* node : graph().nodes)
      for (const Value* v : operands(*node)) users[v].push_back(node);
    for (const std::string& name : job_.parameters) {
      Value* value = parameter(name);
      int home = job_.stages();
      for (const Node* node : users[value]) home = std::min(home, std::max(0, stage_of_.at(node)));
      home_[value] = home;
      if (is_first_rank()) homes_[name] = home;
      for (Node* node : users[value])
        if (stage_of_.at(node) > home) replace_operand(*node, value, sent(value));
    }
    sort_nodes(graph());
  }
  // A gradient may take a parameter where the forward pass was sent what another stage made of it: its transpose.
  void share_on_the_way_back() {
    const NodeNumbers numbers = numbers_of_nodes();
    std::unordered_set<const Value*> parameters;
    for (const std::string& name : job_.parameters) parameters.insert(parameter(name));
    for (Node* node : std::vector<Node*>(graph().nodes)) {
      const int number = numbers.at(node);
      if (number < job_.stages()) continue;
      for (Value* v : operands(*node))
        if (parameters.contains(v) && job_.forward_of(number) > home_.at(v)) replace_operand(*node, v, sent(v));
    }
    sort_nodes(graph());
  }
  // The copy of a parameter that later stages are sent.
  Value* sent(Value* parameter) {
    Value*& copy = sent_[parameter];
    if (!copy) copy = add_copy(parameter, home_.at(parameter));
    return copy;
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
    for (const std::string& name : job_.parameters) {
      if (is_first_rank()) add_state(name, name, job_.divides_parameters()).initial = job_.initial.at(name);
      Value* value = parameter(name);
      const auto part = job_.data.find(name);
      if (job_.divides_parameters() && part != job_.data.end())
        wanted_.push_back(gathered(value, name, part->second));
      else
        wanted_.push_back(make_input(value, name));
      wanted_names_.push_back(name);
    }
    const std::vector<Value*> outputs = graph().outputs;
    graph().outputs.resize(2);  // statistics come back under names of their own
    for (const TrainedStatistic& one : job_.statistics) {
      if (is_first_rank()) add_state(one.name, one.name, false).initial = job_.initial.at(one.name);
      make_input(values_.at(one.name), one.name);
      add_state_output(outputs[one.next_output], one.name);
    }
  }
  PlanState& add_state(const std::string& name, const std::string& parameter, bool with_data) {
    PlanState& state = plan_.states.emplace_back();
    state.name = name;
    state.type = job_.types.at(parameter);
    state.parts = job_.parts_of(parameter, with_data);
    return state;
  }
  Value* make_input(Value* value, const std::string& name) {
    value->source = name;
    value->name = kStateInput + name;
    value->constant = nullptr;
    value->part = nullptr;
    graph().inputs.push_back(value);
    return value;
  }
  // The parameter from the data ranks' parts, of which one is kept here. The backward pass gathers it once more.
  Value* gathered(Value* value, const std::string& name, const PlanState::Part& part) {
    Value* kept = graph().add_value(kStateInput + name, part_type(value->type, {part}, {}));
    kept->source = name;
    graph().inputs.push_back(kept);
    Node* gather = graph().add_node("AllGather", {kept}, {graph().fresh_name(name + "/gathered")}, over_data(part), kCommunicationDomain);
    gather->name = gather->outputs[0]->name;
    value->constant = nullptr;
    value->part = nullptr;
    set_output(*gather, 0, value);
    value->name = gather->name;
    stage_of_[gather] = home_.at(value);
    home_[kept] = home_.at(value);
    gathers_.insert(value);
    sort_nodes(graph());
    return kept;
  }
  std::vector<Attribute> over_data(const PlanState::Part& part) const {
    return {{"axis", std::string("data")}, {"group_size", int64_t{job_.options.mesh.data}}, {"tensor_axis", int64_t{part.dim}}};
  }
  void add_state_output(Value* value, const std::string& name) {
    value->source = name;
    value->name = kStateOutput + name;
    graph().outputs.push_back(value);
  }

  // Adds the backward pass, and sums of each parameter's gradient over micro-batches. What is differentiated is the sum of all ranks'
  // losses: tensor ranks hold the same loss, of which each counts its share, and the gradient of what they hold alike is the sum of what
  // they find.
  void differentiate() {
    GradientOptions options;
    Value* loss = graph().outputs[0];
    if (job_.options.mesh.tensor > 1) options.seed = share_of_loss(*loss);
    if (job_.scales_loss()) options.seed = scaled_loss(*loss, options.seed);
    const Gradients gradients = add_gradients(model_, loss, wanted_, options);
    if (is_first_rank()) {
      plan_.notes.insert(plan_.notes.end(), gradients.notes.begin(), gradients.notes.end());
      find_parameters_without_gradient(gradients);
    }
    for (size_t i = 0; i < wanted_.size(); ++i)
      if (!job_.without_gradient.contains(wanted_names_[i])) add_sum(wanted_names_[i], wanted_[i], gradients);
    std::vector<Node*> sums;
    for (Node* node : graph().nodes)
      if (sums_.contains(node)) sums.push_back(node);
    place_behind_inputs(graph(), sums);  // what is added up need not be kept, and the ranks' exchange can begin
    sort_nodes(graph());
  }
  Value* share_of_loss(const Value& loss) {
    auto tensor = make_tensor(loss.type.dtype, dims_of(*loss.type.shape));
    const double share = 1.0 / job_.options.mesh.tensor;
    if (loss.type.dtype == DType::float64)
      *reinterpret_cast<double*>(mutable_data(*tensor)) = share;
    else
      *reinterpret_cast<float*>(mutable_data(*tensor)) = static_cast<float>(share);
    return graph().add_constant(graph().fresh_name(loss.name + "_grad"), tensor);
  }
  // The loss's scale, times the share.
  Value* scaled_loss(const Value& loss, Value* share) {
    if (is_first_rank()) {
      PlanState& state = plan_.states.emplace_back();
      state.name = kLossScale, state.type = Type::tensor(DType::float32, Shape{});
    }
    Value* seed = graph().add_value(std::string(kStateInput) + kLossScale, Type::tensor(DType::float32, Shape{}));
    graph().inputs.push_back(seed);
    const auto add = [&](const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes) {
      const std::string name = graph().fresh_name(loss.name + "_scale");
      Node* node = graph().add_node(op, std::move(inputs), {name}, std::move(attributes));
      node->name = name, node->metadata[kBackwardOf] = loss.producer->name;
      return node->outputs[0];
    };
    if (loss.type.dtype != DType::float32) seed = add("Cast", {seed}, {{"to", static_cast<int64_t>(loss.type.dtype)}});
    if (share) seed = add("Mul", {seed, share}, {});
    seed->type = loss.type;
    return seed;
  }
  // They stay as they are, on all tensor ranks alike; the notes name them.
  void find_parameters_without_gradient(const Gradients& gradients) {
    for (size_t i = 0; i < wanted_.size(); ++i)
      if (!gradients.of(wanted_[i])) job_.without_gradient.insert(wanted_names_[i]);
    if (job_.without_gradient.size() == wanted_.size())
      throw Error("no parameter has a gradient", "check what the loss depends on", ErrorCode::usage);
  }
  void add_sum(const std::string& name, Value* wanted, const Gradients& gradients) {
    Value* gradient = gradients.of(wanted);
    if (!gradient) throw Error("the ranks' gradients of '" + name + "' differ", "please report the model");
    const int stage = home_.at(wanted);
    const auto part = job_.data.find(name);
    const bool divided = part != job_.data.end() && job_.divides_gradients();
    if (divided && !job_.divides_parameters()) {
      std::vector<Attribute> attributes = over_data(part->second);
      attributes.push_back({"reduction", std::string("sum")});
      Node* scatter = graph().add_node("ReduceScatter", {gradient}, {graph().fresh_name(gradient->name + "/scattered")}, attributes,
                                       kCommunicationDomain);
      scatter->name = scatter->outputs[0]->name;
      scatter->outputs[0]->type = part_type(gradient->type, {part->second}, {});
      gradient = scatter->outputs[0];
      sums_[scatter] = stage;
    }
    const bool reduced_elsewhere = job_.training.zero == 1 && part != job_.data.end();
    const std::string state = reduced_elsewhere ? gradient_sum_of(name) : gradient_of(name);
    if (is_first_rank()) {
      PlanState& kept = add_state(state, name, divided);
      kept.type.dtype = gradient->type.dtype;
      kept.starts_at_zero = true;
    }
    Node* sum = nullptr;
    const bool is_output = std::count(graph().outputs.begin(), graph().outputs.end(), gradient) > 0;
    if (job_.options.micro_batches == 1 && gradient->producer && !is_output) {
      sum = gradient->producer;
      add_state_output(gradient, state);
    } else {
      if (job_.options.micro_batches == 1) {  // it is another parameter's gradient too
        sum = graph().add_node("Identity", {gradient}, {kStateOutput + state});
      } else {
        Value* before = graph().add_value(kStateInput + state, gradient->type);
        before->source = state;
        graph().inputs.push_back(before);
        sum = graph().add_node("Add", {before, gradient}, {kStateOutput + state});
      }
      sum->name = state;
      sum->outputs[0]->type = gradient->type;
      graph().outputs.push_back(sum->outputs[0]);
    }
    sums_[sum] = stage;
  }

  void recompute() {
    const NodeNumbers numbers = numbers_of_nodes();
    const RecomputeProblem problem = {
        [&](const Node& node) {
          const auto known = stage_of_.find(&node);
          return known != stage_of_.end() && known->second < job_.stages() ? known->second : -1;
        },
        [&](const Node& node) {
          const int number = numbers.at(&node);
          return number < job_.stages() ? -1 : job_.forward_of(number);
        },
    };
    for (const auto& [node, stage] : recompute_blocks(graph(), problem, job_.kept)) stage_of_[node] = job_.backward_of(stage);
  }

  // --- copies ---

  // Parameters that are only taken rounded to 16 bits are kept in that form too: the update rounds them, once a step.
  void take_copies() {
    const Consumers users = consumers_of(graph());
    const NodeNumbers numbers = numbers_of_nodes();
    std::unordered_set<const Node*> gone;
    for (const std::string& name : job_.parameters) {
      if (job_.without_gradient.contains(name)) continue;  // no update makes its copy
      Value* value = parameter(name);
      Value* kept = gathers_.contains(value) ? value->producer->inputs[0] : value;
      const std::optional<RoundedUse> use = job_.types.at(name).dtype == DType::float32 ? rounded_use(kept, graph(), users) : std::nullopt;
      if (is_first_rank() && use) add_copy_state(name, use->type);
      if (job_.copies.contains(name) != use.has_value()) throw Error("the ranks' uses of '" + name + "' differ", "please report the model");
      if (!use) continue;
      kept->type.dtype = use->type;
      kept->source = copy_of(name), kept->name = kStateInput + kept->source;
      for (Node* node : use->handing_on) node->outputs[0]->type.dtype = use->type;
      for (Node* cast : use->casts)
        if (pass_by(*cast, users, numbers)) gone.insert(cast);
    }
    std::erase_if(graph().nodes, [&](const Node* node) { return gone.contains(node); });
  }
  void add_copy_state(const std::string& name, DType type) {
    job_.copies[name] = type;
    const auto own = std::find_if(plan_.states.begin(), plan_.states.end(), [&](const PlanState& state) { return state.name == name; });
    own->parts = job_.parts_of(name, job_.divides(name));
    PlanState& copy = add_state(copy_of(name), name, job_.divides_parameters());
    copy.type.dtype = type, copy.rounded_from = name;
  }
  // The cast's input has its type already. What runs in other stages is sent it from here, as before; true: there is no such node.
  bool pass_by(Node& cast, const Consumers& users, const NodeNumbers& numbers) {
    Value *in = cast.inputs[0], *out = cast.outputs[0];
    bool all = std::find(graph().outputs.begin(), graph().outputs.end(), out) == graph().outputs.end();
    if (const auto found = users.find(out); found != users.end()) {
      for (Node* user : found->second) {
        const bool here = bodies(*user).empty() && job_.forward_of(numbers.at(user)) == job_.forward_of(numbers.at(&cast));
        if (here) std::replace(user->inputs.begin(), user->inputs.end(), out, in);
        all &= here;
      }
    }
    if (!all) cast.op = "Identity", cast.attributes.clear();
    return all;
  }

  // --- cutting ---

  // A backward graph takes what its forward graph was sent from there, and is not sent it once more; a graph of weights likewise from
  // both. A parameter that was gathered is gathered again.
  void keep_received_values() {
    const NodeNumbers numbers = numbers_of_nodes();
    std::map<std::pair<const Value*, int>, Value*> kept;
    for (Node* node : std::vector<Node*>(graph().nodes)) {
      const int own = numbers.at(node), stage = own < 0 ? own : job_.forward_of(own);
      if (own < job_.stages()) continue;
      for (Value* v : operands(*node)) {
        const int from = v->producer ? numbers.at(v->producer) : -1;
        if (from < 0 || job_.forward_of(from) == stage) continue;
        const int holder = from < job_.stages() ? stage : job_.backward_of(stage);
        if (from >= holder || holder == own) continue;
        Value*& copy = kept[{v, holder}];
        if (!copy) copy = add_copy(v, holder);
        replace_operand(*node, v, copy);
      }
    }
    gather_again(numbers);
    sort_nodes(graph());
  }
  void gather_again(const NodeNumbers& numbers) {
    std::map<std::pair<const Value*, int>, Value*> made;
    for (Node* node : std::vector<Node*>(graph().nodes)) {
      const auto number = numbers.find(node);
      if (number == numbers.end() || number->second < job_.stages()) continue;
      for (Value* v : operands(*node)) {
        if (!gathers_.contains(v) || job_.forward_of(number->second) != stage_of_.at(v->producer)) continue;
        Value*& again = made[{v, number->second}];
        if (!again) {
          const std::string name = graph().fresh_name(v->name + "/again");
          Node* gather = graph().add_node("AllGather", {v->producer->inputs[0]}, {name}, v->producer->attributes, kCommunicationDomain);
          gather->name = name;
          gather->outputs[0]->type = v->type;
          stage_of_[gather] = number->second;
          again = gather->outputs[0];
        }
        replace_operand(*node, v, again);
      }
    }
  }

  NodeNumbers numbers_of_nodes() const { return number_nodes(*model_.graph, job_, stage_of_, sums_); }

  void cut() {
    GraphIndex index(graph());
    const NodeNumbers numbers = numbers_of_nodes();
    StageAssignment assignment;
    assignment.stages = job_.micro_batch_graphs();
    assignment.may_be_empty = true, assignment.forward = job_.stages();
    for (size_t i = 0; i < index.nodes.size(); ++i) {
      assignment.order.push_back(static_cast<int>(i));
      assignment.stage_of.push_back(numbers.at(index.nodes[i]));
    }
    const size_t before = plan_.graphs.size();
    Plan other;
    other.inputs = plan_.inputs, other.outputs = plan_.outputs, other.mesh = plan_.mesh;
    Plan& made = is_first_rank() ? plan_ : other;
    build_stages(model_, index, assignment, made, tensor_);
    if (!is_first_rank()) {
      if (other.routes.size() != plan_.routes.size()) throw Error("the ranks' graphs differ", "please report the model");
      for (PlanGraph& g : other.graphs) plan_.graphs.push_back(std::move(g));
    }
    for (size_t i = before; i < plan_.graphs.size(); ++i) name_graph(plan_.graphs[i]);
  }
  void name_graph(PlanGraph& g) const {
    if (g.stage < job_.stages()) return;
    g.kind = g.stage < 2 * job_.stages() ? "backward" : "weights";
    const std::string rank = job_.options.mesh.tensor > 1 ? fmt::format(".tensor{}", tensor_) : "";
    g.file = fmt::format("stage{}.{}{}.onnx", job_.forward_of(g.stage), g.kind, rank);
  }

  TrainingJob& job_;
  Model& model_;
  const StateValues& values_;
  int tensor_;
  Plan& plan_;
  std::map<std::string, int>& homes_;
  NodeNumbers stage_of_;                           // of forward nodes and copies: the number of their graph; -1: copied
  NodeNumbers sums_;                               // stages of sums of gradients
  std::unordered_map<const Value*, int> home_;     // stages of parameters
  std::unordered_map<const Value*, Value*> sent_;  // copies of parameters
  std::vector<Value*> wanted_;                     // whose gradients are added up
  std::vector<std::string> wanted_names_;
  std::unordered_set<const Value*> gathers_;  // parameters that are gathered from the data ranks
};

}  // namespace

void add_micro_batch_graphs(TrainingJob& job, Model& model, const StateValues& values, int tensor, Plan& plan,
                            std::map<std::string, int>& homes) {
  JointGraph(job, model, values, tensor, plan, homes).run();
}

}  // namespace fretsaw
