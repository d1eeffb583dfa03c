// What kernels see of their node and of the running program; the registry of kernels.
#include "kernels/kernel.h"

#include <algorithm>

namespace fretsaw {

namespace {

template <typename T>
void append_ints(const TensorView& x, std::vector<int64_t>& out) {
  for (T v : x.span<T>()) out.push_back(static_cast<int64_t>(v));
}

std::string index_text(size_t i) {
  return std::to_string(i);
}

}  // namespace

const TensorView& RunContext::input(size_t i) const {
  const RuntimeValue& found = value(i);
  if (found.kind != RuntimeValue::Kind::tensor) {
    throw Error("input " + index_text(i) + " is a sequence where a tensor is expected", "check the types in the model");
  }
  return found.tensor;
}

const RuntimeValue& RunContext::value(size_t i) const {
  if (i >= inputs_.size() || !inputs_[i]) throw Error("input " + index_text(i) + " is left out", "give the node this input");
  const RuntimeValue& found = *inputs_[i];
  if (found.kind == RuntimeValue::Kind::absent) throw Error("input " + index_text(i) + " is an empty optional", "give it a value");
  return found;
}

std::vector<int64_t> RunContext::input_ints(size_t i) const {
  const TensorView& x = input(i);
  std::vector<int64_t> out;
  out.reserve(static_cast<size_t>(x.count()));
  switch (x.dtype) {
    case DType::int64:
      append_ints<int64_t>(x, out);
      break;
    case DType::int32:
      append_ints<int32_t>(x, out);
      break;
    case DType::int16:
      append_ints<int16_t>(x, out);
      break;
    case DType::int8:
      append_ints<int8_t>(x, out);
      break;
    case DType::uint64:
      append_ints<uint64_t>(x, out);
      break;
    case DType::uint32:
      append_ints<uint32_t>(x, out);
      break;
    case DType::uint16:
      append_ints<uint16_t>(x, out);
      break;
    case DType::uint8:
      append_ints<uint8_t>(x, out);
      break;
    case DType::boolean:
      append_ints<bool>(x, out);
      break;
    default:
      throw Error("input " + index_text(i) + " is of type " + std::string(name_of(x.dtype)) + " where integers are expected",
                  "cast it to int64");
  }
  return out;
}

TensorView& RunContext::output(size_t i, const Dims& dims, DType dtype, Layout layout) {
  if (!wants_output(i)) throw Error("nothing takes output " + index_text(i), "this is a fault of the kernel");
  if (dtype == DType::undefined) dtype = input(0).dtype;
  RuntimeValue& value = *outputs_[i];
  void* data = memory_.output(i, dtype, dims, layout);
  value.kind = RuntimeValue::Kind::tensor;
  value.tensor.dtype = dtype;
  value.tensor.dims = dims;
  value.tensor.layout = layout;
  value.tensor.memory = device_ ? Memory::device : Memory::host;
  value.tensor.data = data;
  return value.tensor;
}

RuntimeValue& RunContext::output_value(size_t i) {
  if (!wants_output(i)) throw Error("nothing takes output " + index_text(i), "this is a fault of the kernel");
  return *outputs_[i];
}

std::optional<Dims> CompileContext::input_dims(size_t i) const {
  if (!has_input(i)) return std::nullopt;
  if (i < constants.size() && constants[i]) return constants[i]->dims;
  if (i >= input_types.size() || !input_types[i].is_tensor()) return std::nullopt;
  const std::optional<Shape>& shape = input_types[i].shape;
  if (!shape || !is_static(*shape)) return std::nullopt;
  return dims_of(*shape);
}

void KernelRegistry::add(KernelRecord record) {
  std::string key = record.domain + ":" + record.op;
  if (!records_.emplace(key, std::move(record)).second) throw Error("two kernels for " + key, "register each operator once");
}

const KernelRecord* KernelRegistry::find(const std::string& op, const std::string& domain) const {
  // "ai.onnx" is the long spelling of the default domain.
  const auto found = records_.find((domain == "ai.onnx" ? "" : domain) + ":" + op);
  return found == records_.end() ? nullptr : &found->second;
}

std::string why_unsupported_on_cpu(const CompileContext& context) {
  const Node& node = context.node();
  const KernelRecord* record = cpu_kernels().find(node.op, node.domain);
  if (!record || !record->make) {
    return "no CPU kernel for the operator " + (node.domain.empty() ? "" : node.domain + ".") + node.op;
  }
  return record->unsupported ? record->unsupported(context) : "";
}

}  // namespace fretsaw
