// Reverse-mode differentiation: gradients of a scalar, as further nodes of its graph.
//
//   Gradients g = add_gradients(model, loss, {w, b});    // loss = sum((x w + b) * t)
//
//   %gy = Mul(%seed, %t)  ...  %gw = Gemm(%x, %gy) {transA=1}      g.of(w)
//                              %gb = ReduceSum(%gy, [0])           g.of(b)
//
// Each operator's record holds its rule (OperatorRecord::gradient), which is written with a GradientContext:
//
//   std::vector<Value*> tanh_gradient(GradientContext& c) {        // d tanh(x) = 1 - y^2
//     Term g(c, c.of_output()), y(c, c.output(0));                // graph/operators/gradient_terms.h
//     return {g * (1 - y * y)};
//   }
//
// The rules use ONNX's newest operators wherever those will do, else the operators of graph/gradient_operators.h.
#pragma once
#include <initializer_list>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "graph/ir.h"
#include "graph/passes.h"

namespace fretsaw {

struct GradientNodes;

// What a rule sees of one forward node, and how it adds nodes. New nodes are named after the forward node.
class GradientContext {
 public:
  GradientContext(GradientNodes& nodes, Node& node, std::vector<Value*> of_outputs, std::vector<bool> wanted);

  // --- the forward node ---
  const Node& node() const { return node_; }
  Value* input(size_t i) const { return node_.input(i); }
  // A forward output. One that the node leaves out (a mask, an index) is made from now on, with this element type.
  Value* output(size_t i = 0, DType dtype = DType::undefined);
  Value* of_output(size_t i = 0) const { return i < of_outputs_.size() ? of_outputs_[i] : nullptr; }  // null where none flows
  bool wants(size_t i) const { return i < wanted_.size() && wanted_[i]; }                             // whether input i needs a gradient
  std::vector<Value*> none() const { return std::vector<Value*>(node_.inputs.size()); }               // a null for each input
  [[noreturn]] void refuse(const std::string& problem, const std::string& remedy = "") const;         // Error naming the node

  const Shape* shape(const Value* value) const;        // null where not even the rank is known
  const Shape& known_shape(const Value* value) const;  // Error where the rank is not known
  size_t rank(const Value* value) const { return known_shape(value).size(); }
  size_t axis(int64_t axis, size_t rank) const;  // counted from the front; Error when out of range
  // The elements of a constant integer input; nullopt where it is left out or computed.
  std::optional<std::vector<int64_t>> constant_ints(size_t input) const;
  std::optional<double> constant_number(const Value* value) const;  // the one element of a constant number

  // --- new nodes ---
  // One output. Its element type is that of the first input until types are inferred, where `dtype` does not say otherwise.
  Value* add(const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes = {}, DType dtype = DType::undefined);
  Value* add_own(const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes = {});  // of ai.fretsaw
  // Those outputs that are wanted; null for the others.
  std::vector<Value*> add_several(const std::string& op, std::vector<Value*> inputs, const std::vector<bool>& wanted,
                                  std::vector<Attribute> attributes = {}, const std::string& domain = "");
  Value* number(double value, DType dtype);                        // a scalar constant
  Value* numbers(const std::vector<double>& values, DType dtype);  // [n]
  Value* integers(const std::vector<int64_t>& values);             // int64 [n]
  Value* integer(int64_t value);                                   // int64 []

  Value* shape_value(Value* value);                                 // its dimensions, int64 [rank]: a constant where all are known
  Value* size_value(Value* value, int64_t axis);                    // one of them, int64 [1]
  Value* reshape_like(Value* gradient, Value* value);               // the elements of `gradient` in the shape of `value`
  Value* zeros_like(Value* value, DType dtype = DType::undefined);  // of its element type, or of this one
  Value* expand_like(Value* gradient, Value* value);                // broadcast to the shape of `value`
  Value* reduce_sum(Value* value, const std::vector<int64_t>& axes, bool keepdims);
  // Sums a gradient of shape `has` over what `operand` was broadcast along. Where the types leave that open, SumTo decides while it runs.
  Value* sum_to(Value* gradient, const Shape* has, Value* operand);
  // The same for a gradient of output 0's shape, to which the node's operands broadcast, all of them.
  Value* sum_to(Value* gradient, Value* operand);
  // The attributes of the forward node with these names, where it has them.
  std::vector<Attribute> attributes(std::initializer_list<const char*> names) const;

 private:
  Value* sum_dims(Value* gradient, const Shape* has, Value* operand, const std::vector<bool>& own);
  std::vector<bool> own_dims(const Shape& result, const Value* operand) const;

  GradientNodes& nodes_;
  Node& node_;
  std::vector<Value*> of_outputs_;
  std::vector<bool> wanted_;
};

// The rule of operators whose derivative is zero wherever there is one, or whose outputs carry none (integers, booleans).
std::vector<Value*> zero_gradient(GradientContext& context);

struct Gradients {
  std::unordered_map<const Value*, Value*> values;  // wanted value -> its gradient, of the same type. Two may share one
  std::vector<std::string> notes;                   // wanted values that the loss does not depend on; operators that were expanded
  Value* of(const Value* value) const {             // null where the gradient is zero
    auto it = values.find(value);
    return it == values.end() ? nullptr : it->second;
  }
};

struct GradientOptions {
  Value* seed = nullptr;  // the gradient of the loss itself, of its type; null: 1. Loss scaling puts its factor here
  InferOptions infer;     // types are inferred anew at the end
};

// Node metadata: the forward node that a node of the backward pass belongs to.
inline constexpr const char* kBackwardOf = "fretsaw.backward";

// Adds the nodes that compute d loss / d value for each of `wanted`: floating-point values of the model's main graph (initializers, inputs
// or what nodes make). `loss` has one element. The model is in the newest opset with known types; those of new values are known afterwards.
// Contributions of several consumers are added up. Operators without a rule become the function that ONNX defines for them, where there is
// one (Attention in float32, with a cache, or with a mask that learns), and Scans Loops. The gradient of an If is an If, that of a Loop a
// Loop (graph/gradient_bodies.cpp). Throws Error naming the node where an operator on the way has no rule, where a loop carries values of
// changing sizes, and for a loss or wanted value that is no float.
Gradients add_gradients(Model& model, Value* loss, const std::vector<Value*>& wanted, const GradientOptions& options = {});

// The first part of that: only makes functions of the operators that have no rule, and Loops of Scans. For who divides the forward graph
// before it is differentiated. Returns a note for each.
std::vector<std::string> expand_for_gradients(Model& model, Value* loss, const std::vector<Value*>& wanted);

}  // namespace fretsaw
