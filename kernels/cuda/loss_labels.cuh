// What losses and their gradients share: attributes, and the labels as kernels read them.
#pragma once
#include <optional>
#include <string>

#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/fold_readers.cuh"

namespace fretsaw::cuda {

enum class LossReduction : uint8_t { none, sum, mean };

struct LossSettings {
  explicit LossSettings(const Node& node) {
    const std::string name = node.get_string("reduction", "mean");
    require(name == "mean" || name == "sum" || name == "none", "an unknown reduction of a loss", "use mean, sum or none");
    reduction = name == "none" ? LossReduction::none : name == "sum" ? LossReduction::sum : LossReduction::mean;
    if (node.has("ignore_index")) ignored = node.get_int("ignore_index", 0);
  }
  LossReduction reduction = LossReduction::mean;
  std::optional<int64_t> ignored;
};

// What the kernels read besides the scores. labels [N, D...], weights [C] (null: all 1).
struct Labels {
  const void* data;
  DType type;
  const void* weights;
  bool ignores;
  int64_t ignored;
  DeviceFault* fault;
};

// The class of a position; -1 where it is ignored or none of the classes.
__device__ inline int64_t class_at(const Labels& labels, int64_t position, int64_t classes) {
  const int64_t label = load_integer<int64_t>(labels.data, labels.type, position);
  if (labels.ignores && label == labels.ignored) return -1;
  const int64_t at = label < 0 ? label + classes : label;
  if (at >= 0 && at < classes) return at;
  *reinterpret_cast<longlong2*>(labels.fault) = make_longlong2(label, classes + 1);  // in one piece
  return -1;
}

}  // namespace fretsaw::cuda
