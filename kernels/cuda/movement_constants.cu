// Operators that make tensors from little: ConstantOfShape, EyeLike.
#include <algorithm>
#include <cstring>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/movement.h"
#include "kernels/cuda/strided_copy.h"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256;

CompiledKernel make_constant_of_shape(const CompileContext& c) {
  TensorPtr value = c.node().get_tensor("value");
  if (!value) value = make_float(0);
  require(value->count() == 1 && value->data, "the value must have one element");
  const size_t bytes = element_bytes(value->dtype);
  return {[value, bytes](RunContext& r) {
    const TensorView& y = device_output(r, 0, r.input_ints(0), value->dtype);
    fill(y.data, y.count(), Pattern(value->data, bytes), bytes, stream_of(r));
  }};
}

std::string refuse_constant_of_shape(const CompileContext& c) {
  const TensorPtr value = c.node().get_tensor("value");
  return value ? refuse_unmovable(value->dtype) : "";
}

template <typename T>
__global__ void __launch_bounds__(kThreads) write_diagonal(T* to, int64_t columns, int64_t shift, T one, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const int64_t row = i / columns;
    to[i] = i - row * columns == row + shift ? one : T{};
  }
}

DType eye_type(const CompileContext& c) {
  const auto named = static_cast<DType>(c.node().get_int("dtype", 0));
  return named == DType::undefined ? c.input_dtype(0) : named;
}

CompiledKernel make_eye_like(const CompileContext& c) {
  const DType dtype = eye_type(c);
  const int64_t k = c.node().get_int("k", 0);
  Pattern one;
  const float value = 1;
  store_from<float>(dtype, one.bytes, 0, 1, &value);
  return {[=](RunContext& r) {
    const Dims dims = r.input(0).dims;
    require(dims.size() == 2, "the input must be a matrix");
    const TensorView& y = device_output(r, 0, dims, dtype);
    const int64_t count = y.count();
    if (count == 0) return;
    const int64_t shift = std::clamp(k, -dims[0] - 1, dims[1] + 1);
    with_unit(element_bytes(dtype), [&](auto* typed) {
      using T = std::remove_pointer_t<decltype(typed)>;
      T element;
      std::memcpy(&element, one.bytes, sizeof(T));
      write_diagonal<T><<<blocks_for(count, kThreads, 2), kThreads, 0, stream_of(r)>>>(y.as<T>(), dims[1], shift, element, count);
      check_launch("EyeLike");
    });
  }};
}

std::string refuse_eye_like(const CompileContext& c) {
  const DType dtype = eye_type(c);
  return contains(types::ordered, dtype) ? "" : not_supported(dtype);
}

}  // namespace

void register_constants(KernelRegistry& registry) {
  registry.add({.op = "ConstantOfShape", .make = make_constant_of_shape, .unsupported = refuse_constant_of_shape, .host_inputs = {0}});
  registry.add({.op = "EyeLike", .make = make_eye_like, .unsupported = refuse_eye_like});
}

}  // namespace fretsaw::cuda
