// Operators that make values from sizes, settings or chance: constants, ranges, shapes, random numbers.
#include "graph/operators/gradient_rules.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

using Kind = Factor::Kind;

// Only the shape is read: no element of the input flows.
FactorRule shape_factors(const Node& node) {
  RuleBuilder rule(node);
  const Shape* y = rule.output_shape(0);
  rule.out_rank(0, y ? y->size() : node.is("Size") ? 0 : 1);
  rule.rest_whole_out(0, "dims");
  FactorRule r = rule.done();
  for (auto& operand : r.inputs)
    for (auto& dim : operand) dim.clear();
  return r;
}

// One value everywhere.
FactorRule constant_of_shape_factors(const Node& node) {
  RuleBuilder rule(node);
  const Shape* y = rule.output_shape(0);
  if (!y) throw NoRule{"the shape of its result is not known"};
  rule.out_rank(0, y->size());
  for (size_t d = 0; d < y->size(); ++d)
    if ((*y)[d].value != 1) rule.out(0, d, rule.repeated((*y)[d], "i" + std::to_string(d)));
  FactorRule r = rule.done();
  for (auto& operand : r.inputs)
    for (auto& dim : operand) dim.clear();
  return r;
}

// The result is made whole.
FactorRule made_factors(const Node& node) {
  RuleBuilder rule(node);
  const Shape* y = rule.output_shape(0);
  if (!y) throw NoRule{"the shape of its result is not known"};
  rule.out_rank(0, y->size());
  rule.rest_whole_out(0, "i");
  FactorRule r = rule.done();
  for (auto& operand : r.inputs)
    for (auto& dim : operand) dim.clear();
  return r;
}

// Random numbers in the shape of the input: the elements of an axis can be drawn apart, as the counter is an element's index.
FactorRule random_like_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0);
  rule.out_rank(0, rank);
  for (size_t d = 0; d < rank; ++d) {
    int f = rule.from(0, d, Kind::parallel, "i" + std::to_string(d));
    if (f >= 0) rule.out(0, d, f);
  }
  return rule.done();
}

OperatorRecord random_operator(const char* name, FactorRule (*factors)(const Node&)) {
  OperatorRecord r{.name = name, .since = 22, .factors = factors, .flops = output_elements};
  r.random = true;
  return r;
}

}  // namespace

std::vector<OperatorRecord> generation_operators() {
  std::vector<OperatorRecord> records = {
      {.name = "Constant", .since = 25, .factors = made_factors},
      {.name = "ConstantOfShape", .since = 25, .role = Role::movement, .factors = constant_of_shape_factors},
      {.name = "Range", .since = 27, .role = Role::movement, .factors = made_factors},
      {.name = "EyeLike", .since = 22, .role = Role::movement, .factors = made_factors},
      {.name = "Shape", .since = 25, .factors = shape_factors},
      {.name = "Size", .since = 25, .factors = shape_factors},
      random_operator("RandomNormal", made_factors),
      random_operator("RandomUniform", made_factors),
      random_operator("RandomNormalLike", random_like_factors),
      random_operator("RandomUniformLike", random_like_factors),
      random_operator("Bernoulli", random_like_factors),
  };
  return with_gradients(std::move(records), generation_gradient);
}

}  // namespace fretsaw
