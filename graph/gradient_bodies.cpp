// The gradients of If and Loop: what their bodies do is done again, and then back.
#include <algorithm>
#include <unordered_set>

#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/gradient_walk.h"
#include "graph/passes/loops.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

GraphPtr body_of(const Node& node, const char* name) {
  GraphPtr body = node.get_graph(name);
  if (!body) throw Error(std::string("the attribute '") + name + "' holds no graph", "export the model again").at_node(node.name, node.op);
  return body;
}

// A body's output is made by one of its own nodes.
Value* made_inside(GradientContext& inside, const Graph& body, Value* value) {
  return value->graph == &body && value->producer ? value : inside.add("Identity", {value});
}

// The gradient of a Loop is a Loop from the last pass to the first. Before each the forward loop records what it carries; the backward one
// takes that up, does the pass again, and goes back through it:
//
//   [i, ok, h] -> [ok, h' = f(h, w, x[i])]     forward, which carries h, with a record of all h
//   [j, ok, dh', dw] -> [ok, dh, dw + ..., dx[i]]  with i = passes - 1 - j, h = record[i]
//
// It carries the gradients of what the forward loop carries, and adds up those of outer values. The gradients of rows that a pass gathers
// from an outer value are stacked, and put in their places behind the loop.
class LoopGradient {
 public:
  struct Part {
    Value *value, *gradient;
  };

  LoopGradient(Graph& graph, GradientNodes& nodes, Node& loop)
      : graph_(graph),
        nodes_(nodes),
        loop_(loop),
        outside_(nodes, loop, {}, {}),
        given_(body_of(loop, "body")),
        body_(clone(*given_)),
        walk_(*body_),
        inside_(walk_.nodes(), loop, {}, {}) {
    if (!fitting_body(loop))
      throw Error("its body does not take and give what it carries", "export the model again").at_node(loop.name, loop.op);
    body_->parent = &graph;
    iteration_ = body_->inputs[0];
    before_.assign(body_->inputs.begin() + 2, body_->inputs.end());
    results_.assign(body_->outputs.begin() + 1, body_->outputs.end());
    replace_uses(*body_, body_->inputs[1], body_->add_constant(body_->fresh_name("condition"), make_true()));
    walk_.keep_taken_rows();
  }

  // `learning`: outer values that the body takes and that gradients are wanted of; `initial_learns`: whether those of what it carries are.
  std::vector<Part> run(const std::vector<Value*>& of_outputs, const std::vector<Value*>& learning,
                        const std::vector<bool>& initial_learns) {
    find_flows(of_outputs, learning, initial_learns);
    std::vector<Value*> inputs = {body_->add_value(body_->fresh_name("passes_back"), Type::tensor(DType::int64, Shape{})),
                                  body_->add_value(body_->fresh_name("goes_on"), Type::tensor(DType::boolean, Shape{}))};
    body_->inputs = inputs;
    const std::vector<Node*> forward = body_->nodes;
    start_from(of_outputs);
    walk_.go_back(forward);
    body_->outputs = {inside_.add("Identity", {inputs[1]})};
    give_carried();
    add_up(learning);
    stack_rows();
    if (body_->outputs.size() == 1) return {};
    recall(inputs[0]);
    sort_nodes(*body_);
    return parts(initial_learns);
  }
  const GradientWalk& walk() const { return walk_; }

 private:
  struct Carried {
    size_t place;    // among what the loop carries
    Value* of_end;   // the gradient of its value after the pass, in the body
    Value* initial;  // that of its last value
  };
  struct Sum {
    Value *of, *initial;
  };

