// The coordinates and weights of Resize along one axis, as ONNX defines them; the same for every device.
#pragma once
#include <cmath>

#include "kernels/cpu/resize_axes.h"
#include "kernels/host_device.h"

namespace fretsaw {

// x / scale, without rounding the scale first where it is a quotient of sizes.
FRETSAW_HOST_DEVICE double unscaled(const AxisSize& s, double x) {
  return s.from_sizes ? x * static_cast<double>(s.in) / static_cast<double>(s.out) : x / s.scale;
}

// Where output j lies in the input's coordinates.
FRETSAW_HOST_DEVICE double source_coordinate(Coordinates mode, const AxisSize& s, double j) {
  const auto in = static_cast<double>(s.in), out = static_cast<double>(s.out);
  const double scaled = s.from_sizes ? out : product_of(s.scale, in);  // the output's size before it was cut to an integer
  const double roi_start = product_of(s.roi_start, in - 1), roi_length = (s.roi_end - s.roi_start) * (in - 1);
  switch (mode) {
    case Coordinates::align_corners:
      return scaled == 1 ? 0 : j * (in - 1) / (scaled - 1);
    case Coordinates::asymmetric:
      return unscaled(s, j);
    case Coordinates::tf_crop_and_resize:
      if (scaled == 1) return product_of(0.5, roi_length) + roi_start;
      return j * roi_length / (scaled - 1) + roi_start;
    case Coordinates::pytorch_half_pixel:
      return scaled == 1 ? -0.5 : unscaled(s, j + 0.5) - 0.5;
    case Coordinates::half_pixel_symmetric:
      return product_of(in / 2, 1 - out / scaled) + unscaled(s, j + 0.5) - 0.5;
    case Coordinates::half_pixel:
      break;
  }
  return unscaled(s, j + 0.5) - 0.5;
}

FRETSAW_HOST_DEVICE double nearest_index(NearestRule rule, double x) {
  const double below = floor(x);
  switch (rule) {
    case NearestRule::floor:
      return below;
    case NearestRule::ceil:
      return ceil(x);
    case NearestRule::round_prefer_ceil:
      return x - below >= 0.5 ? below + 1 : below;
    case NearestRule::round_prefer_floor:
      break;
  }
  return x - below > 0.5 ? below + 1 : below;
}

// The kernel's value at a distance from its centre.
FRETSAW_HOST_DEVICE double kernel_value(const ResizeRule& rule, double distance) {
  const double x = fabs(distance), a = rule.cubic_a;
  if (rule.mode == ResizeMode::linear) return x < 1 ? 1 - x : 0;
  if (x <= 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  return x < 2 ? ((a * x - 5 * a) * x + 8 * a) * x - 4 * a : 0;
}

// How the outputs of one axis read its inputs.
struct TapRule {
  ResizeRule rule;
  AxisSize size;
  int64_t taps = 1, first = 0;  // how many, and the offset of the first from the element left of the coordinate
  double kernel_scale = 1;
  bool identity = false;  // every output is the input of the same index

  TapRule(const ResizeRule& resize, const AxisSize& axis);  // throws Error when the axis is too long

  FRETSAW_HOST_DEVICE double coordinate(int64_t j) const {
    return identity ? static_cast<double>(j) : source_coordinate(rule.coordinates, size, static_cast<double>(j));
  }
  // True when the output at input coordinate x is the extrapolation value.
  FRETSAW_HOST_DEVICE bool extrapolates(double x) const {
    return rule.coordinates == Coordinates::tf_crop_and_resize && (x < 0 || x > static_cast<double>(size.in - 1));
  }
  FRETSAW_HOST_DEVICE int32_t clamped(double index) const {
    const auto last = static_cast<double>(size.in - 1);
    return static_cast<int32_t>(!(index > 0) ? 0 : index > last ? last : index);
  }

  // Calls f(t, index, weight) for each tap of the output at input coordinate x.
  template <typename F>
  FRETSAW_HOST_DEVICE void each_tap(double x, F&& f) const {
    if (rule.mode == ResizeMode::nearest) return f(int64_t{0}, clamped(nearest_index(rule.nearest, x)), 1.0);
    double left = floor(x), ratio = x - left;
    if (ratio == 0) left -= 1, ratio = 1;
    double sum = 0;
    for (int64_t t = 0; t < taps; ++t) sum += weight(t, left, ratio);
    const double divisor = (rule.antialias || rule.exclude_outside) && sum != 0 ? sum : 1;
    for (int64_t t = 0; t < taps; ++t) f(t, clamped(left + static_cast<double>(first + t)), weight(t, left, ratio) / divisor);
  }

 private:
  FRETSAW_HOST_DEVICE double weight(int64_t t, double left, double ratio) const {
    const auto offset = static_cast<double>(first + t);
    const bool outside = left + offset < 0 || left + offset > static_cast<double>(size.in - 1);
    return outside && rule.exclude_outside ? 0 : kernel_value(rule, (offset - ratio) * kernel_scale);
  }
};

}  // namespace fretsaw
