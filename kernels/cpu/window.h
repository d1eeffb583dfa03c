// The geometry of convolutions and poolings: kernels, strides, dilations and padding over the spatial dimensions.
#pragma once
#include <vector>

#include "graph/ir.h"
#include "graph/types.h"

namespace fretsaw {

// One entry for each spatial dimension.
//
//   X [N, C, D1, D2, ...]   Y [N, O, E1, E2, ...]   E = (D + begin + end - (dilation * (kernel - 1) + 1)) / stride + 1
struct Window {
  Dims kernel, strides, dilations, pads_begin, pads_end;
  std::string auto_pad;  // "NOTSET", "VALID", "SAME_UPPER" or "SAME_LOWER"

  size_t rank() const { return kernel.size(); }
  int64_t extent(size_t i) const { return dilations[i] * (kernel[i] - 1) + 1; }  // cells from the first tap to the last
  int64_t taps() const { return count_of(kernel); }
};

// Reads and checks the attributes; `kernel` is what the weights say, or empty to read kernel_shape (then it must be there).
Window read_window(const Node& node, size_t spatial_rank, Dims kernel = {});
// Sets the padding that auto_pad asks for with an input of these spatial dimensions.
void resolve_padding(Window& window, const Dims& spatial);
// The spatial dimensions of the output. With `ceil_mode` a last window may start in the input and run past its padding.
Dims output_spatial(const Window& window, const Dims& spatial, bool ceil_mode = false);

inline Dims spatial_of(const Dims& dims) {
  return Dims(dims.begin() + 2, dims.end());
}

}  // namespace fretsaw
