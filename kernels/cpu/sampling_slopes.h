// What the weights of GridSample change by as its points move, one axis at a time; the same for every device.
#pragma once
#include "kernels/cpu/sampling_taps.h"

namespace fretsaw {

// For each of the taps that axis_taps_at gives. At the corners of a mode it is one side's.
struct SampleSlopes {
  double slope[4];
};

// The derivatives of cubic_weights.
FRETSAW_HOST_DEVICE SampleSlopes cubic_slopes(double x) {
  constexpr double a = -0.75;
  const double far = x + 1, near = 1 - x, beyond = 2 - x;
  return {{(3 * a * far - 10 * a) * far + 8 * a, (3 * (a + 2) * x - 2 * (a + 3)) * x, -(3 * (a + 2) * near - 2 * (a + 3)) * near,
           -((3 * a * beyond - 10 * a) * beyond + 8 * a)}};
}

// What the weights of axis_taps_at change by with the coordinate.
FRETSAW_HOST_DEVICE SampleSlopes axis_slopes_at(const SampleRule& rule, double normalised, int64_t extent) {
  if (rule.mode == SampleMode::nearest) return {};
  const auto length = static_cast<double>(extent);
  const double low = rule.align_corners ? 0 : -0.5, high = low == 0 ? length - 1 : length - 0.5;
  double slope = (rule.align_corners ? length - 1 : length) / 2;
  double x = product_of(normalised + 1, slope) + low;  // to the bit that of axis_taps_at: both are between the same elements
  if (!(fabs(x) < 0x1p40)) return {};
  if (x < low || x > high) {
    if (rule.outside == Outside::border) return {};
    if (rule.outside == Outside::reflection) {
      const bool turned = high > low && fmod(fabs(x - low), 2 * (high - low)) > high - low;
      if (turned != (x < low)) slope = -slope;
      if (high <= low) slope = 0;
      x = reflected(x, low, high);
    }
  }
  SampleSlopes slopes{{-1, 1, 0, 0}};
  if (rule.mode == SampleMode::cubic) slopes = cubic_slopes(x - floor(x));
  for (double& s : slopes.slope) s *= slope;
  return slopes;
}

}  // namespace fretsaw
