#include "graph/gradient_walk.h"

#include <algorithm>

#include "graph/catalogue.h"
#include "graph/errors.h"

namespace fretsaw {
namespace {

// Attention that does more than AttentionGrad knows: caches, lengths, scores that somebody takes. In float32 its products run faster
// one by one on GPUs.
bool is_left_to_function(const Node& node) {
  if (!node.is("Attention")) return false;
  const bool plain = !node.input(4) && !node.input(5) && !node.input(6) && !node.out(1) && !node.out(2) && !node.out(3);
  return !plain || (node.input(0) && node.input(0)->type.dtype == DType::float32);
}

std::vector<Value*> apply_rule(const Node& node, GradientContext& context) {
  if (!bodies(node).empty())
    context.refuse("its bodies are not differentiated", "unroll it, or freeze the parameters before and inside it");
  for (const Value* v : node.inputs)
    if (v && v->type.kind == Type::Kind::sequence && v->producer && v->producer->is("Loop") && !has_gradient_rule(node))
      throw Error(
          "a list that a loop appends to is not differentiated, unless the number of its passes is known",
          "give the inputs fixed sizes (--shape), append one tensor of one size in each pass, or freeze the parameters before and inside "
          "it")
          .at_node(v->producer->name, v->producer->op);
  if (!has_gradient_rule(node))
    context.refuse("there is no gradient for this operator", "write it with other operators, or freeze the parameters before it");
  try {
    return find_operator(node.op, node.domain)->gradient(context);
  } catch (const Error& e) {
    throw e.at_node(node.name, node.op);
  }
}

// That of its value, but for integers.
Type type_of_gradient(const Value& value, const Value& gradient) {
  return carries_gradient(value.type) ? value.type : Type::tensor(gradient.type.dtype, value.type.shape);
}

}  // namespace

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

bool carries_gradient(const Value& value) {
  return carries_gradient(value.type) || (value.producer && value.producer->is("QuantizeLinear"));
}

bool has_gradient_rule(const Node& node, bool mask_learns) {
  const OperatorRecord* record = find_operator(node.op, node.domain);
  return record && record->gradient && !is_left_to_function(node) && !(mask_learns && node.is("Attention") && node.input(3));
}

bool stops_gradient(const Node& node) {
  const OperatorRecord* record = find_operator(node.op, node.domain);
  return record && record->gradient == zero_gradient;
}

void GradientWalk::find_dependent(const std::vector<Value*>& wanted) {
  dependent_ = std::unordered_set<const Value*>(wanted.begin(), wanted.end());
  for (const Node* node : graph_.nodes) {
    if (stops_gradient(*node) || !takes_dependent(*node)) continue;
    for (const Value* v : node->outputs)
      if (v && carries_gradient(*v)) dependent_.insert(v);
  }
}

bool GradientWalk::takes_dependent(const Node& node) const {
  const std::vector<Value*> taken = operands(node);
  return std::any_of(taken.begin(), taken.end(), [&](const Value* v) { return depends(v); });
}

void GradientWalk::contribute(Node* by, Value* value, Value* gradient) {
  if (!gradient->type.shape && gradient->producer) gradient->type = type_of_gradient(*value, *gradient);
  contributions_[value].push_back(gradient);
  found_.push_back({by, value, gradient});
  first_user_[value] = by;  // the walk goes backwards
}

void GradientWalk::go_back(const std::vector<Node*>& forward) {
  for (size_t i = forward.size(); i-- > 0;) differentiate(*forward[i]);
}

Value* GradientWalk::total(Value* value) {
  auto it = contributions_.find(value);
  if (it == contributions_.end()) return nullptr;
  std::vector<Value*>& parts = it->second;
  if (parts.size() > 1) {
    const Node* owner = value->producer ? value->producer : first_user_[value];
    Value* sum = nodes_.add(owner, value->name + "_grad_sum", parts.size() == 2 ? "Add" : "Sum", parts, {true}, {}, "")[0];
    sum->type = type_of_gradient(*value, *parts.front());
    parts = {sum};
  }
  return parts.front();
}

void GradientWalk::differentiate(Node& node) {
  const bool reached = std::any_of(node.outputs.begin(), node.outputs.end(), [&](const Value* v) { return contributions_.count(v) > 0; });
  if (!reached || stops_gradient(node) || !takes_dependent(node)) return;
  std::vector<Value*> of_outputs;
  for (Value* v : node.outputs) of_outputs.push_back(v ? total(v) : nullptr);
  if (node.is("If")) return differentiate_branches(node, of_outputs);
  if (node.is("Loop")) return differentiate_loop(node, of_outputs);
  if (is_row_of_outer_value(node)) {
    taken_rows_.push_back({&node, of_outputs[0]});
    return;
  }
  std::vector<bool> wanted;
  for (const Value* v : node.inputs) wanted.push_back(depends(v) && carries_gradient(*v));
  GradientContext context(nodes_, node, std::move(of_outputs), wanted);
  const std::vector<Value*> found = apply_rule(node, context);
  for (size_t i = 0; i < found.size() && i < node.inputs.size(); ++i)
    if (found[i] && wanted[i]) contribute(&node, node.inputs[i], found[i]);
}

bool GradientWalk::is_row_of_outer_value(const Node& node) const {
  if (!keeps_rows_ || !node.is("Gather")) return false;
  const Value *from = node.inputs[0], *indices = node.inputs[1];
  return from->graph != &graph_ && from->type.shape && indices->type.shape && is_static(*indices->type.shape);
}

}  // namespace fretsaw
