// Constant folding: a node's own kernel runs while compiling.
#include <algorithm>
#include <cstring>

#include "graph/catalogue.h"
#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/tensor_bytes.h"
#include "runtime/evaluate.h"
#include "runtime/program.h"

namespace fretsaw {
namespace {

struct TooBig {};

constexpr size_t always_folded_bytes = size_t{64} << 20;  // larger results are kept only where they replace constants of their size
constexpr size_t never_folded_bytes = size_t{1} << 30;
constexpr size_t shared_bytes = size_t{64} << 10;

// Memory that the constants keep.
class FoldMemory : public KernelMemory {
 public:
  FoldMemory(std::vector<RuntimeValue>& outputs, size_t limit_bytes) : outputs_(outputs), limit_bytes_(limit_bytes) {}
  void* output(size_t index, DType dtype, const Dims& dims, Layout layout) override {
    if (bytes_of(dtype, dims, layout) > limit_bytes_) throw TooBig();
    if (layout != Layout::plain) throw TooBig();
    RuntimeValue made = make_value(dtype, dims);
    outputs_[index].owner = made.owner;
    return made.tensor.data;
  }
  void* scratch(size_t bytes) override {
    scratch_ = make_value(DType::uint8, {static_cast<int64_t>(bytes)});
    return scratch_.tensor.data;
  }

 private:
  std::vector<RuntimeValue>& outputs_;
  size_t limit_bytes_;
  RuntimeValue scratch_;
};

}  // namespace

bool is_control_flow(const Node& node) {
  return node.is("If") || node.is("Loop") || node.is("Scan") || node.is("SequenceMap");
}

TensorPtr to_constant(const RuntimeValue& value) {
  auto tensor = std::make_shared<Tensor>();
  tensor->dtype = value.tensor.dtype;
  tensor->dims = value.tensor.dims;
  if (value.tensor.dtype == DType::string) {
    auto strings = value.tensor.span<std::string>();
    tensor->strings.assign(strings.begin(), strings.end());
    return tensor;
  }
  if (value.owner.use_count() > 0) {
    tensor->data = static_cast<const std::byte*>(value.tensor.data);
    tensor->owner = value.owner;
    return tensor;
  }
  auto copy = make_tensor(value.tensor.dtype, value.tensor.dims);
  if (size_t bytes = value.tensor.bytes()) std::memcpy(mutable_data(*copy), value.tensor.data, bytes);
  return copy;
}

namespace {

size_t alignment_of(DType dtype) {
  int bits = bits_of(dtype);
  return bits <= 8 ? 1 : static_cast<size_t>(dtype == DType::complex64 ? 4 : dtype == DType::complex128 ? 8 : bits / 8);
}

}  // namespace

TensorPtr readable(const TensorPtr& tensor, RankContext& rank) {
  if (!tensor || tensor->data || !tensor->generate) return tensor;
  TensorPtr& made = rank.made_constants[tensor];
  if (!made) made = with_bytes(tensor);
  return made;
}

// Kernels read constants where they lie, in the mapped file mostly; only those at odd addresses are copied, once for a rank.
void from_constant(const TensorPtr& given, RuntimeValue& value, RankContext* rank) {
  static std::max_align_t nothing{};
  const TensorPtr tensor = rank ? readable(given, *rank) : with_bytes(given);
  value.kind = RuntimeValue::Kind::tensor;
  value.tensor = {tensor->dtype, tensor->dims, nullptr, Layout::plain};
  value.owner = std::const_pointer_cast<void>(std::shared_ptr<const void>(tensor, tensor.get()));
  if (tensor->dtype == DType::string) {
    value.tensor.data = const_cast<std::string*>(tensor->strings.data());
    return;
  }
  if (tensor->is_missing()) {
    throw Error("the bytes of tensor '" + tensor->name + "' are not there: " + tensor->missing,
                "put the weight file beside the model, or fill random weights");
  }
  value.tensor.data = const_cast<std::byte*>(tensor->data);
  if (!tensor->data) value.tensor.data = &nothing;
  if (reinterpret_cast<uintptr_t>(value.tensor.data) % alignment_of(tensor->dtype) == 0) return;
  std::shared_ptr<void> found;
  std::shared_ptr<void>& copy = rank ? rank->aligned_constants[{tensor->data, tensor->bytes()}] : found;
  if (!copy) {
    RuntimeValue aligned = make_value(tensor->dtype, tensor->dims);
    std::memcpy(aligned.tensor.data, tensor->data, tensor->bytes());
    // The tensor stays alive with its copy, so that no other tensor takes its address.
    copy = std::shared_ptr<void>(aligned.tensor.data, [held = aligned.owner, source = tensor](void*) {});
  }
  value.tensor.data = copy.get();
  value.owner = copy;
}

CompileContext make_context(const std::vector<const Node*>& nodes, int threads) {
  CompileContext c;
  c.nodes = nodes;
  c.threads = threads;
  for (const Value* v : nodes.front()->inputs) c.inputs.push_back(v);
  for (size_t i = 1; i < nodes.size(); ++i) {
    const Value* before = nodes[i - 1]->out(0);
    for (const Value* v : nodes[i]->inputs) {
      if (v != before) c.inputs.push_back(v);
    }
  }
  for (const Value* v : nodes.back()->outputs) c.outputs.push_back(v);
  for (const Value* v : c.inputs) {
    c.input_types.push_back(v ? v->type : Type{});
    c.constants.push_back(v ? v->constant : nullptr);
    if (v && v->constant) c.input_types.back() = Type::tensor(v->constant->dtype, shape_of(v->constant->dims));
  }
  for (const Value* v : c.outputs) c.output_types.push_back(v ? v->type : Type{});
  c.offered.assign(c.inputs.size(), Layout::plain);
  return c;
}

bool evaluate_node(const Node& node, const std::vector<TensorPtr>& inputs, int threads, size_t limit_bytes,
                   std::vector<TensorPtr>& outputs) {
  const KernelRecord* record = cpu_kernels().find(node.op, node.domain);
  if (!record || !record->make || record->host_random || is_control_flow(node)) return false;
  const OperatorRecord* known = find_operator(node.op, node.domain);
  if ((known && known->random) || communicates(node)) return false;
  for (const Value* v : node.outputs) {
    if (v && v->type.kind != Type::Kind::tensor && v->type.kind != Type::Kind::unknown) return false;
  }
  CompileContext c = make_context({&node}, threads);
  for (size_t i = 0; i < inputs.size(); ++i) {
    c.constants[i] = nullptr;
    if (!inputs[i]) continue;
    if (inputs[i]->is_missing()) return false;
    if (inputs[i]->generate && inputs[i]->bytes() > limit_bytes) return false;
    c.constants[i] = with_bytes(inputs[i]);
    c.input_types[i] = Type::tensor(inputs[i]->dtype, shape_of(inputs[i]->dims));
  }
  if (record->unsupported && !record->unsupported(c).empty()) return false;
  std::vector<RuntimeValue> in(inputs.size()), out(node.outputs.size());
  std::vector<RuntimeValue*> in_pointers(inputs.size(), nullptr), out_pointers(node.outputs.size(), nullptr);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i]) continue;
    from_constant(c.constants[i], in[i], nullptr);
    in_pointers[i] = &in[i];
  }
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    if (node.outputs[i]) out_pointers[i] = &out[i];
  }
  FoldMemory memory(out, limit_bytes);
  RunContext run(in_pointers, out_pointers, memory, threads);
  try {
    CompiledKernel kernel = record->make(c);
    for (Layout layout : kernel.input_layouts) {
      if (layout != Layout::plain) return false;
    }
    kernel.run(run);
  } catch (const TooBig&) {
    return false;
  } catch (const Error&) {
    return false;  // the step will say it when it runs, if it runs: it may stand in a branch that is never taken
  }
  outputs.assign(out.size(), nullptr);
  for (size_t i = 0; i < out.size(); ++i) {
    if (!node.outputs[i]) continue;
    if (out[i].kind != RuntimeValue::Kind::tensor) return false;
    outputs[i] = to_constant(out[i]);
  }
  return true;
}

