// What RotaryEmbedding says about itself: attributes and sizes, for the kernels of every device.
#pragma once
#include "kernels/kernel.h"

namespace fretsaw {

struct RotarySettings {
  explicit RotarySettings(const Node& node);
  bool interleaved;          // pairs are neighbours, not (i, i + half)
  int64_t dimension, heads;  // 0: the whole head; what the shape says
};

// Sizes of one run: X [B, H, S, D], or [B, S, H * D] with `heads_inside`. The first 2 * half elements of a head are rotated, the others
// copied; the rows of the caches have `width` elements.
struct RotaryShape {
  int64_t B, H, S, D, half, width;
  bool heads_inside;
};
// Checks X and the caches: [positions, width] with position_ids [B, S] (whose values it does not look at), or [B, S, width] without.
RotaryShape rotary_shape(RunContext& r, const RotarySettings& s);

}  // namespace fretsaw
