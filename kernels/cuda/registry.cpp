// The registry of all CUDA kernels, and what their files ask of a context.
#include <algorithm>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/devices.h"
#include "kernels/cuda/gradients.h"

namespace fretsaw {

const KernelRegistry& kernels_of_cuda_devices() {
  return cuda::cuda_kernels();
}

namespace cuda {

const KernelRegistry& cuda_kernels() {
  static const KernelRegistry registry = [] {
    KernelRegistry r;
    for (auto add : {register_pointwise, register_reductions, register_normalization, register_movement, register_indexing, register_image,
                     register_matmul, register_attention, register_convolution, register_pooling, register_recurrent, register_gradients}) {
      add(r);
    }
    return r;
  }();
  return registry;
}

std::string refuse_unknown_dims(const CompileContext& c) {
  const auto known = [](const Type& type) { return type.is_tensor() && type.shape && is_static(*type.shape); };
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    if (c.inputs[i] && !known(c.input_types[i])) return "shapes that depend on data";
  }
  for (size_t i = 0; i < c.outputs.size(); ++i) {
    if (c.outputs[i] && !known(c.output_types[i])) return "shapes that depend on data";
  }
  return "";
}

std::string refuse_other_types(const CompileContext& c, size_t i, std::initializer_list<DType> types) {
  if (!c.has_input(i) || std::find(types.begin(), types.end(), c.input_dtype(i)) != types.end()) return "";
  return "elements of type " + std::string(name_of(c.input_dtype(i)));
}

}  // namespace cuda
}  // namespace fretsaw
