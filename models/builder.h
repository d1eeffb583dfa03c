// Writes a model node by node: names, weights that are generated when written, and the layers that architectures share.
#pragma once
#include <string>
#include <vector>

#include "graph/ir.h"
#include "models/settings.h"

namespace fretsaw {

class Builder {
 public:
  Builder(const std::string& name, Settings& settings);

  // --- edges ---
  Value* input(const std::string& name, DType dtype, Shape shape);
  void output(const std::string& name, Value* value, Shape shape);  // renames the value
  // Weights: numbers of mean `mean` and standard deviation `deviation`, by (seed, name, element).
  Value* weight(const std::string& name, Dims dims, double deviation, double mean = 0);
  Value* ints(std::vector<int64_t> values);  // [n]; equal ones are shared
  Value* int_scalar(int64_t value);
  Value* scalar(double value);  // of the model's type
  DType dtype() const { return dtype_; }

  // --- nodes ---
  Value* op(const std::string& type, std::vector<Value*> inputs, std::vector<Attribute> attributes = {}, const std::string& name = "");
  std::vector<Value*> split(Value* x, int64_t parts, int64_t axis);  // into equal parts
  Value* reshape(Value* x, std::vector<int64_t> shape) { return op("Reshape", {x, ints(std::move(shape))}); }
  Value* transpose(Value* x, std::vector<int64_t> permutation);
  Value* cast(Value* x, DType to);

  // --- layers; names are scopes, as "encoder.0.attention" ---
  Value* linear(const std::string& name, Value* x, int64_t in, int64_t out, bool bias = true, double gain = 1);  // [..., in] -> [..., out]
  Value* conv(const std::string& name, Value* x, int64_t in, int64_t out, int64_t kernel, int64_t stride, int64_t pad, int64_t groups = 1,
              bool bias = false);
  Value* batch_norm(const std::string& name, Value* x, int64_t channels, double scale = 1);
  Value* layer_norm(const std::string& name, Value* x, int64_t size, double epsilon);
  Value* rms_norm(const std::string& name, Value* x, int64_t size, double epsilon);  // in pieces, as exporters write it
  Value* gelu(Value* x, bool tanh_form = false);
  // Scaled dot-product attention on [batch, heads, sequence, head size]; `mask` is added to the scores, null for none.
  Value* attention(Value* q, Value* k, Value* v, Value* mask, int64_t head_size);
  Value* split_heads(Value* x, int64_t heads, int64_t head_size);  // [B, S, heads*size] -> [B, heads, S, size]
  Value* join_heads(Value* x, int64_t heads, int64_t head_size);   // and back

  Model finish();

 private:
  std::string scoped(const std::string& op_type);

  Model model_;
  Graph& graph_;
  DType dtype_;
  uint64_t seed_;
  int64_t opset_;
  std::map<std::vector<int64_t>, Value*> shared_ints_;
  std::map<std::string, int> counters_;
};

// Adds the builders of a family to the list.
struct Architecture {
  std::string name, summary;
  std::vector<std::string> keys;
  Model (*build)(const std::string& name, Settings& settings);
};
void add_convolutional(std::vector<Architecture>& list);  // mlp, resnet*, vgg16, unet, mobilenet_v2
void add_transformers(std::vector<Architecture>& list);   // bert, gpt2, small_gpt, llama, vit

}  // namespace fretsaw