bool evaluate_on_constants(const Node& node, const std::vector<TensorPtr>& inputs, std::vector<TensorPtr>& outputs) {
  return evaluate_node(node, inputs, 1, size_t{64} << 20, outputs);
}

bool fold_node(const Node& node, const std::vector<TensorPtr>& inputs, RankContext& rank, std::vector<TensorPtr>& outputs) {
  const std::string key = node.op + ":" + node.name;
  size_t input_bytes = 0;
  for (const TensorPtr& input : inputs) input_bytes += input ? input->bytes() : 0;
  auto same_data = [](const TensorPtr& a, const TensorPtr& b) {
    return a == b || (a && b && a->data && a->data == b->data && a->dims == b->dims);
  };
  for (const auto& known : rank.folded) {
    if (known.node == key && known.inputs.size() == inputs.size() && known.outputs.size() == node.outputs.size() &&
        std::equal(inputs.begin(), inputs.end(), known.inputs.begin(), same_data)) {
      outputs = known.outputs;
      return true;
    }
  }
  // Weights transposed, cast or dequantized: up to four times the bytes they had.
  size_t limit = std::max(always_folded_bytes, std::min(4 * input_bytes, never_folded_bytes));
  if (!evaluate_node(node, inputs, rank.threads, limit, outputs)) return false;
  size_t output_bytes = 0;
  for (const TensorPtr& output : outputs) output_bytes += output ? output->bytes() : 0;
  if (output_bytes >= shared_bytes) rank.folded.push_back({key, inputs, outputs});
  return true;
}

}  // namespace fretsaw
