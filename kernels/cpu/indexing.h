// Parts of the indexing kernels that others share.
#pragma once
#include <vector>

#include "kernels/kernel.h"

namespace fretsaw {

// The index at each element of an integer input, counted from the front; throws Error naming the first one outside `bound`.
std::vector<int64_t> normalised_indices(RunContext& r, size_t input, int64_t bound);

// y = the slices of x along `axis` that `indices` (counted from the front) name; y is shaped already.
void gather_into(TensorView& y, const TensorView& x, size_t axis, const std::vector<int64_t>& indices, int threads);

// For input `indices` [..., K] of x with `batch` leading dimensions in common: the element offset in x of each of the slices.
std::vector<int64_t> slice_offsets(RunContext& r, size_t indices_input, const Dims& dims, size_t batch);

}  // namespace fretsaw
