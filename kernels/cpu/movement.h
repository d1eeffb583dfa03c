// Parts of the movement kernels that sequences and padding share.
#pragma once
#include <string>
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

enum class PadMode : uint8_t { constant, edge, reflect, wrap };
PadMode pad_mode_of(const std::string& name);

// What becomes of one dimension: [crop_start, crop_start + kept) of the input, `before` elements in front, `after` behind.
struct PadAxis {
  int64_t crop_start = 0, kept = 0, before = 0, after = 0;
  int64_t extent() const { return before + kept + after; }
};
std::vector<PadAxis> padded_axes(RunContext& r);                                      // of a Pad node
std::vector<PadAxis> centred_axes(RunContext& r, const std::vector<int64_t>* named);  // of a CenterCropPad node; null: all axes
Dims extents_of(const std::vector<PadAxis>& axes);

}  // namespace fretsaw
