// BERT, GPT-2, Llama and Vision Transformer.
#include <cmath>

#include "models/builder.h"

namespace fretsaw {
namespace {

std::string layer(const std::string& base, int64_t i) {
  return base + "." + std::to_string(i);
}

struct Sizes {
  int64_t layers, hidden, heads, intermediate;
  int64_t head_size() const { return hidden / heads; }
};

Sizes read_sizes(Settings& s, int64_t layers, int64_t hidden, int64_t heads, int64_t intermediate_default) {
  Sizes z;
  z.layers = s.number("layers", layers, 1 << 12);
  z.hidden = s.number("hidden", hidden, 1 << 20);
  z.heads = s.number("heads", heads, 1 << 12);
  z.intermediate = s.number("intermediate", intermediate_default ? intermediate_default : 4 * z.hidden, 1 << 22);
  if (z.hidden % z.heads != 0) s.refuse("heads", "must divide hidden, " + std::to_string(z.hidden));
  return z;
}

// The first S rows of a table [rows, H], S being the sequence length of `ids` [B, S].
Value* positions(Builder& b, Value* table, Value* ids) {
  Value* length = b.op("Shape", {ids}, {{"start", int64_t{1}, "", ""}, {"end", int64_t{2}, "", ""}});
  return b.op("Slice", {table, b.ints({0}), length, b.ints({0})});
}

Value* embed(Builder& b, const std::string& name, Value* ids, int64_t rows, int64_t hidden) {
  return b.op("Gather", {b.weight(name + ".weight", {rows, hidden}, 1.0), ids}, {{"axis", int64_t{0}, "", ""}}, name);
}

// [0, 1, ..., S-1] for `ids` [B, S].
Value* position_range(Builder& b, Value* ids) {
  Value* length = b.op("Gather", {b.op("Shape", {ids}), b.int_scalar(1)}, {{"axis", int64_t{0}, "", ""}});
  return b.op("Range", {b.int_scalar(0), length, b.int_scalar(1)});
}

double lowest(DType dtype) {
  return dtype == DType::float16 ? -65504.0 : -3.3895314e38;
}

// [S, S]: 0 where a position may look, the lowest number where it may not.
Value* causal_mask(Builder& b, Value* range) {
  Value* allowed = b.op("LessOrEqual", {b.op("Unsqueeze", {range, b.ints({0})}), b.op("Unsqueeze", {range, b.ints({1})})});
  return b.op("Where", {allowed, b.scalar(0), b.scalar(lowest(b.dtype()))});
}

double residual_gain(int64_t layers) {
  return 1.0 / std::sqrt(2.0 * static_cast<double>(layers));
}

// Devlin et al., 2018: normalisation after each residual sum.
Model bert(const std::string& name, Settings& s) {
  Builder b(name, s);
  Sizes z = read_sizes(s, 12, 768, 12, 0);
  int64_t vocab = s.number("vocab", 30522, 1 << 24), longest = 512;
  Dim batch = s.dimension("batch"), sequence = s.dimension("sequence");
  if (sequence.known()) longest = std::max(longest, sequence.value);
  Value* ids = b.input("input_ids", DType::int64, {batch, sequence});
  Value* mask = b.input("attention_mask", DType::int64, {batch, sequence});
  Value* types = b.input("token_type_ids", DType::int64, {batch, sequence});
  Value* x = b.op("Add", {embed(b, "embeddings.word", ids, vocab, z.hidden), embed(b, "embeddings.token_type", types, 2, z.hidden)});
  x = b.op("Add", {x, positions(b, b.weight("embeddings.position.weight", {longest, z.hidden}, 1.0), ids)});
  x = b.layer_norm("embeddings.norm", x, z.hidden, 1e-12);  // [B, S, H]
  Value* open = b.cast(b.op("Unsqueeze", {mask, b.ints({1, 2})}), b.dtype());
  Value* bias = b.op("Mul", {b.op("Sub", {b.scalar(1), open}), b.scalar(lowest(b.dtype()))});  // [B, 1, 1, S]
  for (int64_t i = 0; i < z.layers; ++i) {
    std::string scope = layer("encoder", i);
    auto heads = [&](const std::string& part) {
      return b.split_heads(b.linear(scope + ".attention." + part, x, z.hidden, z.hidden), z.heads, z.head_size());
    };
    Value *q = heads("query"), *k = heads("key"), *v = heads("value");
    Value* a = b.join_heads(b.attention(q, k, v, bias, z.head_size()), z.heads, z.head_size());
    a = b.linear(scope + ".attention.output", a, z.hidden, z.hidden);
    x = b.layer_norm(scope + ".attention.norm", b.op("Add", {a, x}), z.hidden, 1e-12);
    Value* f =
        b.linear(scope + ".output", b.gelu(b.linear(scope + ".intermediate", x, z.hidden, z.intermediate)), z.intermediate, z.hidden);
    x = b.layer_norm(scope + ".output.norm", b.op("Add", {f, x}), z.hidden, 1e-12);
  }
  Value* first = b.op("Gather", {x, b.int_scalar(0)}, {{"axis", int64_t{1}, "", ""}});
  Value* pooled = b.op("Tanh", {b.linear("pooler", first, z.hidden, z.hidden)});
  b.output("last_hidden_state", x, {batch, sequence, z.hidden});
  b.output("pooler_output", pooled, {batch, z.hidden});
  return b.finish();
}

// What a GPT starts from.
struct GptStart {
  int64_t vocab, longest;  // the longest: of sequences
  double table, position;  // deviations of embeddings
  bool scaled;             // whether the logits are divided by sqrt(hidden)
};

// Radford et al., 2019: normalisation before each sublayer, fused QKV, the embedding tied to the output layer.
Model gpt(const std::string& name, Settings& s, const Sizes& z, const GptStart& start) {
  Builder b(name, s);
  int64_t vocab = s.number("vocab", start.vocab, 1 << 24), longest = start.longest;
  Dim batch = s.dimension("batch"), sequence = s.dimension("sequence");
  if (sequence.known()) longest = std::max(longest, sequence.value);
  Value* ids = b.input("input_ids", DType::int64, {batch, sequence});
  Value* table = b.weight("wte.weight", {vocab, z.hidden}, start.table);
  Value* x = b.op("Gather", {table, ids}, {{"axis", int64_t{0}, "", ""}});
  x = b.op("Add", {x, positions(b, b.weight("wpe.weight", {longest, z.hidden}, start.position), ids)});
  Value* mask = causal_mask(b, position_range(b, ids));
  for (int64_t i = 0; i < z.layers; ++i) {
    std::string scope = layer("h", i);
    Value* n = b.layer_norm(scope + ".ln_1", x, z.hidden, 1e-5);
    std::vector<Value*> qkv = b.split(b.linear(scope + ".attn.c_attn", n, z.hidden, 3 * z.hidden), 3, 2);
    for (Value*& part : qkv) part = b.split_heads(part, z.heads, z.head_size());
    Value* a = b.join_heads(b.attention(qkv[0], qkv[1], qkv[2], mask, z.head_size()), z.heads, z.head_size());
    x = b.op("Add", {x, b.linear(scope + ".attn.c_proj", a, z.hidden, z.hidden, true, residual_gain(z.layers))});
    n = b.layer_norm(scope + ".ln_2", x, z.hidden, 1e-5);
    n = b.gelu(b.linear(scope + ".mlp.c_fc", n, z.hidden, z.intermediate), true);
    x = b.op("Add", {x, b.linear(scope + ".mlp.c_proj", n, z.intermediate, z.hidden, true, residual_gain(z.layers))});
  }
  x = b.layer_norm("ln_f", x, z.hidden, 1e-5);
  if (start.scaled) x = b.op("Mul", {x, b.scalar(1.0 / std::sqrt(static_cast<double>(z.hidden)))});
  b.output("logits", b.op("MatMul", {x, b.transpose(table, {1, 0})}), {batch, sequence, vocab});
  return b.finish();
}

// The scale keeps the logits of a table of unit variance near 1.
Model gpt2(const std::string& name, Settings& s) {
  return gpt(name, s, read_sizes(s, 12, 768, 12, 0), {.vocab = 50257, .longest = 1024, .table = 1.0, .position = 0.3, .scaled = true});
}

// To be trained: small embeddings, as GPT-2's were before training, learn faster. A byte is a token.
Model small_gpt(const std::string& name, Settings& s) {
  return gpt(name, s, read_sizes(s, 4, 128, 4, 0), {.vocab = 256, .longest = 128, .table = 0.02, .position = 0.02, .scaled = false});
}

// The rotation of rotary embeddings (Su et al., 2021): x * cos + rotate_half(x) * sin.
struct Rotary {
  Value *cos, *sin;  // [S, D]
  int64_t head_size;

