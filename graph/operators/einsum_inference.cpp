#include "graph/operators/einsum_inference.h"

#include <cctype>

#include "graph/operators/einsum_equation.h"

namespace fretsaw {

bool is_einsum_equation(const std::string& equation) {
  bool arrow = false;
  for (size_t i = 0; i < equation.size(); ++i) {
    const char c = equation[i];
    if (std::isalpha(static_cast<unsigned char>(c)) || c == ',' || c == ' ') continue;
    if (c == '-' && !arrow && equation.compare(i, 2, "->") == 0) {
      arrow = true;
      ++i;
    } else if (c == '.' && equation.compare(i, 3, "...") == 0) {
      i += 2;
    } else {
      return false;
    }
  }
  return true;
}

void correct_einsum(const Node& node) {
  Type& type = node.outputs[0]->type;
  std::vector<const Shape*> operands;
  for (const Value* v : node.inputs) operands.push_back(v && v->type.is_tensor() && v->type.shape ? &*v->type.shape : nullptr);
  const std::optional<Shape> shape = einsum_shape(parse_einsum(node.get_string("equation", "")), operands);
  if (type.is_tensor() && shape && (!type.shape || type.shape->size() == shape->size())) type.shape = shape;
}

}  // namespace fretsaw
