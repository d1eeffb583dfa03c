// Runs single nodes for table-driven tests.
#include "tests/kernels/operator_case.h"

#include <algorithm>

#include "graph/errors.h"
#include "tests/kernels/interpreter.h"
#include "tests/kernels/test_data.h"

namespace fretsaw::testing {

namespace {

template <typename T>
RuntimeValue filled(DType dtype, const Dims& dims, const std::vector<T>& values) {
  RuntimeValue value = make_value(dtype, dims);
  std::copy(values.begin(), values.end(), value.tensor.as<T>());
  return value;
}

}  // namespace

RuntimeValue tensor_of(const Dims& dims, const std::vector<float>& values) {
  return filled(DType::float32, dims, values);
}
RuntimeValue tensor_of(const Dims& dims, const std::vector<double>& values) {
  return filled(DType::float64, dims, values);
}
RuntimeValue tensor_of(const Dims& dims, const std::vector<int64_t>& values) {
  return filled(DType::int64, dims, values);
}
RuntimeValue tensor_of(const Dims& dims, const std::vector<int32_t>& values) {
  return filled(DType::int32, dims, values);
}
RuntimeValue tensor_of(const Dims& dims, const std::vector<uint8_t>& values) {
  return filled(DType::uint8, dims, values);
}
RuntimeValue tensor_of(const Dims& dims, const std::vector<bool>& values) {
  return filled(DType::boolean, dims, values);
}
RuntimeValue tensor_of(const Dims& dims, const std::vector<std::string>& values) {
  return filled(DType::string, dims, values);
}

RuntimeValue counting(const Dims& dims) {
  std::vector<float> values(static_cast<size_t>(count_of(dims)));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  return tensor_of(dims, values);
}
RuntimeValue ints(const std::vector<int64_t>& values) {
  return tensor_of({static_cast<int64_t>(values.size())}, values);
}
RuntimeValue number(int64_t value) {
  return tensor_of({}, std::vector<int64_t>{value});
}
RuntimeValue number(float value) {
  return tensor_of({}, std::vector<float>{value});
}
RuntimeValue nothing() {
  return {};
}

std::vector<RuntimeValue> run_operator(const OperatorCase& c, size_t outputs, int threads) {
  Graph graph;
  std::vector<RuntimeValue> inputs = c.inputs;
  std::vector<Value*> values;
  std::vector<RuntimeValue*> given;
  for (RuntimeValue& input : inputs) {
    const bool absent = input.kind == RuntimeValue::Kind::absent;
    values.push_back(absent ? nullptr : graph.add_value("x" + std::to_string(values.size())));
    given.push_back(absent ? nullptr : &input);
  }
  std::vector<std::string> names;
  for (size_t i = 0; i < outputs; ++i) names.push_back("y" + std::to_string(i));
  const Node* node = graph.add_node(c.op, values, names, c.attributes, c.domain);
  return run_node(*node, given, {.threads = threads});
}

std::string failure_of(const OperatorCase& c) {
  for (int threads : {1, 3}) {
    try {
      const std::vector<RuntimeValue> got = run_operator(c, c.outputs.size(), threads);
      for (size_t i = 0; i < got.size(); ++i) {
        const std::string reason = difference(got[i], c.outputs[i]);
        if (!reason.empty()) return "output " + std::to_string(i) + " with " + std::to_string(threads) + " threads: " + reason;
      }
    } catch (const Error& e) {
      return e.what();
    }
  }
  return "";
}

std::string error_of(const OperatorCase& c, size_t outputs) {
  try {
    run_operator(c, outputs);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

}  // namespace fretsaw::testing
