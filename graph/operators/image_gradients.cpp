// Gradients of operators on images: Resize, Col2Im, AffineGrid, GridSample, RoiAlign, MaxRoiPool.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "graph/communication_schemas.h"
#include "graph/operators/gradient_rules.h"
#include "graph/operators/gradient_terms.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

// A Resize reads each axis by itself: y = R x along it, with R [out, in] what it makes of the identity matrix [in, in]. So dx = RT g.
class ResizeGradient {
 public:
  explicit ResizeGradient(GradientContext& c) : c_(c), rank_(c.rank(c.input(0))) {
    const Node& node = c.node();
    if (node.get_string("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize") c.refuse("there is no gradient for crops");
    if (node.get_string("keep_aspect_ratio_policy", "stretch") != "stretch")
      c.refuse("there is no gradient for a keep_aspect_ratio_policy", "give the sizes outright");
    for (int64_t a : node.get_ints("axes")) axes_.push_back(static_cast<int64_t>(c.axis(a, rank_)));
    for (size_t d = 0; d < rank_ && !node.has("axes"); ++d) axes_.push_back(static_cast<int64_t>(d));
    if (c.input(2) && !float_values(c.input(2), scales_)) scales_.clear();
    by_scales_ = c.input(2) && !(c.shape(c.input(2)) && c.shape(c.input(2))->size() == 1 && c.shape(c.input(2))->front().value == 0);
  }

  Value* make() {
    if (Value* block = repeated_block()) return block;
    Value* g = c_.of_output();
    for (size_t k = 0; k < axes_.size(); ++k)
      if (!keeps(k)) g = along(g, axes_[k], matrix(k));
    return g;
  }

 private:
  const Dim* size(const Value* v, int64_t axis) const {
    const Shape* s = c_.shape(v);
    return s ? &(*s)[static_cast<size_t>(axis)] : nullptr;
  }

  // Whether axis k stays as it is.
  bool keeps(size_t k) const {
    if (k < scales_.size()) return scales_[k] == 1;
    const Dim *in = size(c_.input(0), axes_[k]), *out = size(c_.output(0), axes_[k]);
    return !by_scales_ && in && out && in->known() && *in == *out;
  }

  // Every element repeated a whole number of times, as decoders do: the sum over blocks, by an average. Null where it is otherwise.
  Value* repeated_block() {
    const Node& node = c_.node();
    if (node.get_string("mode", "nearest") != "nearest" || rank_ < 3 || scales_.size() != axes_.size()) return nullptr;
    const std::string coordinates = node.get_string("coordinate_transformation_mode", "half_pixel");
    const std::string rounding = node.get_string("nearest_mode", "round_prefer_floor");
    const bool floors = coordinates == "asymmetric" && rounding == "floor";
    const bool rounds = (coordinates == "half_pixel" || coordinates == "pytorch_half_pixel") && rounding.rfind("round", 0) == 0;
    if (!floors && !rounds) return nullptr;
    std::vector<int64_t> block(rank_ - 2, 1);
    int64_t count = 1;
    for (size_t k = 0; k < axes_.size(); ++k) {
      if (scales_[k] == 1) continue;
      if (axes_[k] < 2 || scales_[k] < 1 || scales_[k] != std::floor(scales_[k])) return nullptr;
      block[static_cast<size_t>(axes_[k] - 2)] = static_cast<int64_t>(scales_[k]);
      count *= static_cast<int64_t>(scales_[k]);
    }
    if (count == 1) return c_.of_output();
    Value* average = c_.add("AveragePool", {c_.of_output()}, {{"kernel_shape", block}, {"strides", block}});
    return Term(c_, average) * static_cast<double>(count);
  }

  // R [out, in] of axis k.
  Value* matrix(size_t k) {
    const DType type = c_.input(0)->type.dtype;
    Value* in = c_.size_value(c_.input(0), axes_[k]);
    Value* square = c_.add("Concat", {in, in}, {{"axis", int64_t{0}}}, DType::int64);
    Value* identity = c_.add("EyeLike", {c_.add("ConstantOfShape", {square})}, {{"dtype", static_cast<int64_t>(type)}}, type);
    std::vector<Attribute> attributes = c_.attributes(
        {"mode", "coordinate_transformation_mode", "nearest_mode", "cubic_coeff_a", "exclude_outside", "antialias", "extrapolation_value"});
    attributes.push_back({"axes", std::vector<int64_t>{0}});
    std::vector<Value*> operands = {identity, nullptr};
    if (by_scales_)
      operands.push_back(scale(k));
    else
      operands.insert(operands.end(), {nullptr, c_.size_value(c_.output(0), axes_[k])});
    return c_.add("Resize", operands, attributes);
  }

  Value* scale(size_t k) {
    const auto at = static_cast<int64_t>(k);
    return c_.add("Slice", {c_.input(2), c_.integers({at}), c_.integers({at + 1}), c_.integers({0})});
  }

  // g [..., out, ...] along the axis times R [out, in].
  Value* along(Value* g, int64_t axis, Value* matrix) {
    const auto last = static_cast<int64_t>(rank_) - 1;
    if (axis == last) return c_.add("MatMul", {g, matrix});
    if (axis == last - 1) return c_.add("MatMul", {c_.add("Transpose", {matrix}), g});
    std::vector<int64_t> perm(rank_);
    for (size_t d = 0; d < rank_; ++d) perm[d] = static_cast<int64_t>(d);
    std::swap(perm[static_cast<size_t>(axis)], perm.back());
    auto turned = [&](Value* v) { return c_.add("Transpose", {v}, {{"perm", perm}}); };
    return turned(c_.add("MatMul", {turned(g), matrix}));
  }

  GradientContext& c_;
  size_t rank_;
  std::vector<int64_t> axes_;
  std::vector<double> scales_;  // empty where they are not known, or sizes are given
  bool by_scales_ = false;
};

std::vector<Value*> resize_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  found[0] = ResizeGradient(c).make();
  return found;
}

