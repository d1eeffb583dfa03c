// Type plans from operator schemas, and the operators that schemas say too little about.
#include "graph/passes/precision_rules.h"

#include <onnx/defs/schema.h>

#include <algorithm>
#include <cmath>

#include "graph/catalogue.h"
#include "graph/communication_schemas.h"
#include "graph/errors.h"

namespace fretsaw {
namespace {

using onnx::OpSchema;

// Operators that stay in float32: quantised scales, coordinates, counting, transforms of signals.
bool stays_wide(const Node& node) {
  static const std::unordered_set<std::string> ops = {"BitCast",
                                                      "QuantizeLinear",
                                                      "DequantizeLinear",
                                                      "DynamicQuantizeLinear",
                                                      "QLinearConv",
                                                      "QLinearMatMul",
                                                      "Range",
                                                      "DFT",
                                                      "STFT",
                                                      "MelWeightMatrix",
                                                      "HannWindow",
                                                      "HammingWindow",
                                                      "BlackmanWindow",
                                                      "GridSample",
                                                      "AffineGrid",
                                                      "RoiAlign",
                                                      "MaxRoiPool",
                                                      "NonMaxSuppression",
                                                      "TfIdfVectorizer"};
  return node.domain.empty() && ops.count(node.op) > 0;
}

// Operators that take any type and give nothing of it.
bool takes_any(const Node& node) {
  return node.is("Shape") || node.is("Size") || node.is("Cast") || node.is("NonZero") || node.is("IsNaN");
}

// Operators whose attribute, not an input, says the type of output 0.
const char* type_attribute(const Node& node) {
  for (const char* op : {"EyeLike", "RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "SequenceEmpty"})
    if (node.is(op)) return "dtype";
  return nullptr;
}

const OpSchema::FormalParameter* parameter(const std::vector<OpSchema::FormalParameter>& all, size_t i) {
  if (i < all.size()) return &all[i];
  const bool repeats = !all.empty() && all.back().GetOption() == OpSchema::Variadic;
  return repeats ? &all.back() : nullptr;
}

// Whether a type letter of a schema allows an element type; a type spelled out allows itself alone.
bool allows(const OpSchema& schema, const std::string& letter, const std::string& element) {
  auto names = [&](const std::string& text) { return text.find("tensor(" + element + ")") != std::string::npos; };
  for (const auto& constraint : schema.typeConstraintParams())
    if (constraint.type_param_str == letter)
      return std::any_of(constraint.allowed_type_strs.begin(), constraint.allowed_type_strs.end(), names);
  return names(letter);
}

// Training's random numbers are float32, and so are their limits. What is computed of them alone (logarithms of numbers near 1, thresholds)
// is as sensitive as positions are.
bool draws(const Node& node) {
  return node.domain == kCommunicationDomain && node.op == "RandomAt";
}

bool is_counter(DType type) {  // 8-bit integers fit every float
  return is_integer(type) && bits_of(type) >= 16;
}

}  // namespace

bool holds_float32(const Type& type) {
  if (type.is_tensor()) return type.dtype == DType::float32;
  return (type.kind == Type::Kind::sequence || type.kind == Type::Kind::optional) && type.element && holds_float32(*type.element);
}

Type with_element(const Type& type, DType dtype) {
  Type changed = type;
  if (type.is_tensor())
    changed.dtype = dtype;
  else if (type.element)
    changed.element = std::make_shared<Type>(with_element(*type.element, dtype));
  return changed;
}

bool IndexArithmetic::has_any(const Node& node) const {
  return std::any_of(node.outputs.begin(), node.outputs.end(), [&](const Value* v) { return has(v); });
}

bool IndexArithmetic::belongs(const Node& node) const {
  const Value* x = node.input(0);
  if (node.is("Range") || draws(node)) return true;
  if (node.is("Cast") && x && x->type.is_tensor() && is_counter(x->type.dtype)) return true;
  const OperatorRecord* known = find_operator(node.op, node.domain);
  if (!known || known->random || !bodies(node).empty() || node.domain == kCommunicationDomain) return false;
  const bool plain = known->role == Role::elementwise || known->role == Role::movement || known->role == Role::reduction;
  bool found = false;
  for (const Value* v : node.inputs) {
    if (!v || !v->type.is_tensor() || v->type.dtype != DType::float32) continue;
    found |= has(v);
    // A product with few numbers spreads positions over frequencies; one with many is a layer.
    if (!has(v) && (!is_fixed(v) || (!plain && v->constant->count() > 4096))) return false;
  }
  return found && (plain || known->role == Role::contraction || node.is("CumSum"));
}

void IndexArithmetic::find(Graph& graph) {
  for (const Node* node : graph.nodes) {
    for (const GraphPtr& body : bodies(*node)) find(*body);
    if (!belongs(*node)) continue;
    bool large = false;
    for (const Value* v : node->inputs) {
      std::vector<double> numbers;
      large |= v && is_large(v);
      if (v && v->constant && v->constant->count() < 4096 && float_values(v, numbers))
        large |= std::any_of(numbers.begin(), numbers.end(), [](double x) { return std::isfinite(x) && std::abs(x) > 65504; });
    }
    for (const Value* v : node->outputs) {
      if (!v || !v->type.is_tensor() || v->type.dtype != DType::float32) continue;
      values_.insert(v);
      if (large) large_.insert(v);
    }
  }
}

bool PrecisionRules::allows_sequences() const {
  const OpSchema* schema = onnx::OpSchemaRegistry::Schema("SequenceConstruct", "");
  return schema && allows(*schema, "S", std::string(name_of(type_)));
}

// Sets the attribute that names the type of the output, where it names float32.
bool PrecisionRules::by_attribute(Node& node) const {
  if (node.is("ConstantOfShape")) return true;  // its tensor is converted with the constants
  const char* attribute = type_attribute(node);
  if (!attribute) return false;
  node.set(attribute, static_cast<int64_t>(type_));
  return true;
}

TypePlan PrecisionRules::plan(Node& node, const std::vector<Type>& inputs) const {
  TypePlan plan{std::vector<Want>(node.inputs.size(), Want::wide), std::vector<bool>(node.outputs.size(), false)};
  if (node.domain == kCommunicationDomain || node.is("CastLike")) {  // all ranks agree on the types they exchange
    std::fill(plan.inputs.begin(), plan.inputs.end(), Want::narrow);
    std::fill(plan.outputs.begin(), plan.outputs.end(), true);
    return plan;
  }
  if (takes_any(node)) {
    std::fill(plan.inputs.begin(), plan.inputs.end(), Want::either);
    return plan;
  }
  auto opset = opsets_.find(node.domain);
  const int version = opset == opsets_.end() ? 1 : static_cast<int>(std::min<int64_t>(opset->second, INT32_MAX));
  const OpSchema* schema = onnx::OpSchemaRegistry::Schema(node.op, version, node.domain);
  bool known = true;
  for (size_t i = 0; i < inputs.size(); ++i) known &= !node.inputs[i] || inputs[i].kind != Type::Kind::unknown;
  if (!schema || !known || stays_wide(node)) return plan;
  auto is_sequence = [](const Type& type) { return !type.is_tensor() && holds_float32(type); };
  const bool sequences = std::any_of(inputs.begin(), inputs.end(), is_sequence) ||
                         std::any_of(node.outputs.begin(), node.outputs.end(), [&](const Value* v) { return v && is_sequence(v->type); });
  if (sequences && !narrow_sequences) return plan;
  const std::string element(name_of(type_));
  std::unordered_set<std::string> narrow;  // type letters
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    const auto* p = parameter(schema->inputs(), i);
    if (!p || !holds_float32(inputs[i]) || !allows(*schema, p->GetTypeStr(), element)) continue;
    if (node.is("Resize") && i > 0) continue;
    plan.inputs[i] = Want::narrow;
    narrow.insert(p->GetTypeStr());
  }
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    const auto* p = parameter(schema->outputs(), i);
    if (!p || !node.outputs[i] || !holds_float32(node.outputs[i]->type)) continue;
    const bool named = i == 0 && allows(*schema, p->GetTypeStr(), element) && by_attribute(node);
    plan.outputs[i] = named || sequences || narrow.count(p->GetTypeStr()) > 0;
  }
  return plan;
}

}  // namespace fretsaw
