// Bytes of constants, whether they are there or are still to be made.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "graph/tensor.h"

namespace fretsaw {

// Copies the tensor's bytes from `first` on, or has them made. A tensor that has neither leaves `out` as it is.
void read_bytes(const Tensor& tensor, uint64_t first, std::span<std::byte> out);
// The tensor with its bytes in memory: itself where they are.
TensorPtr with_bytes(const TensorPtr& tensor);

// What Tensor::generate holds for tensors that lie side by side in one: each of its rows is a row of every part in turn.
//
//   parts [2, 3] and [2, 1], rows = 2:   a a a b
//                                        a a a b
struct JoinedTensors {
  std::vector<TensorPtr> parts;
  size_t rows = 1;

  void operator()(uint64_t first, std::span<std::byte> bytes) const;  // the whole's bytes from `first` on
};

}  // namespace fretsaw
