// Gradients of norms. Throughout, n = (x - mean) / deviation is the normalised tensor, and averages are over what was normalised:
//
//   y = n s + b:   db = sum g,   ds = sum g n,   dx = (g s - mean(g s) - n mean(g s n)) / deviation
#include <algorithm>
#include <unordered_map>

#include "graph/communication_schemas.h"
#include "graph/operators/gradient_rules.h"
#include "graph/operators/gradient_terms.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

// A vector along the channels [C] as [C, 1, ...], so that it broadcasts to x.
Term per_channel(GradientContext& c, Value* vector, size_t rank) {
  std::vector<int64_t> axes;
  for (size_t d = 2; d < rank; ++d) axes.push_back(static_cast<int64_t>(d) - 1);
  return {c, axes.empty() ? vector : c.add("Unsqueeze", {vector, c.integers(axes)})};
}

Term reduced(const char* op, const Term& x, const std::vector<int64_t>& axes) {
  return x.made(op, {x, x.context->integers(axes)}, {{"keepdims", int64_t{1}}});
}

void no_gradient_through(GradientContext& c, size_t first_output) {
  for (size_t o = first_output; o < c.node().outputs.size(); ++o)
    if (c.of_output(o)) c.refuse("there is no gradient through its statistics", "let the loss depend on its first output alone");
}

// By running statistics: y = (x - mean) / sqrt(variance + epsilon) s + b, mean and variance being inputs like the others. X, the scale and
// the statistics may be of three types: all is computed in the widest.
std::vector<Value*> batch_norm_inference(GradientContext& c) {
  std::vector<Value*> found = c.none();
  const size_t rank = c.rank(c.input(0));
  const std::vector<int64_t> axes = all_but_channels(rank);
  DType widest = DType::float32;
  for (const Value* v : c.node().inputs)
    if (bits_of(v->type.dtype) > bits_of(widest)) widest = v->type.dtype;
  auto wide = [&](Value* v) { return cast_to(widest, Term(c, v)); };
  Term g = wide(c.of_output()), x = wide(c.input(0)), scale = wide(c.input(1)), variance = wide(c.input(4));
  Term inverse = 1.0 / apply("Sqrt", variance + static_cast<double>(c.node().get_float("epsilon", 1e-5F)));  // [C]
  auto sum = [&](Value* v) { return Term(c, c.reduce_sum(v, axes, false)); };
  auto centred = [&] { return x - per_channel(c, wide(c.input(3)), rank); };
  if (c.wants(0)) found[0] = g * per_channel(c, scale * inverse, rank);
  if (c.wants(2)) found[2] = sum(g);
  if (c.wants(1)) found[1] = sum(g * centred()) * inverse;
  if (c.wants(3)) found[3] = -(sum(g) * scale * inverse);
  if (c.wants(4)) found[4] = -0.5 * (sum(g * centred()) * scale * (inverse * inverse * inverse));
  for (size_t i = 0; i < found.size(); ++i)
    if (found[i]) found[i] = cast_to(c.input(i)->type.dtype, Term(c, found[i]));
  return found;
}

// By the batch's own statistics. The running ones only move: they carry no gradient.
std::vector<Value*> batch_norm_gradient(GradientContext& c) {
  if (c.node().get_int("training_mode", 0) == 0) return batch_norm_inference(c);
  no_gradient_through(c, 1);
  std::vector<Value*> found = c.none();
  const std::vector<Value*> made = c.add_several("BatchNormalizationGrad", {c.of_output(), c.input(0), c.input(1)},
                                                 {c.wants(0), c.wants(1), c.wants(2)}, c.attributes({"epsilon"}), kCommunicationDomain);
  std::copy(made.begin(), made.end(), found.begin());
  return found;
}

