// Factor rules: the loop axes of an operator, named once, as in einsum.
//
//   MatMul  [m, k], [k, n] -> [m, n]     factors m (parallel), k (sum), n (parallel)
//   Reshape [8, 64] -> [8, 4, 16]        factors a=8, b=4, c=16: [a, (b c)] -> [a, b, c]
//
// A dimension is a list of factors, the slowest-varying first. Which axes may be cut, what stays a pending sum, how a batch axis
// travels and how much arithmetic a node does all follow from the rule; nothing else has a switch over operators for that.
#pragma once
#include <string>
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

struct Factor {
  enum class Kind : uint8_t {
    parallel,  // in outputs: a cut gives that part of the result
    sum,       // only in inputs: a cut leaves a pending sum
    whole,     // every index needs every other: may not be cut (the softmax axis)
    halo,      // sliding windows: a cut needs neighbours' rows
  };
  Dim size;
  Kind kind = Kind::parallel;
  std::string name;       // for people: "m", "batch"
  bool repeated = false;  // only in outputs, which are the same at every index along it (Expand, Tile)
};
struct FactorRule {
  std::vector<Factor> factors;
  // For each operand, for each dimension: factor numbers, slowest first. A dimension of size 1 that broadcasts has none.
  std::vector<std::vector<std::vector<int>>> inputs, outputs;
  std::string unknown;  // not empty: why there is no rule here; the operator must be given whole tensors
};

// The rule of this node at the shapes its values have. Never throws for odd nodes: `unknown` says why.
FactorRule factor_rule(const Node& node);
// "m k, k n -> m n | sum k"; the factors of one dimension stand in parentheses, "1" is a dimension without factors.
std::string to_string(const FactorRule& rule);

}  // namespace fretsaw
