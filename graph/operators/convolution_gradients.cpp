// Gradients of convolutions and poolings.
#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "graph/communication_schemas.h"
#include "graph/operators/gradient_rules.h"
#include "graph/operators/gradient_terms.h"

namespace fretsaw {
namespace {

// The sizes from dimension 2 on; nullopt where one is not known.
std::optional<std::vector<int64_t>> spatial(GradientContext& c, const Value* x) {
  const Shape& shape = c.known_shape(x);
  std::vector<int64_t> sizes;
  for (size_t d = 2; d < shape.size(); ++d) {
    if (!shape[d].known()) return std::nullopt;
    sizes.push_back(shape[d].value);
  }
  return sizes;
}

// The spatial sizes of the weights, input 1; nullopt where nothing tells them.
std::optional<std::vector<int64_t>> kernel_of(GradientContext& c) {
  if (c.node().has("kernel_shape")) return c.node().get_ints("kernel_shape");
  return spatial(c, c.input(1));
}

// How a window slides over `in` cells and makes `out` cells.
struct Sliding {
  std::vector<int64_t> in, out, kernel, strides, dilations, pads;  // pads: all before, then all after

  int64_t extent(size_t i) const { return dilations[i] * (kernel[i] - 1) + 1; }
  size_t rank() const { return kernel.size(); }
  // What the window leaves over at the end, so that (out - 1) strides + extent + rest = in + pads.
  std::vector<int64_t> rest() const {
    std::vector<int64_t> left;
    for (size_t i = 0; i < rank(); ++i) left.push_back(in[i] + pads[i] + pads[i + rank()] - extent(i) - (out[i] - 1) * strides[i]);
    return left;
  }
};

std::vector<int64_t> list_or(const Node& node, const char* name, size_t size, int64_t absent) {
  std::vector<int64_t> given = node.get_ints(name);
  return given.empty() ? std::vector<int64_t>(size, absent) : given;
}

Sliding window_of(const Node& node, std::vector<int64_t> kernel) {
  Sliding w;
  w.strides = list_or(node, "strides", kernel.size(), 1);
  w.dilations = list_or(node, "dilations", kernel.size(), 1);
  w.pads = list_or(node, "pads", 2 * kernel.size(), 0);
  w.kernel = std::move(kernel);
  return w;
}

// Shares the padding that takes `in` cells to `out` between both ends.
void share_padding(Sliding& w, const std::string& auto_pad) {
  for (size_t i = 0; i < w.rank(); ++i) {
    const int64_t total = auto_pad == "VALID" ? 0 : std::max<int64_t>(0, (w.out[i] - 1) * w.strides[i] + w.extent(i) - w.in[i]);
    w.pads[i] = auto_pad == "SAME_LOWER" ? total - total / 2 : total / 2;
    w.pads[i + w.rank()] = total - w.pads[i];
  }
}

std::string auto_pad_of(const Node& node) {
  const std::string name = node.get_string("auto_pad", "NOTSET");
  return name.empty() ? "NOTSET" : name;
}

std::vector<Attribute> attributes_of(GradientContext& c, const Sliding& w) {
  std::vector<Attribute> found = {{"strides", w.strides}, {"dilations", w.dilations}, {"pads", w.pads}, {"kernel_shape", w.kernel}};
  if (c.node().has("group")) found.push_back({"group", c.node().get_int("group", 1)});
  return found;
}

// The attributes of the node with its kernel's shape, for operators that read them as the node itself does.
std::vector<Attribute> own_attributes(GradientContext& c, const std::optional<std::vector<int64_t>>& kernel) {
  if (!kernel) c.refuse("its gradient needs the shape of the kernel, which is not known");
  std::vector<Attribute> found = c.attributes({"strides", "dilations", "pads", "auto_pad", "group"});
  found.push_back({"kernel_shape", *kernel});
  return found;
}

// The gradient of x: a transposed convolution of g with the same weights, where the sizes are known.
Value* conv_input_gradient(GradientContext& c) {
  Value *x = c.input(0), *w = c.input(1), *g = c.of_output();
  const auto kernel = kernel_of(c), in = spatial(c, x), out = spatial(c, c.output(0));
  if (!in || !out || !kernel) return c.add_own("ConvGradInput", {g, w, c.shape_value(x)}, own_attributes(c, kernel));
  Sliding sliding = window_of(c.node(), *kernel);
  sliding.in = *in;
  sliding.out = *out;
  if (auto_pad_of(c.node()) != "NOTSET") share_padding(sliding, auto_pad_of(c.node()));
  std::vector<Attribute> attributes = attributes_of(c, sliding);
  const std::vector<int64_t> rest = sliding.rest();
  if (std::count(rest.begin(), rest.end(), 0) != static_cast<int64_t>(rest.size())) attributes.push_back({"output_padding", rest});
  return c.add("ConvTranspose", {g, w}, attributes);
}

std::vector<Value*> conv_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  Value *x = c.input(0), *g = c.of_output();
  if (c.wants(0)) found[0] = conv_input_gradient(c);
  if (c.wants(1)) found[1] = c.add_own("ConvGradWeight", {g, x}, own_attributes(c, kernel_of(c)));
  if (c.wants(2)) found[2] = c.reduce_sum(g, all_but_channels(c.rank(x)), false);
  return found;
}

// The padding of a transposed convolution, which output_shape or auto_pad may leave to be worked out.
Sliding transposed_window(GradientContext& c) {
  const auto kernel = kernel_of(c), in = spatial(c, c.input(0)), out = spatial(c, c.output(0));
  if (!kernel) c.refuse("its gradient needs the shape of the kernel, which is not known");
  Sliding w = window_of(c.node(), *kernel);
  const std::string auto_pad = auto_pad_of(c.node());
  const std::vector<int64_t> extra = list_or(c.node(), "output_padding", w.rank(), 0);
  if (auto_pad == "VALID") w.pads.assign(2 * w.rank(), 0);
  const bool open = c.node().has("output_shape") || auto_pad == "SAME_UPPER" || auto_pad == "SAME_LOWER";
  if (open && (!in || !out)) c.refuse("its gradient needs known sizes where output_shape or auto_pad decide the padding");
  for (size_t i = 0; i < w.rank(); ++i) {
    if (open) {
      const int64_t total = ((*in)[i] - 1) * w.strides[i] + extra[i] + w.extent(i) - (*out)[i];
      w.pads[i] = std::max<int64_t>(0, auto_pad == "SAME_UPPER" ? total / 2 : total - total / 2);
      w.pads[i + w.rank()] = total - w.pads[i];
    }
    if (extra[i] >= w.strides[i] || w.pads[i + w.rank()] < 0) c.refuse("there is no gradient for output_padding beyond its strides");
  }
  return w;
}

// y is to x what the input of a convolution is to its output.
std::vector<Value*> conv_transpose_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  Value *x = c.input(0), *g = c.of_output();
  const Sliding window = transposed_window(c);
  const std::vector<Attribute> attributes = attributes_of(c, window);
  if (c.wants(0)) found[0] = c.add("Conv", {g, c.input(1)}, attributes);
  if (c.wants(1)) found[1] = c.add_own("ConvGradWeight", {x, g}, attributes);
  if (c.wants(2)) found[2] = c.reduce_sum(g, all_but_channels(c.rank(x)), false);
  return found;
}

