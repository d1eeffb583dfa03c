// The gradient rules of each family, for the records of its file.
#pragma once
#include <string>
#include <vector>

#include "graph/catalogue.h"
#include "graph/gradients.h"

namespace fretsaw {

using GradientRule = std::vector<Value*> (*)(GradientContext&);

// By the operator's name; null where there is none.
GradientRule elementwise_gradient(const std::string& name);    // elementwise_gradients.cpp: unary operators, activations
GradientRule broadcasting_gradient(const std::string& name);   // broadcasting_gradients.cpp: several operands; Cast, Dropout
GradientRule reduction_gradient(const std::string& name);      // reduction_gradients.cpp
GradientRule contraction_gradient(const std::string& name);    // contraction_gradients.cpp
GradientRule convolution_gradient(const std::string& name);    // convolution_gradients.cpp: pooling too
GradientRule normalisation_gradient(const std::string& name);  // normalisation_gradients.cpp
GradientRule loss_gradient(const std::string& name);           // loss_gradients.cpp: Softmax, losses
GradientRule movement_gradient(const std::string& name);       // movement_gradients.cpp: Reshape and its like too
GradientRule indexing_gradient(const std::string& name);       // indexing_gradients.cpp
GradientRule attention_gradient(const std::string& name);      // other_gradients.cpp, and all that follow
GradientRule generation_gradient(const std::string& name);
GradientRule recurrent_gradient(const std::string& name);  // recurrent_gradients.cpp
GradientRule image_gradient(const std::string& name);      // image_gradients.cpp
GradientRule signal_gradient(const std::string& name);
GradientRule quantization_gradient(const std::string& name);  // quantization_gradients.cpp
GradientRule no_float_gradient(const std::string& name);      // strings, flags of sequences

// The records, each with its rule.
std::vector<OperatorRecord> with_gradients(std::vector<OperatorRecord> records, GradientRule (*rule)(const std::string&));

}  // namespace fretsaw