// [n, (c block), l] -> [n, c, image...] adds up blocks; so each element of a block reads the image where it stood: a convolution of every
// channel with the kernels that have a single 1.
std::vector<Value*> col2im_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  const auto block = c.constant_ints(2);
  const Shape *x = c.shape(c.input(0)), *y = c.shape(c.output(0));
  if (!block || !y || y->size() != block->size() + 2 || !(*y)[1].known() || !x)
    c.refuse("its gradient needs constant blocks and a known number of channels");
  const int64_t channels = (*y)[1].value;
  const auto taps = static_cast<size_t>(std::accumulate(block->begin(), block->end(), int64_t{1}, std::multiplies<>()));
  std::vector<double> ones(static_cast<size_t>(channels) * taps * taps, 0);
  for (size_t i = 0; i < static_cast<size_t>(channels) * taps; ++i) ones[i * taps + i % taps] = 1;
  std::vector<int64_t> dims = {channels * static_cast<int64_t>(taps), 1};
  dims.insert(dims.end(), block->begin(), block->end());
  Value* kernels = c.add("Reshape", {c.numbers(ones, c.input(0)->type.dtype), c.integers(dims)});
  std::vector<Attribute> attributes = c.attributes({"strides", "dilations", "pads"});
  attributes.push_back({"group", channels});
  found[0] = c.reshape_like(c.add("Conv", {c.of_output(), kernels}, attributes), c.input(0));
  return found;
}

// grid [n, cells..., k] = p theta^T with theta [n, k, k + 1] and the cells' positions p and a 1; theta = (1 0) makes p itself.
std::vector<Value*> affine_grid_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  Value* theta = c.input(0);
  const Shape& shape = c.known_shape(theta);
  if (shape.size() != 3 || !shape[1].known()) c.refuse("its gradient needs to know the number of dimensions of the grid");
  const int64_t k = shape[1].value;
  std::vector<double> unit(static_cast<size_t>(k * (k + 1)), 0);
  for (int64_t i = 0; i < k; ++i) unit[static_cast<size_t>(i * (k + 2))] = 1;
  Value* units = c.add("Reshape", {c.numbers(unit, theta->type.dtype), c.integers({1, k, k + 1})});
  auto as_rows = [&](Value* v) { return c.add("Reshape", {v, c.integers({0, -1, k})}); };  // [n, cells, k]
  Value* positions = as_rows(c.add("AffineGrid", {c.expand_like(units, theta), c.input(1)}, c.attributes({"align_corners"})));
  Value* g = as_rows(c.of_output());
  Value* turned = c.add("Transpose", {g}, {{"perm", std::vector<int64_t>{0, 2, 1}}});
  Value* sums = c.add("Unsqueeze", {c.reduce_sum(g, {1}, false), c.integers({2})});
  found[0] = c.add("Concat", {c.add("MatMul", {turned, positions}), sums}, {{"axis", int64_t{2}}});
  return found;
}

std::vector<Value*> grid_sample_gradient(GradientContext& c) {
  std::vector<Value*> made = c.add_several("GridSampleGrad", {c.of_output(), c.input(0), c.input(1)}, {c.wants(0), c.wants(1)},
                                           c.attributes({"mode", "padding_mode", "align_corners"}), kCommunicationDomain);
  made.resize(2);
  return made;
}

// Of the image: regions have none, as in PyTorch.
std::vector<Value*> roi_align_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  if (c.wants(0))
    found[0] = c.add_own(
        "RoiAlignGrad", {c.of_output(), c.input(0), c.input(1), c.input(2)},
        c.attributes({"mode", "output_height", "output_width", "sampling_ratio", "spatial_scale", "coordinate_transformation_mode"}));
  return found;
}

std::vector<Value*> max_roi_pool_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  if (c.wants(0))
    found[0] = c.add_own("MaxRoiPoolGrad", {c.of_output(), c.input(0), c.input(1)}, c.attributes({"pooled_shape", "spatial_scale"}));
  return found;
}

}  // namespace

GradientRule image_gradient(const std::string& name) {
  if (name == "AffineGrid") return affine_grid_gradient;
  if (name == "Resize") return resize_gradient;
  if (name == "GridSample") return grid_sample_gradient;
  if (name == "RoiAlign") return roi_align_gradient;
  if (name == "MaxRoiPool") return max_roi_pool_gradient;
  if (name == "Col2Im") return col2im_gradient;
  return name == "ImageDecoder" ? zero_gradient : nullptr;
}

}  // namespace fretsaw
