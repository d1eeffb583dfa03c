// Which element types an operator takes and gives when a model's float32 parts become another type. Private to graph/passes.
#pragma once
#include <unordered_set>
#include <vector>

#include "graph/passes/rewrite.h"

namespace fretsaw {

// What a float32 input of a node becomes.
enum class Want : uint8_t {
  narrow,  // the new type
  wide,    // float32
  either,  // whatever is there
};

struct TypePlan {
  std::vector<Want> inputs;   // of float32 inputs
  std::vector<bool> outputs;  // whether a float32 output has the new type
};

// Whether values of this type hold float32: tensors, and sequences and optionals of them.
bool holds_float32(const Type& type);
// The same type with `dtype` in place of float32.
Type with_element(const Type& type, DType dtype);

// Floats that come from integers or random numbers alone (positions, sizes, noise, and what is computed of them): they are exact only in
// float32.
class IndexArithmetic {
 public:
  explicit IndexArithmetic(Graph& graph) { find(graph); }
  bool has(const Value* value) const { return values_.count(value) > 0; }
  bool has_any(const Node& node) const;
  // Whether numbers beyond `limit` went into it.
  bool is_large(const Value* value) const { return large_.count(value) > 0; }

 private:
  void find(Graph& graph);
  bool belongs(const Node& node) const;
  std::unordered_set<const Value*> values_, large_;
};

// What the operators' schemas say.
class PrecisionRules {
 public:
  PrecisionRules(DType type, std::map<std::string, int64_t> opsets) : type_(type), opsets_(std::move(opsets)) {}
  // Whether sequences can hold the new type.
  bool narrow_sequences = true;

  // The plan of a node without bodies that is no index arithmetic; `inputs` are the types before the change, as those of its outputs
  // still are. Attributes that name the type of an output are set.
  TypePlan plan(Node& node, const std::vector<Type>& inputs) const;
  bool allows_sequences() const;

 private:
  bool by_attribute(Node& node) const;
  DType type_;
  std::map<std::string, int64_t> opsets_;
};

}  // namespace fretsaw
