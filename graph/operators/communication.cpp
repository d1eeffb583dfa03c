// The communication operators of the domain ai.fretsaw. Send and Recv pass a tensor on; collectives over one mesh axis may work on parts
// that another axis cuts, along the dimensions that they leave alone.
#include "graph/gradients.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

// AllGather and ReduceScatter: the axis that they join or cut is whole, the others pass.
FactorRule other_axes_pass(const Node& node) {
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

// Every rank's loss depends on every rank's part of a sum: the gradients are added up as the parts were.
std::vector<Value*> all_reduce_gradient(GradientContext& c) {
  if (c.node().get_string("reduction", "sum") != "sum") c.refuse("is differentiated where it sums only");
  return {c.add_own("AllReduce", {c.of_output()}, c.attributes({"axis", "group_size", "reduction"}))};
}

}  // namespace

std::vector<OperatorRecord> communication_operators() {
  std::vector<OperatorRecord> records;
  for (const char* name : {"Send", "Recv"})
    records.push_back({.name = name, .domain = "ai.fretsaw", .since = 1, .role = Role::movement, .factors = elementwise_factors});
  records.push_back(
      {.name = "AllReduce", .domain = "ai.fretsaw", .since = 1, .factors = elementwise_factors, .gradient = all_reduce_gradient});
  records.push_back({.name = "Broadcast", .domain = "ai.fretsaw", .since = 1, .factors = elementwise_factors});
  for (const char* name : {"AllGather", "ReduceScatter"})
    records.push_back({.name = name, .domain = "ai.fretsaw", .since = 1, .factors = other_axes_pass});
  for (const char* name : {"AllToAll", "HaloExchange"}) records.push_back({.name = name, .domain = "ai.fretsaw", .since = 1});
  return records;
}

}  // namespace fretsaw
