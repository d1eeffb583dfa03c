// A fusion group compiled and run as one kernel, and the same nodes run one by one.
#pragma once
#include <omp.h>

#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "tests/kernels/single_op.h"

namespace fretsaw::testing {

// Nodes with the values they take from outside. The first node is the contraction; each other takes the result of the one before.
class FusedGroup {
 public:
  Value* input(const std::string& name, RuntimeValue value);     // known when the group runs
  Value* constant(const std::string& name, RuntimeValue value);  // known when it is compiled
  // Adds a node. A null among `inputs` of a later node stands for the result of the node before.
  void add(const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes = {});

  std::vector<const Node*> chain() const;  // without the contraction
  const Node& contraction() const { return *nodes_.front(); }
  RuntimeValue run_fused(int threads, Layout offered = Layout::plain);
  RuntimeValue run_one_by_one(int threads);
  // Fills in the types of the values between, from a run one by one.
  void infer();

 private:
  Graph graph_;
  std::vector<Node*> nodes_;
  std::map<const Value*, RuntimeValue> values_;
};

// The largest difference of two float32 tensors, relative to the largest element of the second.
inline double relative_difference(const RuntimeValue& got, const RuntimeValue& wanted);

namespace fused_group_detail {

class OneOutput : public KernelMemory {
 public:
  explicit OneOutput(RuntimeValue& value) : value_(value) {}
  void* output(size_t, DType dtype, const Dims& dims, Layout layout) override {
    RuntimeValue block = make_value(DType::uint8, {static_cast<int64_t>(bytes_of(dtype, dims, layout))});
    value_.owner = block.owner;
    return block.tensor.data;
  }
  void* scratch(size_t bytes) override {
    scratch_ = make_value(DType::uint8, {static_cast<int64_t>(bytes)});
    return scratch_.tensor.data;
  }

 private:
  RuntimeValue& value_;
  RuntimeValue scratch_;
};

inline TensorPtr constant_of(const RuntimeValue& value) {
  std::shared_ptr<Tensor> tensor = make_tensor(value.tensor.dtype, value.tensor.dims);
  std::memcpy(mutable_data(*tensor), value.tensor.data, value.tensor.bytes());
  return tensor;
}

}  // namespace fused_group_detail

inline Value* FusedGroup::input(const std::string& name, RuntimeValue value) {
  Value* v = graph_.add_value(name, Type::tensor(value.tensor.dtype, shape_of(value.tensor.dims)));
  values_[v] = std::move(value);
  return v;
}

inline Value* FusedGroup::constant(const std::string& name, RuntimeValue value) {
  Value* v = graph_.add_constant(name, fused_group_detail::constant_of(value));
  v->type = Type::tensor(value.tensor.dtype, shape_of(value.tensor.dims));
  values_[v] = std::move(value);
  return v;
}

inline void FusedGroup::add(const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes) {
  if (!nodes_.empty()) {
    for (Value*& v : inputs) v = v ? v : nodes_.back()->out(0);
  }
  nodes_.push_back(graph_.add_node(op, std::move(inputs), {"r" + std::to_string(nodes_.size())}, std::move(attributes)));
}

inline std::vector<const Node*> FusedGroup::chain() const {
  return {nodes_.begin() + 1, nodes_.end()};
}

inline RuntimeValue FusedGroup::run_fused(int threads, Layout offered) {
  omp_set_num_threads(threads);
  CompileContext c;
  c.nodes = {nodes_.begin(), nodes_.end()};
  c.threads = threads;
  const Value* previous = nullptr;
  for (const Node* node : nodes_) {
    for (Value* v : node->inputs) {
      if (v == previous) continue;
      c.inputs.push_back(v);
      c.input_types.push_back(v ? v->type : Type{});
      c.constants.push_back(v ? v->constant : nullptr);
      c.offered.push_back(Layout::plain);
    }
    previous = node->out(0);
  }
  c.offered[0] = offered;
  c.outputs = {previous};
  c.output_types = {previous->type};
  const CompiledKernel kernel = cpu_kernels().find(nodes_[0]->op, "")->make(c);
  std::vector<RuntimeValue> given;
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    const Layout wanted = i < kernel.input_layouts.size() ? kernel.input_layouts[i] : Layout::plain;
    given.push_back(c.inputs[i] ? reordered(values_.at(c.inputs[i]), wanted) : RuntimeValue{});
  }
  std::vector<RuntimeValue*> inputs;
  for (size_t i = 0; i < given.size(); ++i) inputs.push_back(c.inputs[i] ? &given[i] : nullptr);
  RuntimeValue result;
  fused_group_detail::OneOutput memory(result);
  RuntimeValue* outputs[] = {&result};
  RunContext run(inputs, outputs, memory, threads);
  kernel.run(run);
  const Layout promised = kernel.output_layouts.empty() ? Layout::plain : kernel.output_layouts[0];
  EXPECT_EQ(result.tensor.layout, promised);
  return reordered(result, Layout::plain);
}

inline RuntimeValue FusedGroup::run_one_by_one(int threads) {
  omp_set_num_threads(threads);
  InterpreterOptions options;
  options.threads = threads;
  std::map<const Value*, RuntimeValue> known = values_;
  for (const Node* node : nodes_) {
    std::vector<RuntimeValue*> inputs;
    for (Value* v : node->inputs) inputs.push_back(v ? &known.at(v) : nullptr);
    known[node->out(0)] = reordered(run_node(*node, inputs, options)[0], Layout::plain);
  }
  return known.at(nodes_.back()->out(0));
}

inline void FusedGroup::infer() {
  InterpreterOptions options;
  std::map<const Value*, RuntimeValue> known = values_;
  for (const Node* node : nodes_) {
    std::vector<RuntimeValue*> inputs;
    for (Value* v : node->inputs) inputs.push_back(v ? &known.at(v) : nullptr);
    RuntimeValue result = reordered(run_node(*node, inputs, options)[0], Layout::plain);
    node->out(0)->type = Type::tensor(result.tensor.dtype, shape_of(result.tensor.dims));
    known[node->out(0)] = std::move(result);
  }
}

inline double relative_difference(const RuntimeValue& got, const RuntimeValue& wanted) {
  if (got.tensor.dims != wanted.tensor.dims) return INFINITY;
  double worst = 0, scale = 1e-30;
  for (int64_t i = 0; i < wanted.tensor.count(); ++i) {
    const double a = got.tensor.as<float>()[i], b = wanted.tensor.as<float>()[i];
    worst = std::max(worst, a == a ? std::fabs(a - b) : INFINITY);
    scale = std::max(scale, std::fabs(b));
  }
  return worst / scale;
}

}  // namespace fretsaw::testing