// LayerNormalization and RMSNormalization over the dimensions from `axis` on, to which scale and bias broadcast.
std::vector<Value*> row_norm_gradient(GradientContext& c, const std::string& op) {
  no_gradient_through(c, 1);
  std::vector<Value*> found = c.none();
  Value *x = c.input(0), *g = c.of_output();
  const std::vector<Attribute> settings = c.attributes({"axis", "epsilon"});
  if (c.wants(0)) found[0] = c.add_own(op, {g, x, c.input(1)}, settings);
  if (c.wants(1)) {
    const Shape& shape = c.known_shape(x);
    const size_t axis = c.axis(c.node().get_int("axis", -1), shape.size());
    const Shape row(shape.begin() + static_cast<int64_t>(axis), shape.end());
    const auto of_scale = [&](const Term& gradient, const Term& of_x) {
      return Term(c, c.sum_to(c.add_own(op + "Scale", {gradient, of_x}, settings), &row, c.input(1)));
    };
    const Shape* own = c.shape(c.input(1));
    const bool whole = own && std::equal(own->begin(), own->end(), row.begin(), row.end(), same_known);
    // What is added up further is not rounded in between.
    found[1] = whole ? of_scale({c, g}, {c, x}) : in_float32(of_scale, Term(c, g), Term(c, x));
  }
  if (c.wants(2)) found[2] = c.sum_to(g, c.shape(c.output(0)), c.input(2));
  return found;
}
std::vector<Value*> layer_norm_gradient(GradientContext& c) {
  return row_norm_gradient(c, "LayerNormalizationGrad");
}
std::vector<Value*> rms_norm_gradient(GradientContext& c) {
  return row_norm_gradient(c, "RMSNormalizationGrad");
}

// The target that makes [N, groups, rest] of x [N, C, ...]; groups 0: each channel is one. A -1 would not be found out where N is 0.
Value* rows_of_groups(GradientContext& c, Value* x, int64_t groups) {
  const Shape& shape = c.known_shape(x);
  if (shape[0].value > 0) return c.integers({0, groups, -1});
  const int64_t first = groups == 0 ? 2 : 1;
  if (std::all_of(shape.begin() + first, shape.end(), [](const Dim& d) { return d.known(); })) {
    int64_t rest = 1;
    for (size_t d = static_cast<size_t>(first); d < shape.size(); ++d) rest *= shape[d].value;
    return c.integers({0, groups, groups == 0 ? rest : rest / groups});
  }
  Term sizes(c, c.add("Shape", {x}, {{"start", first}}, DType::int64));
  Term rest = sizes.made("ReduceProd", {sizes}, {{"keepdims", int64_t{1}}});
  Value* count = groups == 0 ? c.size_value(x, 1) : c.integers({groups});
  if (groups != 0) rest = rest.made("Div", {rest, count});
  return c.add("Concat", {c.size_value(x, 0), count, rest}, {{"axis", int64_t{0}}}, DType::int64);
}

// Runs of channels [N, (G C/G), ...], each normalised as one row [N, G, rest] of a LayerNormalization without scale.
std::vector<Value*> channel_norm_gradient(GradientContext& c, int64_t groups) {
  std::vector<Value*> found = c.none();
  const size_t rank = c.rank(c.input(0));
  Term g(c, c.of_output()), x(c, c.input(0)), one = x.number(1), zero = x.number(0);
  Value* rows = rows_of_groups(c, x, groups);
  auto as_rows = [&](const Term& v) { return v.made("Reshape", {v, rows}); };
  std::vector<Attribute> settings = c.attributes({"epsilon"});
  settings.push_back({"axis", int64_t{2}});
  Term row = as_rows(x);
  if (c.wants(0)) {
    Term scaled = as_rows(g * per_channel(c, c.input(1), rank));
    found[0] = c.reshape_like(c.add_own("LayerNormalizationGrad", {scaled, row, one}, settings), x);
  }
  if (c.wants(1)) {
    Value* normalised = c.reshape_like(row.made("LayerNormalization", {row, one, zero}, settings), x);
    found[1] = c.reduce_sum(g * Term(c, normalised), all_but_channels(rank), false);
  }
  if (c.wants(2)) found[2] = c.reduce_sum(g, all_but_channels(rank), false);
  return found;
}
std::vector<Value*> group_norm_gradient(GradientContext& c) {
  return channel_norm_gradient(c, c.node().get_int("num_groups", 1));
}
std::vector<Value*> instance_norm_gradient(GradientContext& c) {
  return channel_norm_gradient(c, 0);
}

