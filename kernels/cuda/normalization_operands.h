// Scales and biases of norms over rows.
#pragma once
#include <algorithm>

#include "graph/types.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/strided_copy.h"

namespace fretsaw::cuda {

// Scales and biases, inputs of shapes that broadcast to the last dimensions of X, as dense rows: their own memory where they are that
// already.
class RowOperands {
 public:
  RowOperands(RunContext& r, const Dims& row, std::initializer_list<size_t> inputs) : r_(r), row_(row) {
    for (size_t i : inputs) {
      if (needs_copy(i)) bytes_ += padded(bytes_of(r.input(i).dtype, count_of(row)));
    }
    if (bytes_) free_ = static_cast<char*>(r.scratch(bytes_));
  }
  const void* operator()(size_t i) {
    if (!r_.has_input(i)) return nullptr;
    const TensorView& x = r_.input(i);
    if (!needs_copy(i)) return x.data;
    void* dense = free_;
    free_ += padded(bytes_of(x.dtype, count_of(row_)));
    StridedCopy copy;
    copy.element_bytes = static_cast<size_t>(bits_of(x.dtype) / 8);
    copy.dims = row_, copy.from_strides = broadcast_strides(x.dims);
    copy.to = dense, copy.from = x.data;
    copy_strided(copy, stream_of(r_));
    return dense;
  }

 private:
  static size_t padded(size_t bytes) { return (bytes + 255) / 256 * 256; }
  bool needs_copy(size_t i) const { return r_.has_input(i) && without_leading_ones(r_.input(i).dims) != without_leading_ones(row_); }
  static Dims without_leading_ones(const Dims& dims) {
    return Dims(std::find_if(dims.begin(), dims.end(), [](int64_t d) { return d != 1; }), dims.end());
  }
  Dims broadcast_strides(const Dims& dims) const {
    require(dims.size() <= row_.size(), "a scale or bias has more dimensions than what it scales", "give it the normalised dimensions");
    Dims strides(row_.size(), 0);
    const Dims own = strides_of(dims);
    for (size_t d = 0; d < dims.size(); ++d) {
      const size_t at = row_.size() - dims.size() + d;
      require(dims[d] == 1 || dims[d] == row_[at], "a scale or bias does not broadcast to what it scales",
              "give it the normalised dimensions");
      strides[at] = dims[d] == 1 ? 0 : own[d];
    }
    return strides;
  }

  RunContext& r_;
  const Dims row_;
  size_t bytes_ = 0;
  char* free_ = nullptr;
};

}  // namespace fretsaw::cuda
