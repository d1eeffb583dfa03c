// Normalisations over axes, groups and channels: what they have in common. The operators are in normalization_*.cu.
#include <algorithm>

#include "kernels/cuda/normalization.h"

namespace fretsaw::cuda {

void follow_layout(const CompileContext& c, CompiledKernel& kernel) {
  const std::optional<Dims> dims = c.input_dims(0);
  if (!dims || dims->size() != 4 || c.offered.empty() || c.offered[0] != Layout::nhwc) return;
  kernel.input_layouts.assign(c.inputs.size(), Layout::plain);
  kernel.input_layouts[0] = Layout::nhwc;
  kernel.output_layouts.assign(std::max<size_t>(c.outputs.size(), 1), Layout::plain);
  kernel.output_layouts[0] = Layout::nhwc;
}

std::string refuse_other_float_inputs(const CompileContext& c) {
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    const std::string reason = refuse_other_types(c, i, {DType::float32, DType::float16, DType::bfloat16, DType::float64});
    if (!reason.empty()) return reason;
  }
  return "";
}

std::string refuse_other_norm_types(const CompileContext& c) {
  for (size_t i = 1; i < c.inputs.size(); ++i) {
    if (c.has_input(i) && c.input_dtype(i) != c.input_dtype(0)) return "a scale or bias of another type than X";
  }
  return refuse_other_float_inputs(c);
}

void register_normalization(KernelRegistry& registry) {
  cuda::register_row_normalization(registry);
  cuda::register_group_normalization(registry);
  cuda::register_batch_normalization(registry);
  cuda::register_local_normalization(registry);
}

}  // namespace fretsaw::cuda
