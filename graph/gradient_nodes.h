// What all rules of one backward pass add their nodes through. Private to graph/gradient*.cpp.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

struct GradientNodes {
  Graph& graph;
  bool own_domain = false;  // whether an operator of ai.fretsaw was added
  std::map<std::pair<DType, double>, Value*> numbers;
  std::map<std::vector<int64_t>, Value*> lists;

  // A node that belongs to `forward`, with those outputs that are wanted; null for the others. `name` is a wish for their names.
  std::vector<Value*> add(const Node* forward, const std::string& name, const std::string& op, std::vector<Value*> inputs,
                          const std::vector<bool>& wanted, std::vector<Attribute> attributes, const std::string& domain);
  Value* add_constant(const std::string& name, TensorPtr tensor);
  static TensorPtr filled(DType dtype, const Dims& dims, double value);
};

}  // namespace fretsaw
