// What a kernel is, what it is told when a program is compiled, and what it may ask for while it runs.
//
// An operator's kernel is made once, when shapes and constants are known, and run many times:
//
//   CompiledKernel make_softmax(const CompileContext& c) {
//     int64_t axis = c.node().get_int("axis", -1);          // attributes are read here, once
//     return {[axis](RunContext& r) {
//       const TensorView& x = r.input(0);                   // [..., J]
//       TensorView& y = r.output(0, x.dims);                // asks for memory; dtype defaults to input 0's
//       ...
//     }};
//   }
//   void register_softmax(KernelRegistry& registry) { registry.add({.op = "Softmax", .make = make_softmax}); }
//
// A kernel computes the shape of its outputs from its inputs. Where the program has planned the output it gets the planned
// memory, otherwise (shapes that depend on data) memory from the rank's pool.
//
// A device's kernel has the same form. Its views point to device memory, `run` puts its work on the device's stream and returns
// without waiting for it, and what it reads on the host (`KernelRecord::host_inputs`) comes as host memory.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "graph/errors.h"
#include "graph/ir.h"
#include "kernels/tensor_view.h"

namespace fretsaw {

class Device;

// Gives a kernel its memory while it runs; the executor implements it.
class KernelMemory {
 public:
  virtual ~KernelMemory() = default;
  // Memory for output `index` of the running step. Strings are constructed.
  virtual void* output(size_t index, DType dtype, const Dims& dims, Layout layout) = 0;
  virtual void* scratch(size_t bytes) = 0;  // 64-byte aligned, until the kernel returns; one block at a time
};

class RunContext {
 public:
  RunContext(std::span<RuntimeValue* const> inputs, std::span<RuntimeValue* const> outputs, KernelMemory& memory, int threads,
             Device* device = nullptr)
      : inputs_(inputs), outputs_(outputs), memory_(memory), threads_(threads), device_(device) {}

  size_t input_count() const { return inputs_.size(); }
  bool has_input(size_t i) const { return i < inputs_.size() && inputs_[i] && inputs_[i]->kind != RuntimeValue::Kind::absent; }
  const TensorView& input(size_t i) const;    // throws Error when it is left out or no tensor
  const RuntimeValue& value(size_t i) const;  // of any kind; for sequences and optionals
  // Elements of an integer input of any integer type (shapes, axes, indexes).
  std::vector<int64_t> input_ints(size_t i) const;

  size_t output_count() const { return outputs_.size(); }
  bool wants_output(size_t i) const { return i < outputs_.size() && outputs_[i] != nullptr; }
  TensorView& output(size_t i, const Dims& dims, DType dtype = DType::undefined, Layout layout = Layout::plain);
  RuntimeValue& output_value(size_t i);  // for sequences and optionals; the kernel fills it
  void* scratch(size_t bytes) { return memory_.scratch(bytes); }
  int threads() const { return threads_; }
  bool on_device() const { return device_ != nullptr; }
  Device& device() const { return *device_; }  // of a device's kernel

 private:
  std::span<RuntimeValue*const> inputs_, outputs_;  // null where left out
  KernelMemory& memory_;
  int threads_;
  Device* device_;
};

// What is known when a kernel is made. A fused step has several nodes: the first leads it, the others follow in graph order.
// `inputs` are then the first node's inputs and after them what the others take from outside, in node order (a value that two
// nodes take may stand there twice). `outputs` are those values that are used outside the step, in node order: on the CPU only
// the last node's output.
class CompileContext {
 public:
  std::vector<const Node*> nodes;               // one, or a fusion group
  std::vector<const Value*> inputs;             // null where left out
  std::vector<const Value*> outputs;            // null where nobody asks for it
  std::vector<Type> input_types, output_types;  // shape absent or with unknown dimensions where it depends on data
  std::vector<TensorPtr> constants;             // for each input; null unless it is known now
  std::vector<Layout> offered;                  // for each input: the layout its producer leaves it in
  int threads = 1;
  Device* device = nullptr;  // of a device's kernel
  bool tf32 = false;         // float32 operands of matrix products and convolutions may be rounded to TF32

  const Node& node() const { return *nodes.front(); }
  bool has_input(size_t i) const { return i < inputs.size() && inputs[i] != nullptr; }
  DType input_dtype(size_t i) const { return has_input(i) ? input_types[i].dtype : DType::undefined; }
  DType output_dtype(size_t i = 0) const { return i < output_types.size() ? output_types[i].dtype : DType::undefined; }
  std::optional<Dims> input_dims(size_t i) const;  // nullopt when not known now
};

struct CompiledKernel;

// A device's kernel that can be put on the stream together with others of its kind, as one: of steps that need nothing of one another.
class JoinableKernel {
 public:
  virtual ~JoinableKernel() = default;
  virtual const std::string& kind() const = 0;  // those of equal kinds can be joined
  // Of a step whose inputs and outputs are those of the members, one after another.
  virtual CompiledKernel join(const std::vector<std::shared_ptr<const JoinableKernel>>& members) const = 0;
};

struct CompiledKernel {
  std::function<void(RunContext&)> run;
  // Layouts it takes and leaves; empty: all plain. The program reorders an input whose producer left it otherwise.
  // The numbers a kernel gives must not depend on the layouts it was offered (a cut changes them).
  std::vector<Layout> input_layouts, output_layouts;
  // The input that output 0 had best be placed on, where nobody needs it afterwards; the kernel then finds the two at one address.
  int overwrites = -1;
  // Of a device's kernel: constant inputs that it keeps in a form of its own (`Device::constant`), so that `run` does not read them.
  std::vector<size_t> packed_inputs;
  // Of a device's kernel: `run` only puts work on the stream, the same every time, so that it can be captured and replayed.
  bool capturable = true;
  // Of a device's kernel that is small work: null where it can't be joined with others.
  std::shared_ptr<const JoinableKernel> joinable;
};

struct KernelRecord {
  std::string op;
  std::string domain = "";
  CompiledKernel (*make)(const CompileContext&) = nullptr;
  // A reason this node can't run here ("float64 indexes"), or "" when it can. Null: it always can.
  std::string (*unsupported)(const CompileContext&) = nullptr;
  bool view = false;         // output 0 has input 0's bytes: it may share them (Reshape, Identity, Squeeze)
  bool in_place = false;     // output 0 may overwrite an input of the same size (elementwise)
  bool host_random = false;  // draws random numbers: never folded
  // Of a device's kernel:
  std::vector<size_t> host_inputs;  // inputs whose contents it reads on the host (axes, shapes)
  bool leads = false;               // `make` takes steps of several nodes with this one first, as far as `unsupported` lets them
  bool follows = false;             // a node that may be a later member of a fused step
};

class KernelRegistry {
 public:
  void add(KernelRecord record);
  const KernelRecord* find(const std::string& op, const std::string& domain) const;
  const std::unordered_map<std::string, KernelRecord>& all() const { return records_; }

 private:
  std::unordered_map<std::string, KernelRecord> records_;  // "domain:op"
};

// Every CPU kernel (kernels/cpu/registry.cpp lists the families).
const KernelRegistry& cpu_kernels();
// Why the operator of this node can't run on the CPU: no kernel, or its types; "" when it can.
std::string why_unsupported_on_cpu(const CompileContext& context);

}  // namespace fretsaw
