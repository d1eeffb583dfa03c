// The operators that steps are made of.
#pragma once
#include "kernels/cuda/pointwise_step.h"

namespace fretsaw::cuda {

std::vector<std::string> point_operators();                 // the elementwise ones (pointwise_operators.cpp)
void lower_node(StepBuilder& b, const Node& node);          // adds the values of a node; throws Refused
bool lower_row_operator(StepBuilder& b, const Node& node);  // the same for rows over the last axis; false for other operators

}  // namespace fretsaw::cuda
