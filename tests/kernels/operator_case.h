// One node in a table: attributes, inputs and the outputs it must give.
#pragma once
#include <string>
#include <vector>

#include "graph/ir.h"
#include "kernels/tensor_view.h"

namespace fretsaw::testing {

RuntimeValue tensor_of(const Dims& dims, const std::vector<float>& values);
RuntimeValue tensor_of(const Dims& dims, const std::vector<double>& values);
RuntimeValue tensor_of(const Dims& dims, const std::vector<int64_t>& values);
RuntimeValue tensor_of(const Dims& dims, const std::vector<int32_t>& values);
RuntimeValue tensor_of(const Dims& dims, const std::vector<uint8_t>& values);
RuntimeValue tensor_of(const Dims& dims, const std::vector<bool>& values);
RuntimeValue tensor_of(const Dims& dims, const std::vector<std::string>& values);
// Short forms: 0, 1, 2, ... as float32; a vector of int64; a scalar.
RuntimeValue counting(const Dims& dims);
RuntimeValue ints(const std::vector<int64_t>& values);
RuntimeValue number(int64_t value);
RuntimeValue number(float value);
RuntimeValue nothing();  // an input that is left out

struct OperatorCase {
  std::string name, op;
  std::vector<Attribute> attributes;
  std::vector<RuntimeValue> inputs;
  std::vector<RuntimeValue> outputs;
  std::string domain = "";
};

// What the operator gives, with `outputs` outputs.
std::vector<RuntimeValue> run_operator(const OperatorCase& c, size_t outputs, int threads = 1);
// "" when the case's outputs come out, with 1 and with 3 threads.
std::string failure_of(const OperatorCase& c);
// The message of the Error it throws; "" when it throws none.
std::string error_of(const OperatorCase& c, size_t outputs = 1);

}  // namespace fretsaw::testing
