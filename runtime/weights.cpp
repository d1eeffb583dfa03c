// Random weights and the count of weights.
#include "runtime/weights.h"

#include <bit>
#include <cmath>
#include <functional>
#include <unordered_set>

#include "graph/errors.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/random.h"

namespace fretsaw {
namespace {

void for_each_constant(const Graph& graph, const std::function<void(const Value&)>& f) {
  for (const Value& v : graph.all_values()) {
    if (v.constant) f(v);
  }
  for (const Node* node : graph.nodes) {
    for (const GraphPtr& body : bodies(*node)) for_each_constant(*body, f);
  }
}

// FNV-1a over the name, then mixed with the seed.
uint64_t key_of(uint64_t seed, const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (unsigned char c : name) hash = (hash ^ c) * 0x100000001b3u;
  hash ^= seed * 0x9e3779b97f4a7c15u;
  hash ^= hash >> 29;
  return hash * 0xbf58476d1ce4e5b9u;
}

// Uniform numbers in [low, high): matrices and filters by their fan-in, vectors (biases, scales, variances) positive near 1.
struct Range {
  float low, high;
};
Range range_of(const Dims& dims) {
  if (dims.size() < 2) return {0.5f, 1.0f};
  double fan_in = static_cast<double>(std::max<int64_t>(dims[0], 1));
  if (dims.size() == 2) {
    fan_in = static_cast<double>(std::max({dims[0], dims[1], int64_t{1}}));  // [K, N] or [N, K]: either way not too large
  } else {
    fan_in = 1;
    for (size_t i = 1; i < dims.size(); ++i) fan_in *= static_cast<double>(std::max<int64_t>(dims[i], 1));
  }
  auto bound = static_cast<float>(std::sqrt(3.0 / fan_in));
  return {-bound, bound};
}

uint16_t bfloat_bits(float v) {
  auto u = std::bit_cast<uint32_t>(v);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

template <typename T, typename Make>
void fill_elements(Tensor& tensor, const Philox& random, const Make& make) {
  T* out = reinterpret_cast<T*>(mutable_data(tensor));
  int64_t count = tensor.count();
  parallel_for((count + 3) / 4, kGrainElements, omp_get_max_threads(), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      auto words = random.block(static_cast<uint64_t>(b));
      for (int64_t i = 4 * b; i < std::min(4 * b + 4, count); ++i) out[i] = make(words[static_cast<size_t>(i - 4 * b)]);
    }
  });
}

TensorPtr random_tensor(const Tensor& like, uint64_t key) {
  auto tensor = make_tensor(like.dtype, like.dims);
  tensor->name = like.name;
  Philox random(key);
  Range range = range_of(like.dims);
  auto real = [range](uint32_t word) { return range.low + (range.high - range.low) * (static_cast<float>(word >> 8) * 0x1p-24f); };
  switch (like.dtype) {
    case DType::float32:
      fill_elements<float>(*tensor, random, real);
      break;
    case DType::float64:
      fill_elements<double>(*tensor, random, [&](uint32_t w) { return static_cast<double>(real(w)); });
      break;
    case DType::float16:
      fill_elements<_Float16>(*tensor, random, [&](uint32_t w) { return static_cast<_Float16>(real(w)); });
      break;
    case DType::bfloat16:
      fill_elements<uint16_t>(*tensor, random, [&](uint32_t w) { return bfloat_bits(real(w)); });
      break;
    case DType::int8:
    case DType::uint8:
      fill_elements<uint8_t>(*tensor, random, [](uint32_t w) { return static_cast<uint8_t>(w >> 24); });
      break;
    default:
      break;  // indexes and flags: zeros are always legal
  }
  return tensor;
}

TensorPtr generated_tensor(const Tensor& like) {
  auto tensor = make_tensor(like.dtype, like.dims);
  tensor->name = like.name;
  like.generate(0, {mutable_data(*tensor), tensor->bytes()});
  return tensor;
}

void fill(Graph& graph, const WeightOptions& options) {
  for (Value& v : graph.all_values()) {
    if (!v.constant) continue;
    if (v.constant->generate && !v.constant->data) {
      v.constant = generated_tensor(*v.constant);
    } else if (v.constant->is_missing()) {
      v.constant = random_tensor(*v.constant, key_of(options.seed, v.source_name()));
    }
  }
  for (Node* node : graph.nodes) {
    for (const GraphPtr& body : bodies(*node)) fill(*body, options);
  }
}

}  // namespace

std::shared_ptr<const Model> with_weights(const std::shared_ptr<const Model>& model, const WeightOptions& options) {
  bool complete = true;
  for_each_constant(*model->graph, [&](const Value& v) {
    if (v.constant->is_missing() && !options.random) {
      throw Error("weight '" + v.source_name() + "' is not there: " + v.constant->missing,
                  "put the weight file beside the model, or run with --random-weights SEED");
    }
    complete &= !v.constant->is_missing() && !(v.constant->generate && !v.constant->data);
  });
  if (complete) return model;
  auto copy = std::make_shared<Model>(clone(*model));
  fill(*copy->graph, options);
  return copy;
}

int64_t weight_bytes(const std::vector<std::shared_ptr<const Model>>& models) {
  std::unordered_set<const void*> seen;
  int64_t bytes = 0;
  for (const auto& model : models) {
    for_each_constant(*model->graph, [&](const Value& v) {
      const void* identity = v.constant->data ? static_cast<const void*>(v.constant->data) : v.constant.get();
      if (seen.insert(identity).second) bytes += static_cast<int64_t>(v.constant->bytes());
    });
  }
  return bytes;
}

}  // namespace fretsaw
