// Schemas of the gradient operators, with their shape inference.
#include "graph/gradient_operators.h"
#include "graph/gradient_schema_parts.h"

namespace fretsaw {

using namespace gradient_schemas;

namespace {

// dY [n, o, ...], X [n, c, ...] -> [o, c / group, kernel...]
void weight_shape(InferenceContext& context) {
  onnx::propagateElemTypeFromInputToOutput(context, 0, 0);
  const AttributeProto* kernel = context.getAttribute("kernel_shape");
  if (!kernel || !onnx::hasNInputShapes(context, 2)) return;
  const auto &dy = onnx::getInputShape(context, 0), &x = onnx::getInputShape(context, 1);
  if (dy.dim_size() < 2 || x.dim_size() < 2) fail_shape_inference("operands without channels");
  onnx::TensorShapeProto made;
  *made.add_dim() = dy.dim(1);
  const int64_t group = int_attribute(context, "group", 1);
  auto* channels = made.add_dim();
  if (x.dim(1).has_dim_value() && group > 0) channels->set_dim_value(x.dim(1).dim_value() / group);
  for (int64_t k : kernel->ints()) made.add_dim()->set_dim_value(k);
  onnx::updateOutputShape(context, 0, made);
}

void batch_norm_shapes(InferenceContext& context) {
  like(context, 1, 0);
  for (size_t o : {1, 2})
    if (o < context.getNumOutputs()) like(context, 2, o);
}

// The dimensions of X from `axis` on.
void row_shape(InferenceContext& context) {
  onnx::propagateElemTypeFromInputToOutput(context, 1, 0);
  if (!onnx::hasInputShape(context, 1)) return;
  const auto& x = onnx::getInputShape(context, 1);
  int64_t axis = int_attribute(context, "axis", -1);
  if (axis < 0) axis += x.dim_size();
  if (axis < 0 || axis > x.dim_size()) fail_shape_inference("axis is outside a tensor of rank ", x.dim_size());
  onnx::TensorShapeProto made;
  for (int d = static_cast<int>(axis); d < x.dim_size(); ++d) *made.add_dim() = x.dim(d);
  onnx::updateOutputShape(context, 0, made);
}

OpSchema with_window(OpSchema schema) {
  for (const char* name : {"kernel_shape", "strides", "dilations", "pads"})
    schema.Attr(name, "As the operator's", AttributeProto::INTS, false);
  return schema.Attr("auto_pad", "As the operator's", AttributeProto::STRING, std::string("NOTSET"));
}

OpSchema convolution(const char* name, const char* doc) {
  return with_window(base(name, doc, "dY")).Attr("group", "As Conv's", AttributeProto::INT, static_cast<int64_t>(1));
}

OpSchema pooling(const char* name, const char* doc) {
  return with_window(base(name, doc, "dY")).Attr("ceil_mode", "As the operator's", AttributeProto::INT, static_cast<int64_t>(0));
}

OpSchema row_norm(const char* name, const char* doc) {
  return base(name, doc, "dY")
      .Input(1, "X", "The norm's input", "T")
      .Attr("axis", "As the norm's", AttributeProto::INT, static_cast<int64_t>(-1))
      .Attr("epsilon", "As the norm's", AttributeProto::FLOAT, 1e-5F);
}
OpSchema row_norm_input(const char* name, const char* doc) {
  return row_norm(name, doc)
      .Input(2, "scale", "The norm's scale", "T")
      .Output(0, "dX", "The gradient of X", "T")
      .TypeAndShapeInferenceFunction(like_input<1>);
}
OpSchema row_norm_scale(const char* name, const char* doc) {
  return row_norm(name, doc).Output(0, "dScale", "The gradient of the scale", "T").TypeAndShapeInferenceFunction(row_shape);
}

OpSchema loss(const char* name, const char* doc) {
  return base(name, doc, "dLoss")
      .Input(1, "scores", "The loss's scores [N, C, ...]", "T")
      .Input(2, "labels", "The loss's labels [N, ...]", "I")
      .Input(3, "weights", "The loss's weights [C]", "T", OpSchema::Optional)
      .Output(0, "dScores", "The gradient of the scores", "T")
      .TypeConstraint("I", {"tensor(int32)", "tensor(int64)"}, "Indices")
      .Attr("reduction", "As the loss's", AttributeProto::STRING, std::string("mean"))
      .Attr("ignore_index", "As the loss's", AttributeProto::INT, false)
      .TypeAndShapeInferenceFunction(like_input<1>);
}

std::vector<OpSchema> movement_schemas() {
  std::vector<OpSchema> schemas;
  schemas.push_back(with_shape(base("SumTo", "The sum over what a tensor of this shape was broadcast along.", "X"), 1)
                        .Output(0, "Y", "The sum", "T")
                        .TypeAndShapeInferenceFunction(shaped_by<1>));
  schemas.push_back(with_shape(base("GatherGrad", "The rows of dY added up where Gather took them from.", "dY"), 2)
                        .Input(1, "indices", "Gather's indices", "I")
                        .Output(0, "dX", "The gradient of Gather's data", "T")
                        .TypeConstraint("I", {"tensor(int32)", "tensor(int64)"}, "Indices")
                        .Attr("axis", "As Gather's", AttributeProto::INT, static_cast<int64_t>(0))
                        .TypeAndShapeInferenceFunction(shaped_by<2>));
  return schemas;
}

std::vector<OpSchema> window_schemas() {
  std::vector<OpSchema> schemas;
  schemas.push_back(with_shape(convolution("ConvGradInput", "The gradient of a convolution's input."), 2)
                        .Input(1, "W", "Conv's weights", "T")
                        .Output(0, "dX", "The gradient of Conv's X", "T")
                        .TypeAndShapeInferenceFunction(shaped_by<2>));
  schemas.push_back(convolution("ConvGradWeight", "The gradient of a convolution's weights.")
                        .Input(1, "X", "Conv's input", "T")
                        .Output(0, "dW", "The gradient of Conv's W", "T")
                        .TypeAndShapeInferenceFunction(weight_shape));
  schemas.push_back(convolution("DeformConvGrad", "The gradients of DeformConv.")
                        .Input(1, "X", "DeformConv's input", "T")
                        .Input(2, "W", "DeformConv's weights", "T")
                        .Input(3, "offset", "DeformConv's offsets", "T")
                        .Input(4, "mask", "DeformConv's mask", "T", OpSchema::Optional)
                        .Output(0, "dX", "The gradient of X", "T", OpSchema::Optional)
                        .Output(1, "dW", "The gradient of W", "T", OpSchema::Optional)
                        .Output(2, "doffset", "The gradient of the offsets", "T", OpSchema::Optional)
                        .Output(3, "dmask", "The gradient of the mask", "T", OpSchema::Optional)
                        .Attr("offset_group", "As DeformConv's", AttributeProto::INT, static_cast<int64_t>(1))
                        .TypeAndShapeInferenceFunction(like_inputs_from_1));
  schemas.push_back(pooling("MaxPoolGrad", "The gradient of MaxPool: the first of the largest in a window, or the last NaN, takes it.")
                        .Input(1, "X", "MaxPool's input", "T")
                        .Output(0, "dX", "The gradient of MaxPool's X", "T")
                        .TypeAndShapeInferenceFunction(like_input<1>));
  schemas.push_back(with_shape(pooling("AveragePoolGrad", "The gradient of AveragePool."), 1)
                        .Output(0, "dX", "The gradient of AveragePool's X", "T")
                        .Attr("count_include_pad", "As AveragePool's", AttributeProto::INT, static_cast<int64_t>(0))
                        .TypeAndShapeInferenceFunction(shaped_by<1>));
  return schemas;
}

std::vector<OpSchema> norm_schemas() {
  std::vector<OpSchema> schemas;
  schemas.push_back(
      base("BatchNormalizationGrad", "The gradients of BatchNormalization in training mode.", "dY")
          .Input(1, "X", "The norm's input", "T")
          .Input(2, "scale", "The norm's scale", "U")
          .Output(0, "dX", "The gradient of X", "T", OpSchema::Optional)
          .Output(1, "dScale", "The gradient of the scale", "U", OpSchema::Optional)
          .Output(2, "dB", "The gradient of the shift", "U", OpSchema::Optional)
          .TypeConstraint("U", {"tensor(float16)", "tensor(bfloat16)", "tensor(float)", "tensor(double)"}, "Floating-point numbers")
          .Attr("epsilon", "As the norm's", AttributeProto::FLOAT, 1e-5F)
          .TypeAndShapeInferenceFunction(batch_norm_shapes));
  schemas.push_back(row_norm_input("LayerNormalizationGrad", "The gradient of LayerNormalization's input."));
  schemas.push_back(row_norm_scale("LayerNormalizationGradScale", "The gradient of LayerNormalization's scale."));
  schemas.push_back(row_norm_input("RMSNormalizationGrad", "The gradient of RMSNormalization's input."));
  schemas.push_back(row_norm_scale("RMSNormalizationGradScale", "The gradient of RMSNormalization's scale."));
  schemas.push_back(loss("SoftmaxCrossEntropyLossGrad", "The gradient of SoftmaxCrossEntropyLoss by its first output."));
  schemas.push_back(loss("NegativeLogLikelihoodLossGrad", "The gradient of NegativeLogLikelihoodLoss."));
  return schemas;
}

// dQ, dK, dV are like Q, K, V.
void attention_shapes(InferenceContext& context) {
  for (size_t o : {0, 1, 2})
    if (o < context.getNumOutputs()) like(context, o + 1, o);
}

std::vector<OpSchema> attention_schemas() {
  OpSchema schema = base("AttentionGrad", "The gradients of Attention's queries, keys and values.", "dY");
  schema.Input(1, "Q", "Attention's queries", "T")
      .Input(2, "K", "Attention's keys", "T")
      .Input(3, "V", "Attention's values", "T")
      .Input(4, "attn_mask", "Attention's mask", "U", OpSchema::Optional)
      .Output(0, "dQ", "The gradient of Q", "T", OpSchema::Optional)
      .Output(1, "dK", "The gradient of K", "T", OpSchema::Optional)
      .Output(2, "dV", "The gradient of V", "T", OpSchema::Optional)
      .TypeConstraint("U", {"tensor(bool)", "tensor(float16)", "tensor(bfloat16)", "tensor(float)", "tensor(double)"}, "A mask")
      .Attr("scale", "As Attention's", AttributeProto::FLOAT, false)
      .Attr("softcap", "As Attention's", AttributeProto::FLOAT, 0.0F)
      .TypeAndShapeInferenceFunction(attention_shapes);
  for (const char* name : {"q_num_heads", "kv_num_heads"}) schema.Attr(name, "As Attention's", AttributeProto::INT, false);
  schema.Attr("is_causal", "As Attention's", AttributeProto::INT, static_cast<int64_t>(0));
  for (const char* name : {"left_window_size", "right_window_size"})
    schema.Attr(name, "As Attention's", AttributeProto::INT, static_cast<int64_t>(-1));
  return {schema};
}

template <int32_t kType>
void drawn_shape(InferenceContext& context) {
  onnx::updateOutputElemType(context, 0, kType);
  bool found = false;
  const onnx::TensorShapeProto shape = onnx::getShapeInput(context, 0, found);
  if (found) onnx::updateOutputShape(context, 0, shape);
}

// The rows of scores [N, C], as float32 [N].
void row_losses(InferenceContext& context) {
  for (size_t o = 0; o < context.getNumOutputs(); ++o) {
    onnx::updateOutputElemType(context, o, onnx::TensorProto::FLOAT);
    if (!onnx::hasInputShape(context, 0)) continue;
    const auto& scores = onnx::getInputShape(context, 0);
    if (scores.dim_size() != 2) fail_shape_inference("scores are no rows of classes");
    onnx::TensorShapeProto rows;
    *rows.add_dim() = scores.dim(0);
    onnx::updateOutputShape(context, o, rows);
  }
}

OpSchema of_rows(const char* name, const char* doc) {
  OpSchema schema(name, __FILE__, __LINE__);
  return schema.SetDomain(kCommunicationDomain)
      .SinceVersion(1)
      .SetDoc(doc)
      .TypeConstraint("T", {"tensor(float)", "tensor(float16)", "tensor(bfloat16)"}, "Scores")
      .TypeConstraint("L", {"tensor(float)"}, "Losses")
      .TypeConstraint("I", {"tensor(int64)"}, "Classes")
      .Attr("label_smoothing", "The share of a target's probability that all classes get", AttributeProto::FLOAT, 0.0f)
      .Attr("ignore_index", "The target that counts for nothing", AttributeProto::INT, false)
      .Attr("classes", "How many of the scores count, the first ones of each row: C where it is left out, and at most C",
            AttributeProto::INT, false);
}

std::vector<OpSchema> cross_entropy_schemas() {
  return {of_rows("CrossEntropy", "The cross-entropy of each row of scores and its class.")
              .Input(0, "scores", "[N, C]", "T")
              .Input(1, "target", "[N], 0 to classes - 1 or ignore_index", "I")
              .Output(0, "loss", "[N]", "L")
              .Output(1, "lse", "The logarithm of the sum of the scores' exponentials, [N]", "L")
              .TypeAndShapeInferenceFunction(row_losses),
          of_rows("CrossEntropyGrad", "The gradient of CrossEntropy's scores.")
              .Input(0, "dLoss", "The gradient of the losses, [N]", "L")
              .Input(1, "scores", "CrossEntropy's scores", "T")
              .Input(2, "target", "CrossEntropy's classes", "I")
              .Input(3, "lse", "What CrossEntropy gave", "L")
              .Output(0, "dScores", "[N, C], zero where scores do not count", "T")
              .TypeAndShapeInferenceFunction([](InferenceContext& context) { like(context, 1, 0); })};
}

std::vector<OpSchema> sum_schemas() {
  OpSchema sum("SquaredSum", __FILE__, __LINE__);
  sum.SetDomain(kCommunicationDomain)
      .SinceVersion(1)
      .SetDoc("The squares of all elements of all tensors, added up.")
      .Input(0, "X", "Tensors of any shapes", "T", OpSchema::Variadic, true, 1)
      .Output(0, "sum", "One number", "S")
      .TypeConstraint("T", {"tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)"}, "Numbers")
      .TypeConstraint("S", {"tensor(float)"}, "The sum")
      .TypeAndShapeInferenceFunction([](InferenceContext& context) {
        onnx::updateOutputElemType(context, 0, onnx::TensorProto::FLOAT);
        onnx::getOutputShape(context, 0);  // none: one number
      });
  return {sum};
}

// What is drawn by the index in the whole batch.
OpSchema drawn(const char* name, const char* doc) {
  OpSchema schema(name, __FILE__, __LINE__);
  schema.SetDomain(kCommunicationDomain)
      .SinceVersion(1)
      .SetDoc(doc)
      .Input(0, "shape", "The shape of the result", "S")
      .Input(1, "samples", "The first sample at hand and how many there are", "S")
      .Input(2, "counter", "Another number in every step", "S")
      .TypeConstraint("S", {"tensor(int64)"}, "Whole numbers")
      .Attr("key", "Of the generator", AttributeProto::INT, static_cast<int64_t>(0));
  return schema;
}

std::vector<OpSchema> random_schemas() {
  return {drawn("DropoutMask", "Which elements a dropout keeps, by their index in the whole batch.")
              .Output(0, "mask", "True where an element stays", "B")
              .TypeConstraint("B", {"tensor(bool)"}, "The mask")
              .Attr("ratio", "The share of elements that go", AttributeProto::FLOAT, 0.5f)
              .TypeAndShapeInferenceFunction(drawn_shape<onnx::TensorProto::BOOL>),
          drawn("RandomAt", "Random numbers, by their index in the whole batch.")
              .Input(3, "limits", "One number, or one for each element", "F", OpSchema::Optional)
              .Output(0, "numbers", "The numbers; with limits, 1 where they are below them and otherwise 0", "F")
              .TypeConstraint("F", {"tensor(float)"}, "Numbers")
              .Attr("normal", "1: of mean 0 and deviation 1; otherwise uniform from 0 to 1", AttributeProto::INT, static_cast<int64_t>(0))
              .TypeAndShapeInferenceFunction(drawn_shape<onnx::TensorProto::FLOAT>)};
}

}  // namespace

void register_gradient_schemas() {
  for (auto family : {movement_schemas, window_schemas, norm_schemas, attention_schemas, other_gradient_schemas, cross_entropy_schemas,
                      sum_schemas, random_schemas})
    for (OpSchema& schema : family()) onnx::RegisterSchema(std::move(schema), 0, false);
}

}  // namespace fretsaw
