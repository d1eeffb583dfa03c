// Scales and zero points of any granularity, spread over the elements they belong to.
#pragma once
#include <vector>

#include "kernels/kernel.h"

namespace fretsaw {

// One scale for the tensor, one for each index of an axis, or one for each block of `block` indexes of it.
//
// Example: x [2, 6, 4], axis 1, block 3: scales [2, 2, 4]; element (1, 4, 2) has scale (1, 1, 2).
class Quantization {
 public:
  // Reads input 1 (scale) and, where it is there, input 2 (zero point) for an x of this shape.
  Quantization(RunContext& r, const Dims& dims, int64_t axis, int64_t block);

  // The scales and zero points of elements [begin, begin + n).
  void spread(int64_t begin, int64_t n, float* scales, float* zeros) const;
  bool single() const { return scales_.size() == 1; }

 private:
  std::vector<float> scales_, zeros_;
  int64_t axis_size_ = 1, inner_ = 1, block_ = 0;  // block 0: one scale for each index of the axis
};

class KernelRegistry;
void register_dynamic_quantization(KernelRegistry& registry);

}  // namespace fretsaw
