// The elements that GridSample reads around a point, one axis at a time, and the points of AffineGrid; the same for every device.
#pragma once
#include <cmath>
#include <cstdint>

#include "kernels/host_device.h"
#include "kernels/kernel.h"

namespace fretsaw {

enum class SampleMode : uint8_t { nearest, linear, cubic };
enum class Outside : uint8_t { zeros, border, reflection };

struct SampleRule {
  SampleMode mode = SampleMode::linear;
  Outside outside = Outside::zeros;
  bool align_corners = false;

  explicit SampleRule(const Node& node);  // throws Error for values ONNX does not know
  FRETSAW_HOST_DEVICE int taps() const { return mode == SampleMode::nearest ? 1 : mode == SampleMode::linear ? 2 : 4; }
};

// Mirrors x at `low` and `high` until it lies between them.
FRETSAW_HOST_DEVICE double reflected(double x, double low, double high) {
  const double range = high - low;
  if (range <= 0) return low;
  double beyond = fmod(fabs(x - low), 2 * range);
  if (beyond > range) beyond = 2 * range - beyond;
  return low + beyond;
}

// The elements of one axis around a point: indexes (-1: a zero) and weights.
struct SampleTaps {
  int64_t index[4];
  double weight[4];
};

FRETSAW_HOST_DEVICE void cubic_weights(double x, double* w) {
  constexpr double a = -0.75;
  const double far = x + 1, near = 1 - x, beyond = 2 - x;
  w[0] = ((a * far - 5 * a) * far + 8 * a) * far - 4 * a;
  w[1] = ((a + 2) * x - (a + 3)) * x * x + 1;
  w[2] = ((a + 2) * near - (a + 3)) * near * near + 1;
  w[3] = ((a * beyond - 5 * a) * beyond + 8 * a) * beyond - 4 * a;
}

FRETSAW_HOST_DEVICE SampleTaps axis_taps_at(const SampleRule& rule, double normalised, int64_t extent) {
  const auto length = static_cast<double>(extent);
  double x = rule.align_corners ? (normalised + 1) / 2 * (length - 1) : (product_of(normalised + 1, length) - 1) / 2;
  if (!(fabs(x) < 0x1p40)) x = x > 0 ? 0x1p40 : -0x1p40;  // also NaN: far outside
  if (rule.mode == SampleMode::nearest) x = nearbyint(x);
  const double low = rule.align_corners ? 0 : -0.5, high = low == 0 ? length - 1 : length - 0.5;
  if (x < low || x > high) {
    if (rule.outside == Outside::border) x = x < 0 ? 0 : x > length - 1 ? length - 1 : x;
    if (rule.outside == Outside::reflection) x = reflected(x, low, high);
  }
  SampleTaps taps{};
  const double left = rule.mode == SampleMode::nearest ? trunc(x) : floor(x);
  const auto first = static_cast<int64_t>(left) - (rule.mode == SampleMode::cubic ? 1 : 0);
  taps.weight[0] = 1;
  if (rule.mode == SampleMode::linear) taps.weight[0] = 1 - (x - left), taps.weight[1] = x - left;
  if (rule.mode == SampleMode::cubic) cubic_weights(x - left, taps.weight);
  for (int t = 0; t < 4; ++t) {  // a fixed count, so that a device unrolls it and keeps the taps in registers
    if (t >= rule.taps()) break;
    int64_t i = first + t;
    if (i < 0 || i >= extent) {
      if (rule.outside == Outside::zeros) i = -1;
      if (rule.outside == Outside::border) i = i < 0 ? 0 : extent - 1;
      if (rule.outside == Outside::reflection) {
        i = static_cast<int64_t>(reflected(static_cast<double>(i), low, high));
        i = i < 0 ? 0 : i >= extent ? extent - 1 : i;
      }
    }
    taps.index[t] = i;
  }
  return taps;
}

// The points [N, spatial...] of an AffineGrid, each of r numbers. `size` (input 1) is N, C, spatial; throws Error unless that names 2 or 3
// axes, and theta is [N, r, r + 1].
Dims affine_points(const TensorView& theta, const std::vector<int64_t>& size);
// The coordinate from -1 to 1 of element i of an axis, for AffineGrid.
FRETSAW_HOST_DEVICE double grid_coordinate(int64_t i, int64_t extent, bool align_corners) {
  const auto n = static_cast<double>(extent), at = static_cast<double>(i);
  if (align_corners) return extent > 1 ? -1 + 2 * at / (n - 1) : 0;
  return (2 * at + 1) / n - 1;
}

}  // namespace fretsaw
