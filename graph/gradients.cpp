// The walk from the loss back to the wanted values.
#include "graph/gradients.h"

#include <algorithm>
#include <unordered_set>

#include "graph/catalogue.h"
#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/gradient_nodes.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

// Whether a gradient can flow through a value of this type. Of what is not known, and of sequences, it is found out at their nodes.
bool carries_gradient(const Type& type) {
  switch (type.kind) {
    case Type::Kind::tensor:
      return type.dtype == DType::undefined || is_float(type.dtype);
    case Type::Kind::sequence:
    case Type::Kind::optional:
      return !type.element || carries_gradient(*type.element);
    case Type::Kind::unknown:
      return true;
    default:
      return false;
  }
}

// Attention that does more than AttentionGrad knows: caches, lengths, scores that somebody takes. In float32 its products run faster
// one by one on GPUs.
bool is_left_to_function(const Node& node) {
  if (!node.is("Attention")) return false;
  const bool plain = !node.input(4) && !node.input(5) && !node.input(6) && !node.out(1) && !node.out(2) && !node.out(3);
  return !plain || (node.input(0) && node.input(0)->type.dtype == DType::float32);
}

// mask_learns: of Attention, whether its mask has a gradient.
bool has_rule(const Node& node, bool mask_learns = false) {
  const OperatorRecord* record = find_operator(node.op, node.domain);
  return record && record->gradient && !is_left_to_function(node) && !(mask_learns && node.is("Attention") && node.input(3));
}

bool stops_gradient(const Node& node) {
  const OperatorRecord* record = find_operator(node.op, node.domain);
  return record && record->gradient == zero_gradient;
}

// The walk back through one graph: the model's main graph, or a copy of a branch, which takes values of the graphs around it.
class Walk {
 public:
  explicit Walk(Graph& graph) : graph_(graph), nodes_{graph} {}

  struct Found {
    const Node* by;
    Value *value, *gradient;
  };

  // What the wanted values flow into.
  void find_dependent(const std::vector<Value*>& wanted) {
    dependent_ = std::unordered_set<const Value*>(wanted.begin(), wanted.end());
    for (const Node* node : graph_.nodes) {
      if (stops_gradient(*node) || !takes_dependent(*node)) continue;
      for (const Value* v : node->outputs)
        if (v && carries_gradient(v->type)) dependent_.insert(v);
    }
  }
  bool depends(const Value* value) const { return value && dependent_.count(value) > 0; }
  bool takes_dependent(const Node& node) const {
    const std::vector<Value*> taken = operands(node);
    return std::any_of(taken.begin(), taken.end(), [&](const Value* v) { return depends(v); });
  }

  // `by`: the node whose rule found it; null for what was found elsewhere.
  void contribute(Node* by, Value* value, Value* gradient) {
    if (!gradient->type.shape && gradient->producer) gradient->type = value->type;
    contributions_[value].push_back(gradient);
    found_.push_back({by, value, gradient});
    first_user_[value] = by;  // the walk goes backwards
  }
  // From what has been contributed, through these nodes.
  void go_back(const std::vector<Node*>& forward) {
    for (size_t i = forward.size(); i-- > 0;) differentiate(*forward[i]);
  }
  // The sum of what has come for a value; null when nothing has.
  Value* total(Value* value) {
    auto it = contributions_.find(value);
    if (it == contributions_.end()) return nullptr;
    std::vector<Value*>& parts = it->second;
    if (parts.size() > 1) {
      const Node* owner = value->producer ? value->producer : first_user_[value];
      Value* sum = nodes_.add(owner, value->name + "_grad_sum", parts.size() == 2 ? "Add" : "Sum", parts, {true}, {}, "")[0];
      sum->type = value->type;
      parts = {sum};
    }
    return parts.front();
  }

  GradientNodes& nodes() { return nodes_; }
  const std::vector<Found>& found() const { return found_; }