  // What gradients flow through of what is carried: parameters have a part in it, and the loss takes of it, in a later pass at least.
  void find_flows(const std::vector<Value*>& of_outputs, const std::vector<Value*>& learning, const std::vector<bool>& initial_learns) {
    const auto is_taken = [&](size_t o) { return o < of_outputs.size() && of_outputs[o]; };
    std::vector<bool> learns = initial_learns, reaches(learns.size());
    std::vector<std::vector<bool>> parts;  // of each carried value: the results that it has a part in
    for (size_t k = 0; k < learns.size(); ++k) {
      walk_.find_dependent({before_[k]});
      std::vector<bool>& part = parts.emplace_back();
      for (const Value* result : results_) part.push_back(walk_.depends(result));
      reaches[k] = is_taken(k);
      for (size_t o = learns.size(); o < results_.size(); ++o) reaches[k] = reaches[k] || (part[o] && is_taken(o));
    }
    walk_.find_dependent(learning);
    for (size_t k = 0; k < learns.size(); ++k) learns[k] = learns[k] || walk_.depends(results_[k]);
    for (bool found = true; found;) {
      found = false;
      for (size_t from = 0; from < learns.size(); ++from)
        for (size_t to = 0; to < learns.size(); ++to) {
          if (!parts[from][to]) continue;
          if (learns[from] && !learns[to]) learns[to] = found = true;
          if (reaches[to] && !reaches[from]) reaches[from] = found = true;
        }
    }
    std::vector<Value*> wanted = learning;
    for (size_t k = 0; k < learns.size(); ++k) {
      flows_.push_back(learns[k] && reaches[k]);
      if (flows_[k]) wanted.push_back(before_[k]);
    }
    walk_.find_dependent(wanted);
  }

  void start_from(const std::vector<Value*>& of_outputs) {
    const auto start = [&](Value* result, Value* gradient) {
      if (walk_.depends(result)) walk_.contribute(result->graph == body_.get() ? result->producer : nullptr, result, gradient);
    };
    for (size_t k = 0; k < flows_.size(); ++k) {
      if (!flows_[k]) continue;
      check_keeps_size(k);
      Value* of_end = body_->add_value(body_->fresh_name(before_[k]->name + "_grad"), before_[k]->type);
      body_->inputs.push_back(of_end);
      Value* given = k < of_outputs.size() ? of_outputs[k] : nullptr;
      carried_.push_back({k, of_end, given ? given : outside_.zeros_like(loop_.inputs[2 + k])});
      start(results_[k], of_end);
    }
    for (size_t o = flows_.size(); o < of_outputs.size() && o < results_.size(); ++o)
      if (of_outputs[o] && walk_.depends(results_[o])) start(results_[o], inside_.add("Gather", {of_outputs[o], iteration_}));
  }

  // The records are tensors with a row for each pass.
  void check_keeps_size(size_t k) const {
    const Type &type = before_[k]->type, &initial = loop_.inputs[2 + k]->type;
    if (!type.is_tensor())
      throw Error("it carries '" + before_[k]->name + "', which is " + to_string(type) + ", and how often it runs is not known",
                  "give the inputs fixed sizes (--shape), write into a tensor, or freeze the parameters before and inside it")
          .at_node(loop_.name, loop_.op);
    bool keeps = type.shape.has_value();
    for (size_t d = 0; keeps && initial.shape && d < type.shape->size(); ++d)
      keeps = (*type.shape)[d] == (*initial.shape)[d] || !(*initial.shape)[d].known();
    if (!keeps)
      throw Error(
          "the size of '" + before_[k]->name + "', which it carries, may change from pass to pass: the gradient needs one size",
          "begin with a value of the final size, give the inputs fixed sizes (--shape), or freeze the parameters before and inside it")
          .at_node(loop_.name, loop_.op);
  }

  void give_carried() {
    for (const Carried& one : carried_) {
      Value* gradient = walk_.total(before_[one.place]);
      body_->outputs.push_back(made_inside(inside_, *body_, gradient ? gradient : inside_.zeros_like(one.of_end)));
    }
  }

  // Sums in 16 bits come to a stop: they are added up in float32.
  void add_up(const std::vector<Value*>& learning) {
    for (Value* v : learning) {
      Value* gradient = walk_.total(v);
      if (!gradient) continue;
      const DType type = v->type.dtype == DType::float16 || v->type.dtype == DType::bfloat16 ? DType::float32 : v->type.dtype;
      Value* before = body_->add_value(body_->fresh_name(v->name + "_grad_so_far"), Type::tensor(type, v->type.shape));
      body_->inputs.push_back(before);
      if (type != v->type.dtype) gradient = inside_.add("Cast", {gradient}, {{"to", static_cast<int64_t>(type)}}, type);
      body_->outputs.push_back(inside_.add("Add", {before, gradient}));
      sums_.push_back({v, outside_.zeros_like(v, type)});
    }
  }

