// Einsum's equation, read and set against the shapes of its operands.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "graph/types.h"

namespace fretsaw::einsum {

using Labels = std::vector<int>;  // letters; those of an ellipsis are 1000 less the distance from its end

struct Equation {
  std::vector<Labels> inputs;  // an ellipsis stands as -1
  Labels output;
};
Equation parse_equation(std::string text);  // throws Error

bool contains_label(const Labels& labels, int label);
Labels joined(std::initializer_list<Labels> parts);

using Extents = std::map<int, int64_t>;

// The equation with every ellipsis replaced by labels of its own, and what each label stands for.
struct Resolved {
  std::vector<Labels> inputs;
  Labels output;
  Extents extents;
};
Resolved resolve(const Equation& equation, const std::vector<Dims>& inputs);  // throws Error

}  // namespace fretsaw::einsum