 private:
  void differentiate(Node& node) {
    const bool reached = std::any_of(node.outputs.begin(), node.outputs.end(), [&](const Value* v) { return contributions_.count(v) > 0; });
    if (!reached || stops_gradient(node) || !takes_dependent(node)) return;
    std::vector<Value*> of_outputs;
    for (Value* v : node.outputs) of_outputs.push_back(v ? total(v) : nullptr);
    if (node.is("If")) return differentiate_branches(node, of_outputs);
    std::vector<bool> wanted;
    for (const Value* v : node.inputs) wanted.push_back(depends(v) && carries_gradient(v->type));
    GradientContext context(nodes_, node, std::move(of_outputs), wanted);
    const std::vector<Value*> found = apply_rule(node, context);
    for (size_t i = 0; i < found.size() && i < node.inputs.size(); ++i)
      if (found[i] && wanted[i]) contribute(&node, node.inputs[i], found[i]);
  }

  [[noreturn]] static void refuse_loop(const Node& loop) {
    throw Error("how often it runs is not known, or too often to write each pass out: it is not differentiated",
                "give the inputs fixed sizes (--shape), a loop that counts or whose condition does, or freeze the parameters before and "
                "inside it")
        .at_node(loop.name, loop.op);
  }
  static std::vector<Value*> apply_rule(const Node& node, GradientContext& context) {
    if (node.is("Loop") || node.is("Scan")) refuse_loop(node);
    if (!bodies(node).empty())
      context.refuse("its bodies are not differentiated", "unroll it, or freeze the parameters before and inside it");
    for (const Value* v : node.inputs)  // a list that a loop makes: the loop is what stands in the way
      if (v && v->type.kind == Type::Kind::sequence && v->producer && v->producer->is("Loop") && !has_rule(node)) refuse_loop(*v->producer);
    if (!has_rule(node))
      context.refuse("there is no gradient for this operator", "write it with other operators, or freeze the parameters before it");
    try {
      return find_operator(node.op, node.domain)->gradient(context);
    } catch (const Error& e) {
      throw e.at_node(node.name, node.op);
    }
  }

  // The gradient of an If is an If on the same condition.
  void differentiate_branches(Node& node, const std::vector<Value*>& of_outputs) {
    std::vector<Value*> learning;
    for (Value* v : captures(node))
      if (depends(v) && carries_gradient(v->type)) learning.push_back(v);
    if (learning.empty()) return;
    std::vector<Attribute> branches;
    for (const char* name : {"then_branch", "else_branch"}) branches.push_back({name, gradient_branch(node, name, of_outputs, learning)});
    const std::vector<Value*> found = nodes_.add(&node, node.name + "_grad_If", "If", {node.inputs[0]},
                                                 std::vector<bool>(learning.size(), true), std::move(branches), "");
    for (size_t i = 0; i < learning.size(); ++i) contribute(&node, learning[i], found[i]);
  }
  // A copy of the branch, so that nothing of it need be kept, and from its results the way back to what it captures.
  GraphPtr gradient_branch(Node& node, const char* name, const std::vector<Value*>& of_outputs, const std::vector<Value*>& learning) {
    const GraphPtr given = node.get_graph(name);
    if (!given)
      throw Error(std::string("the attribute '") + name + "' holds no graph", "export the model again").at_node(node.name, node.op);
    GraphPtr branch = clone(*given);
    branch->parent = &graph_;
    Walk walk(*branch);
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
      if (!gradient) gradient = inside.zeros_like(v);
      if (gradient->graph != branch.get() || !gradient->producer) gradient = inside.add("Identity", {gradient});
      branch->outputs.push_back(gradient);
    }
    remove_dead_nodes(*branch);
    nodes_.own_domain = nodes_.own_domain || walk.nodes_.own_domain;
    found_.insert(found_.end(), walk.found_.begin(), walk.found_.end());
    return branch;
  }

  Graph& graph_;
  GradientNodes nodes_;
  std::unordered_set<const Value*> dependent_;
  std::unordered_map<const Value*, std::vector<Value*>> contributions_;
  std::unordered_map<const Value*, Node*> first_user_;
  std::vector<Found> found_;
};

