// Factor rules: the loop axes of an operator, named once, as in einsum.
//
//   MatMul  [m, k], [k, n] -> [m, n]     factors m (parallel), k (sum), n (parallel)
//   Reshape [8, 64] -> [8, 4, 16]        factors a=8, b=4, c=16: [a, (b c)] -> [a, b, c]
//
// A dimension is a list of factors, the slowest-varying first. Which axes may be cut, what stays a pending sum, how a batch axis
// travels and how much arithmetic a node does all follow from the rule; nothing else has a switch over operators for that.
#pragma once
#include <optional>
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
  // Of a whole factor: what a cut of it takes all the same.
  enum class WhenCut : uint8_t {
    impossible,
    masked,    // rows outside a part give zero, and the results add up (the rows of an embedding)
    averaged,  // results weighed by the size of the part add up (ReduceMean)
    combined,  // ranks exchange partial results (the maximum and the sum of a Softmax); parts must be in order
  };
  WhenCut when_cut = WhenCut::impossible;
};
// A dimension that is several others one after the other, and `factor` that each of them has as its slowest: cutting it cuts every segment.
//
//   Split [96] -> [64], [16], [16]: factor 16: [64] = (16 4), [16] = (16 1)
struct Segments {
  bool splits = false;         // input 0 into the outputs (Split); else the inputs into output 0 (Concat)
  size_t axis = 0;             // of all of them
  std::vector<int64_t> sizes;  // of the segments
  int64_t factor = 0;          // the greatest common divisor of the sizes
};
// An attribute that counts factors ("group", "q_num_heads"): the product of their sizes.
struct CountAttribute {
  std::string name;
  std::vector<int> factors;
};
struct FactorRule {
  std::vector<Factor> factors;
  // For each operand, for each dimension: factor numbers, slowest first. A dimension of size 1 that broadcasts has none.
  std::vector<std::vector<std::vector<int>>> inputs, outputs;
  std::optional<Segments> segments;  // of the axis that the rule says is whole
  std::vector<size_t> added;         // operands that a pending sum takes once (the bias of a convolution)
  bool rounds = false;               // the result is rounded, so there are no pending sums
  double exchanges = 0;              // small all-reduces that a `combined` factor takes
  int shape_operand = -1;            // the operand that holds the shape of output 0 (Reshape, Expand)
  std::vector<CountAttribute> counts;
  std::string unknown;  // not empty: why there is no rule here; the operator must be given whole tensors
};

// The rule of this node at the shapes its values have. Never throws for odd nodes: `unknown` says why.
FactorRule factor_rule(const Node& node);
// "m k, k n -> m n | sum k"; the factors of one dimension stand in parentheses, "1" is a dimension without factors.
std::string to_string(const FactorRule& rule);

}  // namespace fretsaw