// The gradient of the one input from a formula of g, x and y, computed in float32 at least.
template <typename Formula>
std::vector<Value*> widely(GradientContext& c, const Formula& formula) {
  return {in_float32(formula, Term(c, c.of_output()), Term(c, c.input(0)), Term(c, c.output(0)))};
}

// y = (x - mean) / deviation over `axes`, with 1e-9 added to the deviation.
std::vector<Value*> mean_variance_gradient(GradientContext& c) {
  const std::vector<int64_t> axes = c.node().get_ints("axes", {0, 2, 3});
  return widely(c, [&](const Term& g, const Term& x, const Term& y) {
    Term centred = x - reduced("ReduceMean", x, axes);
    Term deviation = apply("Sqrt", reduced("ReduceMean", centred * centred, axes)) + 1e-9;
    return (g - reduced("ReduceMean", g, axes) - y * reduced("ReduceMean", g * y, axes)) / deviation;
  });
}

// y = x / |x| with the norm of order 1 or 2; 0 where the norm is
std::vector<Value*> lp_norm_gradient(GradientContext& c) {
  const std::vector<int64_t> axis = {c.node().get_int("axis", -1)};
  const bool first = c.node().get_int("p", 2) == 1;
  return widely(c, [&](const Term& g, const Term& x, const Term& y) {
    Term norm = reduced(first ? "ReduceL1" : "ReduceL2", x, axis), along = reduced("ReduceSum", g * y, axis);
    return where(norm == 0.0, 0.0, (g - (first ? apply("Sign", x) : y) * along) / norm);
  });
}

// The sum over neighbouring channels: `before` before and `after` after.
Term neighbours(GradientContext& c, const Term& x, int64_t before, int64_t after) {
  Term image = x.made("Unsqueeze", {x.made("Reshape", {x, rows_of_groups(c, c.input(0), 0)}), c.integers({1})});  // [N, 1, C, rest]
  const std::vector<int64_t> kernel = {before + after + 1, 1}, pads = {before, 0, after, 0};
  Term average = image.made("AveragePool", {image}, {{"kernel_shape", kernel}, {"pads", pads}, {"count_include_pad", int64_t{1}}});
  return {c, c.reshape_like(average * static_cast<double>(kernel[0]), c.input(0))};
}

// y = x d^-beta, d = bias + alpha/size sum x^2 over neighbours: g d^-beta - 2 alpha beta/size x sum(g y / d)
std::vector<Value*> lrn_gradient(GradientContext& c) {
  auto number = [&](const char* name, float absent) { return static_cast<double>(c.node().get_float(name, absent)); };
  const double alpha = number("alpha", 1e-4F), beta = number("beta", 0.75F), bias = number("bias", 1);
  const int64_t size = c.node().get_int("size", 1), before = (size - 1) / 2, after = size - 1 - before;
  const double share = alpha / static_cast<double>(size);
  return widely(c, [&](const Term& g, const Term& x, const Term& y) {
    Term d = bias + share * neighbours(c, x * x, before, after);
    Term around = neighbours(c, g * y / d, after, before);  // those whose sums x is in
    return g * d.made("Pow", {d, d.number(-beta)}) - 2 * share * beta * (x * around);
  });
}

}  // namespace

GradientRule normalisation_gradient(const std::string& name) {
  static const std::unordered_map<std::string, GradientRule> rules = {
      {"BatchNormalization", batch_norm_gradient},
      {"LayerNormalization", layer_norm_gradient},
      {"RMSNormalization", rms_norm_gradient},
      {"GroupNormalization", group_norm_gradient},
      {"InstanceNormalization", instance_norm_gradient},
      {"MeanVarianceNormalization", mean_variance_gradient},
      {"LpNormalization", lp_norm_gradient},
      {"LRN", lrn_gradient},
  };
  auto it = rules.find(name);
  return it == rules.end() ? loss_gradient(name) : it->second;
}

}  // namespace fretsaw
