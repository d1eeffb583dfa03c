// Small models for tests of the partitioner, built in a line an operator.
#pragma once
#include <string>
#include <vector>

#include "graph/ir.h"
#include "graph/passes.h"

namespace fretsaw {

struct Net {
  Model model;
  Graph& g;

  Net() : g(*(model.graph = std::make_shared<Graph>())) {
    model.ir_version = 10;
    model.opsets[""] = newest_opset();
    g.name = "net";
  }
  Value* input(const std::string& name, Shape shape, DType dtype = DType::float32) {
    Value* v = g.add_value(name, Type::tensor(dtype, std::move(shape)));
    g.inputs.push_back(v);
    return v;
  }
  // A float32 weight of small different numbers.
  Value* weight(const std::string& name, Dims dims) {
    auto t = make_tensor(DType::float32, std::move(dims));
    t->name = name;
    auto* data = reinterpret_cast<float*>(mutable_data(*t));
    for (int64_t i = 0; i < t->count(); ++i) data[i] = static_cast<float>(i % 7) * 0.125f - 0.25f;
    return g.add_constant(name, t);
  }
  Value* ints(const std::string& name, const std::vector<int64_t>& values) { return g.add_constant(name, make_int64s(values)); }
  Value* op(const std::string& op_type, std::vector<Value*> inputs, const std::string& name, std::vector<Attribute> attributes = {}) {
    return g.add_node(op_type, std::move(inputs), {name}, std::move(attributes))->outputs[0];
  }
  // MatMul with a square weight and Relu: one fusion group.
  Value* layer(Value* x, const std::string& name, int64_t width) {
    return op("Relu", {op("MatMul", {x, weight(name + ".w", {width, width})}, name + ".m")}, name);
  }
  void output(Value* v) { g.outputs.push_back(v); }
};

}  // namespace fretsaw