  Value* apply(Builder& b, Value* x) const {  // [B, heads, S, D]
    int64_t half = head_size / 2;
    Value* low = b.op("Slice", {x, b.ints({0}), b.ints({half}), b.ints({3})});
    Value* high = b.op("Slice", {x, b.ints({half}), b.ints({head_size}), b.ints({3})});
    Value* turned = b.op("Concat", {b.op("Neg", {high}), low}, {{"axis", int64_t{-1}, "", ""}});
    return b.op("Add", {b.op("Mul", {x, cos}), b.op("Mul", {turned, sin})});
  }
};

Rotary rotary(Builder& b, Graph& graph, Value* range, int64_t head_size, double theta) {
  auto t = make_tensor(DType::float32, {1, head_size / 2});
  for (int64_t i = 0; i < head_size / 2; ++i)
    reinterpret_cast<float*>(mutable_data(*t))[i] =
        static_cast<float>(std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_size)));
  Value* frequency = graph.add_constant("rotary.inv_freq", t);
  Value* angle = b.op("Mul", {b.op("Unsqueeze", {b.cast(range, DType::float32), b.ints({1})}), frequency});  // [S, D/2]
  angle = b.op("Concat", {angle, angle}, {{"axis", int64_t{-1}, "", ""}});
  Value *cos = b.op("Cos", {angle}), *sin = b.op("Sin", {angle});
  if (b.dtype() != DType::float32) {
    cos = b.cast(cos, b.dtype());
    sin = b.cast(sin, b.dtype());
  }
  return {cos, sin, head_size};
}