std::vector<Value*> max_pool_gradient(GradientContext& c) {
  if (!c.of_output()) return c.none();
  return {c.add_own("MaxPoolGrad", {c.of_output(), c.input(0)},
                    c.attributes({"kernel_shape", "strides", "dilations", "pads", "auto_pad", "ceil_mode"}))};
}

Value* spread_average(GradientContext& c, Value* g, std::vector<Attribute> attributes) {
  return c.add_own("AveragePoolGrad", {g, c.shape_value(c.input(0))}, std::move(attributes));
}

std::vector<Value*> average_pool_gradient(GradientContext& c) {
  return {spread_average(c, c.of_output(),
                         c.attributes({"kernel_shape", "strides", "dilations", "pads", "auto_pad", "ceil_mode", "count_include_pad"}))};
}

// y = (sum |x|^p)^(1/p): g sign(x) (|x| / y)^(p-1) with g / y^(p-1) spread by `spread`; 0 where y is 0
template <typename Spread>
Term norm_slope(GradientContext& c, const Spread& spread) {
  const int64_t p = c.node().get_int("p", 2);
  const auto formula = [&](const Term& g, const Term& x, const Term& y) {
    if (p == 1) return apply("Sign", x) * spread(g);
    if (p == 2) return x * spread(where(y == 0.0, 0.0, g / y));
    const auto power = static_cast<double>(p - 1);
    Term share = spread(where(y == 0.0, 0.0, g / y.made("Pow", {y, y.number(power)})));
    Term magnitude = apply("Abs", x);
    return apply("Sign", x) * magnitude.made("Pow", {magnitude, x.number(power)}) * share;
  };
  return in_float32(formula, Term(c, c.of_output()), Term(c, c.input(0)), Term(c, c.output(0)));
}

