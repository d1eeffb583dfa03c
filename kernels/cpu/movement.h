// Parts of the movement kernels that others share: sequences, padding, and the kernels of other devices.
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
void check_split(const std::vector<int64_t>& sizes, int64_t extent);
// Of a Split node, for each output: the sizes that input 1 names, or equal ones. `named_parts` is num_outputs (0: not given), `extent` the
// dimension that is split.
std::vector<int64_t> split_sizes(RunContext& r, int64_t named_parts, int64_t extent);

// What a Slice node takes of input 0: element i of the output is at offset + sum i_k * strides_k, in elements.
struct SlicedPart {
  Dims dims, strides;
  int64_t offset = 0;  // may lie outside the input where the part is empty
};
// `strides` are those of input 0 as it lies in memory, one for each of its dimensions.
SlicedPart sliced_part(RunContext& r, Dims strides);

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

// The matrices [rows, columns] that input 0 of a Trilu node holds. Their diagonal is in column row + k.
struct Diagonal {
  int64_t rows, columns, k;
};
Diagonal diagonal_of(RunContext& r);

}  // namespace fretsaw
