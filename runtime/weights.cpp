// Random weights and the count of weights.
#include "runtime/weights.h"

#include <functional>
#include <unordered_set>

#include "graph/errors.h"
#include "graph/tensor_bytes.h"
#include "graph/value_parts.h"
#include "kernels/random_weights.h"

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

// By initializer name; of those that are not listed the rank has the whole tensor.
using Parts = std::map<std::string, ValuePart>;

TensorPtr random_tensor(const Tensor& like, RandomWeights weights) {
  auto tensor = std::make_shared<Tensor>();
  tensor->name = like.name;
  tensor->dtype = like.dtype;
  tensor->dims = like.dims;
  tensor->generate = std::move(weights);
  return tensor;
}

TensorPtr made_up_tensor(const Value& v, const Parts& parts, uint64_t seed) {
  const Tensor& like = *v.constant;
  const auto found = parts.find(v.name);
  if (found == parts.end()) return random_tensor(like, RandomWeights(key_of(seed, v.source_name()), like.dtype, like.dims));
  const ValuePart& part = found->second;
  if (part.of.empty()) return make_tensor(like.dtype, like.dims);  // another rank adds the tensor itself
  if (part.of_part) throw Error("weight '" + v.name + "' is cut over two tensor axes and can't be made up", "use one tensor axis");
  const auto dim = static_cast<size_t>(part.dim);
  if (part.dim >= 0 && (dim >= like.dims.size() || like.dims[dim] != size_of(part.intervals)))
    throw Error("the metadata entry fretsaw.parts does not fit the weight '" + v.name + "'", "partition the model again");
  return random_tensor(like, RandomWeights(key_of(seed, part.of), like.dtype, like.dims, &part));
}

// Smaller weights are looked at by passes and kernels.
constexpr int64_t made_later_elements = int64_t{64} << 10;

class WeightFiller {
 public:
  WeightFiller(const Parts& parts, const WeightOptions& options) : parts_(parts), options_(options) {}

  void fill(Graph& graph) {
    for (Value& v : graph.all_values()) {
      if (!v.constant) continue;
      const bool missing = v.constant->is_missing();
      if (missing) v.constant = made_up_tensor(v, parts_, options_.seed);
      if (!missing || !options_.later || v.constant->count() < made_later_elements) v.constant = with_bytes(v.constant);
    }
    for (Node* node : graph.nodes) {
      for (const GraphPtr& body : bodies(*node)) fill_body(*body);
    }
  }

 private:
  // The host runs bodies, and their weights are not cut.
  void fill_body(Graph& body) const {
    const Parts whole;
    WeightFiller(whole, {options_.random, options_.seed, /*later=*/false}).fill(body);
  }

  const Parts& parts_;
  WeightOptions options_;
};

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
  const Parts parts = recorded_parts(*copy);
  WeightFiller(parts, options).fill(*copy->graph);
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
