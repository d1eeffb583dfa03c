// The equation of an Einsum, taken apart.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

// One term: labels before and after the ellipsis, whose dimensions are aligned from the right.
struct EinsumTerm {
  std::string before, after;
  bool ellipsis = false;
};

struct EinsumEquation {
  std::vector<EinsumTerm> terms;
  EinsumTerm result;  // of an implicit one: the ellipsis, then the labels that occur once, in alphabetical order
};

EinsumEquation parse_einsum(std::string equation);

// The shape of the result from the operands' shapes, null where one is not known. Sizes of 1 broadcast to the others, for labels and for
// the ellipsis; where operands differ in what is not known the dimension is not known either. nullopt where the rank is not, or the
// equation does not fit the operands.
std::optional<Shape> einsum_shape(const EinsumEquation& equation, const std::vector<const Shape*>& operands);

}  // namespace fretsaw