class Differentiation {
 public:
  Differentiation(Model& model, Value* loss, const GradientOptions& options)
      : model_(model), graph_(*model.graph), loss_(loss), options_(options), walk_(graph_) {}

  std::vector<std::string> expand(const std::vector<Value*>& wanted) {
    check(wanted);
    walk_.find_dependent(wanted);
    std::vector<std::string> notes;
    if (expand_functions(notes)) {
      sort_nodes(graph_);
      check(wanted);  // types of what the functions hold
    }
    return notes;
  }

  Gradients run(const std::vector<Value*>& wanted) {
    check(wanted);
    sort_nodes(graph_);
    Gradients result;
    walk_.find_dependent(wanted);
    if (expand_functions(result.notes)) walk_.find_dependent(wanted);
    name_dimensions();
    const std::vector<Node*> forward = graph_.nodes;
    if (walk_.depends(loss_)) walk_.contribute(loss_->producer, loss_, seed());
    walk_.go_back(forward);
    for (Value* v : wanted) {
      Value* gradient = walk_.total(v);
      if (gradient)
        result.values[v] = gradient;
      else
        result.notes.push_back("'" + v->name + "' has no gradient: '" + loss_->name + "' does not depend on it");
    }
    finish(forward);
    return result;
  }

 private:
  void check(const std::vector<Value*>& wanted) const {
    auto opset = model_.opsets.find("");
    if (opset != model_.opsets.end() && opset->second != newest_opset())
      throw Error("gradients of a model in opset " + std::to_string(opset->second), "bring it to the newest opset first (normalise)");
    auto require_float = [&](const Value* v, const char* what) {
      if (!v || v->graph != &graph_) throw Error(std::string(what) + " is not in the model's main graph", "name a value of it");
      if (!v->type.is_tensor() || !is_float(v->type.dtype))
        throw Error(std::string(what) + " '" + v->name + "' is " + to_string(v->type), "gradients need floating-point numbers");
    };
    require_float(loss_, "the loss");
    const auto& shape = loss_->type.shape;
    if (!shape || !std::all_of(shape->begin(), shape->end(), [](const Dim& d) { return d.value == 1; }))
      throw Error("the loss '" + loss_->name + "' is " + to_string(loss_->type), "it must have one element; sum or average it");
    for (const Value* v : wanted) require_float(v, "the value whose gradient is wanted");
  }

  // Symbols for dimensions without one: rules then see that two values have the same size there, and sum over nothing.
  void name_dimensions() {
    const auto nameless = [](const Value* v) {
      return v && v->type.is_tensor() && v->type.shape &&
             std::any_of(v->type.shape->begin(), v->type.shape->end(), [](const Dim& d) { return !d.known() && d.symbol.empty(); });
    };
    const bool any = std::any_of(graph_.nodes.begin(), graph_.nodes.end(),
                                 [&](const Node* node) { return std::any_of(node->outputs.begin(), node->outputs.end(), nameless); });
    if (!any) return;
    InferOptions options = options_.infer;
    options.name_unknown = true;
    infer_shapes(model_, options);
  }

