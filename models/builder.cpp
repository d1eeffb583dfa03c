// The model builder: weights by a counter-based generator, and common layers.
#include "models/builder.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "graph/errors.h"

namespace fretsaw {
namespace {

uint64_t mix(uint64_t x) {  // the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

uint64_t hash_name(const std::string& name) {
  uint64_t h = 0xcbf29ce484222325ull;  // FNV-1a
  for (unsigned char c : name) h = (h ^ c) * 0x100000001b3ull;
  return h;
}

// Uniform with the wanted mean and standard deviation; element `i` depends on nothing but the key and i.
float element(uint64_t key, uint64_t i, float mean, float deviation) {
  auto u = static_cast<float>(mix(key + i) >> 40) * 0x1p-24f;  // [0, 1)
  return mean + deviation * 3.4641016f * (u - 0.5f);
}

uint16_t to_bfloat16(float f) {
  auto bits = std::bit_cast<uint32_t>(f);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

uint16_t to_float16(float f) {  // weights are small and finite: rounds to nearest even, values below 2^-14 become subnormal
  auto bits = std::bit_cast<uint32_t>(f);
  uint32_t sign = (bits >> 16) & 0x8000;
  float a = std::fabs(f);
  if (a >= 65504.0f) return static_cast<uint16_t>(sign | 0x7bff);
  if (a < 0x1p-14f) return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(a * 0x1p24f)));
  uint32_t rounded = (bits & 0x7fffffff) + 0xfff + ((bits >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}

template <typename T, typename Convert>
void fill(uint64_t first_byte, std::span<std::byte> bytes, uint64_t key, float mean, float deviation, Convert convert) {
  uint64_t first = first_byte / sizeof(T);
  for (size_t i = 0; i < bytes.size() / sizeof(T); ++i) {
    T v = convert(element(key, first + i, mean, deviation));
    std::memcpy(bytes.data() + i * sizeof(T), &v, sizeof(T));
  }
}

void fill_weights(DType dtype, uint64_t first_byte, std::span<std::byte> bytes, uint64_t key, float mean, float deviation) {
  switch (dtype) {
    case DType::float16:
      return fill<uint16_t>(first_byte, bytes, key, mean, deviation, to_float16);
    case DType::bfloat16:
      return fill<uint16_t>(first_byte, bytes, key, mean, deviation, to_bfloat16);
    case DType::float64:
      return fill<double>(first_byte, bytes, key, mean, deviation, [](float f) { return double{f}; });
    default:
      return fill<float>(first_byte, bytes, key, mean, deviation, [](float f) { return f; });
  }
}

constexpr size_t kGenerateFrom = 1 << 16;  // smaller weights are simply made

}  // namespace

Builder::Builder(const std::string& name, Settings& settings)
    : graph_(*(model_.graph = std::make_shared<Graph>())), dtype_(settings.dtype()), seed_(settings.seed()), opset_(settings.opset()) {
  model_.ir_version = opset_ >= 21 ? 10 : 8;
  if (opset_ >= 23) model_.ir_version = 11;
  model_.opsets[""] = opset_;
  graph_.name = name;
}

Value* Builder::input(const std::string& name, DType dtype, Shape shape) {
  Value* v = graph_.add_value(name, Type::tensor(dtype, std::move(shape)));
  graph_.inputs.push_back(v);
  return v;
}

void Builder::output(const std::string& name, Value* value, Shape shape) {
  value->name = name;
  value->type = Type::tensor(dtype_, std::move(shape));
  graph_.outputs.push_back(value);
}

Value* Builder::weight(const std::string& name, Dims dims, double deviation, double mean) {
  uint64_t key = mix(seed_ ^ hash_name(name));
  auto m = static_cast<float>(mean), d = static_cast<float>(deviation);
  if (bytes_of(dtype_, count_of(dims)) < kGenerateFrom) {
    auto t = make_tensor(dtype_, dims);
    t->name = name;
    fill_weights(dtype_, 0, {mutable_data(*t), t->bytes()}, key, m, d);
    return graph_.add_constant(name, t);
  }
  auto t = std::make_shared<Tensor>();
  t->name = name;
  t->dtype = dtype_;
  t->dims = std::move(dims);
  t->generate = [=, dtype = dtype_](uint64_t first, std::span<std::byte> bytes) { fill_weights(dtype, first, bytes, key, m, d); };
  return graph_.add_constant(name, t);
}

Value* Builder::ints(std::vector<int64_t> values) {
  Value*& v = shared_ints_[values];
  if (!v) v = graph_.add_constant(graph_.fresh_name("ints"), make_int64s(values));
  return v;
}

Value* Builder::int_scalar(int64_t value) {
  return graph_.add_constant(graph_.fresh_name("int"), make_int64(value));
}

Value* Builder::scalar(double value) {
  auto t = make_tensor(dtype_, {});
  auto f = static_cast<float>(value);
  fill_weights(dtype_, 0, {mutable_data(*t), t->bytes()}, 0, f, 0);
  return graph_.add_constant(graph_.fresh_name("scalar"), t);
}

std::string Builder::scoped(const std::string& op_type) {
  int k = counters_[op_type]++;
  return k == 0 ? op_type : op_type + "_" + std::to_string(k);
}

Value* Builder::op(const std::string& type, std::vector<Value*> inputs, std::vector<Attribute> attributes, const std::string& name) {
  std::string value = name.empty() ? scoped(type) : name + "." + type;
  Node* node = graph_.add_node(type, std::move(inputs), {graph_.fresh_name(value)}, std::move(attributes));
  return node->outputs[0];
}

std::vector<Value*> Builder::split(Value* x, int64_t parts, int64_t axis) {
  std::string base = scoped("Split");
  std::vector<std::string> names;
  for (int64_t i = 0; i < parts; ++i) names.push_back(base + "." + std::to_string(i));
  std::vector<Attribute> attributes = {{"axis", axis, "", ""}};
  if (opset_ >= 18) attributes.push_back({"num_outputs", parts, "", ""});
  return graph_.add_node("Split", {x}, names, attributes)->outputs;
}

Value* Builder::transpose(Value* x, std::vector<int64_t> permutation) {
  return op("Transpose", {x}, {{"perm", std::move(permutation), "", ""}});
}

Value* Builder::cast(Value* x, DType to) {
  return op("Cast", {x}, {{"to", static_cast<int64_t>(to), "", ""}});
}

Value* Builder::linear(const std::string& name, Value* x, int64_t in, int64_t out, bool bias, double gain) {
  Value* w = weight(name + ".weight", {in, out}, gain / std::sqrt(static_cast<double>(in)));
  Value* y = op("MatMul", {x, w}, {}, name);
  return bias ? op("Add", {y, weight(name + ".bias", {out}, 0.02)}, {}, name) : y;
}

Value* Builder::conv(const std::string& name, Value* x, int64_t in, int64_t out, int64_t kernel, int64_t stride, int64_t pad,
                     int64_t groups, bool bias) {
  double fan_in = static_cast<double>(in / groups * kernel * kernel);
  std::vector<Value*> inputs = {x, weight(name + ".weight", {out, in / groups, kernel, kernel}, std::sqrt(2.0 / fan_in))};
  if (bias) inputs.push_back(weight(name + ".bias", {out}, 0.02));
  return op("Conv", inputs,
            {{"kernel_shape", std::vector<int64_t>{kernel, kernel}, "", ""},
             {"strides", std::vector<int64_t>{stride, stride}, "", ""},
             {"pads", std::vector<int64_t>{pad, pad, pad, pad}, "", ""},
             {"group", groups, "", ""}},
            name);
}

Value* Builder::batch_norm(const std::string& name, Value* x, int64_t channels, double scale) {
  return op("BatchNormalization",
            {x, weight(name + ".weight", {channels}, 0.1 * scale, scale), weight(name + ".bias", {channels}, 0.05),
             weight(name + ".running_mean", {channels}, 0.05), weight(name + ".running_var", {channels}, 0.05, 1.0)},
            {{"epsilon", 1e-5f, "", ""}}, name);
}

Value* Builder::layer_norm(const std::string& name, Value* x, int64_t size, double epsilon) {
  return op("LayerNormalization", {x, weight(name + ".weight", {size}, 0.1, 1.0), weight(name + ".bias", {size}, 0.05)},
            {{"axis", int64_t{-1}, "", ""}, {"epsilon", static_cast<float>(epsilon), "", ""}}, name);
}

Value* Builder::rms_norm(const std::string& name, Value* x, int64_t size, double epsilon) {
  bool half = dtype_ == DType::float16 || dtype_ == DType::bfloat16;
  Value* h = half ? cast(x, DType::float32) : x;
  auto number = [&](double v) -> Value* {
    if (!half) return scalar(v);
    return graph_.add_constant(graph_.fresh_name("scalar"), make_float(static_cast<float>(v)));
  };
  Value* square = op("Pow", {h, number(2)}, {}, name);
  std::vector<Attribute> keep = {{"keepdims", int64_t{1}, "", ""}};
  Value* mean;
  if (opset_ >= 18) {
    mean = op("ReduceMean", {square, ints({-1})}, keep, name);
  } else {
    keep.push_back({"axes", std::vector<int64_t>{-1}, "", ""});
    mean = op("ReduceMean", {square}, keep, name);
  }
  Value* deviation = op("Sqrt", {op("Add", {mean, number(epsilon)}, {}, name)}, {}, name);
  Value* normal = op("Div", {h, deviation}, {}, name);
  if (half) normal = cast(normal, dtype_);
  return op("Mul", {normal, weight(name + ".weight", {size}, 0.1, 1.0)}, {}, name);
}

Value* Builder::gelu(Value* x, bool tanh_form) {
  if (opset_ >= 20) {
    std::vector<Attribute> attributes;
    if (tanh_form) attributes.push_back({"approximate", std::string("tanh"), "", ""});
    return op("Gelu", {x}, attributes);
  }
  Value* half = op("Mul", {x, scalar(0.5)});
  if (!tanh_form) return op("Mul", {half, op("Add", {op("Erf", {op("Div", {x, scalar(std::sqrt(2.0))})}), scalar(1)})});
  Value* cubic = op("Mul", {op("Pow", {x, scalar(3)}), scalar(0.044715)});
  Value* inner = op("Mul", {op("Add", {x, cubic}), scalar(std::sqrt(2.0 / M_PI))});
  return op("Mul", {half, op("Add", {op("Tanh", {inner}), scalar(1)})});
}

Value* Builder::attention(Value* q, Value* k, Value* v, Value* mask, int64_t head_size) {
  Value* scores = op("MatMul", {q, transpose(k, {0, 1, 3, 2})});  // [B, heads, S, S]
  scores = op("Mul", {scores, scalar(1.0 / std::sqrt(static_cast<double>(head_size)))});
  if (mask) scores = op("Add", {scores, mask});
  return op("MatMul", {op("Softmax", {scores}, {{"axis", int64_t{-1}, "", ""}}), v});
}

Value* Builder::split_heads(Value* x, int64_t heads, int64_t head_size) {
  return transpose(reshape(x, {0, 0, heads, head_size}), {0, 2, 1, 3});
}

Value* Builder::join_heads(Value* x, int64_t heads, int64_t head_size) {
  return reshape(transpose(x, {0, 2, 1, 3}), {0, 0, heads * head_size});
}

Model Builder::finish() {
  return std::move(model_);
}

}  // namespace fretsaw
