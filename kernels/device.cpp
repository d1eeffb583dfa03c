// What all devices share: constants that are uploaded once, and the question whether a kernel exists.
#include "kernels/device.h"

namespace fretsaw {

std::shared_ptr<void> Device::constant(const TensorPtr& tensor, const std::string& form, size_t bytes,
                                       const std::function<void(void*)>& fill) {
  const void* identity = tensor->data ? static_cast<const void*>(tensor->data) : tensor.get();
  Constant& known = constants_[{identity, form}];
  // An address may have been used again: the bytes are the same ones while their owner lives.
  if (auto memory = known.memory.lock(); memory && known.tensor.lock()) return memory;
  void* made = allocate(bytes);
  constant_bytes_ += static_cast<int64_t>(bytes);
  std::shared_ptr<void> memory(made, [this, bytes, keeps_address = tensor](void* p) {
    constant_bytes_ -= static_cast<int64_t>(bytes);
    release(p);
  });
  fill(made);
  known = {tensor, memory};
  return memory;
}

std::shared_ptr<void> Device::constant(const TensorPtr& tensor) {
  return constant(tensor, "", tensor->bytes(), [&](void* memory) { upload(memory, tensor->data, tensor->bytes()); });
}

std::string why_unsupported_on_device(const CompileContext& c) {
  const KernelRecord* record = c.device->kernels().find(c.node().op, c.node().domain);
  if (!record || !record->make) return "there is no kernel for it";
  if (c.nodes.size() > 1 && !record->leads) return "it leads no fused step";
  return record->unsupported ? record->unsupported(c) : "";
}

}  // namespace fretsaw
