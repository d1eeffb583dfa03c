// Attributes and schema of the operators that only devices' graphs have.
#include "graph/device_operators.h"

#include <onnx/defs/schema.h>
#include <onnx/defs/shape_inference.h>

#include <mutex>

#include "graph/errors.h"

namespace fretsaw {
namespace {

using onnx::AttributeProto;
using onnx::OpSchema;

void require(bool holds, const char* problem) {
  if (!holds) throw Error(std::string("StridedAttention ") + problem, "report this as a fault, with the node");
}

HeadsView read_view(const Node& node, const std::string& name) {
  const std::vector<int64_t> dims = node.get_ints(name + "_dims"), strides = node.get_ints(name + "_strides");
  require(dims.size() == 4 && strides.size() == 3, "needs four dimensions and three strides for each operand");
  HeadsView view{dims[0], dims[1], dims[2], dims[3], node.get_int(name + "_offset", 0), strides[0], strides[1], strides[2]};
  for (int64_t n : {view.batches, view.heads, view.rows, view.width, view.offset, view.batch, view.head, view.row})
    require(n >= 0, "has a negative dimension, offset or stride");
  return view;
}

void write_view(Node& node, const std::string& name, const HeadsView& view) {
  node.set(name + "_dims", std::vector<int64_t>{view.batches, view.heads, view.rows, view.width});
  node.set(name + "_strides", std::vector<int64_t>{view.batch, view.head, view.row});
  node.set(name + "_offset", view.offset);
}

// Y has the shape that the node says.
void infer_strided_attention(onnx::InferenceContext& context) {
  onnx::propagateElemTypeFromInputToOutput(context, 0, 0);
  const AttributeProto* shape = context.getAttribute("y_shape");
  if (!shape) fail_shape_inference("y_shape is missing");
  onnx::TensorShapeProto made;
  for (int64_t d : shape->ints()) made.add_dim()->set_dim_value(d);
  onnx::updateOutputShape(context, 0, made);
}

OpSchema strided_attention() {
  OpSchema schema("StridedAttention", __FILE__, __LINE__);
  schema.SetDomain(kDeviceDomain)
      .SinceVersion(1)
      .SetDoc("ONNX's Attention without caches, whose operands and result are views of tensors.")
      .Input(0, "Q", "The tensor that holds the queries", "T")
      .Input(1, "K", "The tensor that holds the keys", "T")
      .Input(2, "V", "The tensor that holds the values", "T")
      .Input(3, "attn_mask", "As Attention's", "U", OpSchema::Optional)
      .Output(0, "Y", "The tensor that holds the result", "T")
      .TypeConstraint("T", {"tensor(float)", "tensor(float16)", "tensor(bfloat16)"}, "Floating-point numbers")
      .TypeConstraint("U", {"tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(bool)"}, "Floating-point numbers, or booleans")
      .Attr("y_shape", "The shape of Y", AttributeProto::INTS)
      .TypeAndShapeInferenceFunction(infer_strided_attention);
  for (const char* name : {"q", "k", "v", "y"}) {
    const std::string operand = name;
    schema.Attr(operand + "_dims", "[batches, heads, rows, width]", AttributeProto::INTS)
        .Attr(operand + "_strides", "Elements from one batch, head and row to the next", AttributeProto::INTS)
        .Attr(operand + "_offset", "Elements before the first", AttributeProto::INT, static_cast<int64_t>(0));
  }
  for (const char* name : {"is_causal", "softmax_precision"}) schema.Attr(name, "As Attention's", AttributeProto::INT, false);
  for (const char* name : {"left_window_size", "right_window_size"}) schema.Attr(name, "As Attention's", AttributeProto::INT, false);
  for (const char* name : {"scale", "softcap"}) schema.Attr(name, "As Attention's", AttributeProto::FLOAT, false);
  return schema;
}

}  // namespace

bool has_strided_form(const Node& attention) {
  for (size_t i : {4, 5, 6})
    if (attention.input(i)) return false;
  for (size_t i : {1, 2, 3})
    if (attention.out(i)) return false;
  return attention.is("Attention") && attention.inputs.size() >= 3 && attention.out(0);
}

int64_t HeadsView::last() const {
  if (batches * heads * rows * width == 0) return -1;
  return offset + (batches - 1) * batch + (heads - 1) * head + (rows - 1) * row + width - 1;
}

HeadsView dense_view(int64_t batches, int64_t heads, int64_t rows, int64_t width) {
  return {batches, heads, rows, width, 0, heads * rows * width, rows * width, width};
}

AttentionViews read_attention_views(const Node& node) {
  AttentionViews views{read_view(node, "q"), read_view(node, "k"), read_view(node, "v"), read_view(node, "y"), node.get_ints("y_shape")};
  const auto& [q, k, v, y, shape] = views;
  require(k.batches == q.batches && v.batches == q.batches && y.batches == q.batches, "has different numbers of batches");
  require(y.heads == q.heads && v.heads == k.heads && k.heads > 0 && q.heads % k.heads == 0, "has heads that do not fit each other");
  require(k.width == q.width && y.width == v.width && k.rows == v.rows && y.rows == q.rows, "has operands that do not fit each other");
  require(y.batches * y.heads * y.rows * y.width == count_of(shape) && y.last() < count_of(shape), "does not make all of Y");
  return views;
}

void write_attention_views(Node& node, const AttentionViews& views) {
  write_view(node, "q", views.q);
  write_view(node, "k", views.k);
  write_view(node, "v", views.v);
  write_view(node, "y", views.y);
  node.set("y_shape", views.shape);
}

void register_device_schemas() {
  static std::once_flag once;
  std::call_once(once, [] {
    auto& domains = onnx::OpSchemaRegistry::DomainToVersionRange::Instance();
    if (!domains.Map().count(kDeviceDomain)) domains.AddDomainToVersion(kDeviceDomain, 1, 1);
    onnx::RegisterSchema(strided_attention(), 0, false);
  });
}

}  // namespace fretsaw
