// What the files of the convolution family share.
#pragma once
#include "kernels/cpu/window.h"
#include "kernels/kernel.h"

namespace fretsaw {

struct ConvolutionShape;

// Checks shapes and groups. X [N, C, D...]; W [O, C/groups, K...], or [C, O/groups, K...] when transposed. Returns Y's shape [N, O, E...].
Dims convolution_output(const Node& node, const Dims& x, const Dims& w, bool transposed, Window& window);
ConvolutionShape shape_of_convolution(const Node& node, const Dims& x, const Dims& y);

void register_quantized_convolution(KernelRegistry& registry);   // ConvInteger, QLinearConv
void register_deformable_convolution(KernelRegistry& registry);  // DeformConv

}  // namespace fretsaw
