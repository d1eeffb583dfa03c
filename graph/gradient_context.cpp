// The helpers that gradient rules are written with: new nodes, constants, shapes, sums over broadcast axes.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/gradient_nodes.h"
#include "graph/gradients.h"
#include "graph/operators/rule_builder.h"
#include "graph/passes/narrow_floats.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {

std::vector<Value*> GradientNodes::add(const Node* forward, const std::string& name, const std::string& op, std::vector<Value*> inputs,
                                       const std::vector<bool>& wanted, std::vector<Attribute> attributes, const std::string& domain) {
  std::vector<std::string> names;
  for (bool used : wanted) names.push_back(used ? graph.fresh_name(name) : "");
  Node* node = graph.add_node(op, std::move(inputs), names, std::move(attributes), domain);
  if (forward) node->metadata[kBackwardOf] = forward->name;
  own_domain = own_domain || domain == kCommunicationDomain;
  return node->outputs;
}

Value* GradientNodes::add_constant(const std::string& name, TensorPtr tensor) {
  return graph.add_constant(graph.fresh_name(name), std::move(tensor));
}

TensorPtr GradientNodes::filled(DType dtype, const Dims& dims, double value) {
  return float_tensor(dtype, dims, std::vector<double>(static_cast<size_t>(count_of(dims)), value));
}

GradientContext::GradientContext(GradientNodes& nodes, Node& node, std::vector<Value*> of_outputs, std::vector<bool> wanted)
    : nodes_(nodes), node_(node), of_outputs_(std::move(of_outputs)), wanted_(std::move(wanted)) {}

Value* GradientContext::output(size_t i, DType dtype) {
  if (node_.outputs.size() <= i) node_.outputs.resize(i + 1);
  if (!node_.outputs[i]) {
    Value* made = nodes_.graph.add_value(nodes_.graph.fresh_name(node_.name + "_" + std::to_string(i)), Type::tensor(dtype));
    made->producer = &node_;
    made->output = static_cast<int>(i);
    node_.outputs[i] = made;
  }
  return node_.outputs[i];
}

void GradientContext::refuse(const std::string& problem, const std::string& remedy) const {
  throw Error(problem, remedy).at_node(node_.name, node_.op);
}

const Shape* GradientContext::shape(const Value* value) const {
  return value && value->type.is_tensor() && value->type.shape ? &*value->type.shape : nullptr;
}

const Shape& GradientContext::known_shape(const Value* value) const {
  const Shape* s = shape(value);
  if (!s)
    refuse("its gradient needs the rank of '" + (value ? value->name : std::string()) + "', which is not known",
           "give the model's inputs shapes");
  return *s;
}

size_t GradientContext::axis(int64_t axis, size_t rank) const {
  const auto n = static_cast<int64_t>(rank);
  if (axis < -n || axis >= n) refuse("axis " + std::to_string(axis) + " is out of range for rank " + std::to_string(rank));
  return static_cast<size_t>(axis < 0 ? axis + n : axis);
}

std::optional<std::vector<int64_t>> GradientContext::constant_ints(size_t input) const {
  return fretsaw::constant_ints(node_, input);
}

std::optional<double> GradientContext::constant_number(const Value* value) const {
  double number = 0;
  return value && scalar_value(value, number) ? std::optional(number) : std::nullopt;
}

Value* GradientContext::add(const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes, DType dtype) {
  if (dtype == DType::undefined && !inputs.empty() && inputs[0]) dtype = inputs[0]->type.dtype;
  Value* made = add_several(op, std::move(inputs), {true}, std::move(attributes))[0];
  made->type = Type::tensor(dtype);
  return made;
}

Value* GradientContext::add_own(const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes) {
  const DType dtype = inputs[0]->type.dtype;
  Value* made = add_several(op, std::move(inputs), {true}, std::move(attributes), kCommunicationDomain)[0];
  made->type = Type::tensor(dtype);
  return made;
}

std::vector<Value*> GradientContext::add_several(const std::string& op, std::vector<Value*> inputs, const std::vector<bool>& wanted,
                                                 std::vector<Attribute> attributes, const std::string& domain) {
  return nodes_.add(&node_, node_.name + "_grad_" + op, op, std::move(inputs), wanted, std::move(attributes), domain);
}

Value* GradientContext::number(double value, DType dtype) {
  Value*& slot = nodes_.numbers[{dtype, value}];
  if (!slot) {
    TensorPtr tensor = is_float(dtype) ? GradientNodes::filled(dtype, {}, value) : make_int64(static_cast<int64_t>(value));
    slot = nodes_.add_constant("grad_number", std::move(tensor));
  }
  return slot;
}

Value* GradientContext::integers(const std::vector<int64_t>& values) {
  Value*& slot = nodes_.lists[values];
  if (!slot) slot = nodes_.add_constant("grad_integers", make_int64s(values));
  return slot;
}

Value* GradientContext::integer(int64_t value) {
  return number(static_cast<double>(value), DType::int64);
}

