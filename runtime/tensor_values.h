// Constant tensors as values that a program takes, and back.
#pragma once
#include <memory>

#include "graph/tensor.h"
#include "kernels/tensor_view.h"

namespace fretsaw {

RuntimeValue value_from_tensor(const Tensor& tensor);              // copies; throws Error when the bytes are not there
std::shared_ptr<Tensor> tensor_from_view(const TensorView& view);  // copies; strings too

}  // namespace fretsaw
