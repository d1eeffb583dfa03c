// How Resize reads one axis: which elements each output takes, and with what weights.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/kernel.h"

namespace fretsaw {

enum class ResizeMode : uint8_t { nearest, linear, cubic };
enum class Coordinates : uint8_t { half_pixel, half_pixel_symmetric, pytorch_half_pixel, align_corners, asymmetric, tf_crop_and_resize };
enum class NearestRule : uint8_t { round_prefer_floor, round_prefer_ceil, floor, ceil };

struct ResizeRule {
  ResizeMode mode = ResizeMode::nearest;
  Coordinates coordinates = Coordinates::half_pixel;
  NearestRule nearest = NearestRule::round_prefer_floor;
  double cubic_a = -0.75;
  bool antialias = false, exclude_outside = false;

  explicit ResizeRule(const Node& node);  // throws Error for values ONNX does not know
};

struct AxisSize {
  int64_t in = 0, out = 0;
  double scale = 1;                   // what the coordinates are computed with
  bool from_sizes = false;            // scale is out / in exactly: the coordinates are then computed without rounding it first
  double roi_start = 0, roi_end = 1;  // of tf_crop_and_resize, as parts of the axis
};

enum class AspectPolicy : uint8_t { stretch, not_larger, not_smaller };

struct ResizeNode {
  ResizeRule rule;
  AspectPolicy policy = AspectPolicy::stretch;
  std::vector<int64_t> axes;  // empty: all
  bool has_axes = false;
  float extrapolation = 0;

  explicit ResizeNode(const Node& node);  // throws Error for values ONNX does not know
};
// What becomes of each axis, from the inputs roi, scales and sizes on the host.
std::vector<AxisSize> axis_sizes(const ResizeNode& node, RunContext& r);

// Output j is the sum over t of weight[t * out + j] * input[index[t * out + j]].
struct AxisTaps {
  int64_t in = 0, out = 0, taps = 1;
  bool identity = false;  // every output is the input of the same index
  std::vector<int32_t> index;
  std::vector<double> weight;
  std::vector<uint8_t> extrapolated;  // empty, or 1 where the output is the extrapolation value
};
AxisTaps axis_taps(const ResizeRule& rule, const AxisSize& size);

}  // namespace fretsaw