  void stack_rows() {
    for (const GradientWalk::TakenRow& row : walk_.taken_rows()) {
      body_->outputs.push_back(made_inside(inside_, *body_, row.gradient));
      body_->outputs.push_back(made_inside(inside_, *body_, row.gather->inputs[1]));
    }
  }

  // Gives what the pass needs: its number, and what was carried to it.
  void recall(Value* back) {
    remove_dead_nodes(*body_);
    std::unordered_set<const Value*> needed;
    for (const Node* node : body_->nodes)
      for (const Value* v : operands(*node)) needed.insert(v);
    Value* numbers = record(*given_->inputs[0]);
    passes_ = outside_.add("Squeeze", {outside_.size_value(numbers, 0), outside_.integers({0})});
    for (size_t k = 0; k < before_.size(); ++k) {
      if (!needed.count(before_[k])) continue;
      check_keeps_size(k);
      Value* all = record(*given_->inputs[2 + k]);
      make(before_[k], inside_.add("Gather", {all, iteration_}));
      needed.insert(iteration_);
    }
    if (needed.count(iteration_)) make(iteration_, inside_.add("Sub", {outside_.add("Sub", {passes_, outside_.integer(1)}), back}));
  }
  static void make(Value* value, Value* stand_in) { set_output(*stand_in->producer, 0, value); }

  // A further output of the forward loop: what this value of its body was in each pass.
  Value* record(Value& inside) {
    Value* row = given_->add_node("Identity", {&inside}, {given_->fresh_name(inside.name + "_row")})->outputs[0];
    row->type = inside.type;
    given_->outputs.push_back(row);
    const size_t output = given_->outputs.size() - 2;
    loop_.outputs.resize(output + 1);
    Type type = inside.type;
    if (type.shape) type.shape->insert(type.shape->begin(), Dim());
    Value* rows = graph_.add_value(graph_.fresh_name(loop_.name + "_" + inside.name), type);
    set_output(loop_, output, rows);
    return rows;
  }

  std::vector<Part> parts(const std::vector<bool>& initial_learns) {
    std::vector<Value*> inputs = {passes_, nullptr};
    for (const Carried& one : carried_) inputs.push_back(one.initial);
    for (const Sum& sum : sums_) inputs.push_back(sum.initial);
    const std::vector<bool> all(body_->outputs.size() - 1, true);
    const std::vector<Value*> made = nodes_.add(&loop_, loop_.name + "_grad_Loop", "Loop", std::move(inputs), all, {{"body", body_}}, "");
    std::vector<Part> found;
    size_t next = 0;
    for (const Carried& one : carried_) {
      Value* gradient = made[next++];
      if (initial_learns[one.place]) found.push_back({loop_.inputs[2 + one.place], gradient});
    }
    for (const Sum& sum : sums_) {
      Value* gradient = made[next++];
      gradient->type = sum.initial->type;
      if (sum.initial->type.dtype != sum.of->type.dtype)
        gradient = outside_.add("Cast", {gradient}, {{"to", static_cast<int64_t>(sum.of->type.dtype)}}, sum.of->type.dtype);
      found.push_back({sum.of, gradient});
    }
    for (const GradientWalk::TakenRow& row : walk_.taken_rows()) {
      found.push_back({row.gather->inputs[0], of_gathered(*row.gather, made[next], made[next + 1])});
      next += 2;
    }
    return found;
  }

