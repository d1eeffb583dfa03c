// The operator catalogue: one record for each operator, in a file of its family under graph/operators/.
#pragma once
#include <string>
#include <vector>

#include "graph/factors.h"
#include "graph/ir.h"

namespace fretsaw {

class GradientContext;  // graph/gradients.h

// What an operator is to fusion.
enum class Role : uint8_t { other, contraction, elementwise, movement, reduction, normalisation };

// How a pending sum passes an operator: parts that add up to x give results that add up to the result.
enum class Linear : uint8_t {
  no,
  first,  // in operand 0, the others given whole (Transpose, ReduceMean)
  each,   // in any one operand (Mul, MatMul)
  all,    // in all operands together (Add, Concat)
};

struct OperatorRecord {
  std::string name;
  std::string domain = "";
  int since = 1;  // the opset version whose semantics the kernels implement
  Role role = Role::other;
  FactorRule (*factors)(const Node&) = nullptr;  // null: no rule, given whole tensors
  // Floating-point operations at the shapes the values have: two for a multiply-add, one an element for other
  // arithmetic (input elements for reductions), none for moving data. Unknown dimensions count as 1. Null: none.
  double (*flops)(const Node&) = nullptr;
  bool random = false;
  Linear linear = Linear::no;
  // Adds the nodes that make the gradients of the inputs from those of the outputs (graph/gradients.h): one value for each input, null
  // where there is none. zero_gradient: nothing flows through. Null: there is no rule.
  std::vector<Value*> (*gradient)(GradientContext&) = nullptr;
};

const OperatorRecord* find_operator(const std::string& name, const std::string& domain);  // null when not in the catalogue
const std::vector<OperatorRecord>& all_operators();
double flops_of(const Node& node);  // bodies of control flow included, counted once
Role role_of(const Node& node);

}  // namespace fretsaw
