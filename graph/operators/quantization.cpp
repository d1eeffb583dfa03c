// QuantizeLinear and its relatives.
#include "graph/operators/gradient_rules.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

using Kind = Factor::Kind;

// x [..., c, ...] with a scale of one element, one for each index of `axis`, or one for each block along it.
FactorRule quantize_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0), scales = rule.rank(1);
  bool blocked = node.get_int("block_size", 0) > 0;
  bool single = scales == 0 || (scales == 1 && rule.dim(1, 0).value == 1 && !blocked);
  size_t axis = single ? rank : axis_of(node.get_int("axis", 1), rank);
  rule.out_rank(0, rank);
  for (size_t d = 0; d < rank; ++d) {
    Kind kind = d == axis && blocked ? Kind::whole : Kind::parallel;
    int f = rule.from(0, d, kind, (kind == Kind::whole ? "w" : "i") + std::to_string(d));
    if (f >= 0) rule.out(0, d, f);
    for (size_t i : {1, 2}) {
      if (single || f < 0 || !rule.has(i)) continue;
      if (blocked && d != axis && rule.rank(i) == rank) rule.in_unless_one(i, d, f);
      if (!blocked && d == axis) rule.in_unless_one(i, 0, f);
    }
  }
  if (blocked)
    for (size_t i : {1, 2}) rule.rest_whole(i, "s");
  return rule.done();
}

// The scale comes from all elements.
FactorRule dynamic_quantize_factors(const Node& node) {
  RuleBuilder rule(node);
  rule.out_rank(0, rule.rank(0));
  for (size_t d = 0; d < rule.rank(0); ++d) {
    int f = rule.from(0, d, Kind::whole, "w" + std::to_string(d));
    if (f >= 0) rule.out(0, d, f);
  }
  return rule.done();
}

}  // namespace

std::vector<OperatorRecord> quantization_operators() {
  std::vector<OperatorRecord> records = {
      {.name = "QuantizeLinear", .since = 28, .role = Role::elementwise, .factors = quantize_factors, .flops = output_elements},
      {.name = "DequantizeLinear", .since = 28, .role = Role::elementwise, .factors = quantize_factors, .flops = output_elements},
      {.name = "DynamicQuantizeLinear", .since = 11, .role = Role::reduction, .factors = dynamic_quantize_factors, .flops = input_elements},
  };
  return with_gradients(std::move(records), quantization_gradient);
}

}  // namespace fretsaw
