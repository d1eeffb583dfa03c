// Random weights and the count of weights.
#include "runtime/weights.h"

#include <bit>
#include <cmath>
#include <functional>
#include <unordered_set>

#include "graph/errors.h"
#include "graph/value_parts.h"
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

// Which elements of a whole tensor a part has: runs of them, one for each interval of each block before the dimension that is cut.
class Elements {
 public:
  explicit Elements(const Dims& dims)
      : whole_(dims), intervals_{{0, 1}}, inner_(count_of(dims)), part_block_(inner_), whole_block_(inner_) {}
  Elements(const Dims& dims, const ValuePart& part) : whole_(dims), intervals_(part.intervals) {
    whole_.at(static_cast<size_t>(part.dim)) = part.size;
    for (size_t d = static_cast<size_t>(part.dim) + 1; d < dims.size(); ++d) inner_ *= dims[d];
    part_block_ = inner_ * size_of(intervals_);
    whole_block_ = inner_ * part.size;
  }
  const Dims& whole() const { return whole_; }

  // Calls run(first in the part, first in the whole, count) for the elements [begin, end) of the part.
  template <typename Run>
  void for_each_run(int64_t begin, int64_t end, const Run& run) const {
    while (begin < end) {
      const int64_t block = begin / part_block_;
      int64_t rest = begin % part_block_;
      for (const Interval& i : intervals_) {
        const int64_t there = inner_ * i.size();
        const int64_t count = std::min(there - rest, end - begin);
        if (count > 0) {
          run(begin, block * whole_block_ + inner_ * i.begin + rest, count);
          begin += count;
        }
        rest = std::max<int64_t>(rest - there, 0);
      }
    }
  }

 private:
  Dims whole_;
  Intervals intervals_;
  int64_t inner_ = 1, part_block_ = 0, whole_block_ = 0;  // elements of one index, of all indexes of the part, of the whole
};

template <typename T, typename Make>
void fill_elements(Tensor& tensor, const Elements& elements, const Philox& random, const Make& make) {
  T* out = reinterpret_cast<T*>(mutable_data(tensor));
  parallel_for(tensor.count(), 4 * kGrainElements, omp_get_max_threads(), [&](int64_t begin, int64_t end) {
    elements.for_each_run(begin, end, [&](int64_t first, int64_t whole, int64_t count) {
      for (int64_t b = whole / 4; 4 * b < whole + count; ++b) {
        const auto words = random.block(static_cast<uint64_t>(b));
        for (int64_t i = std::max(4 * b, whole); i < std::min(4 * b + 4, whole + count); ++i)
          out[first + i - whole] = make(words[static_cast<size_t>(i - 4 * b)]);
      }
    });
  });
}

TensorPtr random_tensor(const Tensor& like, const Elements& elements, uint64_t key) {
  auto tensor = make_tensor(like.dtype, like.dims);
  tensor->name = like.name;
  Philox random(key);
  Range range = range_of(elements.whole());
  auto real = [range](uint32_t word) { return range.low + (range.high - range.low) * (static_cast<float>(word >> 8) * 0x1p-24f); };
  switch (like.dtype) {
    case DType::float32:
      fill_elements<float>(*tensor, elements, random, real);
      break;
    case DType::float64:
      fill_elements<double>(*tensor, elements, random, [&](uint32_t w) { return static_cast<double>(real(w)); });
      break;
    case DType::float16:
      fill_elements<_Float16>(*tensor, elements, random, [&](uint32_t w) { return static_cast<_Float16>(real(w)); });
      break;
    case DType::bfloat16:
      fill_elements<uint16_t>(*tensor, elements, random, [&](uint32_t w) { return bfloat_bits(real(w)); });
      break;
    case DType::int8:
    case DType::uint8:
      fill_elements<uint8_t>(*tensor, elements, random, [](uint32_t w) { return static_cast<uint8_t>(w >> 24); });
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

// By initializer name; of those that are not listed the rank has the whole tensor.
using Parts = std::map<std::string, ValuePart>;

TensorPtr made_up_tensor(const Value& v, const Parts& parts, uint64_t seed) {
  const Tensor& like = *v.constant;
  const auto found = parts.find(v.name);
  if (found == parts.end()) return random_tensor(like, Elements(like.dims), key_of(seed, v.source_name()));
  const ValuePart& part = found->second;
  if (part.of.empty()) return make_tensor(like.dtype, like.dims);  // another rank adds the tensor itself
  if (part.of_part) throw Error("weight '" + v.name + "' is cut over two tensor axes and can't be made up", "use one tensor axis");
  const uint64_t key = key_of(seed, part.of);
  if (part.dim < 0) return random_tensor(like, Elements(like.dims), key);
  const auto dim = static_cast<size_t>(part.dim);
  if (dim >= like.dims.size() || like.dims[dim] != size_of(part.intervals))
    throw Error("the metadata entry fretsaw.parts does not fit the weight '" + v.name + "'", "partition the model again");
  return random_tensor(like, Elements(like.dims, part), key);
}

void fill(Graph& graph, const Parts& parts, uint64_t seed) {
  for (Value& v : graph.all_values()) {
    if (!v.constant) continue;
    if (v.constant->generate && !v.constant->data) {
      v.constant = generated_tensor(*v.constant);
    } else if (v.constant->is_missing()) {
      v.constant = made_up_tensor(v, parts, seed);
    }
  }
  for (Node* node : graph.nodes) {
    for (const GraphPtr& body : bodies(*node)) fill(*body, {}, seed);  // weights of bodies are not cut
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
  fill(*copy->graph, recorded_parts(*copy), options.seed);
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
