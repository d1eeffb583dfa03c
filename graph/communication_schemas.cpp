// Schemas of the communication operators, with their shape inference.
#include "graph/communication_schemas.h"

#include <onnx/defs/schema.h>
#include <onnx/defs/shape_inference.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <numeric>
#include <vector>

#include "graph/gradient_operators.h"
#include "graph/ir.h"

namespace fretsaw {
namespace {

using onnx::AttributeProto;
using onnx::InferenceContext;
using onnx::OpSchema;

void same_type(InferenceContext& context) {
  onnx::propagateElemTypeFromInputToOutput(context, 0, 0);
  if (onnx::hasNInputShapes(context, 1)) onnx::propagateShapeFromInputToOutput(context, 0, 0);
}

// Of operators that take several tensors: each output is as its input.
void same_types(InferenceContext& context) {
  for (size_t i = 0; i < context.getNumOutputs(); ++i) {
    if (i >= context.getNumInputs()) fail_shape_inference("there are more outputs than inputs");
    onnx::propagateElemTypeFromInputToOutput(context, i, i);
    if (onnx::hasInputShape(context, i)) onnx::propagateShapeFromInputToOutput(context, i, i);
  }
}

int64_t int_attribute(InferenceContext& context, const char* name, int64_t absent) {
  const AttributeProto* a = context.getAttribute(name);
  return a && a->has_i() ? a->i() : absent;
}

std::vector<int64_t> ints_attribute(InferenceContext& context, const char* name) {
  const AttributeProto* a = context.getAttribute(name);
  return a ? std::vector<int64_t>(a->ints().begin(), a->ints().end()) : std::vector<int64_t>();
}

// The dimension that an attribute names, counted from the front.
int dimension_at(InferenceContext& context, const onnx::TensorShapeProto& shape, const char* axis_attribute) {
  int64_t axis = int_attribute(context, axis_attribute, 0);
  if (axis < 0) axis += shape.dim_size();
  if (axis < 0 || axis >= shape.dim_size())
    fail_shape_inference(axis_attribute, " ", axis, " is outside a tensor of rank ", shape.dim_size());
  return static_cast<int>(axis);
}

int64_t known_size(const onnx::TensorShapeProto& shape, int dimension) {
  return shape.dim(dimension).has_dim_value() ? shape.dim(dimension).dim_value() : -1;
}

void set_size(onnx::TensorShapeProto& shape, int dimension, int64_t size) {
  shape.mutable_dim(dimension)->clear_value();
  if (size >= 0) shape.mutable_dim(dimension)->set_dim_value(size);
}

// The ranks' `parts` of a dimension joined, or the one of rank `index`. -1: not known.
int64_t gathered_size(const std::vector<int64_t>& parts) {
  return std::accumulate(parts.begin(), parts.end(), int64_t{0});
}
int64_t scattered_size(const std::vector<int64_t>& parts, int64_t index) {
  return index >= 0 && index < static_cast<int64_t>(parts.size()) ? parts[static_cast<size_t>(index)] : -1;
}
int64_t times(int64_t size, int64_t group_size) {
  return size >= 0 && group_size > 0 ? size * group_size : -1;
}
int64_t part_of(int64_t size, int64_t group_size) {
  return size >= 0 && group_size > 0 && size % group_size == 0 ? size / group_size : -1;
}

// AllGather and ReduceScatter: the input's shape with another size along tensor_axis. Uneven parts whose sizes are not given leave it open.
void sized_axis(InferenceContext& context, size_t place, bool gathers) {
  onnx::propagateElemTypeFromInputToOutput(context, place, place);
  if (!onnx::hasInputShape(context, place)) return;
  onnx::TensorShapeProto shape = onnx::getInputShape(context, place);
  int dimension = dimension_at(context, shape, "tensor_axis");
  auto parts = ints_attribute(context, "sizes");
  int64_t size = known_size(shape, dimension), group_size = int_attribute(context, "group_size", -1), made = -1;
  if (!parts.empty()) {
    made = gathers ? gathered_size(parts) : scattered_size(parts, int_attribute(context, "index", -1));
  } else if (int_attribute(context, "uneven", 0) == 0) {
    made = gathers ? times(size, group_size) : part_of(size, group_size);
  }
  set_size(shape, dimension, made);
  onnx::updateOutputShape(context, place, shape);
}
void sized_axes(InferenceContext& context) {
  for (size_t i = 0; i < context.getNumOutputs(); ++i) {
    if (i >= context.getNumInputs()) fail_shape_inference("there are more outputs than inputs");
    sized_axis(context, i, /*gathers=*/false);
  }
}

// AllToAll: split_axis becomes smaller, concat_axis larger by the number of ranks.
void exchanged_axes(InferenceContext& context) {
  onnx::propagateElemTypeFromInputToOutput(context, 0, 0);
  if (!onnx::hasNInputShapes(context, 1)) return;
  onnx::TensorShapeProto shape = onnx::getInputShape(context, 0);
  int split = dimension_at(context, shape, "split_axis"), joined = dimension_at(context, shape, "concat_axis");
  int64_t group_size = int_attribute(context, "group_size", -1);
  if (split != joined) {
    set_size(shape, split, part_of(known_size(shape, split), group_size));
    set_size(shape, joined, times(known_size(shape, joined), group_size));
  }
  onnx::updateOutputShape(context, 0, shape);
}

// `several`: tensors of one type, each of which becomes the output in its place, by one exchange of all.
OpSchema base(const char* name, const char* doc, bool several = false) {
  const auto form = several ? OpSchema::Variadic : OpSchema::Single;
  OpSchema schema(name, __FILE__, __LINE__);
  schema.SetDomain(kCommunicationDomain)
      .SinceVersion(1)
      .SetDoc(doc)
      .Input(0, "X", "The tensor on this rank", "T", form, true, 1)
      .Output(0, "Y", "The tensor after communication", "T", form, true, 1)
      .TypeConstraint("T", OpSchema::all_tensor_types_ir13(), "Any tensor")
      .Attr("axis", "The mesh axis along which ranks communicate: data, pipeline or tensor", AttributeProto::STRING)
      .TypeAndShapeInferenceFunction(several ? same_types : same_type);
  return schema;
}

OpSchema collective(const char* name, const char* doc, bool several = false) {
  return base(name, doc, several).Attr("group_size", "The number of ranks along the axis", AttributeProto::INT, static_cast<int64_t>(-1));
}

OpSchema with_axis(OpSchema schema) {
  return schema.Attr("tensor_axis", "The tensor's axis that is cut", AttributeProto::INT, static_cast<int64_t>(0))
      .Attr("uneven", "1 where ranks hold parts of different sizes", AttributeProto::INT, static_cast<int64_t>(0))
      .Attr("sizes", "The size each rank holds along the axis, where they are known and uneven", AttributeProto::INTS, false)
      .Attr("index", "This rank's index along the mesh axis, where its part's size depends on it", AttributeProto::INT,
            static_cast<int64_t>(-1));
}

OpSchema channels_last(OpSchema schema) {
  return schema.Attr("channels_last",
                     "1 where devices had best hold the tensor [N, C, H, W] as [N, H, W, C], on all ranks: a convolution made it",
                     AttributeProto::INT, static_cast<int64_t>(0));
}

OpSchema with_reduction(OpSchema schema) {
  return schema.Attr("reduction", "sum, max, min, product or mean", AttributeProto::STRING, std::string("sum"));
}

OpSchema border(const char* name, const char* doc, const char* peer) {
  return channels_last(
      base(name, doc).Attr("peer", peer, AttributeProto::INT).Attr("tag", "The number of the route in plan.json", AttributeProto::INT));
}

void register_all() {
  auto& domains = onnx::OpSchemaRegistry::DomainToVersionRange::Instance();
  if (!domains.Map().count(kCommunicationDomain)) domains.AddDomainToVersion(kCommunicationDomain, 1, 1);
  std::vector<OpSchema> schemas;
  schemas.push_back(border("Send", "Marks a value that leaves its stage. The schedule's actions move it.", "The stage it goes to"));
  schemas.push_back(
      border("Recv", "Marks a value that comes from another stage. The schedule's actions move it.", "The stage it comes from"));
  schemas.push_back(
      channels_last(with_reduction(collective("AllReduce", "Every rank gets the elementwise reduction of all ranks' tensors.", true))));
  schemas.push_back(channels_last(with_axis(collective(
                                      "AllGather", "Every rank gets the ranks' tensors joined along tensor_axis, in the order of ranks.")))
                        .TypeAndShapeInferenceFunction([](InferenceContext& c) { sized_axis(c, 0, true); }));
  schemas.push_back(
      channels_last(with_axis(with_reduction(collective(
                        "ReduceScatter", "The tensors are reduced elementwise; each rank gets its part along tensor_axis.", true))))
          .TypeAndShapeInferenceFunction(sized_axes));
  schemas.push_back(
      collective("AllToAll", "The tensor is cut along split_axis, part k goes to rank k, and what arrives is joined along concat_axis.")
          .Attr("split_axis", "The axis that is cut", AttributeProto::INT, static_cast<int64_t>(0))
          .Attr("concat_axis", "The axis that is joined", AttributeProto::INT, static_cast<int64_t>(0))
          .TypeAndShapeInferenceFunction(exchanged_axes));
  schemas.push_back(collective("Broadcast", "Every rank gets the root's tensor.")
                        .Attr("root", "The index of the root along the axis", AttributeProto::INT, static_cast<int64_t>(0)));
  schemas.push_back(with_axis(collective("HaloExchange", "The tensor grows along tensor_axis by its neighbours' rows."))
                        .Attr("before", "Rows taken from the rank before", AttributeProto::INT, static_cast<int64_t>(0))
                        .Attr("after", "Rows taken from the rank after", AttributeProto::INT, static_cast<int64_t>(0))
                        .TypeAndShapeInferenceFunction([](InferenceContext& c) { onnx::propagateElemTypeFromInputToOutput(c, 0, 0); }));
  for (OpSchema& schema : schemas) onnx::RegisterSchema(std::move(schema), 0, false);
  register_gradient_schemas();
}

}  // namespace

bool communicates(const Node& node) {
  static const char* const names[] = {"Send", "Recv", "AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Broadcast", "HaloExchange"};
  return node.domain == kCommunicationDomain && std::find(std::begin(names), std::end(names), node.op) != std::end(names);
}

void register_communication_schemas() {
  static std::once_flag once;
  std::call_once(once, register_all);
}

}  // namespace fretsaw
