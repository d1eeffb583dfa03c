// Constant tensors as values that a program takes, and back.
#include "runtime/tensor_values.h"

#include <algorithm>
#include <cstring>

#include "graph/errors.h"

namespace fretsaw {

RuntimeValue value_from_tensor(const Tensor& tensor) {
  if (tensor.is_missing()) throw Error("the bytes of tensor '" + tensor.name + "' are not there: " + tensor.missing);
  RuntimeValue value = make_value(tensor.dtype, tensor.dims);
  if (tensor.dtype == DType::string) {
    if (static_cast<int64_t>(tensor.strings.size()) != tensor.count()) throw Error("tensor '" + tensor.name + "' holds too few strings");
    std::copy(tensor.strings.begin(), tensor.strings.end(), value.tensor.as<std::string>());
  } else if (tensor.bytes() > 0) {
    if (!tensor.data) throw Error("tensor '" + tensor.name + "' holds no bytes");
    std::memcpy(value.tensor.data, tensor.data, tensor.bytes());
  }
  return value;
}

std::shared_ptr<Tensor> tensor_from_view(const TensorView& view) {
  std::shared_ptr<Tensor> tensor = make_tensor(view.dtype, view.dims);
  if (view.dtype == DType::string) {
    tensor->strings.assign(view.as<std::string>(), view.as<std::string>() + view.count());
  } else if (tensor->bytes() > 0) {
    std::memcpy(mutable_data(*tensor), view.data, tensor->bytes());
  }
  return tensor;
}

}  // namespace fretsaw
