// The coordinates and weights of Resize, one axis at a time, as ONNX defines them.
#include "kernels/cpu/resize_axes.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/numbers.h"
#include "kernels/cpu/resize_taps.h"

namespace fretsaw {

namespace {

template <typename E>
struct Named {
  const char* name;
  E value;
};

template <typename E, size_t N>
E named(const Node& node, const char* attribute, const char* absent, const Named<E> (&names)[N]) {
  const std::string given = node.get_string(attribute, absent);
  for (const Named<E>& each : names) {
    if (given == each.name) return each.value;
  }
  throw Error(std::string(attribute) + " '" + given + "' is not known", "use one of those that ONNX's Resize lists");
}

constexpr Named<ResizeMode> kModes[] = {{"nearest", ResizeMode::nearest}, {"linear", ResizeMode::linear}, {"cubic", ResizeMode::cubic}};
constexpr Named<Coordinates> kCoordinates[] = {{"half_pixel", Coordinates::half_pixel},
                                               {"half_pixel_symmetric", Coordinates::half_pixel_symmetric},
                                               {"pytorch_half_pixel", Coordinates::pytorch_half_pixel},
                                               {"align_corners", Coordinates::align_corners},
                                               {"asymmetric", Coordinates::asymmetric},
                                               {"tf_crop_and_resize", Coordinates::tf_crop_and_resize}};
constexpr Named<NearestRule> kNearest[] = {{"round_prefer_floor", NearestRule::round_prefer_floor},
                                           {"round_prefer_ceil", NearestRule::round_prefer_ceil},
                                           {"floor", NearestRule::floor},
                                           {"ceil", NearestRule::ceil}};

// Sizes of the named axes from the input `sizes`.
void use_sizes(const ResizeNode& node, const std::vector<int64_t>& sizes, const std::vector<size_t>& axes, std::vector<AxisSize>& result) {
  require(sizes.size() == axes.size(), "there must be one size for each axis");
  double common = node.policy == AspectPolicy::not_larger ? HUGE_VAL : 0;
  for (size_t i = 0; i < axes.size(); ++i) {
    AxisSize& axis = result[axes[i]];
    require(axis.in > 0 || sizes[i] == 0, "an axis without elements can't be resized");
    axis.out = sizes[i];
    axis.from_sizes = true;
    axis.scale = axis.in > 0 ? static_cast<double>(axis.out) / static_cast<double>(axis.in) : 1;
    common = node.policy == AspectPolicy::not_larger ? std::min(common, axis.scale) : std::max(common, axis.scale);
  }
  if (node.policy == AspectPolicy::stretch) return;
  for (size_t i : axes) {
    AxisSize& axis = result[i];
    const double out = std::floor(common * static_cast<double>(axis.in) + 0.5);
    require(out < 0x1p40, "the resized tensor is too large");
    axis.out = static_cast<int64_t>(out);
    axis.scale = common;
    axis.from_sizes = false;
  }
}

void use_scales(const std::vector<double>& scales, const std::vector<size_t>& axes, std::vector<AxisSize>& result) {
  require(scales.size() == axes.size(), "there must be one scale for each axis");
  for (size_t i = 0; i < axes.size(); ++i) {
    AxisSize& axis = result[axes[i]];
    const double out = std::floor(static_cast<double>(axis.in) * scales[i]);
    if (!(scales[i] > 0) || !(out < 0x1p40)) throw Error("a scale of " + std::to_string(scales[i]) + " is out of range");
    axis.out = static_cast<int64_t>(out);
    axis.scale = scales[i];
  }
}

}  // namespace

ResizeRule::ResizeRule(const Node& node)
    : mode(named(node, "mode", "nearest", kModes)),
      coordinates(named(node, "coordinate_transformation_mode", "half_pixel", kCoordinates)),
      nearest(named(node, "nearest_mode", "round_prefer_floor", kNearest)),
      cubic_a(node.get_float("cubic_coeff_a", -0.75f)),
      antialias(node.get_int("antialias", 0) != 0 && mode != ResizeMode::nearest),
      exclude_outside(node.get_int("exclude_outside", 0) != 0) {}

ResizeNode::ResizeNode(const Node& node)
    : rule(node), axes(node.get_ints("axes")), has_axes(node.has("axes")), extrapolation(node.get_float("extrapolation_value", 0)) {
  const std::string name = node.get_string("keep_aspect_ratio_policy", "stretch");
  require(name == "stretch" || name == "not_larger" || name == "not_smaller",
          "keep_aspect_ratio_policy must be stretch, not_larger or not_smaller");
  policy = name == "stretch" ? AspectPolicy::stretch : name == "not_larger" ? AspectPolicy::not_larger : AspectPolicy::not_smaller;
}

std::vector<AxisSize> axis_sizes(const ResizeNode& node, RunContext& r) {
  const Dims& dims = r.input(0).dims;
  std::vector<AxisSize> sizes(dims.size());
  for (size_t i = 0; i < dims.size(); ++i) sizes[i].in = sizes[i].out = dims[i];
  std::vector<int64_t> named(dims.size());
  std::iota(named.begin(), named.end(), 0);
  const std::vector<size_t> axes = normalise_axes(node.has_axes ? node.axes : named, dims.size());
  const bool has_scales = r.has_input(2) && r.input(2).count() > 0;
  if (!has_scales && !r.has_input(3)) throw Error("neither scales nor sizes are given", "give one of them");
  if (has_scales) {
    use_scales(as_doubles(r.input(2)), axes, sizes);
  } else {
    use_sizes(node, r.input_ints(3), axes, sizes);
  }
  if (node.rule.coordinates != Coordinates::tf_crop_and_resize) return sizes;
  const std::vector<double> roi = as_doubles(r.input(1));  // all starts, then all ends
  require(roi.size() == 2 * axes.size(), "the region must have a start and an end for each axis");
  for (size_t i = 0; i < axes.size(); ++i) {
    sizes[axes[i]].roi_start = roi[i];
    sizes[axes[i]].roi_end = roi[axes.size() + i];
  }
  return sizes;
}

TapRule::TapRule(const ResizeRule& resize, const AxisSize& axis) : rule(resize), size(axis) {
  const bool crops = rule.coordinates == Coordinates::tf_crop_and_resize && (size.roi_start != 0 || size.roi_end != 1);
  identity = size.in == size.out && std::fabs(size.scale - 1) < 1e-9 && !crops;
  if (size.in > std::numeric_limits<int32_t>::max() || size.out > std::numeric_limits<int32_t>::max()) {
    throw Error("an axis of " + std::to_string(size.in) + " elements is too large to be resized");
  }
  kernel_scale = rule.antialias ? std::min(size.scale, 1.0) : 1.0;  // the kernel widens when shrinking
  const double radius = rule.mode == ResizeMode::cubic ? 2 : 1;
  first = static_cast<int64_t>(std::floor(-radius / kernel_scale)) + 1;
  if (rule.mode != ResizeMode::nearest) taps = 2 - 2 * first;
}

AxisTaps axis_taps(const ResizeRule& rule, const AxisSize& size) {
  const TapRule taps(rule, size);
  AxisTaps axis{.in = size.in, .out = size.out, .taps = taps.taps, .identity = taps.identity};
  const auto entries = static_cast<size_t>(axis.taps * axis.out);
  axis.index.resize(entries);
  axis.weight.assign(entries, 1.0);
  for (int64_t j = 0; j < axis.out; ++j) {
    const double x = taps.coordinate(j);
    if (!std::isfinite(x)) throw Error("a coordinate of the resized tensor is not a number", "check the scales and the region");
    if (taps.extrapolates(x)) {
      axis.extrapolated.resize(static_cast<size_t>(axis.out), 0);
      axis.extrapolated[static_cast<size_t>(j)] = 1;
    }
    taps.each_tap(x, [&](int64_t t, int32_t index, double weight) {
      axis.index[static_cast<size_t>(t * axis.out + j)] = index;
      axis.weight[static_cast<size_t>(t * axis.out + j)] = weight;
    });
  }
  return axis;
}

}  // namespace fretsaw
