// The gradient operators: what their files have in common.
#include "kernels/cuda/gradients.h"

#include <algorithm>

#include "kernels/cuda/dropout.h"

namespace fretsaw::cuda {

std::string refuse_mixed_floats(const CompileContext& c, std::initializer_list<size_t> inputs) {
  const size_t first = *inputs.begin();
  for (size_t i : inputs) {
    const std::string reason = refuse_other_types(c, i, {DType::float32, DType::float16, DType::bfloat16, DType::float64});
    if (!reason.empty()) return reason;
    if (c.has_input(i) && c.input_dtype(i) != c.input_dtype(first)) return "operands of several types";
  }
  return "";
}

void take_images(const CompileContext& c, std::initializer_list<size_t> inputs, CompiledKernel& kernel) {
  const bool last = std::any_of(inputs.begin(), inputs.end(), [&](size_t i) {
    const std::optional<Dims> dims = c.input_dims(i);
    return dims && dims->size() == 4 && i < c.offered.size() && c.offered[i] == Layout::nhwc;
  });
  if (!last) return;
  kernel.input_layouts.assign(c.inputs.size(), Layout::plain);
  for (size_t i : inputs) kernel.input_layouts[i] = Layout::nhwc;
  kernel.output_layouts.assign(std::max<size_t>(c.outputs.size(), 1), Layout::plain);
  kernel.output_layouts[0] = Layout::nhwc;
}

void register_gradients(KernelRegistry& registry) {
  cuda::register_summing_gradients(registry);
  cuda::register_convolution_gradients(registry);
  cuda::register_pooling_gradients(registry);
  cuda::register_batch_normalization_gradient(registry);
  cuda::register_row_normalization_gradients(registry);
  cuda::register_loss_gradients(registry);
  cuda::register_attention_gradient(registry);
  cuda::register_cross_entropy(registry);
  cuda::register_squared_sum(registry);
  cuda::register_recurrent_gradients(registry);
  cuda::register_sampling_gradient(registry);
  cuda::register_regions_gradient(registry);
  cuda::register_deformable_gradient(registry);
  registry.add(dropout_mask());
}

}  // namespace fretsaw::cuda
