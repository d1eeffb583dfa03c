// Walking an output and its broadcast operands together, in runs as long as their shapes allow, in any layout.
//
// Example: out [2, 3, 8, 8], x [2, 3, 8, 8], y [3, 1, 1]. Merged dimensions [2, 3, 64]; strides x [192, 64, 1], y [0, 1, 0]; so six
// runs of 64 elements in which x advances and y stands still. Operands of the output's own shape give one run.
#pragma once
#include <algorithm>
#include <array>
#include <span>

#include "kernels/kernel.h"

namespace fretsaw {

template <size_t kOperands>
struct BroadcastPlan {
  Dims dims;                            // merged, outermost first, at least one; no dimension of 1 unless it is the only one
  std::array<Dims, kOperands> strides;  // in elements, for each dimension; the last is 0 or 1
};

// `operands` are shapes that broadcast to `out`.
template <size_t kOperands>
BroadcastPlan<kOperands> plan_broadcast(const Dims& out, const std::array<Dims, kOperands>& operands) {
  std::array<Dims, kOperands> full;
  for (size_t k = 0; k < kOperands; ++k) {
    full[k].assign(out.size(), 0);
    int64_t stride = 1;
    for (size_t back = 1; back <= operands[k].size(); ++back) {
      const int64_t d = operands[k][operands[k].size() - back];
      if (d != 1) full[k][out.size() - back] = stride;
      stride *= d;
    }
  }
  BroadcastPlan<kOperands> plan;
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i] == 1) continue;
    // Joins the dimension before it when every operand walks both in one go.
    bool joins = !plan.dims.empty();
    for (size_t k = 0; k < kOperands && joins; ++k) joins = plan.strides[k].back() == full[k][i] * out[i];
    if (!joins) plan.dims.push_back(1);
    plan.dims.back() *= out[i];
    for (size_t k = 0; k < kOperands; ++k) {
      if (!joins) plan.strides[k].push_back(0);
      plan.strides[k].back() = full[k][i];
    }
  }
  if (plan.dims.empty()) {
    plan.dims.push_back(1);
    for (Dims& strides : plan.strides) strides.push_back(0);
  }
  return plan;
}

// Calls body(out_offset, operand_offsets, n) for the runs of the output's elements [begin, end).
template <size_t kOperands, typename Body>
void for_each_run(const BroadcastPlan<kOperands>& plan, int64_t begin, int64_t end, const Body& body) {
  const size_t outer = plan.dims.size() - 1;
  const int64_t length = plan.dims[outer];
  while (begin < end) {
    std::array<int64_t, kOperands> offsets;
    const int64_t within = begin % length;
    for (size_t k = 0; k < kOperands; ++k) offsets[k] = within * plan.strides[k][outer];
    int64_t row = begin / length;
    for (size_t i = outer; i-- > 0 && row > 0;) {
      const int64_t index = row % plan.dims[i];
      for (size_t k = 0; k < kOperands; ++k) offsets[k] += index * plan.strides[k][i];
      row /= plan.dims[i];
    }
    const int64_t n = std::min(length - within, end - begin);
    body(begin, offsets, n);
    begin += n;
  }
}

// --- layouts of elementwise kernels ---
// The layout that an elementwise node with these inputs leaves its output in: that of the first full-size input that is offered in
// one, when every other input is a single number, has a whole channel axis, or is a vector along the channels. Else plain.
// `inputs` are the indexes of the operands.
Layout elementwise_layout(const CompileContext& c, std::span<const size_t> inputs);
// What goes into CompiledKernel::input_layouts for that choice.
std::vector<Layout> elementwise_input_layouts(const CompileContext& c, std::span<const size_t> inputs, Layout layout);

// The shape in which the elements lie in memory, such that broadcasting of these shapes is that of the tensors.
Dims physical_dims(const Dims& dims, Layout layout);
Dims physical_operand(const TensorView& x, Layout layout);
// Writes zeros into the channels that a blocked layout adds.
void clear_padding(TensorView& y);

Dims broadcast_all(std::span<const Dims> shapes);  // throws Error when they do not go together

}  // namespace fretsaw
