// Graph inputs of fixed shapes.
#include <fmt/format.h>

#include "graph/errors.h"
#include "graph/passes.h"

namespace fretsaw {

void set_input_shapes(Model& model, const std::map<std::string, Dims>& shapes) {
  std::map<std::string, int64_t> sizes;  // of symbols; -1: several
  for (const auto& [key, value] : shapes) {
    const std::string& name = key;  // clang 14 captures no structured bindings
    const Dims& dims = value;
    Value* input = nullptr;
    for (Value* v : model.graph->inputs)
      if (v->name == name) input = v;
    if (!input) {
      std::string names;
      for (const Value* v : model.graph->inputs) names += (names.empty() ? "'" : ", '") + v->name + "'";
      throw Error("--shape names '" + name + "', which is no input of the model", "its inputs are " + (names.empty() ? "none" : names),
                  ErrorCode::usage)
          .in_file(model.path);
    }
    Type& type = input->type;
    auto refuse = [&](const std::string& what) {
      throw Error(fmt::format("--shape gives '{}' the shape {}, {}", name, to_string(dims), what),
                  "give it as the model has it: " + to_string(type), ErrorCode::usage)
          .in_file(model.path);
    };
    if (!type.is_tensor()) refuse("and it is no tensor");
    if (type.shape && type.shape->size() != dims.size()) refuse("and its rank is " + std::to_string(type.shape->size()));
    for (size_t i = 0; i < dims.size(); ++i) {
      if (dims[i] < 0) refuse("with a negative dimension");
      if (!type.shape) continue;
      const Dim& dim = (*type.shape)[i];
      if (dim.known() && dim.value != dims[i]) refuse("which differs from a fixed dimension");
      if (dim.known() || dim.symbol.empty()) continue;
      auto [size, is_new] = sizes.try_emplace(dim.symbol, dims[i]);
      if (!is_new && size->second != dims[i]) size->second = -1;  // exporters call unlike sizes by one name: believe the user
    }
    type.shape = shape_of(dims);
  }
  // What is said of a symbol holds for the inputs that nothing is said of.
  for (Value* input : model.graph->inputs) {
    if (shapes.count(input->name) || !input->type.is_tensor() || !input->type.shape) continue;
    for (Dim& dim : *input->type.shape) {
      const auto size = dim.known() ? sizes.end() : sizes.find(dim.symbol);
      if (size != sizes.end() && size->second >= 0) dim = Dim(size->second);
    }
  }
}

}  // namespace fretsaw
