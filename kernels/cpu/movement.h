// Parts of the movement kernels that sequences and padding share.
#pragma once
#include <vector>

#include "kernels/kernel.h"

namespace fretsaw {

void register_padding(KernelRegistry& registry);  // Pad, CenterCropPad, Trilu, ReverseSequence
void register_scatter(KernelRegistry& registry);  // Scatter, ScatterElements, ScatterND, TensorScatter

// Shape of the parts joined on `axis`; throws Error when types or other dimensions differ.
Dims concat_dims(const std::vector<const TensorView*>& parts, size_t axis);
void concat_into(TensorView& y, const std::vector<const TensorView*>& parts, size_t axis, int threads);

// Elements [start, start + length) of `axis` of x.
void split_into(TensorView& y, const TensorView& x, size_t axis, int64_t start, int64_t length, int threads);
// Sizes of `parts` equal parts, the last ones smaller where they do not divide.
std::vector<int64_t> equal_split(int64_t extent, int64_t parts);
void check_split(const std::vector<int64_t>& sizes, int64_t extent);

// Elements start, start + step, ... (`count` of them) of a dimension, as Python slices it; negative numbers count from the back.
struct SliceRange {
  int64_t start, step, count;
};
SliceRange slice_range(int64_t start, int64_t end, int64_t step, int64_t extent);

}  // namespace fretsaw