Value* GradientContext::numbers(const std::vector<double>& values, DType dtype) {
  return nodes_.add_constant(node_.name + "_grad_numbers", float_tensor(dtype, {static_cast<int64_t>(values.size())}, values));
}

Value* GradientContext::shape_value(Value* value) {
  const Shape* s = shape(value);
  if (s && is_static(*s)) return integers(dims_of(*s));
  return add("Shape", {value}, {}, DType::int64);
}

Value* GradientContext::size_value(Value* value, int64_t at) {
  const Shape* s = shape(value);
  if (s) at = static_cast<int64_t>(axis(at, s->size()));
  if (s && (*s)[static_cast<size_t>(at)].known()) return integers({(*s)[static_cast<size_t>(at)].value});
  std::vector<Attribute> range = {{"start", at}};
  if (at != -1) range.push_back({"end", at + 1});
  return add("Shape", {value}, range, DType::int64);
}

// One dimension may stay open: then the target is a constant all the same.
Value* GradientContext::reshape_like(Value* gradient, Value* value) {
  const Shape* s = shape(value);
  const std::vector<Attribute> as_they_are = {{"allowzero", int64_t{1}}};  // sizes: a 0 is one
  if (!s) return add("Reshape", {gradient, shape_value(value)}, as_they_are);
  std::vector<int64_t> target;
  for (const Dim& d : *s) target.push_back(d.value);
  const bool empty = std::count(target.begin(), target.end(), 0) > 0, open = std::count(target.begin(), target.end(), -1) > 0;
  if (std::count(target.begin(), target.end(), -1) > 1 || (empty && open))
    return add("Reshape", {gradient, shape_value(value)}, as_they_are);
  return add("Reshape", {gradient, integers(target)}, empty ? as_they_are : std::vector<Attribute>());
}

Value* GradientContext::zeros_like(Value* value, DType dtype) {
  if (dtype == DType::undefined) dtype = value->type.dtype;
  return add("ConstantOfShape", {shape_value(value)}, {{"value", GradientNodes::filled(dtype, {1}, 0)}}, dtype);
}

Value* GradientContext::expand_like(Value* gradient, Value* value) {
  return add("Expand", {gradient, shape_value(value)});
}

Value* GradientContext::reduce_sum(Value* value, const std::vector<int64_t>& axes, bool keepdims) {
  if (axes.empty()) return value;
  return add("ReduceSum", {value, integers(axes)}, {{"keepdims", int64_t{keepdims}}});
}

Value* GradientContext::sum_to(Value* gradient, const Shape* has, Value* operand) {
  return sum_dims(gradient, has, operand, {});
}

Value* GradientContext::sum_to(Value* gradient, Value* operand) {
  const Shape* result = shape(node_.out(0));
  return sum_dims(gradient, result, operand, result ? own_dims(*result, operand) : std::vector<bool>());
}

// The dimensions of the result that no other operand can have made larger than this one's: they lack them, or have 1.
std::vector<bool> GradientContext::own_dims(const Shape& result, const Value* operand) const {
  std::vector<bool> own(result.size(), true);
  for (const Value* other : node_.inputs) {
    if (!other || other == operand) continue;
    const Shape* s = shape(other);
    for (size_t back = 1; back <= own.size(); ++back)
      if (!s || (back <= s->size() && (*s)[s->size() - back].value != 1)) own[own.size() - back] = false;
  }
  return own;
}

// `own`: dimensions known to be the operand's, whatever the types say.
Value* GradientContext::sum_dims(Value* gradient, const Shape* has, Value* operand, const std::vector<bool>& own) {
  const Shape* wanted = shape(operand);
  auto at_run_time = [&] { return add_own("SumTo", {gradient, shape_value(operand)}); };
  if (!has || !wanted || wanted->size() > has->size()) return at_run_time();
  const size_t missing = has->size() - wanted->size();
  std::vector<int64_t> leading(missing), repeated;
  std::iota(leading.begin(), leading.end(), 0);
  for (size_t d = missing; d < has->size(); ++d) {
    const Dim &to = (*wanted)[d - missing], &from = (*has)[d];
    if (from.value == 1 || same_known(to, from)) continue;
    if (to.value == 1)
      repeated.push_back(static_cast<int64_t>(d));
    else if (!to.known() && (own.empty() || !own[d]))
      return at_run_time();
  }
  if (repeated.empty()) return reduce_sum(gradient, leading, false);
  std::vector<int64_t> axes = leading;
  axes.insert(axes.end(), repeated.begin(), repeated.end());
  Value* sum = reduce_sum(gradient, axes, true);
  return leading.empty() ? sum : add("Squeeze", {sum, integers(leading)});
}

std::vector<Attribute> GradientContext::attributes(std::initializer_list<const char*> names) const {
  std::vector<Attribute> found;
  for (const char* name : names)
    if (const Attribute* a = node_.attribute(name)) found.push_back(*a);
  return found;
}

}  // namespace fretsaw
