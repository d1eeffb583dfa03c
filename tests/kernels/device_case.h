// One operator on a device against the same operator on the CPU.
#pragma once
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "tests/kernels/fused_group.h"
#include "tests/kernels/on_device.h"
#include "tests/kernels/test_data.h"

namespace fretsaw::testing {

struct DeviceCase {
  std::string op;
  std::vector<RuntimeValue> inputs;  // absent ones are left out
  std::vector<Attribute> attributes = {};
  size_t outputs = 1;
  std::vector<size_t> constants = {};  // inputs that are known when the kernel is made
  bool hide_shapes = false;
  std::vector<DType> output_types = {};  // where they differ from the first input's, as inference would give them
  std::string domain = "";
};

inline std::vector<RuntimeValue> run_case(const DeviceCase& c, Device* device) {
  Graph graph;
  std::vector<Value*> values;
  std::vector<RuntimeValue> given = c.inputs;
  std::vector<RuntimeValue*> pointers;
  for (size_t i = 0; i < given.size(); ++i) {
    const std::string name = "x" + std::to_string(i);
    const bool absent = given[i].kind == RuntimeValue::Kind::absent;
    const bool known = std::find(c.constants.begin(), c.constants.end(), i) != c.constants.end();
    values.push_back(absent  ? nullptr
                     : known ? graph.add_constant(name, fused_group_detail::constant_of(given[i]))
                             : graph.add_value(name));
    pointers.push_back(absent ? nullptr : &given[i]);
  }
  std::vector<std::string> names;
  for (size_t i = 0; i < c.outputs; ++i) names.push_back("y" + std::to_string(i));
  InterpreterOptions options;
  options.hide_shapes = c.hide_shapes;
  options.device = device;
  const Node& node = *graph.add_node(c.op, values, names, c.attributes, c.domain);
  for (size_t i = 0; i < c.output_types.size(); ++i) node.outputs[i]->type = Type::tensor(c.output_types[i]);
  return run_node(node, pointers, options);
}

// Fails where the device has no kernel for the case or its results differ from the CPU's. Does nothing on a machine without a device.
inline void expect_same_on_device(const DeviceCase& c, Tolerance tolerance, const std::string& what = "") {
  Device* device = any_device();
  if (!device) return;
  const auto fallbacks = [] {
    int sum = 0;
    for (const auto& [reason, count] : host_fallbacks()) sum += count;
    return sum;
  };
  const int before = fallbacks();
  const std::vector<RuntimeValue> got = run_case(c, device);
  EXPECT_EQ(fallbacks(), before) << c.op << " " << what << " has no kernel on the device";
  const std::vector<RuntimeValue> wanted = run_case(c, nullptr);
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_EQ(difference(reordered(got[i], Layout::plain), reordered(wanted[i], Layout::plain), tolerance), "")
        << c.op << " " << what << " output " << i << " shape " << to_string(c.inputs[0].tensor.dims) << " "
        << name_of(c.inputs[0].tensor.dtype);
}

// Rounding of results that were computed in at least float32.
inline Tolerance tolerance_for(DType type) {
  switch (type) {
    case DType::float64:
      return {1e-11, 1e-12};
    case DType::float16:
      return {2e-3, 1e-4};
    case DType::bfloat16:
      return {1e-2, 1e-4};
    default:
      return {1e-5, 1e-5};
  }
}

inline RuntimeValue numbers(DType type, const Dims& dims, double low = -1, double high = 1, uint32_t seed = 1) {
  return tensor_as(type, dims, spread_values(count_of(dims), low, high, seed));
}
inline RuntimeValue int_list(const std::vector<int64_t>& values) {
  return tensor<int64_t>({static_cast<int64_t>(values.size())}, values);
}

constexpr DType kFloatTypes[] = {DType::float32, DType::float16, DType::bfloat16, DType::float64};

}  // namespace fretsaw::testing
