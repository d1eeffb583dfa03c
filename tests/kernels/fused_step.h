// A fused step of any shape for a device: its nodes run as one kernel there, and one by one.
#pragma once
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "tests/kernels/fused_group.h"
#include "tests/kernels/on_device.h"
#include "tests/kernels/test_data.h"

namespace fretsaw::testing {

class FusedStep {
 public:
  Value* input(RuntimeValue value) { return remember(graph_.add_value(fresh()), std::move(value)); }  // known when the step runs
  Value* constant(RuntimeValue value) {                                                               // known when it is compiled
    Value* v = graph_.add_constant(fresh(), fused_group_detail::constant_of(value));
    return remember(v, std::move(value));
  }
  // A node, run on the CPU at once. Output 0; the others are at `output`.
  Value* add(const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes = {}, size_t outputs = 1,
             const std::string& domain = "") {
    std::vector<std::string> names;
    for (size_t i = 0; i < outputs; ++i) names.push_back(fresh());
    const Node* node = graph_.add_node(op, std::move(inputs), names, std::move(attributes), domain);
    std::vector<RuntimeValue> results = run_node(*node, pointers(node->inputs, values_));
    for (size_t i = 0; i < outputs; ++i) remember(node->out(i), reordered(results[i], Layout::plain));
    nodes_.push_back(node);
    return node->out(0);
  }
  Value* output(size_t i) const { return nodes_.back()->out(i); }
  const RuntimeValue& wanted(const Value* v) const { return values_.at(v); }  // what the nodes gave one by one
  // The float type of fewest bits among all values.
  DType coarsest() const {
    DType found = DType::float64;
    for (const auto& [v, value] : values_) {
      const DType dtype = value.tensor.dtype;
      if (is_float(dtype) && (bits_of(dtype) < bits_of(found) || dtype == DType::bfloat16)) found = dtype;
    }
    return found;
  }

  // The step's context; `kept` are the values that are used outside. 4-D inputs of `offered_dims` are offered in `layout`.
  CompileContext context(const std::vector<Value*>& kept, Layout layout = Layout::plain, const Dims& offered_dims = {}) const {
    CompileContext c;
    c.nodes = nodes_;
    for (const Node* node : nodes_) {
      for (const Value* v : node->inputs) {
        if (v && v->producer) continue;
        if (v || node == nodes_.front()) add_input(c, v, v && values_.at(v).tensor.dims == offered_dims ? layout : Layout::plain);
      }
    }
    for (Value* v : kept) {
      c.outputs.push_back(v);
      c.output_types.push_back(v->type);
    }
    return c;
  }
  std::vector<RuntimeValue> run_fused(Device& device, const CompileContext& c) {
    return run_on_device(device, c, pointers(c.inputs, values_));
  }
  // Each node as a step of its own on the device, from what the device made before.
  std::map<const Value*, RuntimeValue> run_one_by_one(Device& device) {
    std::map<const Value*, RuntimeValue> known = values_;
    for (const Node* node : nodes_) {
      CompileContext c;
      c.nodes = {node};
      for (const Value* v : node->inputs) add_input(c, v, Layout::plain);
      for (const Value* v : node->outputs) {
        c.outputs.push_back(v);
        c.output_types.push_back(v->type);
      }
      std::vector<RuntimeValue> results = run_on_device(device, c, pointers(c.inputs, known));
      for (size_t i = 0; i < results.size(); ++i) known[node->out(i)] = std::move(results[i]);
    }
    return known;
  }

 private:
  std::string fresh() { return "v" + std::to_string(names_++); }
  Value* remember(Value* v, RuntimeValue value) {
    v->type = Type::tensor(value.tensor.dtype, shape_of(value.tensor.dims));
    values_[v] = std::move(value);
    return v;
  }
  static void add_input(CompileContext& c, const Value* v, Layout offered) {
    c.inputs.push_back(v);
    c.input_types.push_back(v ? v->type : Type{});
    c.constants.push_back(v ? v->constant : nullptr);
    c.offered.push_back(offered);
  }
  template <typename Values>
  static std::vector<RuntimeValue*> pointers(const Values& wanted, std::map<const Value*, RuntimeValue>& values) {
    std::vector<RuntimeValue*> out;
    for (const Value* v : wanted) out.push_back(v ? &values.at(v) : nullptr);
    return out;
  }
  Graph graph_;
  std::vector<const Node*> nodes_;
  std::map<const Value*, RuntimeValue> values_;
  int names_ = 0;
};

#define FRETSAW_DEVICE_OR_SKIP(device) \
  Device* device = any_device();       \
  if (!device) GTEST_SKIP() << "no CUDA device"

inline Tolerance tolerance_of(DType dtype) {
  if (dtype == DType::float16) return {2e-3, 2e-3};
  if (dtype == DType::bfloat16) return {1.6e-2, 1.6e-2};
  return dtype == DType::float64 ? Tolerance{1e-12, 1e-14} : Tolerance{3e-6, 1e-6};
}

inline RuntimeValue random_tensor(DType dtype, const Dims& dims, uint32_t seed, double low = -2, double high = 2) {
  return tensor_as(dtype, dims, spread_values(count_of(dims), low, high, seed));
}

inline constexpr DType kHalfAndWide[] = {DType::float32, DType::float16, DType::bfloat16, DType::float64};

// The results of a step that are wanted outside, as one kernel: as the CPU gives them one by one, and with the bits that the device
// gives one by one.
inline void expect_step(Device& device, FusedStep& step, const std::vector<Value*>& kept, Layout layout = Layout::plain,
                        const Dims& offered_dims = {}) {
  const std::vector<RuntimeValue> got = step.run_fused(device, step.context(kept, layout, offered_dims));
  const auto alone = step.run_one_by_one(device);
  for (size_t i = 0; i < kept.size(); ++i) {
    EXPECT_EQ(difference(got[i], step.wanted(kept[i]), tolerance_of(step.coarsest())), "") << "output " << i;
    EXPECT_EQ(difference(got[i], alone.at(kept[i]), {0, 0}), "") << "output " << i << " against the nodes alone";
  }
}

}  // namespace fretsaw::testing
