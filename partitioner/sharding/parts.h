// Parts of constant tensors.
#pragma once
#include "graph/sharding.h"
#include "graph/tensor.h"

namespace fretsaw {

// The rows of dimension `dim` that the intervals name. Bytes are not copied: a part that lies in one piece points into the source, another
// is put together when it is written or loaded. Small tensors are copied at once, so that their elements can be read.
TensorPtr part_of(const TensorPtr& tensor, int dim, const Intervals& intervals);
// Zeros of the tensor's type and shape.
TensorPtr zeros_like(const Tensor& tensor);

}  // namespace fretsaw
