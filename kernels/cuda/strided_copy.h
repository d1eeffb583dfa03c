// Copies between regular arrangements of elements in device memory: what most movement kernels are made of.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "graph/types.h"
#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

// "" when elements of this type can be moved on the device: whole bytes, no strings.
std::string refuse_unmovable(DType dtype);
// The same for a node that moves the elements of its first input.
std::string refuse_unmovable_input(const CompileContext& c);

// Asks for output `i`; throws Error when a dimension is negative. An undefined `dtype` is that of input 0.
TensorView& device_output(RunContext& r, size_t i, const Dims& dims, DType dtype = DType::undefined, Layout layout = Layout::plain);

// One element, repeated to 16 bytes.
struct alignas(16) Pattern {
  unsigned char bytes[16] = {};

  Pattern() = default;
  Pattern(const void* element, size_t element_bytes);
};

// to[i] = from[sum i_k * from_strides_k] for every index i below `dims`, `to` dense and in that order. Strides are in elements; they may
// be zero or negative. The two must not overlap.
struct StridedCopy {
  size_t element_bytes = 1;
  Dims dims, from_strides;
  void* to = nullptr;
  const void* from = nullptr;
};
void copy_strided(StridedCopy copy, cudaStream_t stream);

// Rows [outer, pitch] and parts [outer, length_i] that stand at column `offset_i` of them; all in bytes.
struct RowPart {
  void* memory;
  int64_t offset, length;
};
void join_rows(void* rows, int64_t pitch, int64_t outer, const std::vector<RowPart>& parts, cudaStream_t stream);
void split_rows(const void* rows, int64_t pitch, int64_t outer, const std::vector<RowPart>& parts, cudaStream_t stream);

// Writes `element` to all `count` places of `to`, which is 16-byte aligned.
void fill(void* to, int64_t count, const Pattern& element, size_t element_bytes, cudaStream_t stream);

// copy_strided's part for a transpose (transpose.cu): dimension `along` has stride 1 in `from`, and it is not the last one.
void copy_transposed(const StridedCopy& copy, size_t along, cudaStream_t stream);

// Calls f with a pointer of the type that moves elements of so many bytes.
template <typename F>
void with_unit(size_t bytes, F&& f) {
  switch (bytes) {
    case 1:
      return f(static_cast<uint8_t*>(nullptr));
    case 2:
      return f(static_cast<uint16_t*>(nullptr));
    case 4:
      return f(static_cast<uint32_t*>(nullptr));
    case 8:
      return f(static_cast<uint2*>(nullptr));
    default:
      return f(static_cast<uint4*>(nullptr));
  }
}

}  // namespace fretsaw::cuda