// Each of `kv_heads` heads stands for `group` query heads: [B, kv, S, D] -> [B, kv * group, S, D].
Value* repeat_heads(Builder& b, Value* x, int64_t kv_heads, int64_t group, int64_t head_size) {
  if (group == 1) return x;
  Value* wide = b.op("Expand", {b.op("Unsqueeze", {x, b.ints({2})}), b.ints({1, 1, group, 1, 1})});
  return b.reshape(wide, {0, kv_heads * group, -1, head_size});
}

// Touvron et al., 2023: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU.
Model llama(const std::string& name, Settings& s) {
  Builder b(name, s);
  Sizes z = read_sizes(s, 16, 2048, 32, 8192);
  int64_t kv_heads = s.number("kv_heads", z.heads % 4 == 0 ? z.heads / 4 : z.heads, 1 << 12), vocab = s.number("vocab", 128256, 1 << 24),
          d = z.head_size();
  if (z.heads % kv_heads != 0) s.refuse("kv_heads", "must divide heads, " + std::to_string(z.heads));
  if (d % 2 != 0) s.refuse("heads", "must leave an even head size for rotary embeddings");
  Dim batch = s.dimension("batch"), sequence = s.dimension("sequence");
  Value* ids = b.input("input_ids", DType::int64, {batch, sequence});
  Value* table = b.weight("embed_tokens.weight", {vocab, z.hidden}, 1.0);
  Value* x = b.op("Gather", {table, ids}, {{"axis", int64_t{0}, "", ""}});
  Value* range = position_range(b, ids);
  Value* mask = causal_mask(b, range);
  Rotary turn = rotary(b, *ids->graph, range, d, 500000.0);
  for (int64_t i = 0; i < z.layers; ++i) {
    std::string scope = layer("layers", i);
    Value* n = b.rms_norm(scope + ".input_norm", x, z.hidden, 1e-5);
    Value* q = turn.apply(b, b.split_heads(b.linear(scope + ".q_proj", n, z.hidden, z.hidden, false), z.heads, d));
    Value* k = turn.apply(b, b.split_heads(b.linear(scope + ".k_proj", n, z.hidden, kv_heads * d, false), kv_heads, d));
    Value* v = b.split_heads(b.linear(scope + ".v_proj", n, z.hidden, kv_heads * d, false), kv_heads, d);
    k = repeat_heads(b, k, kv_heads, z.heads / kv_heads, d);
    v = repeat_heads(b, v, kv_heads, z.heads / kv_heads, d);
    Value* a = b.join_heads(b.attention(q, k, v, mask, d), z.heads, d);
    x = b.op("Add", {x, b.linear(scope + ".o_proj", a, z.hidden, z.hidden, false, residual_gain(z.layers))});
    n = b.rms_norm(scope + ".post_norm", x, z.hidden, 1e-5);
    Value* gate = b.linear(scope + ".gate_proj", n, z.hidden, z.intermediate, false);
    gate = b.op("Mul", {gate, b.op("Sigmoid", {gate})});
    Value* up = b.linear(scope + ".up_proj", n, z.hidden, z.intermediate, false);
    x = b.op("Add", {x, b.linear(scope + ".down_proj", b.op("Mul", {gate, up}), z.intermediate, z.hidden, false, residual_gain(z.layers))});
  }
  x = b.rms_norm("norm", x, z.hidden, 1e-5);
  Value* scaled = b.op("Mul", {x, b.scalar(1.0 / std::sqrt(static_cast<double>(z.hidden)))});
  b.output("logits", b.op("MatMul", {scaled, b.transpose(table, {1, 0})}), {batch, sequence, vocab});
  return b.finish();
}

