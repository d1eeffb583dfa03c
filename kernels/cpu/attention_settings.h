// What Attention says about itself: its attributes, for the kernels of every device.
#pragma once
#include <cstdint>
#include <optional>

#include "graph/ir.h"

namespace fretsaw {

struct AttentionSettings {
  explicit AttentionSettings(const Node& node);  // throws Error for values ONNX does not know
  bool causal;
  int64_t q_heads, kv_heads;  // of inputs [B, S, H * D]; 0: not given
  std::optional<float> scale;
  float softcap;        // 0: none
  int64_t mode;         // what qk_matmul_output shows, 0 to 3
  int64_t left, right;  // of the window; -1: no bound
};

}  // namespace fretsaw
