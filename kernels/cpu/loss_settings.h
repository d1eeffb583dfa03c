// The attributes that the losses and their gradients share.
#pragma once
#include <optional>
#include <string>

#include "graph/ir.h"
#include "kernels/cpu/element_copy.h"

namespace fretsaw {

struct LossSettings {
  explicit LossSettings(const Node& node) : reduction(node.get_string("reduction", "mean")) {
    require(reduction == "mean" || reduction == "sum" || reduction == "none", "an unknown reduction of a loss", "use mean, sum or none");
    if (node.has("ignore_index")) ignored = node.get_int("ignore_index", 0);
  }
  std::string reduction;
  std::optional<int64_t> ignored;
};

}  // namespace fretsaw
