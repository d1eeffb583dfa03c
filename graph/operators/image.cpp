// Resampling and other image operators.

#include "graph/operators/gradient_rules.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

using Kind = Factor::Kind;

// The scales of a constant operand; empty when left out, empty or not constant.
std::vector<float> constant_scales(const Node& node, size_t operand) {
  const Tensor* tensor = constant_operand(node, operand);
  if (!tensor || tensor->dtype != DType::float32 || tensor->count() == 0) return {};
  auto values = tensor->as<float>();
  return {values.begin(), values.end()};
}

// Dimensions that keep their size pass; the others are whole.
FactorRule resize_factors(const Node& node) {
  RuleBuilder rule(node);
  if (node.get_string("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize") throw NoRule{"it crops"};
  size_t rank = rule.rank(0);
  const Shape* y = rule.output_shape(0);
  std::vector<bool> touched(rank, !node.has("axes"));
  std::vector<size_t> axes;
  for (int64_t a : node.get_ints("axes")) axes.push_back(axis_of(a, rank));
  if (axes.empty())
    for (size_t d = 0; d < rank; ++d) axes.push_back(d);
  for (size_t a : axes) touched[a] = true;
  std::vector<float> scales = constant_scales(node, node.is("Upsample") ? 1 : 2);
  auto sizes = constant_ints(node, 3);
  for (size_t k = 0; k < axes.size(); ++k) {
    const Dim& in = rule.dim(0, axes[k]);
    if (k < scales.size() && scales[k] == 1.0F) touched[axes[k]] = false;
    // A size given outright says so too, as long as the ratio of other axes cannot change it.
    bool stretched = node.get_string("keep_aspect_ratio_policy", "stretch") == "stretch";
    if (sizes && stretched && k < sizes->size() && in.known() && (*sizes)[k] == in.value) touched[axes[k]] = false;
  }
  rule.out_rank(0, rank);
  for (size_t d = 0; d < rank; ++d) {
    int f = rule.from(0, d, touched[d] ? Kind::whole : Kind::parallel, (touched[d] ? "w" : "i") + std::to_string(d));
    if (touched[d]) f = rule.whole(y && y->size() == rank ? (*y)[d] : Dim(), "w" + std::to_string(d) + "'");
    if (f >= 0) rule.out(0, d, f);
  }
  if (rule.has(3) && !node.has("axes")) rule.set_shape_operand(3);
  return rule.done();
}

double resize_flops(const Node& node) {
  return node.get_string("mode", "nearest") == "nearest" ? 0 : output_elements(node);
}

// theta [n, 2, 3] or [n, 3, 4] -> grid [n, (d,) h, w, 2 or 3]
FactorRule affine_grid_factors(const Node& node) {
  RuleBuilder rule(node);
  int n = rule.parallel(rule.dim(0, 0), "n");
  rule.in(0, 0, n);
  rule.rest_whole(0, "theta");
  rule.set_shape_operand(1);  // [n, c, (d,) h, w]: the samples stand first in both
  const Shape* y = rule.output_shape(0);
  size_t rank = y ? y->size() : rule.rank(0) == 3 && rule.dim(0, 1).value == 3 ? 5 : 4;
  rule.out_rank(0, rank);
  rule.out(0, 0, n);
  rule.rest_whole_out(0, "grid");
  return rule.done();
}

// x [n, c, h, w], grid [n, y, x, 2] -> [n, c, y, x]
FactorRule grid_sample_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0);
  if (rank < 3 || rule.rank(1) != rank) throw NoRule{"operands whose ranks do not fit"};
  int n = rule.parallel(rule.dim(0, 0), "n"), c = rule.parallel(rule.dim(0, 1), "c");
  rule.in(0, 0, n);
  rule.in(0, 1, c);
  rule.rest_whole(0, "s");
  rule.in(1, 0, n);
  rule.out_rank(0, rank);
  rule.out(0, 0, n);
  rule.out(0, 1, c);
  for (size_t d = 2; d < rank; ++d) {
    int f = rule.parallel(rule.dim(1, d - 1), "i" + std::to_string(d));
    rule.in(1, d - 1, f);
    rule.out(0, d, f);
  }
  rule.rest_whole(1, "xy");
  return rule.done();
}

// x [n, c, h, w], boxes [r, 4], which sample [r] -> [r, c, y, x]
FactorRule roi_align_factors(const Node& node) {
  RuleBuilder rule(node);
  if (rule.rank(0) != 4 || rule.rank(1) != 2) throw NoRule{"operands whose ranks do not fit"};
  int c = rule.parallel(rule.dim(0, 1), "c"), r = rule.parallel(rule.dim(1, 0), "r");
  rule.in(0, 1, c);
  rule.rest_whole(0, "x");
  rule.in(1, 0, r);
  rule.rest_whole(1, "box");
  if (rule.has(2)) rule.in(2, 0, r);
  rule.out_rank(0, 4);
  rule.out(0, 0, r);
  rule.out(0, 1, c);
  rule.rest_whole_out(0, "y");
  return rule.done();
}

// [n, (c block), l] -> [n, c, image...]
FactorRule col2im_factors(const Node& node) {
  RuleBuilder rule(node);
  const Shape* y = rule.output_shape(0);
  auto image = constant_ints(node, 1);
  if (!y && !image) throw NoRule{"the rank of its result is not known"};
  int n = rule.parallel(rule.dim(0, 0), "n");
  rule.in(0, 0, n);
  rule.rest_whole(0, "x");
  rule.out_rank(0, y ? y->size() : image->size() + 2);
  rule.out(0, 0, n);
  rule.rest_whole_out(0, "y");
  return rule.done();
}

}  // namespace

std::vector<OperatorRecord> image_operators() {
  std::vector<OperatorRecord> records = {
      {.name = "Resize", .since = 19, .factors = resize_factors, .flops = resize_flops},
      {.name = "Upsample", .since = 10, .factors = resize_factors, .flops = resize_flops},
      {.name = "AffineGrid", .since = 20, .factors = affine_grid_factors, .flops = output_elements},
      {.name = "GridSample", .since = 22, .factors = grid_sample_factors, .flops = output_elements},
      {.name = "RoiAlign", .since = 22, .factors = roi_align_factors, .flops = output_elements},
      {.name = "MaxRoiPool", .since = 22},
      {.name = "Col2Im", .since = 18, .factors = col2im_factors, .flops = input_elements},
      {.name = "ImageDecoder", .since = 20},
  };
  return with_gradients(std::move(records), image_gradient);
}

}  // namespace fretsaw
