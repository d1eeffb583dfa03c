// Convolutions and pooling.
#include <algorithm>

#include "graph/operators/gradient_rules.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

using Kind = Factor::Kind;

// A window that looks at one element and moves by one passes its axis; others need neighbours.
bool passes(const std::vector<int64_t>& kernel, const Node& node, size_t d, size_t spatial) {
  auto at = [&](const char* name, size_t k, int64_t absent) {
    auto v = node.get_ints(name);
    return k < v.size() ? v[k] : absent;
  };
  std::string pad = node.get_string("auto_pad", "NOTSET");
  return d < kernel.size() && kernel[d] == 1 && at("strides", d, 1) == 1 && at("pads", d, 0) == 0 && at("pads", d + spatial, 0) == 0 &&
         at("output_padding", d, 0) == 0 && pad != "SAME_LOWER" && pad != "SAME_UPPER";
}

// Spatial axes of operand `x` and output 0, from dimension 2 on.
void windows(RuleBuilder& rule, size_t x, const std::vector<int64_t>& kernel) {
  const Node& node = rule.node();
  size_t rank = rule.rank(x);
  const Shape* y = rule.output_shape(0);
  for (size_t d = 2; d < rank; ++d) {
    std::string name(1, "hwd"[std::min<size_t>(d - 2, 2)]);
    bool parallel = passes(kernel, node, d - 2, rank - 2);
    Dim size = y && y->size() == rank ? (*y)[d] : parallel ? rule.dim(x, d) : Dim();
    int f = rule.add(size, parallel ? Kind::parallel : Kind::halo, name);
    rule.in(x, d, f);
    rule.out(0, d, f);
  }
}

std::vector<int64_t> kernel_of(const Node& node, RuleBuilder& rule, size_t weight) {
  std::vector<int64_t> kernel = node.get_ints("kernel_shape");
  if (kernel.empty())
    for (size_t d = 2; d < rule.rank(weight); ++d) kernel.push_back(rule.dim(weight, d).value);
  return kernel;
}

struct ConvFactors {
  int group = -1, out = -1;  // group: -1 where there is one
};

// x [n, (g c), h, w], weight [(g o), c, r, s] -> [n, (g o), h, w]
ConvFactors convolve(RuleBuilder& rule, size_t x, size_t w) {
  const Node& node = rule.node();
  size_t rank = rule.rank(x);
  if (rank < 2 || rule.rank(w) != rank) throw NoRule{"operands whose ranks do not fit"};
  int64_t groups = node.get_int("group", 1);
  ConvFactors f;
  rule.out_rank(0, rank);
  int n = rule.parallel(rule.dim(x, 0), "n");
  rule.in(x, 0, n);
  rule.out(0, 0, n);
  Dim outs = rule.dim(w, 0);
  if (groups > 1) {
    f.group = rule.parallel(Dim(groups), "g");
    if (outs.known()) outs = Dim(outs.value / groups);
    rule.in(x, 1, f.group);
    rule.in(w, 0, f.group);
    rule.out(0, 1, f.group);
    rule.set_count("group", {f.group});
  }
  f.out = rule.parallel(outs, "o");
  int c = rule.sum(rule.dim(w, 1), "c");
  rule.in(x, 1, c);
  rule.in(w, 0, f.out);
  rule.in(w, 1, c);
  rule.out(0, 1, f.out);
  windows(rule, x, kernel_of(node, rule, w));
  for (size_t d = 2; d < rank; ++d) rule.in(w, d, rule.whole(rule.dim(w, d), std::string("k") + "hwd"[std::min<size_t>(d - 2, 2)]));
  return f;
}

void per_channel(RuleBuilder& rule, size_t operand, const ConvFactors& f) {
  if (!rule.has(operand) || rule.rank(operand) == 0) return;
  if (rule.rank(operand) == 1 && rule.dim(operand, 0).value == 1 && f.group >= 0) return;
  if (f.group >= 0) rule.in(operand, 0, f.group);
  rule.in(operand, 0, f.out);
}

