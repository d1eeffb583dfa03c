// The type of an Einsum's result, around ONNX's inference of it.
#pragma once
#include <string>

#include "graph/ir.h"

namespace fretsaw {

// Whether an equation has nothing but letters, "...", commas, spaces and one "->": ONNX's parser does not come to an end on others.
bool is_einsum_equation(const std::string& equation);

// ONNX's inference takes the size of a label or of the ellipsis from the first operand that has it, even where another broadcasts it.
// This gives the result the size that they broadcast to.
void correct_einsum(const Node& node);

}  // namespace fretsaw
