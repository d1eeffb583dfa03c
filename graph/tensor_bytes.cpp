// Reading constants that may have to be made first.
#include "graph/tensor_bytes.h"

#include <algorithm>
#include <cstring>

namespace fretsaw {

void read_bytes(const Tensor& tensor, uint64_t first, std::span<std::byte> out) {
  if (out.empty()) return;
  if (tensor.data)
    std::memcpy(out.data(), tensor.data + first, out.size());
  else if (tensor.generate)
    tensor.generate(first, out);
}

TensorPtr with_bytes(const TensorPtr& tensor) {
  if (tensor->data || !tensor->generate) return tensor;
  auto made = make_tensor(tensor->dtype, tensor->dims);
  made->name = tensor->name;
  read_bytes(*tensor, 0, {mutable_data(*made), made->bytes()});
  return made;
}

void JoinedTensors::operator()(uint64_t first, std::span<std::byte> bytes) const {
  uint64_t row_bytes = 0;
  for (const TensorPtr& part : parts) row_bytes += part->bytes() / rows;
  while (!bytes.empty()) {
    const uint64_t row = first / row_bytes;
    uint64_t at = first % row_bytes;
    for (const TensorPtr& part : parts) {
      const uint64_t there = part->bytes() / rows;
      const uint64_t count = at < there ? std::min<uint64_t>(there - at, bytes.size()) : 0;
      if (count > 0) {
        read_bytes(*part, row * there + at, bytes.first(count));
        bytes = bytes.subspan(count);
        first += count;
      }
      at = at < there ? 0 : at - there;
    }
  }
}

}  // namespace fretsaw
