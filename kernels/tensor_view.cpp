// Sizes of tensors in each layout, and owned tensors.
#include "kernels/tensor_view.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "graph/errors.h"

namespace fretsaw {

size_t bytes_of(DType type, const Dims& dims, Layout layout) {
  if (type == DType::string) return static_cast<size_t>(count_of(dims)) * sizeof(std::string);
  if (layout == Layout::plain || layout == Layout::nhwc) return bytes_of(type, count_of(dims));
  if (dims.size() != 4) throw Error("a blocked layout for a tensor of shape " + to_string(dims), "use it for [N,C,H,W] alone");
  const int64_t block = layout == Layout::nChw8c ? 8 : 16;
  return bytes_of(type, count_of({dims[0], (dims[1] + block - 1) / block * block, dims[2], dims[3]}));
}

RuntimeValue make_value(DType dtype, Dims dims) {
  constexpr std::align_val_t kAlignment{64};
  RuntimeValue value;
  value.kind = RuntimeValue::Kind::tensor;
  value.tensor.dtype = dtype;
  value.tensor.dims = std::move(dims);
  const size_t count = static_cast<size_t>(count_of(value.tensor.dims));
  if (dtype == DType::string) {
    auto strings = std::make_shared<std::vector<std::string>>(count);
    value.tensor.data = strings->data();
    value.owner = std::move(strings);
    return value;
  }
  // An empty tensor still gets memory, so that its address is never null.
  const size_t bytes = std::max<size_t>(value.tensor.bytes(), 1);
  void* memory = ::operator new(bytes, kAlignment);
  std::memset(memory, 0, bytes);
  value.tensor.data = memory;
  value.owner = std::shared_ptr<void>(memory, [](void* p) { ::operator delete(p, kAlignment); });
  return value;
}

}  // namespace fretsaw
