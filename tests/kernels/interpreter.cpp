// Running a model node by node with the CPU kernels.
#include "tests/kernels/interpreter.h"

#include <algorithm>
#include <cstring>

#include "graph/passes.h"
#include "tests/kernels/on_device.h"

namespace fretsaw::testing {

namespace {

// A fresh block for every output; one scratch block at a time.
class OwningMemory : public KernelMemory {
 public:
  explicit OwningMemory(std::vector<RuntimeValue*>& outputs) : outputs_(outputs) {}

  void* output(size_t index, DType dtype, const Dims& dims, Layout layout) override {
    RuntimeValue& value = *outputs_.at(index);
    // Counted in bytes, so that blocked layouts get their padding; filled with rubbish, so that kernels that forget it are found.
    if (dtype == DType::string) {
      value.owner = make_value(dtype, dims).owner;
      return std::static_pointer_cast<std::vector<std::string>>(value.owner)->data();
    }
    const auto bytes = static_cast<int64_t>(bytes_of(dtype, dims, layout));
    RuntimeValue block = make_value(DType::uint8, {bytes});
    std::memset(block.tensor.data, 0xcd, static_cast<size_t>(bytes));
    value.owner = block.owner;
    return block.tensor.data;
  }
  void* scratch(size_t bytes) override {
    scratch_ = make_value(DType::uint8, {static_cast<int64_t>(bytes)});
    return scratch_.tensor.data;
  }

 private:
  std::vector<RuntimeValue*>& outputs_;
  RuntimeValue scratch_;
};

// Where element [n, c, h, w] lies, counted in elements.
int64_t offset_in(Layout layout, const Dims& d, int64_t n, int64_t c, int64_t h, int64_t w) {
  if (layout == Layout::nhwc) return ((n * d[2] + h) * d[3] + w) * d[1] + c;
  if (layout == Layout::plain) return ((n * d[1] + c) * d[2] + h) * d[3] + w;
  const int64_t block = layout == Layout::nChw8c ? 8 : 16, blocks = (d[1] + block - 1) / block;
  return (((n * blocks + c / block) * d[2] + h) * d[3] + w) * block + c % block;
}

Type type_of(const RuntimeValue& value, bool hide_shapes) {
  switch (value.kind) {
    case RuntimeValue::Kind::tensor:
      return Type::tensor(value.tensor.dtype, hide_shapes ? std::nullopt : std::optional<Shape>(shape_of(value.tensor.dims)));
    case RuntimeValue::Kind::sequence:
      return Type::sequence(Type::tensor(value.element));
    case RuntimeValue::Kind::absent:
      break;
  }
  return {};
}

CompileContext context_for(const Node& node, const std::vector<RuntimeValue*>& inputs, const InterpreterOptions& options) {
  CompileContext c;
  c.nodes = {&node};
  c.threads = options.threads;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    const Value* v = node.inputs[i];
    c.inputs.push_back(v);
    Type type = v && inputs[i] ? type_of(*inputs[i], options.hide_shapes && !v->is_constant()) : Type{};
    if (v && inputs[i] && inputs[i]->kind == RuntimeValue::Kind::absent) type = v->type;
    c.input_types.push_back(type);
    c.constants.push_back(v ? v->constant : nullptr);
    c.offered.push_back(v && inputs[i] ? inputs[i]->tensor.layout : Layout::plain);
  }
  for (const Value* v : node.outputs) {
    c.outputs.push_back(v);
    Type type = v ? v->type : Type{};
    if (options.hide_shapes) type.shape = std::nullopt;
    c.output_types.push_back(type);
  }
  return c;
}

// What the device makes of the node; where it has no kernel, what the CPU has made.
std::vector<RuntimeValue> repeated_on_device(Device& device, CompileContext c, const std::vector<RuntimeValue*>& inputs,
                                             std::vector<RuntimeValue> from_cpu, const InterpreterOptions& options) {
  if (reads_only_dims(c.node())) return from_cpu;
  c.device = &device;
  for (Layout& layout : c.offered)
    if (layout != Layout::nhwc) layout = Layout::plain;
  for (size_t i = 0; i < from_cpu.size(); ++i) {
    if (c.outputs[i] && from_cpu[i].kind == RuntimeValue::Kind::tensor) c.output_types[i] = type_of(from_cpu[i], options.hide_shapes);
  }
  const std::string reason = why_unsupported_on_device(c);
  if (!reason.empty()) {
    ++host_fallbacks()[c.node().op + ": " + reason];
    return from_cpu;
  }
  return run_on_device(device, c, inputs);
}

}  // namespace