FactorRule conv_factors(const Node& node) {
  RuleBuilder rule(node);
  per_channel(rule, 2, convolve(rule, 0, 1));
  rule.set_added(2);
  return rule.done();
}

FactorRule conv_integer_factors(const Node& node) {
  RuleBuilder rule(node);
  ConvFactors f = convolve(rule, 0, 1);
  if (rule.has(3) && rule.rank(3) == 1) per_channel(rule, 3, f);
  return rule.done();
}

FactorRule qlinear_conv_factors(const Node& node) {
  RuleBuilder rule(node);
  ConvFactors f = convolve(rule, 0, 3);
  for (size_t i : {4, 5, 8})
    if (rule.has(i) && rule.rank(i) == 1 && (i == 8 || rule.dim(i, 0).value != 1)) per_channel(rule, i, f);
  rule.set_rounds();
  return rule.done();
}

// x [n, (g c), h, w], weight [(g c), o, r, s] -> [n, (g o), h', w']
FactorRule conv_transpose_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0);
  if (rank < 2 || rule.rank(1) != rank) throw NoRule{"operands whose ranks do not fit"};
  int64_t groups = node.get_int("group", 1);
  rule.out_rank(0, rank);
  int n = rule.parallel(rule.dim(0, 0), "n");
  rule.in(0, 0, n);
  rule.out(0, 0, n);
  Dim ins = rule.dim(1, 0);
  ConvFactors f;
  if (groups > 1) {
    f.group = rule.parallel(Dim(groups), "g");
    if (ins.known()) ins = Dim(ins.value / groups);
    rule.in(0, 1, f.group);
    rule.in(1, 0, f.group);
    rule.out(0, 1, f.group);
    rule.set_count("group", {f.group});
  }
  int c = rule.sum(ins, "c");
  f.out = rule.parallel(rule.dim(1, 1), "o");
  rule.in(0, 1, c);
  rule.in(1, 0, c);
  rule.in(1, 1, f.out);
  rule.out(0, 1, f.out);
  windows(rule, 0, kernel_of(node, rule, 1));
  rule.rest_whole(1, "k");
  per_channel(rule, 2, f);
  rule.set_added(2);
  return rule.done();
}

// The multiply-adds are counted at the input's positions: each feeds every kernel element.
double conv_transpose_flops(const Node& node) {
  const Value* w = node.input(1);
  double bias = node.input(2) ? output_elements(node) : 0;
  if (!w || !w->type.shape || w->type.shape->empty()) return bias;
  return 2 * input_elements(node) * count_of(w) / number_of(w->type.shape->front()) + bias;
}

double conv_flops(const Node& node) {
  return contraction_flops(node) + (node.input(2) && node.op == "Conv" ? output_elements(node) : 0);
}

// x [n, c, h, w] -> [n, c, h', w']
FactorRule pool_factors(const Node& node) {
  if (node.out(1)) throw NoRule{"its indices count over the whole tensor"};
  RuleBuilder rule(node);
  size_t rank = rule.rank(0);
  rule.out_rank(0, rank);
  for (size_t d = 0; d < std::min<size_t>(rank, 2); ++d) {
    int f = rule.parallel(rule.dim(0, d), d == 0 ? "n" : "c");
    rule.in(0, d, f);
    rule.out(0, d, f);
  }
  windows(rule, 0, node.get_ints("kernel_shape"));
  return rule.done();
}

FactorRule global_pool_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0);
  rule.out_rank(0, rank);
  for (size_t d = 0; d < std::min<size_t>(rank, 2); ++d) {
    int f = rule.parallel(rule.dim(0, d), d == 0 ? "n" : "c");
    rule.in(0, d, f);
    rule.out(0, d, f);
  }
  rule.rest_whole(0, "s");
  return rule.done();
}

