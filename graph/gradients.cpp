// Which values are differentiated, what becomes of operators without a rule, and the types of what is added.
#include "graph/gradients.h"

#include <algorithm>
#include <unordered_set>

#include "graph/catalogue.h"
#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/gradient_walk.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

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

  // Operators on the way that have no rule become the function body that ONNX defines for them, and Scans Loops. True when there was one.
  bool expand_functions(std::vector<std::string>& notes) {
    std::unordered_set<const Value*> reaching = {loss_};
    std::unordered_set<const Node*> without_rule, scans, given;
    for (size_t i = graph_.nodes.size(); i-- > 0;) {
      const Node& node = *graph_.nodes[i];
      const bool reached = std::any_of(node.outputs.begin(), node.outputs.end(), [&](const Value* v) { return reaching.count(v) > 0; });
      if (!reached || stops_gradient(node) || !walk_.takes_dependent(node)) continue;
      for (const Value* v : operands(node)) reaching.insert(v);
      if (bodies(node).empty() && !has_gradient_rule(node, walk_.depends(node.input(3)))) without_rule.insert(&node);
      if (node.is("Scan")) scans.insert(&node);
      // In branches, everything counts as on the way.
      for (const GraphPtr& body : bodies(node))
        for_each_graph(*body, [&](const Graph& inner) {
          for (const Node* n : inner.nodes) {
            if (bodies(*n).empty() && !has_gradient_rule(*n, true)) without_rule.insert(n);
            if (n->is("Scan")) scans.insert(n);
          }
        });
    }
    if (!scans.empty()) {
      scans_to_loops(graph_, [&](const Node& node) { return scans.count(&node) > 0; });
      infer_shapes(model_, options_.infer);
    }
    if (without_rule.empty()) return !scans.empty();
    for_each_graph(graph_, [&](const Graph& g) { given.insert(g.nodes.begin(), g.nodes.end()); });
    decompose_to_functions(model_,
                           [&](const Node& node) { return given.count(&node) ? !without_rule.count(&node) : has_gradient_rule(node); });
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
    const bool same_type = gradient.dtype == value.dtype || !carries_gradient(value);  // integers have a float's
    if (!same_type) return gradient.dtype == DType::undefined || value.dtype == DType::undefined;
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
    for (const GradientWalk::Found& one : walk_.found()) {
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
  GradientWalk walk_;
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