  // The passes' rows [passes, ...] and where they were taken: the gradient of one Gather that takes them all.
  Value* of_gathered(const Node& gather, Value* rows, Value* places) {
    Value* from = gather.inputs[0];
    const size_t axis = outside_.axis(gather.get_int("axis", 0), outside_.rank(from));
    rows->type = Type::tensor(from->type.dtype), places->type = Type::tensor(gather.inputs[1]->type.dtype);
    if (axis > 0) {
      const auto rank = std::ssize(*gather.outputs[0]->type.shape) + 1;
      rows = outside_.add("Transpose", {rows}, {{"perm", first_moved_to(static_cast<int64_t>(axis), rank)}});
    }
    return outside_.add_own("GatherGrad", {rows, places, outside_.shape_value(from)}, {{"axis", static_cast<int64_t>(axis)}});
  }

  Graph& graph_;
  GradientNodes& nodes_;
  Node& loop_;
  GradientContext outside_;
  GraphPtr given_, body_;  // of the forward loop, and the copy that becomes that of the backward one
  GradientWalk walk_;      // through the copy
  GradientContext inside_;
  Value *iteration_ = nullptr, *passes_ = nullptr;
  std::vector<Value*> before_, results_;  // in the copy: what is carried to the pass; that afterwards, and its rows
  std::vector<bool> flows_;
  std::vector<Carried> carried_;
  std::vector<Sum> sums_;
};

}  // namespace

std::vector<Value*> GradientWalk::learning_captures(const Node& node) const {
  std::vector<Value*> learning;
  for (Value* v : captures(node))
    if (depends(v) && carries_gradient(v->type)) learning.push_back(v);
  return learning;
}

void GradientWalk::take_over(const GradientWalk& inner) {
  nodes_.own_domain = nodes_.own_domain || inner.nodes_.own_domain;
  found_.insert(found_.end(), inner.found_.begin(), inner.found_.end());
}

// The gradient of an If is an If on the same condition.
void GradientWalk::differentiate_branches(Node& node, const std::vector<Value*>& of_outputs) {
  const std::vector<Value*> learning = learning_captures(node);
  if (learning.empty()) return;
  std::vector<Attribute> branches;
  for (const char* name : {"then_branch", "else_branch"}) branches.push_back({name, gradient_branch(node, name, of_outputs, learning)});
  const std::vector<Value*> found =
      nodes_.add(&node, node.name + "_grad_If", "If", {node.inputs[0]}, std::vector<bool>(learning.size(), true), std::move(branches), "");
  for (size_t i = 0; i < learning.size(); ++i) contribute(&node, learning[i], found[i]);
}

// A copy of the branch, so that nothing of it need be kept, and from its results the way back to what it captures.
GraphPtr GradientWalk::gradient_branch(Node& node, const char* name, const std::vector<Value*>& of_outputs,
                                       const std::vector<Value*>& learning) {
  GraphPtr branch = clone(*body_of(node, name));
  branch->parent = &graph_;
  GradientWalk walk(*branch);
  walk.find_dependent(learning);
  const std::vector<Node*> forward = branch->nodes;
  for (size_t o = 0; o < of_outputs.size() && o < branch->outputs.size(); ++o) {
    Value* result = branch->outputs[o];
    if (of_outputs[o] && walk.depends(result))
      walk.contribute(result->graph == branch.get() ? result->producer : nullptr, result, of_outputs[o]);
  }
  walk.go_back(forward);
  GradientContext inside(walk.nodes_, node, {}, {});
  branch->outputs.clear();
  for (Value* v : learning) {
    Value* gradient = walk.total(v);
    branch->outputs.push_back(made_inside(inside, *branch, gradient ? gradient : inside.zeros_like(v)));
  }
  remove_dead_nodes(*branch);
  take_over(walk);
  return branch;
}

void GradientWalk::differentiate_loop(Node& node, const std::vector<Value*>& of_outputs) {
  std::vector<bool> initial_learns;
  for (size_t i = 2; i < node.inputs.size(); ++i)
    initial_learns.push_back(node.inputs[i] && depends(node.inputs[i]) && carries_gradient(node.inputs[i]->type));
  LoopGradient gradient(graph_, nodes_, node);
  for (const LoopGradient::Part& part : gradient.run(of_outputs, learning_captures(node), initial_learns))
    contribute(&node, part.value, part.gradient);
  take_over(gradient.walk());
}

}  // namespace fretsaw
