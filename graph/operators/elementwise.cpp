// Elementwise operators: the rows of elementwise.inc and those with a form of their own. All operands broadcast.
#include <algorithm>
#include <unordered_map>

#include "graph/operators/gradient_rules.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

// The opset version of each row's semantics; 13 where it is not listed.
int since_of(const std::string& name) {
  static const std::unordered_map<std::string, int> versions = {
      {"Acos", 22},
      {"Acosh", 22},
      {"Add", 14},
      {"And", 7},
      {"Asin", 22},
      {"Asinh", 22},
      {"Atan", 22},
      {"Atanh", 22},
      {"BitShift", 28},
      {"BitwiseAnd", 18},
      {"BitwiseNot", 18},
      {"BitwiseOr", 18},
      {"BitwiseXor", 18},
      {"Celu", 28},
      {"Cos", 22},
      {"Cosh", 22},
      {"Div", 14},
      {"Elu", 22},
      {"Equal", 19},
      {"Gelu", 20},
      {"GreaterOrEqual", 16},
      {"HardSigmoid", 22},
      {"HardSwish", 22},
      {"IsInf", 20},
      {"IsNaN", 20},
      {"LeakyRelu", 16},
      {"LessOrEqual", 16},
      {"Mish", 22},
      {"Mod", 28},
      {"Mul", 14},
      {"Not", 1},
      {"Or", 7},
      {"PRelu", 16},
      {"Pow", 15},
      {"Relu", 14},
      {"Round", 22},
      {"Selu", 22},
      {"Shrink", 9},
      {"Sin", 22},
      {"Sinh", 22},
      {"Softplus", 22},
      {"Softsign", 22},
      {"Sub", 14},
      {"SwiGLU", 28},
      {"Swish", 24},
      {"Tan", 22},
      {"ThresholdedRelu", 22},
      {"Where", 16},
      {"Xor", 7},
  };
  auto it = versions.find(name);
  return it == versions.end() ? 13 : it->second;
}

// Variadic operators do one operation for each operand after the first.
double variadic_flops(const Node& node) {
  double n = node.inputs.empty() ? 0 : static_cast<double>(node.inputs.size()) - 1;
  return output_elements(node) * (node.is("Mean") ? n + 1 : std::max(n, 0.0));
}

// Operands after the first are settings (a ratio, a mode, a type) whose elements do not flow.
FactorRule like_first(const Node& node) {
  RuleBuilder rule(node);
  std::vector<int> factors;
  for (size_t d = 0; d < rule.rank(0); ++d) factors.push_back(rule.from(0, d, Factor::Kind::parallel, "i" + std::to_string(d)));
  for (size_t o = 0; o < node.outputs.size(); ++o) {
    rule.out_rank(o, factors.size());
    for (size_t d = 0; d < factors.size(); ++d)
      if (factors[d] >= 0) rule.out(o, d, factors[d]);
  }
  return rule.done();
}

OperatorRecord like(const char* name, int since, Role role, bool random = false) {
  OperatorRecord r{.name = name, .since = since, .role = role, .factors = like_first};
  r.random = random;
  return r;
}

}  // namespace

FactorRule elementwise_factors(const Node& node) {
  RuleBuilder rule(node);
  std::vector<size_t> operands;
  for (size_t i = 0; i < node.inputs.size(); ++i)
    if (node.inputs[i]) operands.push_back(i);
  std::vector<int> factors = broadcast(rule, operands);
  for (size_t o = 0; o < node.outputs.size(); ++o) {
    rule.out_rank(o, factors.size());
    for (size_t d = 0; d < factors.size(); ++d)
      if (factors[d] >= 0) rule.out(o, d, factors[d]);
  }
  return rule.done();
}

std::vector<OperatorRecord> elementwise_operators() {
  std::vector<OperatorRecord> records;
  auto row = [&](const char* name, double (*flops)(const Node&)) {
    records.push_back({.name = name, .since = since_of(name), .role = Role::elementwise, .factors = elementwise_factors, .flops = flops});
  };
#define FRETSAW_UNARY(name, ...) row(#name, output_elements);
#define FRETSAW_UNARY_ATTR(name, ...) row(#name, output_elements);
#define FRETSAW_UNARY_CHOICE(name, ...) row(#name, output_elements);
#define FRETSAW_TEST(name, ...) row(#name, output_elements);
#define FRETSAW_BINARY(name, ...) row(#name, output_elements);
#define FRETSAW_BINARY_ATTR(name, ...) row(#name, output_elements);
#define FRETSAW_BINARY_CHOICE(name, ...) row(#name, output_elements);
#define FRETSAW_BINARY_MIXED(name, ...) row(#name, output_elements);
#define FRETSAW_COMPARISON(name, ...) row(#name, output_elements);
#define FRETSAW_VARIADIC(name, ...) row(#name, variadic_flops);
#define FRETSAW_TERNARY(name, ...) row(#name, output_elements);
#include "graph/operators/elementwise.inc"
  for (OperatorRecord& r : records)
    if (r.name == "Where") r.flops = nullptr;  // picks elements
  for (OperatorRecord& r : records) {
    if (r.name == "Add" || r.name == "Sub" || r.name == "Sum" || r.name == "Mean") r.linear = Linear::all;
    if (r.name == "Mul") r.linear = Linear::each;
    if (r.name == "Neg" || r.name == "Div") r.linear = Linear::first;
  }
  records.push_back(like("Identity", 25, Role::movement));
  records.push_back(like("Cast", 28, Role::elementwise));
  records.push_back(like("CastLike", 25, Role::elementwise));
  records.push_back(like("BitCast", 26, Role::elementwise));
  records.push_back(like("Dropout", 22, Role::elementwise, true));
  return with_gradients(std::move(records), elementwise_gradient);
}

}  // namespace fretsaw
