// The equation of an Einsum, taken apart.
#pragma once
#include <string>
#include <vector>

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

}  // namespace fretsaw