RuntimeValue value_of(const TensorPtr& tensor) {
  RuntimeValue value;
  if (tensor->dtype == DType::string) {
    value = make_value(DType::string, tensor->dims);
    std::copy(tensor->strings.begin(), tensor->strings.end(), value.tensor.as<std::string>());
    return value;
  }
  if (tensor->is_missing()) throw Error(tensor->missing);
  value.kind = RuntimeValue::Kind::tensor;
  value.tensor.dtype = tensor->dtype;
  value.tensor.dims = tensor->dims;
  value.tensor.data = const_cast<std::byte*>(tensor->data);
  value.owner = std::const_pointer_cast<Tensor>(tensor);
  // Kernels may count on an address even where there are no elements, and on alignment.
  if (!tensor->data || reinterpret_cast<uintptr_t>(tensor->data) % 16) {
    value = make_value(tensor->dtype, tensor->dims);
    if (tensor->data) std::memcpy(value.tensor.data, tensor->data, tensor->bytes());
  }
  return value;
}

RuntimeValue reordered(const RuntimeValue& value, Layout layout) {
  if (value.kind != RuntimeValue::Kind::tensor || value.tensor.layout == layout) return value;
  const Dims& d = value.tensor.dims;
  const size_t each = static_cast<size_t>(bits_of(value.tensor.dtype)) / 8;
  RuntimeValue block = make_value(DType::uint8, {static_cast<int64_t>(bytes_of(value.tensor.dtype, d, layout))});
  const auto* from = value.tensor.as<char>();
  auto* to = block.tensor.as<char>();
  for (int64_t n = 0; n < d[0]; ++n)
    for (int64_t c = 0; c < d[1]; ++c)
      for (int64_t h = 0; h < d[2]; ++h)
        for (int64_t w = 0; w < d[3]; ++w)
          std::memcpy(to + static_cast<size_t>(offset_in(layout, d, n, c, h, w)) * each,
                      from + static_cast<size_t>(offset_in(value.tensor.layout, d, n, c, h, w)) * each, each);
  block.tensor.dtype = value.tensor.dtype;
  block.tensor.dims = d;
  block.tensor.layout = layout;
  return block;
}

std::vector<RuntimeValue> run_node(const Node& node, const std::vector<RuntimeValue*>& inputs, const InterpreterOptions& options) {
  try {
    const CompileContext context = context_for(node, inputs, options);
    const std::string reason = why_unsupported_on_cpu(context);
    if (!reason.empty()) throw Error(reason);
    const CompiledKernel kernel = cpu_kernels().find(node.op, node.domain)->make(context);

    std::vector<RuntimeValue> given(inputs.size()), results(node.outputs.size());
    std::vector<RuntimeValue*> in(inputs.size()), out(node.outputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i]) continue;
      given[i] = reordered(*inputs[i], i < kernel.input_layouts.size() ? kernel.input_layouts[i] : Layout::plain);
      in[i] = &given[i];
    }
    for (size_t i = 0; i < results.size(); ++i) out[i] = node.outputs[i] ? &results[i] : nullptr;
    OwningMemory memory(out);
    RunContext run(in, out, memory, options.threads);
    kernel.run(run);
    Device* device = options.device ? options.device : test_device();
    return device ? repeated_on_device(*device, context, inputs, std::move(results), options) : results;
  } catch (const Error& e) {
    throw e.at_node(node.name, node.op);
  }
}

Interpreter::Interpreter(Model model, InterpreterOptions options) : model_(std::move(model)), options_(options) {
  run_passes(model_, normalise_passes());
  infer_shapes(model_);
}

std::vector<RuntimeValue> Interpreter::run(const std::vector<RuntimeValue>& inputs) const {
  const Graph& graph = *model_.graph;
  std::unordered_map<const Value*, RuntimeValue> values;
  for (const Value* v : graph.initializers()) values[v] = value_of(v->constant);
  for (size_t i = 0; i < inputs.size() && i < graph.inputs.size(); ++i) {
    const bool image = inputs[i].kind == RuntimeValue::Kind::tensor && inputs[i].tensor.rank() == 4 && bits_of(inputs[i].tensor.dtype) >= 8;
    values[graph.inputs[i]] = image ? reordered(inputs[i], options_.layout) : inputs[i];
  }
  for (const Node* node : graph.nodes) {
    if (!bodies(*node).empty()) throw Error("the interpreter has no control flow").at_node(node->name, node->op);
    std::vector<RuntimeValue*> in;
    for (const Value* v : node->inputs) in.push_back(v ? &values.at(v) : nullptr);
    std::vector<RuntimeValue> results = run_node(*node, in, options_);
    for (size_t i = 0; i < results.size(); ++i) {
      if (node->outputs[i]) values[node->outputs[i]] = std::move(results[i]);
    }
  }
  std::vector<RuntimeValue> outputs;
  for (const Value* v : graph.outputs) outputs.push_back(reordered(values.at(v), Layout::plain));
  return outputs;
}

}  // namespace fretsaw::testing
