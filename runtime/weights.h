// The weights of a rank's graphs: counting them, and filling those that were left out.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

struct WeightOptions {
  bool random = false;  // fill missing weights
  uint64_t seed = 0;
  // Large weights that are filled have no bytes in memory, but a generator (kernels/random_weights.h): a device makes them where they go.
  bool later = false;
};
// The model with all weights readable: itself, or a copy where weights had to be made. Missing ones get values of sensible scale by
// (seed, source name, element), the same whatever the cut. Throws Error naming a tensor that is missing and not to be filled.
std::shared_ptr<const Model> with_weights(const std::shared_ptr<const Model>& model, const WeightOptions& options);
// Bytes of every initializer that the models name, bodies included, shared ones once.
int64_t weight_bytes(const std::vector<std::shared_ptr<const Model>>& models);

}  // namespace fretsaw
