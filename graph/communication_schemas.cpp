// Schemas of the communication operators, with their shape inference.
#include "graph/communication_schemas.h"

#include <onnx/defs/schema.h>
#include <onnx/defs/shape_inference.h>

#include <mutex>

namespace fretsaw {
namespace {

using onnx::AttributeProto;
using onnx::InferenceContext;
using onnx::OpSchema;

void same_type(InferenceContext& context) {
  onnx::propagateElemTypeFromInputToOutput(context, 0, 0);
  if (onnx::hasNInputShapes(context, 1)) onnx::propagateShapeFromInputToOutput(context, 0, 0);
}

int64_t int_attribute(InferenceContext& context, const char* name, int64_t absent) {
  const AttributeProto* a = context.getAttribute(name);
  return a && a->has_i() ? a->i() : absent;
}

// The shape of the input with dimension `tensor_axis` multiplied or divided by `group_size`; both -1 when not known.
void scaled_axis(InferenceContext& context, const char* axis_attribute, bool multiply) {
  onnx::propagateElemTypeFromInputToOutput(context, 0, 0);
  if (!onnx::hasNInputShapes(context, 1)) return;
  onnx::TensorShapeProto shape = onnx::getInputShape(context, 0);
  int64_t axis = int_attribute(context, axis_attribute, 0), size = int_attribute(context, "group_size", -1);
  if (axis < 0) axis += shape.dim_size();
  if (axis < 0 || axis >= shape.dim_size()) fail_shape_inference("tensor_axis ", axis, " is outside a tensor of rank ", shape.dim_size());
  auto* dim = shape.mutable_dim(static_cast<int>(axis));
  int64_t value = dim->has_dim_value() ? dim->dim_value() : -1;
  dim->clear_dim_value();
  dim->clear_dim_param();
  // Uneven shards differ in size: the dimension stays open then.
  if (value >= 0 && size > 0 && int_attribute(context, "uneven", 0) == 0) {
    if (multiply)
      dim->set_dim_value(value * size);
    else if (value % size == 0)
      dim->set_dim_value(value / size);
  }
  onnx::updateOutputShape(context, 0, shape);
}

OpSchema base(const char* name, const char* doc) {
  OpSchema schema(name, __FILE__, __LINE__);
  schema.SetDomain(kCommunicationDomain)
      .SinceVersion(1)
      .SetDoc(doc)
      .Input(0, "X", "The tensor on this rank", "T")
      .Output(0, "Y", "The tensor after communication", "T")
      .TypeConstraint("T", OpSchema::all_tensor_types_ir13(), "Any tensor")
      .Attr("axis", "The mesh axis along which ranks communicate: data, pipeline or tensor", AttributeProto::STRING)
      .TypeAndShapeInferenceFunction(same_type);
  return schema;
}

OpSchema collective(const char* name, const char* doc) {
  return base(name, doc).Attr("group_size", "The number of ranks along the axis", AttributeProto::INT, static_cast<int64_t>(-1));
}

OpSchema with_axis(OpSchema schema) {
  return schema.Attr("tensor_axis", "The tensor's axis that is cut", AttributeProto::INT, static_cast<int64_t>(0))
      .Attr("uneven", "1 where ranks hold parts of different sizes", AttributeProto::INT, static_cast<int64_t>(0))
      .Attr("sizes", "The size each rank holds along the axis, where they are known and uneven", AttributeProto::INTS, false);
}

OpSchema with_reduction(OpSchema schema) {
  return schema.Attr("reduction", "sum, max, min, product or mean", AttributeProto::STRING, std::string("sum"));
}

OpSchema border(const char* name, const char* doc, const char* peer) {
  return base(name, doc).Attr("peer", peer, AttributeProto::INT).Attr("tag", "The number of the route in plan.json", AttributeProto::INT);
}

void register_all() {
  auto& domains = onnx::OpSchemaRegistry::DomainToVersionRange::Instance();
  if (!domains.Map().count(kCommunicationDomain)) domains.AddDomainToVersion(kCommunicationDomain, 1, 1);
  std::vector<OpSchema> schemas;
  schemas.push_back(border("Send", "Marks a value that leaves its stage. The schedule's actions move it.", "The stage it goes to"));
  schemas.push_back(
      border("Recv", "Marks a value that comes from another stage. The schedule's actions move it.", "The stage it comes from"));
  schemas.push_back(with_reduction(collective("AllReduce", "Every rank gets the elementwise reduction of all ranks' tensors.")));
  schemas.push_back(
      with_axis(collective("AllGather", "Every rank gets the ranks' tensors joined along tensor_axis, in the order of ranks."))
          .TypeAndShapeInferenceFunction([](InferenceContext& c) { scaled_axis(c, "tensor_axis", true); }));
  schemas.push_back(with_axis(with_reduction(collective("ReduceScatter",
                                                        "The tensors are reduced elementwise; each rank gets its part along tensor_axis.")))
                        .TypeAndShapeInferenceFunction([](InferenceContext& c) { scaled_axis(c, "tensor_axis", false); }));
  schemas.push_back(
      collective("AllToAll", "The tensor is cut along split_axis, part k goes to rank k, and what arrives is joined along concat_axis.")
          .Attr("split_axis", "The axis that is cut", AttributeProto::INT, static_cast<int64_t>(0))
          .Attr("concat_axis", "The axis that is joined", AttributeProto::INT, static_cast<int64_t>(0))
          .TypeAndShapeInferenceFunction([](InferenceContext& c) {
            onnx::propagateElemTypeFromInputToOutput(c, 0, 0);
            if (!onnx::hasNInputShapes(c, 1)) return;
            if (int_attribute(c, "split_axis", 0) == int_attribute(c, "concat_axis", 0)) onnx::propagateShapeFromInputToOutput(c, 0, 0);
          }));
  schemas.push_back(collective("Broadcast", "Every rank gets the root's tensor.")
                        .Attr("root", "The index of the root along the axis", AttributeProto::INT, static_cast<int64_t>(0)));
  schemas.push_back(with_axis(collective("HaloExchange", "The tensor grows along tensor_axis by its neighbours' rows."))
                        .Attr("before", "Rows taken from the rank before", AttributeProto::INT, static_cast<int64_t>(0))
                        .Attr("after", "Rows taken from the rank after", AttributeProto::INT, static_cast<int64_t>(0))
                        .TypeAndShapeInferenceFunction([](InferenceContext& c) { onnx::propagateElemTypeFromInputToOutput(c, 0, 0); }));
  for (OpSchema& schema : schemas) onnx::RegisterSchema(std::move(schema), 0, false);
}

}  // namespace

void register_communication_schemas() {
  static std::once_flag once;
  std::call_once(once, register_all);
}

}  // namespace fretsaw
