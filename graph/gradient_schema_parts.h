// What the files of the gradient operators' schemas share. Private to graph/gradient_schemas*.cpp.
#pragma once
#include <onnx/defs/schema.h>
#include <onnx/defs/shape_inference.h>

#include <vector>

#include "graph/communication_schemas.h"

namespace fretsaw::gradient_schemas {

using onnx::AttributeProto;
using onnx::InferenceContext;
using onnx::OpSchema;

inline int64_t int_attribute(InferenceContext& context, const char* name, int64_t absent) {
  const AttributeProto* a = context.getAttribute(name);
  return a && a->has_i() ? a->i() : absent;
}

// Output `output` is like input `input`.
inline void like(InferenceContext& context, size_t input, size_t output) {
  if (!context.hasOutput(output)) return;
  onnx::propagateElemTypeFromInputToOutput(context, input, output);
  if (onnx::hasInputShape(context, input)) onnx::propagateShapeFromInputToOutput(context, input, output);
}

// Each result is like the input after the one of its number.
inline void like_inputs_from_1(InferenceContext& context) {
  for (size_t o = 0; o < context.getNumOutputs(); ++o) like(context, o + 1, o);
}

// The type of input 0 in the shape that an input holds.
template <size_t kShape>
void shaped_by(InferenceContext& context) {
  onnx::propagateElemTypeFromInputToOutput(context, 0, 0);
  bool found = false;
  const onnx::TensorShapeProto shape = onnx::getShapeInput(context, kShape, found);
  if (found) onnx::updateOutputShape(context, 0, shape);
}

template <size_t kInput>
void like_input(InferenceContext& context) {
  like(context, kInput, 0);
}

inline OpSchema base(const char* name, const char* doc, const char* first) {
  OpSchema schema(name, __FILE__, __LINE__);
  schema.SetDomain(kCommunicationDomain)
      .SinceVersion(1)
      .SetDoc(doc)
      .Input(0, first, "The gradient of the result", "T")
      .TypeConstraint("T", {"tensor(float16)", "tensor(bfloat16)", "tensor(float)", "tensor(double)"}, "Floating-point numbers");
  return schema;
}

inline OpSchema with_shape(OpSchema schema, int input) {
  return schema.Input(input, "shape", "The shape of the result", "S").TypeConstraint("S", {"tensor(int64)"}, "Sizes");
}

// Those of recurrent operators, image regions and samples, running products and determinants. (gradient_schemas_other.cpp)
std::vector<OpSchema> other_gradient_schemas();

}  // namespace fretsaw::gradient_schemas
