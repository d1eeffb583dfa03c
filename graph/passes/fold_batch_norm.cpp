// BatchNormalization after Conv becomes part of the convolution's weights and bias.
//
//   y = scale * (conv(x, w) + b - mean) / sqrt(variance + epsilon) + shift
//     = conv(x, w * f) + (b - mean) * f + shift          f = scale / sqrt(variance + epsilon)   [O]
#include <cmath>

#include "graph/passes/patterns.h"

namespace fretsaw {
namespace {

bool is_float32_of(const Value* v, int64_t count) {
  return is_fixed(v) && v->constant->dtype == DType::float32 && v->constant->data && !v->constant->is_missing() &&
         v->constant->count() == count;
}

float* floats(Tensor& tensor) {
  return reinterpret_cast<float*>(mutable_data(tensor));
}

// w [O, ...] with each output channel times factors[o].
TensorPtr scale_channels(const Value& weights, const std::vector<double>& factors) {
  std::vector<double> w;
  float_values(&weights, w);
  auto scaled = make_tensor(DType::float32, weights.constant->dims);
  size_t per_channel = w.size() / factors.size();
  for (size_t i = 0; i < w.size(); ++i) floats(*scaled)[i] = static_cast<float>(w[i] * factors[i / per_channel]);
  return scaled;
}

Value* add_derived(Graph& graph, TensorPtr tensor, const Value& source, const std::string& suffix) {
  Value* v = graph.add_constant(graph.fresh_name(source.name + suffix), std::move(tensor));
  v->source = source.source_name();
  return v;
}

void fold(Graph& graph, Match& m, Node& norm, const Node& conv) {
  const Value* weights = conv.inputs[1];  // [O, C / groups, ...]
  auto channels = static_cast<size_t>(weights->constant->dims[0]);
  std::vector<double> scale, shift, mean, variance, bias(channels, 0), factors(channels);
  float_values(norm.inputs[1], scale);
  float_values(norm.inputs[2], shift);
  float_values(norm.inputs[3], mean);
  float_values(norm.inputs[4], variance);
  if (conv.input(2)) float_values(conv.inputs[2], bias);
  double epsilon = norm.get_float("epsilon", 1e-5F);
  auto folded_bias = make_tensor(DType::float32, {static_cast<int64_t>(channels)});
  for (size_t o = 0; o < channels; ++o) {
    factors[o] = scale[o] / std::sqrt(variance[o] + epsilon);
    floats(*folded_bias)[o] = static_cast<float>((bias[o] - mean[o]) * factors[o] + shift[o]);
  }
  Value* w = add_derived(graph, scale_channels(*weights, factors), *weights, "_folded");
  Value* b = add_derived(graph, folded_bias, conv.input(2) ? *conv.inputs[2] : *norm.inputs[2], "_folded");
  Value* x = conv.inputs[0];
  std::vector<Attribute> attributes = conv.attributes;
  m.replace("Conv", {x, w, b}, attributes);
}

}  // namespace

void fold_batch_norm(Graph& graph) {
  if (!has_any(graph, {"BatchNormalization"})) return;
  Matcher matcher(graph);
  matcher.run([&](Node& norm) {
    if (!norm.is("BatchNormalization") || norm.inputs.size() != 5 || norm.get_int("training_mode", 0) != 0) return;
    for (size_t i = 1; i < norm.outputs.size(); ++i)
      if (norm.outputs[i]) return;
    Match m(matcher, norm);
    Node* conv = m.made_by(norm.inputs[0], "Conv");
    const Value* weights = conv ? conv->input(1) : nullptr;
    if (!weights || !is_fixed(weights) || weights->constant->dims.empty() || !is_float32_of(weights, weights->constant->count())) return;
    int64_t channels = weights->constant->dims[0];
    for (size_t i = 1; i < 5; ++i)
      if (!is_float32_of(norm.inputs[i], channels)) return;
    if (channels == 0 || (conv->input(2) && !is_float32_of(conv->inputs[2], channels)) || !m.closed()) return;
    fold(graph, m, norm, *conv);
  });
}

}  // namespace fretsaw