  // Operators on the way that have no rule become the function body that ONNX defines for them. True when there was one.
  bool expand_functions(std::vector<std::string>& notes) {
    std::unordered_set<const Value*> reaching = {loss_};
    std::unordered_set<const Node*> without_rule, given;
    for (size_t i = graph_.nodes.size(); i-- > 0;) {
      const Node& node = *graph_.nodes[i];
      const bool reached = std::any_of(node.outputs.begin(), node.outputs.end(), [&](const Value* v) { return reaching.count(v) > 0; });
      if (!reached || stops_gradient(node) || !walk_.takes_dependent(node)) continue;
      for (const Value* v : operands(node)) reaching.insert(v);
      if (bodies(node).empty() && !has_rule(node, walk_.depends(node.input(3)))) without_rule.insert(&node);
      // In branches, everything counts as on the way.
      for (const GraphPtr& body : bodies(node))
        for_each_graph(*body, [&](const Graph& inner) {
          for (const Node* n : inner.nodes)
            if (bodies(*n).empty() && !has_rule(*n, true)) without_rule.insert(n);
        });
    }
    if (without_rule.empty()) return false;
    for_each_graph(graph_, [&](const Graph& g) { given.insert(g.nodes.begin(), g.nodes.end()); });
    decompose_to_functions(model_, [&](const Node& node) { return given.count(&node) ? !without_rule.count(&node) : has_rule(node); });
    std::unordered_set<const Node*> left;
    for_each_graph(graph_, [&](const Graph& g) { left.insert(g.nodes.begin(), g.nodes.end()); });
    for (const Node* node : without_rule)
      if (!left.count(node))
        notes.push_back("node '" + node->name + "' (" + node->op + ") was written as the function that ONNX defines for it");
    return true;
  }

  Value* seed() {
    if (options_.seed) return options_.seed;
    GradientNodes& nodes = walk_.nodes();
    return nodes.add_constant(loss_->name + "_grad", nodes.filled(loss_->type.dtype, dims_of(*loss_->type.shape), 1));
  }

  // A gradient has its value's element type, rank and sizes, as far as both are known.
  static bool fits(const Type& gradient, const Type& value) {
    if (gradient.dtype != value.dtype) return gradient.dtype == DType::undefined || value.dtype == DType::undefined;
    if (!gradient.shape || !value.shape) return true;
    return std::equal(gradient.shape->begin(), gradient.shape->end(), value.shape->begin(), value.shape->end(),
                      [](const Dim& g, const Dim& v) { return !g.known() || !v.known() || g.value == v.value; });
  }

  // Types of all values anew. A new node whose inputs do not fit is a fault in a rule, and so is a gradient of another type than its
  // value's.
  void finish(const std::vector<Node*>& forward) {
    if (walk_.nodes().own_domain) model_.opsets[kCommunicationDomain] = 1;
    const std::unordered_set<const Node*> before(forward.begin(), forward.end());
    std::unordered_set<std::string> added;
    for (const Node* node : graph_.nodes)
      if (!before.count(node)) added.insert(node->name);
    const ShapeFacts facts = infer_shapes(model_, options_.infer);
    for (const Finding& fault : facts.faults)
      if (added.count(fault.node)) throw Error("a gradient does not fit: " + fault.message, "report this as a fault, with the model");
    for (const Walk::Found& one : walk_.found()) {
      if (fits(one.gradient->type, one.value->type)) continue;
      const Error error("a gradient does not fit: that of '" + one.value->name + "', which is " + to_string(one.value->type) + ", is " +
                            to_string(one.gradient->type),
                        "report this as a fault, with the model");
      throw one.by ? error.at_node(one.by->name, one.by->op) : error;
    }
  }

  Model& model_;
  Graph& graph_;
  Value* loss_;
  const GradientOptions& options_;
  Walk walk_;
};

}  // namespace

std::vector<Value*> zero_gradient(GradientContext& context) {
  return context.none();
}

std::vector<std::string> expand_for_gradients(Model& model, Value* loss, const std::vector<Value*>& wanted) {
  register_communication_schemas();
  const GradientOptions options;
  return Differentiation(model, loss, options).expand(wanted);
}

Gradients add_gradients(Model& model, Value* loss, const std::vector<Value*>& wanted, const GradientOptions& options) {
  register_communication_schemas();
  return Differentiation(model, loss, options).run(wanted);
}

}  // namespace fretsaw
