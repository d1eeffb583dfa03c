// Element types of values, told from the operators' schemas: outputs that share a type letter with an input have its type.
#include <onnx/defs/schema.h>

#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

// Where the element type of an output comes from.
struct Origin {
  DType fixed = DType::undefined;  // "tensor(int64)"
  std::vector<size_t> inputs;      // any of these has it
};
struct Origins {
  std::vector<Origin> outputs;
  bool last_repeats = false;  // a variadic output
};

DType parse_tensor_type(const std::string& text) {  // "tensor(int64)"
  if (text.size() < 9 || text.compare(0, 7, "tensor(") != 0) return DType::undefined;
  std::string name = text.substr(7, text.size() - 8);
  if (name == "bool") return DType::boolean;
  if (name == "float") return DType::float32;
  if (name == "double") return DType::float64;
  for (int i = 1; i <= 26; ++i)
    if (name == name_of(static_cast<DType>(i))) return static_cast<DType>(i);
  return DType::undefined;
}

// What a schema's letter stands for where it allows one type alone, as that of Shape's result.
DType only_type(const onnx::OpSchema& schema, const std::string& letter) {
  for (const auto& constraint : schema.typeConstraintParams())
    if (constraint.type_param_str == letter && constraint.allowed_type_strs.size() == 1)
      return parse_tensor_type(constraint.allowed_type_strs[0]);
  return parse_tensor_type(letter);
}

Origins read_schema(const std::string& op) {
  using onnx::OpSchema;
  Origins result;
  const OpSchema* schema = onnx::OpSchemaRegistry::Schema(op, "");
  if (!schema) return result;
  auto mixed = [](const OpSchema::FormalParameter& p) { return p.GetOption() == OpSchema::Variadic && !p.GetIsHomogeneous(); };
  for (const auto& out : schema->outputs()) {
    Origin origin;
    if (!mixed(out)) {
      origin.fixed = only_type(*schema, out.GetTypeStr());
      for (size_t i = 0; i < schema->inputs().size(); ++i) {
        const auto& in = schema->inputs()[i];
        if (in.GetTypeStr() == out.GetTypeStr() && !mixed(in)) origin.inputs.push_back(i);
      }
    }
    result.last_repeats = out.GetOption() == OpSchema::Variadic;
    result.outputs.push_back(std::move(origin));
  }
  return result;
}

const Origins& origins_of(const std::string& op) {
  thread_local std::unordered_map<std::string, Origins> cache;
  auto it = cache.find(op);
  if (it == cache.end()) it = cache.emplace(op, read_schema(op)).first;
  return it->second;
}

}  // namespace

DType ElementTypes::of(const Value* value) const {
  if (!value) return DType::undefined;
  if (value->constant) return value->constant->dtype;
  if (!value->producer) return value->type.is_tensor() ? value->type.dtype : DType::undefined;
  auto it = known_.find(value);
  return it == known_.end() ? DType::undefined : it->second;
}

void ElementTypes::add(const Node& node) {
  if (!node.domain.empty()) return;
  const Origins& origins = origins_of(node.op);
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    if (!node.outputs[i] || origins.outputs.empty()) continue;
    if (i >= origins.outputs.size() && !origins.last_repeats) continue;
    const Origin& origin = origins.outputs[std::min(i, origins.outputs.size() - 1)];
    DType found = origin.fixed;
    for (size_t k = 0; k < origin.inputs.size() && found == DType::undefined; ++k) found = of(node.input(origin.inputs[k]));
    if (node.op == "Cast") {
      const Attribute* to = node.attribute("to");
      const auto* number = to ? std::get_if<int64_t>(&to->value) : nullptr;
      found = number ? static_cast<DType>(*number) : DType::undefined;
    }
    if (node.op == "ConstantOfShape") {
      TensorPtr value = node.get_tensor("value");
      found = value ? value->dtype : DType::float32;
    }
    if (found != DType::undefined) known_[node.outputs[i]] = found;
  }
}

}  // namespace fretsaw