// Only the samples are independent; the rest is given whole.
FactorRule deform_conv_factors(const Node& node) {
  RuleBuilder rule(node);
  int n = rule.parallel(rule.dim(0, 0), "n");
  for (size_t i : {0, 2, 4})
    if (rule.has(i)) rule.in(i, 0, n);
  for (size_t i = 0; i < node.inputs.size(); ++i) rule.rest_whole(i, "x" + std::to_string(i));
  rule.out_rank(0, rule.rank(0));
  rule.out(0, 0, n);
  rule.rest_whole_out(0);
  return rule.done();
}

double deform_conv_flops(const Node& node) {
  const Value* w = node.input(1);
  if (!w || !w->type.shape || w->type.shape->empty()) return 0;
  return 2 * output_elements(node) * count_of(w) / number_of(w->type.shape->front());
}

// input [n, c, l], weight [c, 1, k], bias [c], past_state [n, c, k-1] -> [n, c, l], [n, c, k-1]
FactorRule causal_conv_factors(const Node& node) {
  RuleBuilder rule(node);
  int n = rule.parallel(rule.dim(0, 0), "n"), c = rule.parallel(rule.dim(0, 1), "c"), l = rule.whole(rule.dim(0, 2), "l");
  rule.in(0, 0, n);
  rule.in(0, 1, c);
  rule.in(0, 2, l);
  rule.in(1, 0, c);
  rule.rest_whole(1, "k");
  if (rule.has(2)) rule.in(2, 0, c);
  if (rule.has(3)) {
    rule.in(3, 0, n);
    rule.in(3, 1, c);
    rule.rest_whole(3, "p");
  }
  for (size_t o = 0; o < 2; ++o) {
    rule.out_rank(o, 3);
    rule.out(o, 0, n);
    rule.out(o, 1, c);
    if (o == 0)
      rule.out(o, 2, l);
    else
      rule.rest_whole_out(o, "p");
  }
  return rule.done();
}

double causal_conv_flops(const Node& node) {
  const Value* w = node.input(1);
  double k = w && w->type.shape && w->type.shape->size() == 3 ? number_of(w->type.shape->back()) : 1;
  return 2 * output_elements(node) * k;
}

}  // namespace

std::vector<OperatorRecord> convolution_operators() {
  std::vector<OperatorRecord> records = {
      {.name = "Conv", .since = 22, .role = Role::contraction, .factors = conv_factors, .flops = conv_flops},
      {.name = "ConvInteger", .since = 10, .role = Role::contraction, .factors = conv_integer_factors, .flops = conv_flops},
      {.name = "QLinearConv", .since = 10, .role = Role::contraction, .factors = qlinear_conv_factors, .flops = conv_flops},
      {.name = "ConvTranspose", .since = 22, .role = Role::contraction, .factors = conv_transpose_factors, .flops = conv_transpose_flops},
      {.name = "DeformConv", .since = 22, .factors = deform_conv_factors, .flops = deform_conv_flops},
      {.name = "CausalConvWithState", .since = 27, .factors = causal_conv_factors, .flops = causal_conv_flops},
      {.name = "MaxPool", .since = 22, .role = Role::reduction, .factors = pool_factors, .flops = input_elements},
      {.name = "AveragePool",
       .since = 22,
       .role = Role::reduction,
       .factors = pool_factors,
       .flops = input_elements,
       .linear = Linear::first},
      {.name = "LpPool", .since = 22, .role = Role::reduction, .factors = pool_factors, .flops = input_elements},
      {.name = "GlobalMaxPool", .since = 22, .role = Role::reduction, .factors = global_pool_factors, .flops = input_elements},
      {.name = "GlobalAveragePool",
       .since = 22,
       .role = Role::reduction,
       .factors = global_pool_factors,
       .flops = input_elements,
       .linear = Linear::first},
      {.name = "GlobalLpPool", .since = 22, .role = Role::reduction, .factors = global_pool_factors, .flops = input_elements},
      {.name = "MaxUnpool", .since = 22},
  };
  return with_gradients(std::move(records), convolution_gradient);
}

}  // namespace fretsaw
