// Schemas of further gradient operators: of recurrent ones, image regions and samples, running products and determinants.
#include "graph/gradient_schema_parts.h"

namespace fretsaw::gradient_schemas {
namespace {

// Each result is like the input whose gradient it is: all but sequence_lens have one.
void recurrent_shapes(InferenceContext& context) {
  for (size_t o = 0; o < context.getNumOutputs(); ++o) like(context, o < 4 ? o : o + 1, o);
}

OpSchema recurrent(const char* name, const char* doc, bool is_lstm) {
  OpSchema schema(name, __FILE__, __LINE__);
  schema.SetDomain(kCommunicationDomain)
      .SinceVersion(1)
      .SetDoc(doc)
      .TypeConstraint("T", {"tensor(float16)", "tensor(bfloat16)", "tensor(float)", "tensor(double)"}, "Floating-point numbers")
      .TypeConstraint("I", {"tensor(int32)"}, "Lengths")
      .TypeAndShapeInferenceFunction(recurrent_shapes);
  std::vector<const char*> operands = {"X", "W", "R", "B", "sequence_lens", "initial_h"}, results = {"Y", "Y_h"};
  if (is_lstm) operands.insert(operands.end(), {"initial_c", "P"}), results.push_back("Y_c");
  int input = 0, output = 0;
  for (const char* operand : operands) {
    const bool lengths = input == 4;
    schema.Input(input, operand, "The operator's input", lengths ? "I" : "T", input < 3 ? OpSchema::Single : OpSchema::Optional);
    if (!lengths) schema.Output(output++, "d" + std::string(operand), "The gradient of " + std::string(operand), "T", OpSchema::Optional);
    ++input;
  }
  schema.Input(input++, "Y", "The operator's states after all steps", "T");
  for (const char* result : results)
    schema.Input(input++, "d" + std::string(result), "The gradient of " + std::string(result), "T", OpSchema::Optional);
  for (const char* attribute : {"activation_alpha", "activation_beta"})
    schema.Attr(attribute, "As the operator's", AttributeProto::FLOATS, false);
  schema.Attr("activations", "As the operator's", AttributeProto::STRINGS, false)
      .Attr("clip", "As the operator's", AttributeProto::FLOAT, false)
      .Attr("direction", "As the operator's", AttributeProto::STRING, std::string("forward"))
      .Attr("hidden_size", "As the operator's", AttributeProto::INT, false);
  for (const char* attribute : {"layout", is_lstm ? "input_forget" : "linear_before_reset"})
    schema.Attr(attribute, "As the operator's", AttributeProto::INT, static_cast<int64_t>(0));
  return schema;
}

std::vector<OpSchema> recurrent_schemas() {
  return {recurrent("LSTMGrad", "The gradients of LSTM.", true), recurrent("GRUGrad", "The gradients of GRU.", false),
          recurrent("RNNGrad", "The gradients of RNN.", false)};
}

std::vector<OpSchema> sampling_schemas() {
  return {base("GridSampleGrad", "The gradients of GridSample.", "dY")
              .Input(1, "X", "GridSample's image [N, C, ...]", "T")
              .Input(2, "grid", "GridSample's points [N, ..., r]", "T")
              .Output(0, "dX", "The gradient of X", "T", OpSchema::Optional)
              .Output(1, "dgrid", "The gradient of the grid", "T", OpSchema::Optional)
              .Attr("mode", "As the operator's", AttributeProto::STRING, std::string("linear"))
              .Attr("padding_mode", "As the operator's", AttributeProto::STRING, std::string("zeros"))
              .Attr("align_corners", "As the operator's", AttributeProto::INT, static_cast<int64_t>(0))
              .TypeAndShapeInferenceFunction(like_inputs_from_1),
          base("RoiAlignGrad", "The gradient of RoiAlign's image.", "dY")
              .Input(1, "X", "RoiAlign's image [N, C, H, W]", "T")
              .Input(2, "rois", "RoiAlign's regions [R, 4]", "T")
              .Input(3, "batch_indices", "The image of each region [R]", "I")
              .Output(0, "dX", "The gradient of X", "T")
              .TypeConstraint("I", {"tensor(int64)"}, "Indices")
              .Attr("mode", "As the operator's", AttributeProto::STRING, std::string("avg"))
              .Attr("coordinate_transformation_mode", "As the operator's", AttributeProto::STRING, std::string("half_pixel"))
              .Attr("output_height", "As the operator's", AttributeProto::INT, static_cast<int64_t>(1))
              .Attr("output_width", "As the operator's", AttributeProto::INT, static_cast<int64_t>(1))
              .Attr("sampling_ratio", "As the operator's", AttributeProto::INT, static_cast<int64_t>(0))
              .Attr("spatial_scale", "As the operator's", AttributeProto::FLOAT, 1.0F)
              .TypeAndShapeInferenceFunction(like_input<1>),
          base("MaxRoiPoolGrad", "The gradient of MaxRoiPool's image.", "dY")
              .Input(1, "X", "MaxRoiPool's image [N, C, H, W]", "T")
              .Input(2, "rois", "MaxRoiPool's regions [R, 5]", "T")
              .Output(0, "dX", "The gradient of X", "T")
              .Attr("pooled_shape", "As the operator's", AttributeProto::INTS)
              .Attr("spatial_scale", "As the operator's", AttributeProto::FLOAT, 1.0F)
              .TypeAndShapeInferenceFunction(like_input<1>)};
}

// Each result is like the input of its number.
void like_own_inputs(InferenceContext& context) {
  for (size_t o = 0; o < context.getNumOutputs(); ++o) like(context, o, o);
}

OpSchema linear_attention() {
  OpSchema schema("LinearAttentionGrad", __FILE__, __LINE__);
  schema.SetDomain(kCommunicationDomain)
      .SinceVersion(1)
      .SetDoc("The gradients of LinearAttention.")
      .TypeConstraint("T", {"tensor(float16)", "tensor(bfloat16)", "tensor(float)", "tensor(double)"}, "Floating-point numbers")
      .TypeConstraint("S", {"tensor(float16)", "tensor(bfloat16)", "tensor(float)", "tensor(double)"}, "States")
      .TypeAndShapeInferenceFunction(like_own_inputs);
  int at = 0;
  for (const char* operand : {"query", "key", "value", "past_state", "decay", "beta"}) {
    const char* type = at == 3 ? "S" : "T";
    schema.Input(at, operand, "LinearAttention's input", type, at < 3 ? OpSchema::Single : OpSchema::Optional)
        .Output(at, "d" + std::string(operand), "The gradient of " + std::string(operand), type, OpSchema::Optional);
    ++at;
  }
  return schema.Input(6, "dY", "The gradient of the output", "T", OpSchema::Optional)
      .Input(7, "dpresent_state", "The gradient of the state after all steps", "S", OpSchema::Optional)
      .Attr("update_rule", "As the operator's", AttributeProto::STRING, std::string("gated_delta"))
      .Attr("scale", "As the operator's", AttributeProto::FLOAT, 0.0F)
      .Attr("q_num_heads", "As the operator's", AttributeProto::INT)
      .Attr("kv_num_heads", "As the operator's", AttributeProto::INT);
}

std::vector<OpSchema> product_schemas() {
  return {base("CumProdGrad", "The gradient of CumProd.", "dY")
              .Input(1, "X", "CumProd's input", "T")
              .Input(2, "axis", "CumProd's axis", "I")
              .Output(0, "dX", "The gradient of X", "T")
              .TypeConstraint("I", {"tensor(int32)", "tensor(int64)"}, "An axis")
              .Attr("exclusive", "As the operator's", AttributeProto::INT, static_cast<int64_t>(0))
              .Attr("reverse", "As the operator's", AttributeProto::INT, static_cast<int64_t>(0))
              .TypeAndShapeInferenceFunction(like_input<1>),
          base("DetGrad", "The gradient of Det: the matrix of cofactors, times dY.", "dY")
              .Input(1, "X", "Det's matrices [..., M, M]", "T")
              .Output(0, "dX", "The gradient of X", "T")
              .TypeAndShapeInferenceFunction(like_input<1>)};
}

}  // namespace

std::vector<OpSchema> other_gradient_schemas() {
  std::vector<OpSchema> schemas = recurrent_schemas();
  for (auto family : {sampling_schemas, product_schemas})
    for (OpSchema& schema : family()) schemas.push_back(std::move(schema));
  schemas.push_back(linear_attention());
  return schemas;
}

}  // namespace fretsaw::gradient_schemas
