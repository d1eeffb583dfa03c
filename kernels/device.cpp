// What all devices share: constants that are uploaded once, and the question whether a kernel exists.
#include "kernels/device.h"

#include <algorithm>
#include <vector>

#include "graph/tensor_bytes.h"
#include "kernels/random_weights.h"

namespace fretsaw {
namespace {

constexpr size_t piece_bytes = size_t{64} << 20;  // of a tensor that the host makes: large enough for all of its cores

// A part of a tensor may begin where the whole does: the number of bytes tells them apart.
std::pair<const void*, std::string> key_of(const TensorPtr& tensor, const std::string& form) {
  const void* identity = tensor->data ? static_cast<const void*>(tensor->data) : tensor.get();
  return {identity, std::to_string(tensor->bytes()) + " " + form};
}

}  // namespace

std::shared_ptr<void> Device::constant(const TensorPtr& tensor, const std::string& form, size_t bytes,
                                       const std::function<void(void*)>& fill) {
  const auto key = key_of(tensor, form);
  Constant& known = constants_[key];
  // An address may have been used again: the bytes are the same ones while their owner lives.
  if (auto memory = known.memory.lock(); memory && known.tensor.lock()) return memory;
  void* made = allocate(bytes);
  constant_bytes_ += static_cast<int64_t>(bytes);
  std::shared_ptr<void> memory(made, [this, bytes, key, keeps_address = tensor](void* p) {
    constant_bytes_ -= static_cast<int64_t>(bytes);
    release(p);
    // Another tensor at the same address may have taken the place by now.
    if (const auto entry = constants_.find(key); entry != constants_.end() && entry->second.memory.expired()) constants_.erase(entry);
  });
  fill(made);
  known = {tensor, memory};
  return memory;
}

std::shared_ptr<void> Device::constant(const TensorPtr& tensor) {
  return constant(tensor, "", tensor->bytes(), [&](void* memory) { put(memory, *tensor); });
}

bool Device::holds(const TensorPtr& tensor) const {
  const auto known = constants_.find(key_of(tensor, ""));
  return known != constants_.end() && !known->second.memory.expired() && !known->second.tensor.expired();
}

void Device::put(void* to, const Tensor& tensor) {
  if (tensor.data || !tensor.generate) return upload(to, tensor.data, tensor.bytes());
  if (const auto* weights = tensor.generate.target<RandomWeights>()) return make_random(to, *weights);
  if (const auto* joined = tensor.generate.target<JoinedTensors>()) return put_side_by_side(to, tensor, *joined);
  put_in_pieces(to, tensor);
}

void Device::put_side_by_side(void* to, const Tensor& tensor, const JoinedTensors& joined) {
  const size_t stride = tensor.bytes() / std::max<size_t>(joined.rows, 1);
  auto* at = static_cast<std::byte*>(to);
  for (const TensorPtr& part : joined.parts) {
    const size_t row_bytes = part->bytes() / std::max<size_t>(joined.rows, 1);
    if (joined.rows == 1) {
      put(at, *part);
    } else {
      const std::shared_ptr<void> rows(allocate(part->bytes()), [this](void* memory) { release(memory); });
      put(rows.get(), *part);
      copy_rows(at, stride, rows.get(), row_bytes, row_bytes, joined.rows);
      synchronize();  // before `rows` go
    }
    at += row_bytes;
  }
}

void Device::put_in_pieces(void* to, const Tensor& tensor) {
  std::vector<std::byte> piece(std::min(piece_bytes, tensor.bytes()));
  for (size_t at = 0; at < tensor.bytes(); at += piece.size()) {
    const size_t count = std::min(piece.size(), tensor.bytes() - at);
    tensor.generate(at, std::span(piece).first(count));
    upload(static_cast<std::byte*>(to) + at, piece.data(), count);
  }
}

bool reads_only_dims(const Node& node) {
  return node.is("Shape") || node.is("Size");
}

std::string why_unsupported_on_device(const CompileContext& c) {
  return why_unsupported(c.device->kernels(), c);
}

std::string why_unsupported(const KernelRegistry& kernels, const CompileContext& c) {
  const KernelRecord* record = kernels.find(c.node().op, c.node().domain);
  if (!record || !record->make) return "there is no kernel for it";
  if (c.nodes.size() > 1 && !record->leads) return "it leads no fused step";
  return record->unsupported ? record->unsupported(c) : "";
}

}  // namespace fretsaw