// Dosovitskiy et al., 2020: patches, a class token, an encoder with normalisation before each sublayer.
Model vit(const std::string& name, Settings& s) {
  Builder b(name, s);
  Sizes z = read_sizes(s, 12, 768, 12, 0);
  int64_t image = s.number("image", 224, 1 << 14), channels = s.number("channels", 3, 1 << 12),
          classes = s.number("classes", 1000, 1 << 24), patch = 16;
  if (image % patch != 0) s.refuse("image", "must be a multiple of the patch size, 16");
  int64_t patches = image / patch * (image / patch);
  Dim batch = s.dimension("batch");
  Value* pixels = b.input("x", b.dtype(), {batch, channels, image, image});
  Value* x = b.conv("patch_embed", pixels, channels, z.hidden, patch, patch, 0, 1, true);  // [B, H, 14, 14]
  x = b.transpose(b.reshape(x, {0, z.hidden, patches}), {0, 2, 1});                        // [B, patches, H]
  Value* count = b.op("Shape", {pixels}, {{"start", int64_t{0}, "", ""}, {"end", int64_t{1}, "", ""}});
  Value* shape = b.op("Concat", {count, b.ints({1, z.hidden})}, {{"axis", int64_t{0}, "", ""}});
  Value* token = b.op("Expand", {b.weight("class_token", {1, 1, z.hidden}, 1.0), shape});
  x = b.op("Concat", {token, x}, {{"axis", int64_t{1}, "", ""}});
  x = b.op("Add", {x, b.weight("position", {1, patches + 1, z.hidden}, 0.3)});
  for (int64_t i = 0; i < z.layers; ++i) {
    std::string scope = layer("blocks", i);
    Value* n = b.layer_norm(scope + ".norm1", x, z.hidden, 1e-6);
    std::vector<Value*> qkv = b.split(b.linear(scope + ".qkv", n, z.hidden, 3 * z.hidden), 3, 2);
    for (Value*& part : qkv) part = b.split_heads(part, z.heads, z.head_size());
    Value* a = b.join_heads(b.attention(qkv[0], qkv[1], qkv[2], nullptr, z.head_size()), z.heads, z.head_size());
    x = b.op("Add", {x, b.linear(scope + ".proj", a, z.hidden, z.hidden, true, residual_gain(z.layers))});
    n = b.layer_norm(scope + ".norm2", x, z.hidden, 1e-6);
    n = b.gelu(b.linear(scope + ".fc1", n, z.hidden, z.intermediate));
    x = b.op("Add", {x, b.linear(scope + ".fc2", n, z.intermediate, z.hidden, true, residual_gain(z.layers))});
  }
  x = b.layer_norm("norm", x, z.hidden, 1e-6);
  x = b.op("Gather", {x, b.int_scalar(0)}, {{"axis", int64_t{1}, "", ""}});
  b.output("logits", b.linear("head", x, z.hidden, classes), {batch, classes});
  return b.finish();
}

}  // namespace

void add_transformers(std::vector<Architecture>& list) {
  list.push_back({"bert",
                  "BERT-base, an encoder",
                  {"layers", "hidden", "heads", "intermediate", "vocab", "sequence", "batch", "dtype", "seed", "opset"},
                  bert});
  list.push_back({"gpt2",
                  "GPT-2 (124M), a decoder with fused QKV and tied embeddings",
                  {"layers", "hidden", "heads", "intermediate", "vocab", "sequence", "batch", "dtype", "seed", "opset"},
                  gpt2});
  list.push_back({"small_gpt",
                  "a GPT of bytes (4 layers of 128) with weights to begin training from",
                  {"layers", "hidden", "heads", "intermediate", "vocab", "sequence", "batch", "dtype", "seed", "opset"},
                  small_gpt});
  list.push_back({"llama",
                  "the shape of Llama-3.2-1B: GQA, RMSNorm, SwiGLU, rotary embeddings",
                  {"layers", "hidden", "heads", "kv_heads", "intermediate", "vocab", "sequence", "batch", "dtype", "seed", "opset"},
                  llama});
  list.push_back({"vit",
                  "ViT-B/16, an image classifier",
                  {"layers", "hidden", "heads", "intermediate", "channels", "image", "classes", "batch", "dtype", "seed", "opset"},
                  vit});
}

}  // namespace fretsaw