// A sum over windows is their average times their size, padding counted.
std::vector<Value*> lp_pool_gradient(GradientContext& c) {
  if (c.node().get_int("ceil_mode", 0) != 0) c.refuse("there is no gradient for ceil_mode");
  const std::vector<int64_t> kernel = c.node().get_ints("kernel_shape");
  const auto taps = static_cast<double>(std::accumulate(kernel.begin(), kernel.end(), int64_t{1}, std::multiplies<>()));
  return {norm_slope(c, [&](const Term& share) {
    std::vector<Attribute> attributes = c.attributes({"kernel_shape", "strides", "dilations", "pads", "auto_pad"});
    attributes.push_back({"count_include_pad", int64_t{1}});
    return Term(c, spread_average(c, share * taps, attributes));
  })};
}

std::vector<Value*> global_average_pool_gradient(GradientContext& c) {
  return {c.expand_like(divided_by_count(c, Term(c, c.of_output()), c.input(0), c.output(0)), c.input(0))};
}

// Cells that are equally the largest share the gradient.
std::vector<Value*> global_max_pool_gradient(GradientContext& c) {
  Term g(c, c.of_output()), mask = as_number(Term(c, c.input(0)) == Term(c, c.output(0)), g);
  std::vector<int64_t> axes = all_but_channels(c.rank(c.input(0)));
  axes.erase(axes.begin());
  return {g / Term(c, c.reduce_sum(mask, axes, true)) * mask};
}

std::vector<Value*> global_lp_pool_gradient(GradientContext& c) {
  return {norm_slope(c, [](const Term& share) { return share; })};
}

// Each element went to where its index says, counted over the whole result.
std::vector<Value*> max_unpool_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  if (c.input(2)) c.refuse("there is no gradient for a MaxUnpool with an output_shape");
  found[0] = c.add("Gather", {c.add("Reshape", {c.of_output(), c.integers({-1})}), c.input(1)});
  return found;
}

// X, W, offset, B, mask
std::vector<Value*> deform_conv_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none(), operands = {c.of_output(), c.input(0), c.input(1), c.input(2)};
  if (c.input(4)) operands.push_back(c.input(4));
  if (c.wants(3)) found[3] = c.reduce_sum(c.of_output(), {0, 2, 3}, false);
  const std::vector<Value*> made = c.add_several(
      "DeformConvGrad", operands, {c.wants(0), c.wants(1), c.wants(2), c.wants(4)},
      c.attributes({"kernel_shape", "strides", "dilations", "pads", "auto_pad", "group", "offset_group"}), kCommunicationDomain);
  const size_t input_of[] = {0, 1, 2, 4};
  for (size_t o = 0; o < made.size(); ++o)
    if (input_of[o] < found.size()) found[input_of[o]] = made[o];
  return found;
}

}  // namespace

GradientRule convolution_gradient(const std::string& name) {
  static const std::unordered_map<std::string, GradientRule> rules = {
      {"Conv", conv_gradient},
      {"ConvTranspose", conv_transpose_gradient},
      {"DeformConv", deform_conv_gradient},
      {"MaxPool", max_pool_gradient},
      {"AveragePool", average_pool_gradient},
      {"LpPool", lp_pool_gradient},
      {"GlobalAveragePool", global_average_pool_gradient},
      {"GlobalMaxPool", global_max_pool_gradient},
      {"GlobalLpPool", global_lp_pool_gradient},
      {"MaxUnpool", max_unpool_gradient},
      {"ConvInteger", zero_gradient},
      {"QLinearConv", zero_gradient},
  };
  auto it = rules.find(name);
  return it == rules.end() ? nullptr : it->second;
}

}  // namespace fretsaw
