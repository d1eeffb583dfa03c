// The window functions of signal processing, for the kernels of every device.
#pragma once
#include "graph/ir.h"

namespace fretsaw {

// constant - first * cos(2 pi i / N) + second * cos(4 pi i / N)
struct CosineWindow {
  const char* op;
  double constant, first, second;
};
inline constexpr CosineWindow kCosineWindows[] = {
    {"HannWindow", 0.5, 0.5, 0}, {"HammingWindow", 25.0 / 46.0, 21.0 / 46.0, 0}, {"BlackmanWindow", 0.42, 0.5, 0.08}};
const CosineWindow& cosine_window_of(const Node& node);  // a node with one of these operators

}  // namespace fretsaw
