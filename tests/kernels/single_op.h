// One operator run on its own: tensors from literals, a node around them, and the results as vectors.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/cpu/convert.h"
#include "tests/kernels/interpreter.h"

namespace fretsaw::testing {

template <typename T>
RuntimeValue tensor(Dims dims, const std::vector<T>& values) {
  RuntimeValue value = make_value(dtype_of<T>(), std::move(dims));
  EXPECT_EQ(static_cast<size_t>(value.tensor.count()), values.size());
  std::copy(values.begin(), values.end(), value.tensor.as<T>());
  return value;
}

template <typename T>
std::vector<T> values_of(const RuntimeValue& value) {
  EXPECT_EQ(value.tensor.dtype, dtype_of<T>());
  return std::vector<T>(value.tensor.as<T>(), value.tensor.as<T>() + value.tensor.count());
}

// Any numeric tensor as double, in its logical order.
inline std::vector<double> doubles_of(const RuntimeValue& value) {
  const RuntimeValue plain = reordered(value, Layout::plain);
  std::vector<double> out(static_cast<size_t>(plain.tensor.count()));
  load_as<double>(plain.tensor.dtype, plain.tensor.data, 0, plain.tensor.count(), out.data());
  return out;
}

// A tensor of any numeric type from doubles.
inline RuntimeValue tensor_as(DType dtype, Dims dims, const std::vector<double>& values) {
  RuntimeValue value = make_value(dtype, std::move(dims));
  store_from<double>(dtype, value.tensor.data, 0, value.tensor.count(), values.data());
  return value;
}

// Numbers between low and high that look random and are the same in every run.
inline std::vector<double> spread_values(int64_t n, double low, double high, uint32_t seed = 1) {
  std::vector<double> out;
  for (int64_t i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    out.push_back(low + (high - low) * (seed >> 8) / double(1 << 24));
  }
  return out;
}

// The outputs of one node with these inputs (absent ones are left out). Layouts are those of the inputs.
inline std::vector<RuntimeValue> run_op(const std::string& op, const std::vector<RuntimeValue>& inputs,
                                        const std::vector<Attribute>& attributes = {}, size_t outputs = 1,
                                        const InterpreterOptions& options = {}) {
  Graph graph;
  std::vector<Value*> values;
  std::vector<RuntimeValue> given = inputs;
  std::vector<RuntimeValue*> pointers;
  for (size_t i = 0; i < given.size(); ++i) {
    const bool absent = given[i].kind == RuntimeValue::Kind::absent;
    values.push_back(absent ? nullptr : graph.add_value("x" + std::to_string(i)));
    pointers.push_back(absent ? nullptr : &given[i]);
  }
  std::vector<std::string> names;
  for (size_t i = 0; i < outputs; ++i) names.push_back("y" + std::to_string(i));
  return run_node(*graph.add_node(op, values, names, attributes), pointers, options);
}

inline Attribute attribute(std::string name, AttributeValue value) {
  return {std::move(name), std::move(value), "", ""};
}

}  // namespace fretsaw::testing
