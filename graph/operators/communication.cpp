// The communication operators of the domain ai.fretsaw. Send and Recv pass a tensor on; collectives over one mesh axis may work on parts
// that another axis cuts, along the dimensions that they leave alone.
#include "graph/gradients.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

// AllReduce and ReduceScatter of several tensors at once come after a graph has been divided.
void check_single(const Node& node) {
  if (node.inputs.size() > 1) throw NoRule{"several tensors that are exchanged together"};
}

FactorRule all_axes_pass(const Node& node) {
  check_single(node);
  return elementwise_factors(node);
}

// AllGather and ReduceScatter: the axis that they join or cut is whole, the others pass.
FactorRule other_axes_pass(const Node& node) {
  check_single(node);
  RuleBuilder rule(node);
  const size_t rank = rule.rank(0), axis = axis_of(node.get_int("tensor_axis", 0), rank);
  rule.out_rank(0, rank);
  for (size_t d = 0; d < rank; ++d) {
    const bool passes = d != axis;
    const int f = rule.from(0, d, passes ? Factor::Kind::parallel : Factor::Kind::whole, (passes ? "i" : "w") + std::to_string(d));
    const Shape* y = rule.output_shape(0);
    if (passes && f >= 0) rule.out(0, d, f);
    if (!passes) rule.out(0, d, rule.whole(y && y->size() == rank ? (*y)[d] : Dim(), "w" + std::to_string(d) + "'"));
  }
  return rule.done();
}

// Gradients of collectives. Every rank's loss may depend on every rank's operand; what is differentiated is the sum of all ranks' losses,
// so the gradient of a value that ranks hold alike is the sum of what they find, each for its own copy.

std::vector<Value*> all_ranks(GradientContext& c, Value* value, const char* reduction) {
  std::vector<Attribute> attributes = c.attributes({"axis", "group_size"});
  attributes.push_back({"reduction", std::string(reduction)});
  return {c.add_own("AllReduce", {value}, std::move(attributes))};
}

// The largest elements of all ranks share the gradient evenly.
std::vector<Value*> extreme_gradient(GradientContext& c) {
  const DType type = c.input(0)->type.dtype;
  Value* chosen = c.add("Cast", {c.add("Equal", {c.input(0), c.output()})}, {{"to", static_cast<int64_t>(type)}}, type);
  Value* share = c.add("Div", {chosen, all_ranks(c, chosen, "sum")[0]});
  return {c.add("Mul", {all_ranks(c, c.of_output(), "sum")[0], share})};
}

void refuse_several(GradientContext& c) {
  if (c.node().inputs.size() > 1) c.refuse("has no gradient where several tensors are exchanged together");
}

std::vector<Value*> all_reduce_gradient(GradientContext& c) {
  refuse_several(c);
  const std::string reduction = c.node().get_string("reduction", "sum");
  if (reduction == "max" || reduction == "min") return extreme_gradient(c);
  if (reduction != "sum" && reduction != "mean") c.refuse("has no gradient for the reduction '" + reduction + "'");
  return all_ranks(c, c.of_output(), reduction.c_str());
}

std::vector<Attribute> parts_of_axis(GradientContext& c) {
  return c.attributes({"axis", "group_size", "tensor_axis", "sizes", "uneven", "index"});
}
std::vector<Value*> all_gather_gradient(GradientContext& c) {
  std::vector<Attribute> attributes = parts_of_axis(c);
  attributes.push_back({"reduction", std::string("sum")});
  return {c.add_own("ReduceScatter", {c.of_output()}, std::move(attributes))};
}
std::vector<Value*> reduce_scatter_gradient(GradientContext& c) {
  refuse_several(c);
  if (c.node().get_string("reduction", "sum") != "sum") c.refuse("is differentiated where it sums only");
  return {c.add_own("AllGather", {c.of_output()}, parts_of_axis(c))};
}

}  // namespace

std::vector<OperatorRecord> communication_operators() {
  std::vector<OperatorRecord> records;
  for (const char* name : {"Send", "Recv"})
    records.push_back({.name = name, .domain = "ai.fretsaw", .since = 1, .role = Role::movement, .factors = elementwise_factors});
  records.push_back({.name = "AllReduce", .domain = "ai.fretsaw", .since = 1, .factors = all_axes_pass, .gradient = all_reduce_gradient});
  records.push_back({.name = "Broadcast", .domain = "ai.fretsaw", .since = 1, .factors = elementwise_factors});
  records.push_back({.name = "AllGather", .domain = "ai.fretsaw", .since = 1, .factors = other_axes_pass, .gradient = all_gather_gradient});
  records.push_back(
      {.name = "ReduceScatter", .domain = "ai.fretsaw", .since = 1, .factors = other_axes_pass, .gradient = reduce_scatter_gradient});
  for (const char* name : {"AllToAll", "HaloExchange"}) records.push_back({.name = name, .domain = "ai.fretsaw", .since = 1});
  return records;
}

}  // namespace fretsaw
